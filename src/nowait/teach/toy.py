"""The real schedules on a machine simple enough to follow by hand: workers without tensors, seconds linear in tokens, virtual time."""

from __future__ import annotations

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from nowait import config
from nowait.config import Experiment
from nowait.runtime.device import Device, InlineExecutor, ModelClock, event_loop
from nowait.runtime.timeline import Timeline
from nowait.schedules.common import Crew, StepRecord
from nowait.training import SCHEDULES
from nowait.workers.simulated import Lengths, RewardCurve, SimulatedLearner, SimulatedPrompts, SimulatedReader, SimulatedSampler, World

FORWARD_SHARE = 0.25  # seconds of a forward pass over those of an update of the same tokens
_load = functools.cache(config.load)


class Call(NamedTuple):
    """One call of a worker: from when to when, in virtual seconds, what went in and what came out."""

    start: float
    end: float
    worker: str
    method: str
    args: tuple
    result: Any


class Played(NamedTuple):
    """What happened: a record per training step, every call in the order of its beginning, and the response tokens of each request."""

    records: list[StepRecord]
    calls: list[Call]
    lengths: np.ndarray  # int64 [requests]

    def of(self, worker: str, method: str) -> list[Call]:
        return [call for call in self.calls if (call.worker, call.method) == (worker, method)]


class _Linear:
    """Stands where `runtime.hardware.Group` does; seconds per token, per decode step however many sequences take it, and per call."""

    devices, hardware = 1, SimpleNamespace(pass_overhead=0.0)

    def __init__(self, token: float = 0.0, step: float = 0.0, call: float = 0.0) -> None:
        self.token, self.step, self.call = token, step, call

    def decode(self, live, held) -> float:
        return self.step * len(live) + self.call

    def forward(self, new, before=None) -> float:
        return self.token * float(new.sum()) + self.call

    def update(self, lengths, **plan) -> float:
        return self.forward(lengths)


def experiment(name: str, method: str, **sections: dict) -> Experiment:
    """A shipped setup at scale smoke with some settings replaced, such as schedule={"steps": 3}; one sequence per request, no evaluation."""
    e = _load(name, scale="smoke", method=method)
    sections["schedule"] = {"group_size": 1, "eval_every": 0, "checkpoint_every": 0} | sections.get("schedule", {})
    return e.model_copy(update={section: getattr(e, section).model_copy(update=values) for section, values in sections.items()})


def play(e: Experiment, lengths: Lengths, *, decode_step=0.01, read_token=0.0, update_token=0.0, call=0.0, rewards=None, seed=0) -> Played:
    """Run the schedule of an experiment to its end, in milliseconds; the same arguments give the same in every process.

    Seconds per decode step, per token (prompt included) that the reward model reads, per token that is trained, and more per call of sampler or
    reward model. The arrays of a batch have an entry per piece of up to 8 tokens (`workers.simulated`).
    """
    plan, calls, records = e.schedule, [], []
    requests = plan.batch_size * (plan.steps + plan.max_staleness + 1) + 2 * e.sampler.slots + e.overlap.delta_max
    world = World(lengths, requests, 1, plan.batch_size, plan.steps, seed, rewards or RewardCurve())
    workers = {
        "sampler": SimulatedSampler(world, _Linear(step=decode_step, call=call), e.sampler.slots),
        "learner": SimulatedLearner(
            world, _Linear(update_token), minibatches=1, epochs=1, micro_batch_tokens=1, recompute=False, forward=FORWARD_SHARE
        ),
        "reward": SimulatedReader(world, _Linear(read_token, call=call)),
    }

    def cost(worker: str, method: str, args: tuple, result: object) -> float:
        now, seconds = asyncio.get_running_loop().time(), world.take_seconds()
        calls.append(Call(now, now + seconds, worker, method, args, result))
        return seconds

    async def drive() -> None:
        async for record in SCHEDULES[plan.kind](await _crew(e, workers, ModelClock(cost)), e, None):
            records.append(record)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: event_loop(ModelClock(cost))) as runner:
            runner.run(drive())

    with ThreadPoolExecutor(1) as pool:  # a notebook's own thread has a loop already
        pool.submit(run).result()
    return Played(records, calls, world.response[:, 0])


async def _crew(e: Experiment, workers: dict[str, Any], clock: ModelClock) -> Crew:
    timeline, hosts = Timeline(), {role: name for name, hosted in e.runtime.placement.items() for role in hosted}
    devices = {name: Device(name, InlineExecutor(), clock, timeline) for name in [*e.runtime.placement, "driver"]}
    names = {role: hosts.get(role, "driver") for role in workers}
    for role, name in names.items():
        await devices[name].place(role, lambda role=role: workers[role])
    sampler, learner, reward = (functools.partial(devices[name].run, role) for role, name in names.items())
    placed = {"sampler": [names["sampler"]], "learner": [names["learner"]], "scorer": [names["reward"]]}
    return Crew([sampler], [learner], reward, SimulatedPrompts(), timeline, placed, slots=e.sampler.slots)
