"""Simulated studies beyond the papers: other systems' schedules on OPPO's setup, and maps over scale. Needs no torch."""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd

from nowait import published, simulate
from nowait.analysis.tables import rounded, setup
from nowait.config import Experiment
from nowait.runtime.hardware import USABLE, DoesNotFit, Group
from nowait.simulate import Assumptions

FIXED = ["overlap.rule=fixed", "overlap.chunk_candidates=[]"]  # few steps are simulated: no rule could act, trials would only disturb
COMPARED = {"a3po": ("sync", "recompute", "loglinear"), "oppo": ("sequential", "both")}
BASELINES = {"recompute": "sync", "loglinear": "recompute", "both": "sequential"}
PAYS = 1.05  # the least speed-up that is worth a change
SHOWN = ("seconds_per_step", "busy_frac", "occupancy", "mean_staleness")
ETAS = (1, 4, 8)
Setup = tuple[Experiment, Assumptions]
LARGE = 256  # requests per batch from which on fewer steps are simulated: a step averages over more of them
ASYNCHRONOUS_CHUNK = 32  # tokens per decode round of asynchronous systems, whose freed slots are taken at once
REASONS = {"tensor_parallel": "too few devices", "weights": "weights and optimiser", "keys": "keys and values"}  # by how DoesNotFit begins


def systems(config: str, overrides: Iterable[str] = (), seeds: Iterable[int] = (0,), steps: int = 10) -> pd.DataFrame:
    """One row per system: seconds per step, busy share of all devices, slot occupancy and mean staleness of `steps` counted steps, mean over seeds.

    `published` is the paper's seconds per step of OPPO and veRL DP, in the rows that stand for them. Needs a task with a reward model.
    """
    experiment, assumed = simulate.load(config, "sequential", [*FIXED, *overrides])
    total = sum(assumed.devices.values())
    two = [f"devices={{a: {total - 2}, b: 2}}", "tensor_parallel={b: 2}"]
    ours = {
        "sequential": ("sequential", []),
        "synchronous, colocated": ("sequential", _together(total)),
        "B + 4": ("inter", ["overlap.delta=4"]),
        "B + 8": ("inter", ["overlap.delta=8"]),
        "intra, by response": ("intra", ["overlap.unit=response"]),
        "intra": ("intra", []),
        "both": ("both", []),
        "sequential, 2 score": ("sequential", two),
        "both, 2 score": ("both", two),
    }
    window, rows = (max(ETAS) + 2, max(ETAS) + 2 + steps), []
    for name, (method, more) in ours.items():
        chosen, given = simulate.load(config, method, [*FIXED, *overrides, *more])
        rows.append({"system": name, "devices": _split(chosen, given), **_steady(chosen, given, *window, seeds)})
    for eta in ETAS:
        splits = [_asynchronous(experiment, assumed, eta, a, total - a) for a in range(1, total)]
        every = [{"system": f"asynchronous, η = {eta}", "devices": _split(*s), **_steady(*s, *window, seeds)} for s in splits]
        rows.append(min(every, key=lambda row: row["seconds_per_step"]))
    facts = published.load("oppo")["tables"]["systems_seconds_per_step"]
    low, high = facts["verl_dp"]
    known = {"both": f"{facts['oppo']}", "synchronous, colocated": f"{low} to {high}"}
    frame = rounded(pd.DataFrame(rows))
    return frame.assign(published=frame["system"].map(known), setup=setup(config))


def chunk_sizes(config: str, sizes: Iterable[int], steps: int = 24) -> pd.DataFrame:
    """Seconds per step of OPPO with a fixed Δ over the tokens of a decode round; the frozen models on a device of their own, or beside the actor's
    calls on all devices, where calls that overlap each take half as long again (an assumption)."""
    total = sum(simulate.assumptions(config).devices.values())
    rows = []
    for place, more in (("own device", []), ("shared devices", [*_together(total), "lanes=3", "contention=1.5"])):
        for size in sizes:
            found = simulate.simulate(*simulate.load(config, "both", [*FIXED, f"sampler.chunk={size}", *more]), steps).summary(4)
            rows.append((setup(config), place, size, found["seconds_per_step"]))
    return rounded(pd.DataFrame(rows, columns=["setup", "place", "chunk", "seconds_per_step"]))


def _together(total: int) -> list[str]:
    """Overrides that put all models on all devices."""
    return ["runtime.placement={a: [sampler, learner, reward, reference]}", "runtime.gpus={}", f"devices={{a: {total}}}"]


def _asynchronous(experiment: Experiment, assumed: Assumptions, eta: int, a: int, b: int) -> Setup:
    """The same work by `a` devices that sample and `b` that do all else: our asynchronous schedule has no frozen models beside the learner, so that
    their reading is charged as a longer forward pass before the update."""
    frozen = sum(simulate.shape(name).parameters for name in (assumed.actor, assumed.reward_model))
    longer = assumed.calibration.score * frozen / simulate.shape(assumed.actor).parameters
    calibration = assumed.calibration.model_copy(update={"forward": assumed.calibration.forward + longer})
    changed = {"schedule": {"kind": "asynchronous", "max_staleness": eta}, "algorithm": {"kl_coef": 0.0},
               "runtime": {"placement": {"a": ["sampler"], "b": ["learner"]}}}  # fmt: skip
    plan = experiment.model_copy(update={key: getattr(experiment, key).model_copy(update=values) for key, values in changed.items()})
    given = {"reward_model": None, "devices": {"a": a, "b": b}, "chunk": ASYNCHRONOUS_CHUNK, "calibration": calibration}
    return plan, assumed.model_copy(update=given)


