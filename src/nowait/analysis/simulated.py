"""The simulation against published numbers and against this machine.

Published: by entry id, with data sheets alone and calibrated, fitted or predicted, and how far it moves. This machine: stages calibrated on the first
method of a bench, the other methods' seconds per step predicted.
"""

from collections.abc import Iterable
from operator import attrgetter

import numpy as np
import pandas as pd

from nowait import published, tasks
from nowait.analysis import oppo, tables
from nowait.config import Experiment
from nowait.simulate import Assumptions, Calibration, assumptions, compare, fit, load, seconds_per_step, simulate
from nowait.workers.simulated import Lengths

SETUPS = {"a3po": ("setup1", "setup2"), "oppo": ("stackexchange_7b", "stackexchange_3b", "gsm8k_7b", "opencoder_3b", "two_nodes")}
FITTED_TASK = "stackexchange_7b"  # of OPPO; its factor serves all tasks
LENGTHS = {  # assumptions that nothing published decides, and by how much they are changed: key, factor
    "responses 30 % shorter": ("lengths.median", 0.7),
    "responses 40 % longer": ("lengths.median", 1.4),
    "lighter tail": ("lengths.sigma", 0.75),
    "heavier tail": ("lengths.sigma", 1.25),
}
VARIATIONS = {
    "a3po": LENGTHS | {"shorter rounds": ("chunk", 0.5), "decoding a quarter slower": ("calibration.generate", 1.25)},  # none calibrated anew
    "oppo": LENGTHS,  # each calibrated anew
}
MARGIN = 0.15  # asked of predictions of this machine's seconds per step
STAGES = {"generate": ("generate",), "forward": ("forward",), "update": ("update",), "score": ("reward", "reference")}  # of each factor
STEPS = 100  # many: with a long tail the mean of a few steps is luck, on either side
COLUMNS = {"generate": ("generate", "sampler_s"), "forward": ("forward", "forward_s"), "update": ("train", "update_s")}  # stage: names in the benches


def study(paper: str, steps: int = 40, variations: Iterable[str] | None = None) -> pd.DataFrame:
    """A row per published number that the simulation has an answer to.

    alone: the assumed hardware with no calibration. simulated: calibrated. role: fitted, where the calibration was made to meet it, or predicted.
    low, high: over the variations (default: all of the paper's). OPPO is calibrated anew in each; A-3PO is not, since its three factors per setup
    would absorb any, and its step come out as recompute's less the forward pass again. error: simulated over published, minus 1.
    """
    calibrated, alone = _numbers(paper, steps), _numbers(paper, steps, calibration=Calibration())
    varied = [_numbers(paper, steps, *VARIATIONS[paper][name]) for name in (VARIATIONS[paper] if variations is None else variations)]
    rows = []
    for entry in published.entries(paper):
        if entry.id in calibrated:
            every = [calibrated[entry.id], *(numbers[entry.id] for numbers in varied)]
            role = "fitted" if _fitted(entry.id) else "predicted"
            rows.append((entry.id, entry.unit, entry.value, alone[entry.id], every[0], min(every), max(every), role, every[0] / entry.value - 1))
    return pd.DataFrame(rows, columns=["entry", "unit", "published", "alone", "simulated", "low", "high", "role", "error"])


def beside(frame: pd.DataFrame, paper: str) -> pd.DataFrame:
    """A frame of setups and methods with what is simulated for the paper's own ones: seconds per step, speed-up over the first method, and busy
    share of the devices."""
    found = {setup: compare(f"{paper}/{setup}") for setup in frame["setup"].unique() if setup in SETUPS[paper]}
    names = {"simulated_seconds_per_step": "seconds_per_step", "simulated_speedup": "speedup", "simulated_utilisation": "busy_frac"}
    rows = [found.get(setup, {}).get(method, {}) for setup, method in zip(frame["setup"], frame["method"], strict=True)]
    return tables.rounded(frame.assign(**{shown: [row.get(name, np.nan) for row in rows] for shown, name in names.items()}))


