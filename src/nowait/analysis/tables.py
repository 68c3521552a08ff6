"""Tidy frames from runs and benches, and the papers' tables as Markdown: published columns first, measured ones after.

Results are {method: [nowait.runs.RunResult per seed]} of one setup; frames of several setups are joined with `pandas.concat`.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pandas as pd
import yaml

from nowait import published
from nowait.analysis.statistics import mean_and_error, paired_difference, standard_error
from nowait.config import Experiment, digest

COLUMNS = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
NOTES = COLUMNS.pop("notes")
REFERENCE = "recompute"  # differences in quality are against the method that A-3PO approximates


def tidy(results: dict[str, list], columns: list[str]) -> pd.DataFrame:
    """One row per run and step that has any of the metrics `columns`: setup, method, seed, scale, clock, step, seconds, then the metrics.

    `seconds` is the run's elapsed time without evaluations, on the run's clock. Numbers carry six significant digits: a CSV returns them exactly.
    """
    parts = []
    for head, run in each(results):
        if missing := sorted(set(columns) - set(run.metrics.columns)):
            raise ValueError(f"{run.manifest['config']['name']} {head['method']} seed {head['seed']} has no metric {', '.join(missing)}")
        rows = run.metrics.dropna(subset=columns, how="all")
        seconds = rows["time/elapsed"].where(rows["step"] > 0, 0.0)
        parts.append(rows[columns].assign(**head, step=rows["step"], seconds=seconds)[[*head, "step", "seconds", *columns]])
    if not parts:
        raise ValueError("no finished runs: run them first")
    return rounded(pd.concat(parts, ignore_index=True))


def provenance(results: Iterable[dict[str, list]]) -> dict:
    """What a figure must say about its runs: seeds, digest of the code, digest of every configuration by setup/method."""
    runs = [(method, run.manifest) for result in results for method, several in result.items() for run in several]
    configs = {f"{setup(run['config']['name'])}/{method}": digest(Experiment.model_validate(run["config"])) for method, run in runs}
    return {"seeds": sorted({run["seed"] for _, run in runs}), "code": sorted({run["code"] for _, run in runs}), "config": configs}


def setup(name: str) -> str:
    """The setup that a config's name ends in: setup1 of a3po/setup1."""
    return PurePosixPath(name).name


def head_of(method: str, run) -> dict:
    """What the rows of a run begin with."""
    config, seed = run.manifest["config"], run.manifest["seed"]
    return {"setup": setup(config["name"]), "method": method, "seed": seed, "scale": config["scale"], "clock": config["runtime"]["clock"]}


def each(results: dict[str, list]) -> Iterator[tuple[dict, Any]]:
    """What the rows of a run begin with, and the run, for every run."""
    return ((head_of(method, run), run) for method, several in results.items() for run in several)


def rows_of(frames: dict[str, pd.DataFrame], name: str, place: str) -> pd.DataFrame:
    """The rows of a setup or task in a saved frame. Raises LookupError where there are none."""
    rows = frames[name][lambda frame: frame["setup"] == place] if name in frames else pd.DataFrame()
    if rows.empty:
        raise LookupError(f"no rows of {place} in {name}.csv")
    return rows


def training_time(bench: dict) -> pd.DataFrame:
    """Seconds per training step and speed-ups, one row per method, from the JSON of the asynchronous bench.

    Speed-ups are medians over the bench's interleaved blocks, with standard errors over blocks (none for one block), as has the difference
    of seconds from recompute; `bound` = 1 + f/u is the most that removing the forward pass can gain over recompute. `overlap_efficiency` is
    A-3PO's: work of the busiest device by itself over elapsed time.
    """
    facts, place = published.load("a3po")["tables"], setup(bench["config"])
    shown = {"hours": "training_hours", **{name: name for name in ("seconds_per_step", "speedup_over_sync", "speedup_over_recompute")}}
    blocks, bases = {row["method"]: np.asarray(row["blocks"], float) for row in bench["rows"]}, ("sync", "sync_colocated", REFERENCE)
    rows = [
        {
            "setup": place,
            "method": row["method"],
            **{f"published_{name}": facts[table].get(place, {}).get(row["method"]) for name, table in shown.items()},
            "seconds_per_step": row["seconds_per_step"],
            "difference_se": standard_error(blocks[row["method"]] - blocks[REFERENCE]),
            **{f"speedup_over_{base}": np.median(blocks[base] / blocks[row["method"]]) for base in bases},
            **{f"speedup_over_{base}_se": standard_error(blocks[base] / blocks[row["method"]]) for base in bases},
            "overlap_efficiency": bench["overlap_efficiency"] if row["method"] == "loglinear" else np.nan,
            "mean_staleness": row["mean_staleness"],
            "blocks": len(row["blocks"]),
        }
        for row in bench["rows"]
    ]
    shared = {key: bench[key] for key in ("sampler_s", "update_s", "forward_s", "scale", "clock")}
    return rounded(pd.DataFrame(rows).assign(**shared, f_over_u=bench["forward_over_update"], bound=1 + bench["forward_over_update"]))