def _split(experiment: Experiment, assumed: Assumptions) -> str:
    return " + ".join(str(assumed.devices[name]) for name in experiment.runtime.placement)


def _steady(experiment: Experiment, assumed: Assumptions, first: int, last: int, seeds: Iterable[int]) -> dict[str, float]:
    """Means of the steps from `first` to `last` over seeds."""
    found = [simulate.simulate(experiment, assumed, last, seed).summary(first) for seed in seeds]
    return pd.DataFrame(found).mean()[list(SHOWN)].to_dict()


def scaled(experiment: Experiment, assumed: Assumptions, eta: int, *, devices: int | None = None, model: str | None = None,
           batch: int | None = None, longest: int | None = None, delta: int | None = None, chunk: int | None = None) -> Setup:  # fmt: skip
    """A setup with at most this eta and another number of devices, other models, requests per batch, longest response, Δ or C.

    What is not given stays, as do the share of each device, Δ/B, and in parts of the longest response C and the lengths, of which those in the
    middle of the training are taken. All models are of one size, with the least tensor_parallel that fits; slots are one batch, or what the cache
    holds. Raises DoesNotFit.
    """
    plan, sampler, total = experiment.schedule, experiment.sampler, sum(assumed.devices.values())
    size, stretch, actor = batch or plan.batch_size, (longest or sampler.max_new_tokens) / sampler.max_new_tokens, model or assumed.actor
    median, cap = assumed.lengths.median * stretch * (1 + assumed.lengths.drift / 2), round(assumed.lengths.cap * stretch)
    lengths = replace(assumed.lengths, median=median, cap=cap, drift=0.0)
    delta = math.ceil(experiment.overlap.delta * size / plan.batch_size) if delta is None else delta
    hardware, shape, count = simulate.hardware(assumed.hardware), simulate.shape(actor), devices or total
    tensor_parallel = 2 ** max(0, math.ceil(math.log2(shape.parameters * shape.bytes / (USABLE * hardware.memory))))
    other = max(tensor_parallel, round(count * assumed.devices["b"] / total))
    room = Group(hardware, shape, count - other, tensor_parallel).cache_tokens
    mean = lengths.prompt + min(lengths.cap, lengths.median * math.exp(lengths.sigma**2 / 2))
    wanted, possible = (size + delta) * plan.group_size, int(room / mean)
    if possible < (wanted if plan.kind == "overlapped" else plan.group_size):
        raise DoesNotFit(f"keys and values of {wanted} sequences of {mean:.0f} tokens exceed the {room} that fit on {count - other} devices")
    changed = {"schedule": {"batch_size": size, "max_concurrent": 4 * size, "max_staleness": min(plan.max_staleness, eta)},
               "sampler": {"slots": min(wanted, possible), "max_new_tokens": lengths.cap},
               "overlap": {"delta": delta, "delta_max": delta, "delta_min": 0}}  # fmt: skip
    given = {"actor": actor, "reward_model": assumed.reward_model and actor, "lengths": lengths, "devices": {"a": count - other, "b": other},
             "chunk": chunk or max(1, round((assumed.chunk or sampler.chunk) * stretch)),
             "tensor_parallel": dict.fromkeys("ab", tensor_parallel)}  # fmt: skip
    placed = experiment.model_copy(update={key: getattr(experiment, key).model_copy(update=values) for key, values in changed.items()})
    return placed, assumed.model_copy(update=given)


def sweep(configs: Iterable[str], grid: dict[str, list], overrides: Iterable[str] = (), seeds: Iterable[int] = (0,),
          steps: int = 12, eta: int = 2) -> pd.DataFrame:  # fmt: skip
    """One row per setup, method of COMPARED and point of a grid {argument of `scaled`: values}: its summary, or the `reason` why it does not fit.

    Of `steps` simulated steps, fewer where batches are larger than LARGE, the first eta + 1 do not count.
    """
    first = eta + 1
    rows, compared = [], [(name, method) for name in configs for method in COMPARED[name.partition("/")[0]]]
    for config, method in compared:
        experiment, assumed = simulate.load(config, method, [*FIXED, *overrides])
        for values in product(*grid.values()):
            point: dict[str, Any] = {"model": assumed.actor, **dict(zip(grid, values, strict=True))}
            row = {"setup": setup(config), "method": method, **point, "billions": simulate.shape(point["model"]).parameters / 1e9}
            try:
                chosen, given = scaled(experiment, assumed, eta, **point)
                last = max(first + 1, min(steps, steps * LARGE // chosen.schedule.batch_size))
                row |= _steady(chosen, given, first, last, seeds)
            except DoesNotFit as error:
                row["reason"] = REASONS[str(error).split()[0].strip(",")]
            rows.append(row | {"training_steps": experiment.schedule.steps})
    return rounded(pd.DataFrame(rows, columns=["setup", "method", *point, "billions", "training_steps", *SHOWN, "reason"]))


def gains(frame: pd.DataFrame) -> pd.DataFrame:
    """Speed-up of every method over its baseline at the same point; NaN where either does not fit."""
    keys = [name for name in frame if name not in (*SHOWN, "reason")]
    base = frame.assign(method=frame["method"].map({base: method for method, base in BASELINES.items()})).dropna(subset=["method"])
    both = frame.merge(base[[*keys, "seconds_per_step"]], on=keys, suffixes=("", "_base"))
    return rounded(both.assign(speedup=both["seconds_per_step_base"] / both["seconds_per_step"]))


def unfit(frame: pd.DataFrame) -> pd.DataFrame:
    """How many points of each method's map are blank, by reason, out of how many."""
    counts = pd.crosstab(frame["method"], frame["reason"])
    return counts.assign(points=frame.groupby("method").size()).fillna(0).astype(int)
