"""The bench of OPPO: seconds per step, utilisation and slot occupancy of the sequential schedule against its overlaps."""

from __future__ import annotations

import statistics
from collections import defaultdict

from nowait import config as configs
from nowait.bench import COUNTED_STEPS, interleaved, short_training
from nowait.config import Experiment

VARIANTS = {  # method, and the share of B in requests that is overcommitted
    "sequential": ("sequential", 0.0),
    "intra": ("intra", 0.0),
    "inter": ("inter", 0.31),
    "both": ("both", 0.31),
    "inter_paper": ("inter", 0.07),
    "both_paper": ("both", 0.07),  # of the paper's fixed degrees, 4 and 8 of 112, the larger
}
SKIPPED = 4  # steps of a block before it counts: until requests of several steps are in flight
STAGES = {"generate": "generate", "reward": "reward", "reference": "ref", "forward": "prox_forward", "train": "train"}


def overlap(
    config: str = "oppo/stackexchange_3b",
    scale: str = "cpu",
    clock: str = "measured",
    blocks: int = 3,
    overrides: list[str] | None = None,
    steps: int = COUNTED_STEPS,
) -> dict:
    """`overlap_times` of a config's variants with a fixed Δ each."""
    return overlap_times(variants(lambda method, more: configs.load(config, scale, [*more, *(overrides or [])], method)), clock, blocks, steps)


def variants(load) -> dict[str, Experiment]:
    """The experiments of `VARIANTS`; load(method, overrides) makes one."""
    batch = load("sequential", []).schedule.batch_size
    degrees = {name: max(1, round(share * batch)) if share else 0 for name, (_, share) in VARIANTS.items()}
    fixed = {name: [f"overlap.{key}={d}" for key in ("delta", "delta_min", "delta_max")] for name, d in degrees.items()}
    return {
        name: load(method, ["overlap.rule=fixed", "overlap.chunk_candidates=[]", *fixed[name], f"sampler.slots={batch + degrees[name]}"])
        for name, (method, _) in VARIANTS.items()
    }


def overlap_times(experiments: dict[str, Experiment], clock: str = "measured", blocks: int = 3, steps: int = COUNTED_STEPS) -> dict:
    """Seconds per training step of every variant, without evaluation: medians over blocks of ratios inside a block.

    measured: each call costs its processor time, devices never contend. wall: a process per device, real seconds.
    utilisation: busy share of the devices, mean; one decoding row counts as busy, so occupancy (live sequences over those that were let in,
    mean over decode steps) stands beside it. overlap_efficiency: ideal over elapsed time of `both`; ideal is the work of its busiest device, in
    processor time. overcommit_share: Δ / B of `both`. rows: per variant seconds per step (median, and of each block), speed-up, its stages.
    """
    facts, results, alone = interleaved(experiments, "both", _block, clock, blocks, steps)
    return facts | _summary(experiments, results, [max(block["work"].values()) for block in alone])


def _block(experiment: Experiment, clock: str, steps: int, seed: int) -> dict:
    """Means per counted step of one short training; `work` is the seconds of each device's calls."""
    rows, timeline = short_training(experiment, clock, SKIPPED + steps, seed)
    counted = rows[SKIPPED:]
    work: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        if span.step >= SKIPPED and span.device != "driver":
            work[span.device] += (span.end - span.start) / steps
    out = {name: statistics.fmean(row.get(f"time/{key}", 0.0) for row in counted) for name, key in STAGES.items()}
    out["step"] = statistics.fmean(row["time/step"] for row in counted)
    out["occupancy"] = statistics.fmean(row["perf/occupancy"] for row in counted)
    return out | {"work": dict(work), "utilisation": sum(work.values()) / len(work) / out["step"]}


def _summary(experiments: dict[str, Experiment], blocks: dict[str, list[dict]], ideals: list[float]) -> dict:
    def gain(name: str, quantity: str) -> float:
        return statistics.median(b[quantity] / a[quantity] for a, b in zip(blocks["sequential"], blocks[name], strict=True))

    def speedup(name: str) -> float:
        return 1 / gain(name, "step")

    rows = []
    for name, several in blocks.items():
        medians = {key: statistics.median(b[key] for b in several) for key in ("step", *STAGES, "utilisation", "occupancy")}
        plan, overlap_ = experiments[name].schedule, experiments[name].overlap
        share = overlap_.delta / plan.batch_size if overlap_.inter else 0.0
        rows.append(
            {"variant": name, "seconds_per_step": medians.pop("step"), "speedup": speedup(name), "overcommit_share": share, **medians}
            | {"blocks": [b["step"] for b in several]}
        )
    return {
        **{f"speedup_{name}": speedup(name) for name in ("both", "intra", "inter")},
        "utilisation_gain": gain("both", "utilisation"),
        "occupancy_gain": gain("both", "occupancy"),
        "overlap_efficiency": statistics.median(ideal / b["step"] for ideal, b in zip(ideals, blocks["both"], strict=True)),
        "overcommit_share": next(row["overcommit_share"] for row in rows if row["variant"] == "both"),
        "rows": rows,
    }
