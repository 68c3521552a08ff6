"""Asynchronous training (A-3PO's setting): a rollout loop beside a training loop, joined by a staleness gate and a buffer.

Strict order: every token has staleness d <= eta at every update, for which a training step may have to wait (`staleness.strict_batch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from nowait.batch import Rollouts
from nowait.config import Experiment
from nowait.schedules.common import Crew, StepRecord, Stopwatch, describe, due, evaluate, learn, max_in_flight
from nowait.schedules.staleness import StalenessGate, strict_batch


class _Run:
    """What the two loops share."""

    def __init__(self, crew: Crew, experiment: Experiment) -> None:
        self.crew, self.experiment, self.plan = crew, experiment, experiment.schedule
        self.gate = StalenessGate(self.plan.batch_size, self.plan.max_staleness, max_in_flight(experiment))
        self.rollouts = Rollouts(self.plan.group_size)
        self.finished: list[int] = []  # complete requests in the order of their completion
        self.loaded = -1  # version of the sampler's weights
        self.changed = asyncio.Event()
        self.hold = self.parked = False
        self.rollout: asyncio.Task | None = None

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def rollout_loop(self) -> None:
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

    async def load_newest(self) -> None:
        if (weights := self.crew.weights).version != self.loaded:
            await self.crew.load(self.crew.samplers[0])
            self.loaded = weights.version

    def batch(self, step: int) -> list[int] | None:
        """Requests of training step `step`, or None while they are not complete."""
        size = self.plan.batch_size
        if self.plan.order == "completion":
            return sorted(self.finished[:size]) if len(self.finished) >= size else None
        return strict_batch(step, self.rollouts.oldest, self.finished, size, self.plan.max_staleness)

    async def next_batch(self, step: int) -> list[int]:
        """Waits for the batch or for the rollout loop's failure, and raises the latter's error."""
        ids = None

        def ready() -> bool:
            nonlocal ids
            ids = self.batch(step)
            return ids is not None or self.rollout.done()

        await self.until(ready)
        if self.rollout.done():
            self.rollout.result()
            raise RuntimeError(f"step {step}: the rollout loop ended early")
        taken = set(ids)
        self.finished = [r for r in self.finished if r not in taken]
        return ids

    async def barrier(self) -> None:
        """Park the rollout loop at a round boundary, with the newest weights loaded and the actor's cache void."""
        self.hold = True
        await self.until(lambda: self.parked or self.rollout.done())
        if self.rollout.done():
            self.rollout.result()
        await self.load_newest()

    def release(self) -> None:
        self.hold = False
        self.changed.set()

    async def get_state(self, step: int, elapsed: float) -> dict:
        sampler, scorer = await self.crew.samplers[0]("get_state"), await self.crew.scorer("get_state")
        own = {"step": step, "elapsed": elapsed, "finished": list(self.finished), "gate": self.gate.get_state()}
        learner = await self.crew.learners[0]("get_state")
        requests = {"rollouts": self.rollouts.get_state(), "prompts": self.crew.prompts.get_state()}
        return {**own, **requests, "sampler": sampler, "scorer": scorer, "learner": learner}

    def set_state(self, state: dict) -> None:
        self.finished = list(state["finished"])
        self.gate.set_state(state["gate"])
        self.rollouts.set_state(state["rollouts"])
        self.loaded = state["step"]


async def asynchronous(crew: Crew, experiment: Experiment, state: dict | None = None) -> AsyncIterator[StepRecord]:
    """One record per training step; `state` is that of a checkpoint's record, whose workers have been restored."""
    run, plan, start = _Run(crew, experiment), experiment.schedule, state["step"] if state else 0
    crew.weights = await crew.learners[0]("publish")
    if state:
        run.set_state(state)
    elif plan.eval_every:
        yield StepRecord(0, *await evaluate(crew, True))
    run.rollout = asyncio.create_task(run.rollout_loop(), name="rollout")
    run.rollout.add_done_callback(lambda _: run.changed.set())
    watch = Stopwatch(state["elapsed"] if state else 0.0)
    try:
        for step in range(start, plan.steps):
            crew.timeline.step = step
            batch, stats = await learn(crew, run.rollouts, await run.next_batch(step), step, experiment.algorithm.anchor)
            run.changed.set()
            evaluation, checkpoint = (due(every, step + 1, plan.steps) for every in (plan.eval_every, plan.checkpoint_every))
            if evaluation or checkpoint:
                await run.barrier()  # inside the step's time, since the sampler goes on working
            record = StepRecord(step + 1, describe(crew, batch, stats, watch.lap(), watch.elapsed, run.rollouts.tokens))
            if evaluation:
                more, record.rewards = await evaluate(crew, step + 1 == plan.steps)
                record.metrics |= more
            if checkpoint:
                record.state = await run.get_state(step + 1, watch.elapsed)
            if evaluation or checkpoint:
                run.release()
                watch.restart()
            yield record
    finally:
        run.rollout.cancel()
        await asyncio.gather(run.rollout, return_exceptions=True)