def on_bench_time(frame: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """The tidy frame with `seconds` = step x seconds per step in `times`: runs made one after another are no fair timing of methods."""
    keys = ["setup", "method"]
    timed = frame.merge(times[[*keys, "seconds_per_step"]], "left", keys)
    if len(missing := timed[timed["seconds_per_step"].isna()]):
        known = missing[keys].drop_duplicates().to_numpy().tolist()
        raise ValueError(f"the bench has no seconds per step for {known}; measure them or leave these methods out")
    seconds = timed["step"] * timed["seconds_per_step"]
    return rounded(timed[list(frame)].assign(seconds=seconds, clock=f"{times['clock'].iloc[0]} (bench)"))


def proximal_seconds(bench: dict) -> pd.DataFrame:
    """Seconds to obtain log pi_prox for one batch of a setup, from the JSON of the proximal bench: by forward pass or interpolation, and their ratio;
    and for tensors of the paper's size, of no setup."""
    small, large = bench["cpu_model"], bench["paper_tensors"]
    place = setup(bench["config"])
    rows = [(place, "cpu model", REFERENCE, small["recompute_s"], small["ratio"], standard_error(small["ratios"]))]
    rows += [(place, "cpu model", "loglinear", small["interpolate_s"], np.nan, np.nan)]
    rows += [("-", "tensors of the paper's size", "loglinear", large["interpolate_s"], np.nan, np.nan)]
    frame = pd.DataFrame(rows, columns=["setup", "tensors", "method", "seconds", "over_loglinear", "over_loglinear_se"])
    return rounded(frame.assign(blocks=bench["blocks"], clock="wall", scale=bench["scale"]))


def final_eval_reward(results: dict[str, list]) -> pd.DataFrame:
    """Last evaluation reward per method, standard error, the difference from recompute, and the rise since step 0, both paired by seed and prompt.

    `learned`: whether the rise is as large, and as many of its standard errors, as targets.yaml asks.
    """
    facts, rows = published.load("a3po")["tables"]["final_eval_reward"], []
    asked = next(rule for rule in published.load("targets")["a3po"]["own"] if rule["judge"] == "rise")
    for row, (method, runs) in zip(quality_rows(results, ["eval"]), results.items(), strict=True):
        before, after = (_rewards(method, runs, "eval", end) for end in ("min", "max"))
        rise = paired_difference((after, before))
        told = {"published": facts.get(row["setup"], {}).get(method), "before": before.mean(axis=None), "rise": rise.mean, "rise_se": rise.se}
        rows.append({**row, **told, "learned": "yes" if rise.mean >= max(asked["least"], asked["errors"] * rise.se) else "no"})
    return rounded(pd.DataFrame(rows))


def benchmarks(results: dict[str, list], sets: list[str]) -> pd.DataFrame:
    """Final reward in % on each of the held-out sets and on their average, per method, compared as in `final_eval_reward`."""
    named = {name: [name] for name in sets} | ({"average": sets} if len(sets) > 1 else {})
    frame = pd.DataFrame([{**row, "set": name} for name, several in named.items() for row in quality_rows(results, several)])
    shares = [name for name in ("reward", "se", "difference", "difference_se") if name in frame]
    return rounded(frame.assign(**{name: 100 * frame[name] for name in shares}))


def markdown(frame: pd.DataFrame, table: str) -> str:
    """A Markdown table of those columns of tables.yaml that the frame has, and the table's note; missing values print as a dash."""
    columns = {name: COLUMNS[table][name] for name in COLUMNS[table] if name in frame}
    rows = [["–" if pd.isna(row[name]) else form.format(row[name]) for name, (_, form) in columns.items()] for row in frame.to_dict("records")]
    text = NOTES[table].format(covered=_covered(frame), **frame.iloc[0]) if table in NOTES else ""
    return grid([heading for heading, _ in columns.values()], rows) + (text and f"\n{text}\n")


def grid(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Cells as a Markdown table."""
    headings = list(headings)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (headings, ["---"] * len(headings), *rows))


def training_time_markdown(frame: pd.DataFrame) -> str:
    balances = map(_balance, frame[frame["method"] == "loglinear"].to_dict("records"))
    return markdown(frame, "training_time") + "".join(f"\n{text}\n" for text in balances)


def _balance(row: dict) -> str:
    """Which device limits a training step, and what that leaves A-3PO to gain."""
    s, u, f = (row[name] for name in ("sampler_s", "update_s", "forward_s"))
    limit = "the sampler, for which recompute waits as well" if s >= u + f else "the learner"
    return (
        f"{row['setup']}: s = {s:.3f}, u = {u:.3f}, f = {f:.3f} seconds of sampling, update and forward pass per step, s/u = {s / u:.2f}; "
        f"the bottleneck is {limit}. A-3PO is {row['speedup_over_recompute']:.2f} times as fast as recompute (1 + f/u = {row['bound']:.2f}), "
        f"and {row['speedup_over_sync_colocated']:.2f} times as fast as sync colocated."
    )


def benchmarks_markdown(frame: pd.DataFrame) -> str:
    facts = published.load("a3po")["tables"]["benchmarks_setup2"]
    rows = [(name, method, *facts[name][method]) for name in ("aime24", "math500") for method in facts[name]]
    rows += [("average", method, value, np.nan) for method, value in facts["average"].items()]
    told = pd.DataFrame(rows, columns=["set", "method", "reward", "se"])
    return f"Published: setup 2, one sample per problem\n\n{markdown(told, 'published_benchmarks')}\n{markdown(frame, 'benchmarks')}"


def _covered(frame: pd.DataFrame) -> str:
    """What the numbers of a bench, or the standard errors of rewards, are over."""
    if "blocks" in frame:
        return "medians over interleaved blocks" if frame["blocks"].iloc[0] > 1 else "one pass over the methods, which shows no spread"
    alone = "seeds" in frame and frame["seeds"].min() == 1
    return "± s.e. is over prompts" + (" only: one seed says nothing about others" if alone else " and seeds")


CONTENTS = {
    "a3po_training_time": training_time_markdown,
    "a3po_training_time_wall": training_time_markdown,
    "a3po_training_time_sampler_bound": training_time_markdown,
    "a3po_final_eval_reward": partial(markdown, table="final_eval_reward"),
    "a3po_benchmarks": benchmarks_markdown,
}


def quality_rows(results: dict[str, list], sets: list[str], reference: str = REFERENCE) -> list[dict]:
    """One row per method: final reward, mean of the sets, and where there is the reference method the difference from it."""
    rewards = {method: [_rewards(method, runs, name) for name in sets] for method, runs in results.items()}
    rows = []
    for method, own in rewards.items():
        config, estimate = results[method][0].manifest["config"], mean_and_error(*own)
        row = {"setup": setup(config["name"]), "method": method, "scale": config["scale"], "reward": estimate.mean, "se": estimate.se}
        if method != reference and reference in rewards:
            pairs = list(zip(own, rewards[reference], strict=True))
            if not all(a.index.equals(b.index) and a.columns.equals(b.columns) for a, b in pairs):
                raise ValueError(f"{row['setup']}: {method} and {reference} need the same seeds and evaluation prompts; run the missing seeds")
            difference = paired_difference(*pairs)
            row |= {"difference": difference.mean, "difference_se": difference.se}
        rows.append(row | {"seeds": estimate.seeds, "prompts": estimate.prompts})
    return rows


def _rewards(method: str, runs: list, evaluation: str, end: str = "max") -> pd.DataFrame:
    """Rewards [seeds, prompts] of the last ("max") or first ("min") evaluation on a set, seeds and rows in ascending order."""
    parts = []
    for run in runs:
        rows = run.evaluations[run.evaluations["set"] == evaluation]
        if rows.empty:
            raise ValueError(f"{run.manifest['config']['name']} {method} seed {run.manifest['seed']} was never evaluated on {evaluation!r}")
        parts.append(rows[rows["step"] == rows["step"].agg(end)].assign(seed=run.manifest["seed"]))
    table = pd.concat(parts).pivot(index="seed", columns="row", values="reward")
    if table.isna().to_numpy().any():
        raise ValueError(f"{method}: the seeds were evaluated on different prompts of {evaluation!r}, or a prompt could not be graded")
    return table


def rounded(frame: pd.DataFrame) -> pd.DataFrame:
    floats = frame.select_dtypes("float").columns
    return frame.assign(**{name: frame[name].map(lambda value: float(f"{value:.6g}")) for name in floats})
