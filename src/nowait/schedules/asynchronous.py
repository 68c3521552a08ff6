"""Asynchronous training (A-3PO's setting): a rollout loop beside a training loop, joined by a staleness gate and a buffer.

Strict order: every token has staleness d <= eta at every update, for which a training step may have to wait (`staleness.strict_batch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from nowait.batch import Batch
from nowait.config import Experiment
from nowait.schedules.common import Crew, Schedule, max_in_flight, train
from nowait.schedules.staleness import StalenessGate, strict_batch


class _Asynchronous(Schedule):
    def __init__(self, crew: Crew, experiment: Experiment) -> None:
        super().__init__(crew, experiment)
        self.gate = StalenessGate(self.plan.batch_size, self.plan.max_staleness, max_in_flight(experiment))
        self.parts["gate"] = self.gate
        self.finished: list[int] = []  # complete requests in the order of their completion
        self.changed = asyncio.Event()
        self.hold = self.parked = False

    def start(self) -> None:
        self.tasks = [asyncio.create_task(self.roll_out(), name="rollout")]
        self.tasks[0].add_done_callback(lambda _: self.changed.set())

    async def until(self, condition: Callable[[], Any]) -> Any:
        """The condition's value as soon as it counts as true. Raises the rollout loop's error as soon as that has failed."""
        while True:
            if self.tasks[0].done():
                self.tasks[0].result()
            if value := condition():
                return value
            self.changed.clear()
            await self.changed.wait()

    async def roll_out(self) -> None:
        sampler, scorer = self.crew.samplers[0], self.crew.scorer
        while True:
            if self.hold:
                self.parked = True
                self.changed.set()
                await self.until(lambda: not self.hold)
                self.parked = False
            await self.load_newest()
            if room := self.gate.capacity(self.loaded):
                requests = self.crew.prompts.next(room)
                self.gate.submitted(room)
                self.rollouts.admit(requests)
                await scorer("admit", requests)
                await sampler("admit", requests)
            if not self.gate.running:
                await self.until(lambda: self.hold or self.crew.weights.version != self.loaded)
                continue
            segments = await self.crew.decode(sampler, self.experiment.sampler.chunk)
            done = self.rollouts.add(segments)
            await scorer("prefill", segments)
            self.gate.finished(len(done))
            self.finished += done
            self.changed.set()

    async def step(self, step: int) -> tuple[Batch, dict[str, float], dict[str, Any]]:
        ids = await self.until(lambda: self.batch(step))
        taken = set(ids)
        self.finished = [r for r in self.finished if r not in taken]
        batch, stats = await self.learn(ids, step)
        self.changed.set()
        return batch, stats, {}

    def batch(self, step: int) -> list[int] | None:
        """Requests of training step `step`, or None while they are not complete."""
        size = self.plan.batch_size
        if self.plan.order == "completion":
            return sorted(self.finished[:size]) if len(self.finished) >= size else None
        return strict_batch(step, self.rollouts.oldest, self.finished, size, self.plan.max_staleness)

    async def barrier(self) -> None:
        """Park the rollout loop at a round boundary, with the newest weights loaded and the sampler's cache void."""
        self.hold = True
        await self.until(lambda: self.parked)
        await self.load_newest()

    def release(self) -> None:
        self.hold = False
        self.changed.set()

    async def get_state(self) -> dict[str, Any]:
        return await super().get_state() | {"finished": list(self.finished)}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.finished = list(state["finished"])


asynchronous = partial(train, _Asynchronous)