def forward_beside(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame of `tables.proximal_seconds` with the seconds of the forward pass at the paper's scale, by data sheets alone: the calibration was made
    to meet the published ones."""
    found = {setup: seconds_per_step(*load(f"a3po/{setup}", "recompute", ["calibration.forward=1"]))[1]["forward"] for setup in SETUPS["a3po"]}
    return tables.rounded(frame.assign(simulated=frame["setup"].map(found).where(frame["method"] == "recompute")))


def shares_beside(frame: pd.DataFrame) -> pd.DataFrame:
    """A frame of `oppo.stage_shares` with those of a sequential step simulated at the paper's scale, for the paper's own tasks."""
    found = {}
    for task in set(frame["setup"]) & set(SETUPS["oppo"]):
        _, row = seconds_per_step(*load(f"oppo/{task}", "sequential"))
        work = {stage: sum(row[name] for name in names) for stage, names in oppo.SHARES.items()}
        found |= {(task, stage): seconds / sum(work.values()) for stage, seconds in work.items()}
    return tables.rounded(frame.assign(simulated=[found.get(key, np.nan) for key in zip(frame["setup"], frame["stage"], strict=True)]))


def metrics(config: str, variants: dict[str, list[str]], steps: int) -> pd.DataFrame:
    """Metrics of every training step of OPPO simulated at the paper's scale with the overrides of each variant, under its name as `method`."""
    found = {name: pd.DataFrame(simulate(*load(config, "both", overrides), steps).rows) for name, overrides in variants.items()}
    head = {"setup": tables.setup(config), "step": range(1, steps + 1)}
    return pd.concat([rows.assign(method=name, **head) for name, rows in found.items()], ignore_index=True)


def saving(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds per step that A-3PO saves over recompute: published and simulated: the difference of two times can be far off where they are not."""
    seconds, rows = frame.set_index("entry"), []
    for setup in SETUPS["a3po"]:
        recompute, ours = (seconds.loc[f"tables.seconds_per_step.{setup}.{method}"] for method in ("recompute", "loglinear"))
        told, found = recompute["published"] - ours["published"], recompute["simulated"] - ours["simulated"]
        rows.append((setup, told, found, ours["error"], found / told - 1))
    return pd.DataFrame(rows, columns=["setup", "published_s", "simulated_s", "error_of_time", "error_of_saving"])


def _fitted(entry: str) -> bool:
    _, table, setup, *rest = entry.split(".")
    if table in ("seconds_per_step", "training_hours", "speedup_over_sync"):
        return rest[0] != "loglinear"
    return table == "proximal_seconds" or (table in ("minutes_to_target", "ablation_minutes") and (setup, rest[0]) == (FITTED_TASK, "trl"))


def _numbers(paper: str, steps: int, key: str = "", factor: float = 1.0, calibration: Calibration | None = None) -> dict[str, float]:
    """{entry id: simulated value}; with one assumption changed by a factor, and for OPPO calibrated anew."""
    if key and paper == "oppo":
        calibration = fit(f"oppo/{FITTED_TASK}", _changed(f"oppo/{FITTED_TASK}", key, factor))
    overrides = [f"calibration.{name}={value}" for name, value in calibration] if calibration else []
    found: dict[str, float] = {}
    for setup in SETUPS[paper]:
        config = f"{paper}/{setup}"
        methods = compare(config, [*_changed(config, key, factor), *overrides], steps)
        found |= _a3po(setup, methods) if paper == "a3po" else _oppo(setup, methods)
    return found


def _changed(config: str, key: str, factor: float) -> list[str]:
    if not key:
        return []
    value = attrgetter(key)(assumptions(config))
    return [f"{key}={type(value)(value * factor)}"]


def _a3po(setup: str, methods: dict[str, dict[str, float]]) -> dict[str, float]:
    steps, seconds = published.load("a3po")["setups"][setup]["steps"], {name: row["seconds_per_step"] for name, row in methods.items()}
    forward = methods["recompute"]["forward"]
    named = {f"tables.seconds_per_step.{setup}.{name}": value for name, value in seconds.items()}
    named |= {f"tables.training_hours.{setup}.{name}": value * steps / 3600 for name, value in seconds.items()}
    named |= {f"tables.speedup_over_sync.{setup}.{name}": seconds["sync"] / value for name, value in seconds.items()}
    named[f"tables.speedup_over_recompute.{setup}.loglinear"] = seconds["recompute"] / seconds["loglinear"]
    return named | {f"figures.proximal_seconds.{setup}.recompute.{name}": forward for name in ("typical", "mean")}


def _oppo(task: str, methods: dict[str, dict[str, float]]) -> dict[str, float]:
    seconds = {name: methods[method]["seconds_per_step"] for name, method in oppo.TRL.items()}
    if task == "two_nodes":
        named = {f"tables.two_nodes_seconds_per_step.{name}": seconds[name] for name in ("trl", "oppo")}
        return named | {"tables.two_nodes_seconds_per_step.speedup": seconds["trl"] / seconds["oppo"]}
    busy = {name: 100 * methods[oppo.TRL[name]]["busy_frac"] for name in ("trl", "oppo")}
    named = {f"tables.gpu_utilisation_pct.{task}.{name}": value for name, value in busy.items()}
    named |= {f"tables.gpu_utilisation_pct.{task}.gain": busy["oppo"] / busy["trl"]}
    named |= {f"tables.minutes_to_target.{task}.speedup": seconds["trl"] / seconds["oppo"]}
    curve = published.load("oppo")["figures"]["reward_vs_step"].get(task, {})
    if task == FITTED_TASK:  # the only task whose steps to the target are known
        minutes = max(curve) / 60
        named |= {f"tables.minutes_to_target.{task}.{name}": seconds[name] * minutes for name in ("trl", "oppo")}
        named |= {f"tables.ablation_minutes.{task}.{name}": seconds[name] * minutes for name in ("trl", "intra", "inter", "both")}
    return named


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
        found, step = _summary(experiment, calibrated, steps)["seconds_per_step"], seconds[method]["step"]
        error, role = found / step - 1, "fitted" if method == name else "predicted"
        verdict = f"within {100 * MARGIN:.0f} %" if abs(error) <= MARGIN else "misses"
        rows.append((tables.setup(experiment.name), method, step, found, role, error, verdict))
    return pd.DataFrame(rows, columns=["setup", "method", "measured_s", "simulated_s", "role", "error", "verdict"])


def _summary(experiment: Experiment, assumed: Assumptions, steps: int) -> dict[str, float]:
    return simulate(experiment, assumed, steps).summary(experiment.schedule.max_staleness + 2)
