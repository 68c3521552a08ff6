"""The simulator against this machine: stages calibrated on the sequential method of a bench, the other methods' seconds per step predicted."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nowait import tasks
from nowait.analysis.tables import setup
from nowait.config import Experiment
from nowait.simulate import Assumptions, Calibration, simulate
from nowait.workers.simulated import Lengths

STAGES = {
    "generate": ("generate",),
    "forward": ("forward",),
    "update": ("update",),
    "score": ("reward", "reference"),
}  # of each factor
STEPS = 100  # many: with a long tail the mean of a few steps is luck, on either side
COLUMNS = {"generate": ("generate", "sampler_s"), "forward": ("forward", "forward_s"), "update": ("train", "update_s")}  # stage: names in the benches


def measured(bench: dict) -> dict[str, dict[str, float]]:
    """{method: seconds of a step and of its stages} from either bench's JSON."""
    found = {}
    for row in bench["rows"]:
        stages = {stage: next(row[name] for name in names if name in row) for stage, names in COLUMNS.items()}
        read = {stage: row.get(stage, 0.0) for stage in STAGES["score"]}
        found[row.get("variant") or row["method"]] = {"step": row["seconds_per_step"], **stages, **read}
    return found


def predicted(experiments: dict[str, Experiment], seconds: dict[str, dict[str, float]], metrics: pd.DataFrame, steps: int = STEPS) -> pd.DataFrame:
    """Seconds per step of every method, measured (`seconds`) and predicted. Fitted: the first method's stages, and the forward pass before an update.

    metrics: of a run of the first method, whose response lengths are drawn from.
    """
    name, first = next(iter(experiments.items()))
    task = tasks.load(first.task)
    prompt = int(np.mean([len(task.prompt("train", row)) for row in range(256)]))  # characters, which are tokens in the embedded task
    assumed = Assumptions(
        hardware="cpu",
        actor=first.model.path.removeprefix("asset:"),
        reward_model=first.reward.path.removeprefix("asset:") if first.reward.path else None,
        devices=dict.fromkeys(["a", "b"], 1),
        lengths=Lengths(prompt=prompt, observed=tuple(np.concatenate(metrics["rollout/lengths"].dropna().tolist()).astype(int).tolist())),
    )
    simulated = {method: _summary(experiment, assumed, steps) for method, experiment in experiments.items()}
    given, unit = (rows[name] | {"forward": max(row["forward"] for row in rows.values())} for rows in (seconds, simulated))
    factors = {factor: sum(given[s] for s in parts) / total for factor, parts in STAGES.items() if (total := sum(unit[s] for s in parts))}
    calibrated = assumed.model_copy(update={"calibration": Calibration(**factors)})
    rows = []
    for method, experiment in experiments.items():
        found = _summary(experiment, calibrated, steps)["seconds_per_step"]
        step = seconds[method]["step"]
        rows.append((setup(experiment.name), method, step, found, "fitted" if method == name else "predicted", found / step - 1))
    return pd.DataFrame(rows, columns=["setup", "method", "measured_s", "simulated_s", "role", "error"])


def _summary(experiment: Experiment, assumed: Assumptions, steps: int) -> dict[str, float]:
    return simulate(experiment, assumed, steps).summary(experiment.schedule.max_staleness + 2)
