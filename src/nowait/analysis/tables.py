"""Tidy frames from runs and benches, and the papers' tables as Markdown: published columns first, measured ones after.

A run is anything with `.manifest` (seed, config, config_digest, code_digest), `.metrics` and `.evaluations` (data frames). Results are {method: [run per seed]}
of one setup; frames of several setups are joined with `pandas.concat`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

import numpy as np
import pandas as pd

from nowait import published
from nowait.analysis.statistics import mean_and_error, paired_difference

REFERENCE = "recompute"  # differences in quality are against the method that A-3PO approximates


def tidy(results: dict[str, list], columns: list[str]) -> pd.DataFrame:
    """One row per run and step that has any of the metrics `columns`: setup, method, seed, scale, clock, step, seconds, then the metrics.

    `seconds` is the run's elapsed time without evaluations, on the run's clock. Numbers carry six significant digits, so that a CSV returns them unchanged.
    """
    parts = [_tidy_run(method, run, columns) for method, runs in results.items() for run in runs]
    if not parts:
        raise ValueError("no finished runs: run them first")
    return pd.concat(parts, ignore_index=True)


def provenance(results: Iterable[dict[str, list]]) -> dict:
    """What a figure must say about its runs: seeds, digest of the code, digest of every configuration by setup/method."""
    runs = [(method, run.manifest) for result in results for method, several in result.items() for run in several]
    configs = {f"{_setup(manifest)}/{method}": manifest["config_digest"] for method, manifest in runs}
    codes = sorted({manifest["code_digest"] for _, manifest in runs})
    return {"seeds": sorted({manifest["seed"] for _, manifest in runs}), "code": codes, "config": dict(sorted(configs.items()))}


def training_time(setup: str, bench: dict, clock: str = "measured", scale: str = "cpu") -> pd.DataFrame:
    """Seconds per training step and speed-ups, one row per method, from the JSON of the asynchronous bench.

    Speed-ups are medians over the bench's interleaved blocks; `bound` = 1 + f/u is the most that removing the forward pass can gain over recompute.
    """
    facts = published.load("a3po")["tables"]
    hours, per_step = facts["training_hours"].get(setup, {}), facts["seconds_per_step"].get(setup, {})
    blocks = {row["method"]: np.asarray(row["blocks"], float) for row in bench["rows"]}
    rows = [
        {
            "setup": setup,
            "method": row["method"],
            "published_hours": hours.get(row["method"]),
            "published_seconds_per_step": per_step.get(row["method"]),
            "published_speedup_over_sync": facts["speedup_over_sync"].get(setup, {}).get(row["method"]),
            "published_speedup_over_recompute": facts["speedup_over_recompute"].get(setup, {}).get(row["method"]),
            "seconds_per_step": row["seconds_per_step"],
            **{f"speedup_over_{base}": np.median(blocks[base] / blocks[row["method"]]) for base in ("sync", REFERENCE)},
            "blocks": len(row["blocks"]),
        }
        for row in bench["rows"]
    ]
    shared = {key: bench[key] for key in ("sampler_s", "update_s", "forward_s", "mean_staleness")}
    f_over_u = bench["forward_s"] / bench["update_s"]
    return _rounded(pd.DataFrame(rows).assign(**shared, f_over_u=f_over_u, bound=1 + f_over_u, scale=scale, clock=clock))


def on_bench_time(frame: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """The tidy frame with `seconds` = step x seconds per step of its method in `times`: runs made one after another do not time each other fairly."""
    per_step = times.set_index(["setup", "method"])["seconds_per_step"]
    keys = pd.MultiIndex.from_frame(frame[["setup", "method"]])
    missing = sorted(set(keys) - set(per_step.index))
    if missing:
        raise ValueError(f"the bench has no seconds per step for {missing}; measure them or leave these methods out")
    return _rounded(frame.assign(seconds=frame["step"].to_numpy() * per_step.reindex(keys).to_numpy(), clock=f"{times['clock'].iloc[0]} (bench)"))


def proximal_seconds(bench: dict, clock: str = "measured") -> pd.DataFrame:
    """Seconds to obtain log pi_prox for one batch, from the JSON of the proximal bench: forward pass or interpolation, at cpu and paper tensor sizes."""
    small, large = bench["cpu_model"], bench["paper_tensors"]
    rows = [("cpu model", REFERENCE, small["recompute_s"]), ("cpu model", "loglinear", small["interpolate_s"])]
    rows.append(("tensors of the paper's size", "loglinear", large["interpolate_s"]))
    return _rounded(pd.DataFrame(rows, columns=["tensors", "method", "seconds"]).assign(clock=clock))


def final_eval_reward(results: dict[str, list], evaluation: str = "eval") -> pd.DataFrame:
    """Last evaluation reward per method, standard error, and the difference from recompute paired by seed and prompt."""
    rewards = {method: _final_rewards(method, runs, evaluation) for method, runs in results.items()}
    setup, scale = _setup(next(iter(results.values()))[0].manifest), next(iter(results.values()))[0].manifest["config"]["scale"]
    values = published.load("a3po")["tables"]["final_eval_reward"].get(setup, {})
    rows = []
    for method, reward in rewards.items():
        estimate = mean_and_error(reward)
        row = {"setup": setup, "method": method, "published": values.get(method), "reward": estimate.mean, "se": estimate.se}
        if REFERENCE in rewards and method != REFERENCE:
            if not (reward.index.equals(rewards[REFERENCE].index) and reward.columns.equals(rewards[REFERENCE].columns)):
                raise ValueError(f"{setup}: {method} and {REFERENCE} need the same seeds and evaluation prompts; run the missing seeds")
            difference = paired_difference(reward, rewards[REFERENCE])
            row |= {"difference": difference.mean, "difference_se": difference.se}
        rows.append(row | {"seeds": estimate.seeds, "prompts": estimate.prompts, "scale": scale})
    return _rounded(pd.DataFrame(rows))


def benchmarks(results: dict[str, list], sets: list[str]) -> pd.DataFrame:
    """Final reward in % on held-out sets, per method, with its standard error (setup, method, set, reward, se, seeds, prompts)."""
    rows = []
    for method, runs in results.items():
        for name in sets:
            estimate = mean_and_error(100 * _final_rewards(method, runs, name))
            row = {"setup": _setup(runs[0].manifest), "method": method, "set": name, "reward": estimate.mean, "se": estimate.se}
            rows.append(row | {"seeds": estimate.seeds, "prompts": estimate.prompts, "scale": runs[0].manifest["config"]["scale"]})
    return _rounded(pd.DataFrame(rows))


def markdown(frame: pd.DataFrame, columns: dict[str, tuple[str, str]]) -> str:
    """A Markdown table of `columns`: {column: (heading, format of a value)}; missing values print as a dash."""
    lines = ["| " + " | ".join(heading for heading, _ in columns.values()) + " |", "|" + " --- |" * len(columns)]
    for row in frame.to_dict("records"):
        cells = ["–" if pd.isna(row[name]) else form.format(row[name]) for name, (_, form) in columns.items()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def training_time_markdown(frame: pd.DataFrame) -> str:
    columns = {
        "setup": ("setup", "{}"),
        "method": ("method", "{}"),
        "published_hours": ("published: hours", "{:.2f}"),
        "published_speedup_over_sync": ("published: over sync", "{:.1f}x"),
        "published_speedup_over_recompute": ("published: over recompute", "{:.2f}x"),
        "seconds_per_step": ("measured: s per step", "{:.3f}"),
        "speedup_over_sync": ("measured: over sync", "{:.2f}x"),
        "speedup_over_recompute": ("measured: over recompute", "{:.2f}x"),
        "f_over_u": ("f/u", "{:.2f}"),
        "bound": ("bound 1 + f/u", "{:.2f}x"),
        "mean_staleness": ("mean d", "{:.1f}"),
        "blocks": ("n (blocks)", "{:d}"),
    }
    first = frame.iloc[0]
    return markdown(frame, columns) + (
        f"\nPublished hours include evaluations; the speed-ups named in the paper are against synchronous training. Measured: {first['scale']} scale, "
        f"clock = {first['clock']}, medians over interleaved blocks. f/u: forward pass over update; 1 + f/u bounds any gain over recompute.\n"
    )


def final_eval_reward_markdown(frame: pd.DataFrame) -> str:
    columns = {
        "setup": ("setup", "{}"),
        "method": ("method", "{}"),
        "published": ("published (n = 1)", "{:.3f}"),
        "reward": ("measured", "{:.3f}"),
        "se": ("± s.e.", "{:.3f}"),
        "difference": ("minus recompute", "{:+.3f}"),
        "difference_se": ("± s.e. (paired)", "{:.3f}"),
        "seeds": ("n (seeds)", "{:d}"),
        "prompts": ("prompts", "{:d}"),
    }
    return markdown(frame, columns) + f"\nMeasured: {frame['scale'].iloc[0]} scale; another model and task than published, so only differences compare.\n"


def benchmarks_markdown(frame: pd.DataFrame) -> str:
    facts = published.load("a3po")["tables"]["benchmarks_setup2"]
    rows = [(name, method, *np.atleast_1d(value)) for name in ("aime24", "math500", "average") for method, value in facts[name].items()]
    shown = {"set": ("set", "{}"), "method": ("method", "{}"), "reward": ("%", "{:.2f}"), "se": ("± s.e.", "{:.2f}")}
    measured = {"setup": ("setup", "{}"), **shown, "seeds": ("n (seeds)", "{:d}"), "prompts": ("prompts", "{:d}")}
    return (
        f"Published: setup 2, one sample per problem\n\n{markdown(pd.DataFrame(rows, columns=list(shown)), shown)}"
        f"\nMeasured: {frame['scale'].iloc[0]} scale, held-out sets of the task\n\n{markdown(frame, measured)}"
    )


TABLES = {"a3po_training_time": training_time_markdown, "a3po_final_eval_reward": final_eval_reward_markdown, "a3po_benchmarks": benchmarks_markdown}


def _setup(manifest: dict) -> str:
    return PurePosixPath(manifest["config"]["name"]).name


def _tidy_run(method: str, run, columns: list[str]) -> pd.DataFrame:
    config, metrics = run.manifest["config"], run.metrics
    missing = sorted(set(columns) - set(metrics.columns))
    if missing:
        raise ValueError(f"{config['name']} {method} seed {run.manifest['seed']} has no metric {', '.join(missing)}")
    rows = metrics.dropna(subset=columns, how="all")
    seconds = rows["time/elapsed"].where(rows["step"] > 0, 0.0)
    head = {"setup": _setup(run.manifest), "method": method, "seed": run.manifest["seed"], "scale": config["scale"], "clock": config["runtime"]["clock"]}
    return _rounded(rows[columns].assign(**head, step=rows["step"], seconds=seconds)[[*head, "step", "seconds", *columns]])


def _final_rewards(method: str, runs: list, evaluation: str) -> pd.DataFrame:
    """Rewards [seeds, prompts] of the last evaluation on a set, seeds and rows in ascending order."""
    parts = []
    for run in runs:
        rows = run.evaluations[run.evaluations["set"] == evaluation]
        if rows.empty:
            raise ValueError(f"{run.manifest['config']['name']} {method} seed {run.manifest['seed']} was never evaluated on {evaluation!r}")
        parts.append(rows[rows["step"] == rows["step"].max()].assign(seed=run.manifest["seed"]))
    table = pd.concat(parts).pivot(index="seed", columns="row", values="reward")
    if table.isna().to_numpy().any():
        raise ValueError(f"{method}: the seeds were evaluated on different prompts of {evaluation!r}")
    return table


def _rounded(frame: pd.DataFrame) -> pd.DataFrame:
    floats = frame.select_dtypes("float").columns
    return frame.assign(**{name: frame[name].map(lambda value: float(f"{value:.6g}")) for name in floats})
