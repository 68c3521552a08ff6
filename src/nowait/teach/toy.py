"""The real schedules on a machine simple enough to follow by hand: workers without tensors, seconds linear in tokens, virtual time."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from nowait import config
from nowait.config import Experiment
from nowait.simulate import Assumptions, Calibration, simulate
from nowait.workers.simulated import Lengths

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
    """What happened: metrics of every training step, every call in the order of its beginning, and the response tokens of each request."""

    rows: list[dict[str, Any]]
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

    def transfer(self) -> float:
        return 0.0


def experiment(name: str, method: str, **sections: dict) -> Experiment:
    """A shipped setup at scale smoke with some settings replaced, such as schedule={"steps": 3}; one sequence per request, no reference."""
    e = _load(name, scale="smoke", method=method)
    sections["schedule"] = {"group_size": 1} | sections.get("schedule", {})
    sections["algorithm"] = {"kl_coef": 0.0} | sections.get("algorithm", {})
    return e.model_copy(update={section: getattr(e, section).model_copy(update=values) for section, values in sections.items()})


def play(e: Experiment, lengths: Lengths, *, decode_step=0.01, read_token=0.0, update_token=0.0, call=0.0, seed=0) -> Played:
    """Run the schedule of an experiment to its end, in milliseconds; the same arguments give the same in every process.

    Seconds per decode step, per token (prompt included) that the reward model reads, per token that is trained, and more per call of sampler or
    reward model. The arrays of a batch have an entry per piece of up to 8 tokens (`workers.simulated`).
    """
    calls, placement = [], e.runtime.placement

    def group(device: str, model: str, training: bool = False) -> _Linear:
        return _Linear(update_token) if training else _Linear(step=decode_step, call=call) if model == "actor" else _Linear(read_token, call=call)

    def heard(seconds: float, *what) -> None:
        now = asyncio.get_running_loop().time()
        calls.append(Call(now, now + seconds, *what))

    costs = {"hardware": "", "devices": dict.fromkeys(placement, 1), "calibration": Calibration(forward=FORWARD_SHARE)}
    reader = "reader" if any("reward" in hosted for hosted in placement.values()) else None
    simulation = simulate(e, Assumptions(actor="actor", reward_model=reader, lengths=lengths, **costs), seed=seed, group=group, heard=heard)
    return Played(simulation.rows, calls, simulation.world.response[:, 0])
