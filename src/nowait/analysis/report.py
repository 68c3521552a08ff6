"""figures/report.md: every published number beside what we measured, judged by published/targets.yaml, and the shape targets for both setups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from nowait import published
from nowait.analysis.statistics import bin_means
from nowait.analysis.tables import REFERENCE, markdown
from nowait.published import Entry

METHODS = ("sync", "recompute", "loglinear")
CURVES = {  # published figure: CSV and column of its measured counterpart
    "eval_reward": ("a3po_eval_reward_steps", "eval/reward"),
    "train_reward": ("a3po_train_reward_steps", "rollout/reward_mean"),
    "clipped_tokens": ("a3po_clipped_tokens", "train/clipped_tokens"),
    "ratio_min": ("a3po_importance_weight_min", "train/ratio_min"),
    "ratio_max": ("a3po_importance_weight_max", "train/ratio_max"),
    "entropy": ("a3po_entropy", "train/entropy"),
}
INTRODUCTION = """# Published, simulated, measured

Made from the CSV files beside this page; provenance.json names the runs behind them. *Simulated* (the paper's hardware) is not part of this version.
*Measured* is the cpu scale: tiny models, real training, judged only on what has no unit, by rules fixed before the runs (`published/targets.yaml`).
n counts seeds, or blocks of a bench for times; published steps are matched by the fraction of the run.
Verdicts: pass, fail, not judged (the reason says why), not run (no data in this folder), not attempted.
"""


class Measured(NamedTuple):
    value: float
    n: int
    se: float = float("nan")

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" ± {self.se:.2g}" if np.isfinite(self.se) else "")


class Row(NamedTuple):
    entry: Entry
    measured: Measured | None
    verdict: str
    reason: str


def report(folder: str | Path = "figures") -> str:
    """Write report.md into `folder` from the CSV files there, whichever exist; returns its text."""
    folder = Path(folder)
    frames = {csv.stem: pd.read_csv(csv) for csv in sorted(folder.glob("*.csv"))}
    values = {**_table_values(frames), **_curve_values(frames)}
    text = INTRODUCTION + "".join(_paper(paper, frames, values) for paper in published.PAPERS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def judge(paper: str, values: dict[str, Measured]) -> list[Row]:
    """One row per published number of a paper; `values` holds what was measured, by entry id."""
    entries, rules = published.entries(paper), published.targets()[paper]["entries"]
    numbers = {entry.id: entry.value for entry in entries}
    return [_judge(entry, next(rule for rule in rules if fnmatchcase(entry.id, rule["match"])), numbers, values) for entry in entries]


def shapes(paper: str, frames: dict[str, pd.DataFrame]) -> Iterator[tuple[str, str, str, str]]:
    """(target, setup, verdict, numbers) for every shape target of a paper in each of its setups."""
    facts = published.load(paper)
    for target, rule in zip(facts["shape_targets"], published.targets()[paper]["shapes"], strict=True):
        for setup in facts.get("setups", ["all"]):
            yield target, setup, *_shape(frames, setup, rule)


def _judge(entry: Entry, rule: dict, numbers: dict[str, float], values: dict[str, Measured]) -> Row:
    measured = values.get(entry.id)
    if "judge" not in rule:
        return Row(entry, measured, rule.get("verdict", "not judged"), rule["reason"])
    if measured is None:
        return Row(entry, None, "not run", "")
    passed, reason = RULES[rule["judge"]](rule, entry, measured.value, numbers, values)
    verdict = "not judged" if passed is None else "pass" if passed else "fail"
    return Row(entry, measured, verdict, f"{reason}; {rule['differs']}" if verdict == "fail" and "differs" in rule else reason)


def _shape(frames: dict[str, pd.DataFrame], setup: str, rule: dict) -> tuple[str, str]:
    if "judge" not in rule:
        return rule["verdict"], rule["reason"]
    try:
        passed, numbers = SHAPES[rule["judge"]](frames, setup, rule)
    except LookupError as missing:
        return "not run", str(missing.args[0])
    return "pass" if passed else "fail", f"{numbers} ({rule['note']})" if "note" in rule else numbers


def _ratio(rule: dict, entry: Entry, value: float, *_) -> tuple[bool, str]:
    return abs(value / entry.value - 1) <= rule["tolerance"], f"{value / entry.value - 1:+.0%}, tolerance {rule['tolerance']:.0%}"


def _range(rule: dict, entry: Entry, value: float, *_) -> tuple[bool, str]:
    low, high = rule["range"]
    return low <= value <= high, f"asked: {low} to {high}"


def _against_reference(rule: dict, entry: Entry, value: float, numbers: dict, values: dict) -> tuple[bool | None, str]:
    """Gap to recompute, judged by its size ("difference": margin) or its direction ("side": resolution)."""
    reference = ".".join(REFERENCE if part in METHODS else part for part in entry.id.split("."))
    if reference == entry.id or reference not in values:
        return None, f"{REFERENCE} is what the others are compared with"
    expected, found = entry.value - numbers[reference], value - values[reference].value
    if rule["judge"] == "difference":
        return abs(found - expected) <= rule["margin"], f"minus {REFERENCE}: {found:+.3f}, published {expected:+.3f}, margin {rule['margin']}"
    if abs(expected) < rule["resolution"] * numbers[reference]:
        return None, f"published gap to {REFERENCE} under {rule['resolution']:.0%}"
    return found * expected > 0, f"published {'above' if expected > 0 else 'below'} {REFERENCE}; measured minus {REFERENCE}: {found:+.3g}"


RULES = {"ratio": _ratio, "range": _range, "difference": _against_reference, "side": _against_reference}


def _shape_seconds(frames: dict, setup: str, rule: dict) -> tuple[bool, str]:
    rows = _rows(frames, "a3po_training_time", setup).set_index("method")
    sync, recompute, loglinear = (_at(rows["seconds_per_step"], method) for method in METHODS)
    share, (low, high) = (recompute - loglinear) / rows["forward_s"].iloc[0], rule["share_of_forward"]
    numbers = f"s per step: loglinear {loglinear:.3g}, recompute {recompute:.3g}, sync {sync:.3g}"
    gap = f"loglinear under recompute by {share:.0%} of the forward pass (asked: {low:.0%} to {high:.0%})"
    return low <= share <= high and max(loglinear, recompute) < sync, f"{numbers}; {gap}"


def _shape_clipped(frames: dict, setup: str, rule: dict) -> tuple[bool, str]:
    frame = _rows(frames, "a3po_clipped_tokens", setup)
    settled, settling = ({m: _window(frame, "train/clip_frac", m, rule[name]) for m in METHODS} for name in ("settled", "settling"))
    passed = settled["loglinear"] < rule["under"] * min(settled["recompute"], settled["sync"])
    if setup in rule["settling_setups"]:
        passed &= settling["loglinear"] > max(settling["recompute"], settling["sync"])
    return passed, f"clipped fraction settled: {_listed(settled)} (asked: under {rule['under']} of either); settling: {_listed(settling)}"


def _shape_weights(frames: dict, setup: str, rule: dict) -> tuple[bool, str]:
    largest, low = _rows(frames, "a3po_importance_weight_max", setup), _rows(frames, "a3po_importance_weight_min", setup)
    peak, median = ({m: _window(largest, "train/ratio_max", m, rule["settled"], how) for m in METHODS} for how in (np.max, np.median))
    late = {m: _window(low, "train/ratio_min", m, rule["late"]) for m in METHODS}
    spiky, flat = peak["recompute"] / peak["loglinear"], peak["loglinear"] / median["loglinear"]
    passed = spiky >= rule["spiky"] and flat <= rule["flat"] and late["loglinear"] > max(late["recompute"], late["sync"])
    asked = f"recompute over loglinear {spiky:.3g} (asked: {rule['spiky']}), loglinear over its median {flat:.3g} (asked: {rule['flat']} at most)"
    return passed, f"largest r: {_listed(peak)}; {asked}; smallest r late: {_listed(late)}"


def _shape_entropy(frames: dict, setup: str, rule: dict) -> tuple[bool, str]:
    frame = _rows(frames, "a3po_entropy", setup)
    late = {m: _window(frame, "train/entropy", m, rule["late"]) for m in METHODS}
    return late["loglinear"] > max(late["recompute"], late["sync"]), f"nats late: {_listed(late)}"


def _shape_final(frames: dict, setup: str, rule: dict) -> tuple[bool, str]:
    rows = _rows(frames, "a3po_final_eval_reward", setup).set_index("method")
    difference, se = _at(rows["difference"], "loglinear"), _at(rows["difference_se"], "loglinear")
    unresolved = "" if 1.96 * se < rule["margin"] else "; not resolved: 1.96 standard errors exceed the margin"
    return abs(difference) <= rule["margin"], f"loglinear minus recompute {difference:+.4f} ± {se:.4f} (asked: {rule['margin']} at most){unresolved}"


SHAPES = {
    "seconds_per_step": _shape_seconds,
    "clipped_tokens": _shape_clipped,
    "importance_weights": _shape_weights,
    "entropy": _shape_entropy,
    "final_eval_reward": _shape_final,
}


def _rows(frames: dict[str, pd.DataFrame], name: str, setup: str) -> pd.DataFrame:
    rows = frames[name][lambda frame: frame["setup"] == setup] if name in frames else pd.DataFrame()
    if rows.empty:
        raise LookupError(f"no rows of {setup} in {name}.csv")
    return rows


def _at(column: pd.Series, method: str) -> float:
    if not np.isfinite(column.get(method, np.nan)):
        raise LookupError(f"no {column.name} of {method}")
    return float(column[method])


def _window(frame: pd.DataFrame, column: str, method: str, window: list[float], how=np.mean) -> float:
    """Summary over seeds and the steps in [from, to), fractions of the run; to = 1 includes the last step."""
    runs = frame[frame["method"] == method].dropna(subset=[column])
    last = runs["step"].max()
    inside = runs[(runs["step"] >= window[0] * last) & ((runs["step"] < window[1] * last) | (window[1] == 1))]
    if inside.empty:
        raise LookupError(f"{method} has no {column} in {window} of the run")
    return float(how(inside[column]))


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{method} {value:.3g}" for method, value in values.items())


def _table_values(frames: dict[str, pd.DataFrame]) -> dict[str, Measured]:
    values = {}
    for row in frames.get("a3po_training_time", pd.DataFrame()).itertuples():
        for name in ("seconds_per_step", "speedup_over_sync", "speedup_over_recompute"):
            values[f"tables.{name}.{row.setup}.{row.method}"] = Measured(getattr(row, name), row.blocks)
        if (row.setup, row.method) == ("setup2", "loglinear"):
            values["tables.v3_headline.speedup"] = Measured(row.speedup_over_sync, row.blocks)
        if (row.setup, row.method) == ("setup1", "loglinear"):
            values["tables.v1_headline.training_time_change_pct"] = Measured(100 / row.speedup_over_recompute - 100, row.blocks)
    for row in frames.get("a3po_final_eval_reward", pd.DataFrame()).itertuples():
        values[f"tables.final_eval_reward.{row.setup}.{row.method}"] = Measured(row.reward, row.seeds, row.se)
    if "a3po_benchmarks" in frames:
        for (setup, method), rows in frames["a3po_benchmarks"].groupby(["setup", "method"]):
            error = np.sqrt((rows["se"] ** 2).sum()) / len(rows)
            values[f"tables.benchmarks_{setup}.average.{method}"] = Measured(rows["reward"].mean(), rows["seeds"].min(), error)
    if "a3po_proximal_seconds" in frames:
        rows = frames["a3po_proximal_seconds"][lambda frame: frame["tensors"] == "cpu model"].set_index("method")
        seconds, n = rows["seconds"], rows["blocks"].iloc[0]
        values |= {f"figures.proximal_seconds.setup1.{method}.typical": Measured(seconds[method], n) for method in seconds.index}
        values["tables.proximal_seconds_headline.text.ratio"] = Measured(seconds[REFERENCE] / seconds["loglinear"], n)
    return values


def _curve_values(frames: dict[str, pd.DataFrame]) -> dict[str, Measured]:
    setups, values = published.load("a3po")["setups"], {}
    for entry in published.entries("a3po"):
        _, figure, setup, *rest = entry.id.split(".")
        name, column = CURVES.get(figure, (None, None))
        if not entry.id.startswith("figures.") or name not in frames or len(rest) != 2:
            continue
        method, label = rest if rest[0] in METHODS else reversed(rest)
        runs = frames[name][lambda frame, s=setup, m=method: (frame["setup"] == s) & (frame["method"] == m)].dropna(subset=[column])
        edges = _edges(label, setups[setup]["steps"], runs["step"].max()) if len(runs) else None
        value = bin_means(runs["step"], runs[column], edges)[0] if edges else np.nan
        if np.isfinite(value):
            values[entry.id] = Measured(value, runs["seed"].nunique())
    return values


def _edges(label: str, published_steps: int, steps: int) -> tuple[float, float] | None:
    """Our steps [from, to) that match a published label: a bin 30-60, a step 30, step1, end; None for anything else."""
    low, _, high = label.partition("-")
    if not low.isdigit():
        return {"step1": (1, 2), "end": (0.95 * steps, steps + 1)}.get(label)
    scale = steps / published_steps
    if not high:
        return int(low) * scale - 0.5, int(low) * scale + 0.5
    return int(low) * scale, steps + 1 if int(high) == published_steps else int(high) * scale


def _paper(paper: str, frames: dict[str, pd.DataFrame], values: dict[str, Measured]) -> str:
    facts, rows = published.load(paper), judge(paper, values)
    text = f"\n## {facts['paper']['title']} (arXiv {facts['paper']['arxiv']})\n\n{len(rows)} published numbers: {_counts(rows)}.\n"
    text += "\n### Shape targets\n\n| target | setup | verdict | numbers |\n| --- | --- | --- | --- |\n"
    text += "".join(f"| {' | '.join(row)} |\n" for row in shapes(paper, frames))
    for part, group in groupby(rows, key=lambda row: row.entry.id.split(".")[:2]):
        text += _section(part, list(group))
    text += "\n### Where the paper contradicts itself\n\n" + "".join(f"- {item}\n" for item in facts["known_inconsistencies"])
    if differences := published.deviations(paper):
        text += "\n### What we do differently\n\n" + markdown(pd.DataFrame(differences), {name: (name, "{}") for name in differences[0]})
    return text + "\nSources: " + "; ".join(f"*{tag}* {meaning}" for tag, meaning in facts["sources"].items()) + ".\n"


def _section(part: list[str], rows: list[Row]) -> str:
    text = f"\n### {part[0].removesuffix('s').capitalize()}: {part[1].replace('_', ' ')}\n\n<details><summary>{_counts(rows)}</summary>\n\n"
    text += "| number | source | published | simulated | measured | n | verdict | reason |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    for entry, measured, verdict, reason in rows:
        name, unit = ".".join(entry.id.split(".")[2:]), "" if entry.unit in ("ratio", "reward") else f" {entry.unit}"
        found, n = (f"{measured}{unit}", str(measured.n)) if measured else ("-", "-")
        text += f"| {name} | {entry.source} | {entry.value:.5g}{unit} | - | {found} | {n} | {verdict} | {reason} |\n"
    return text + "\n</details>\n"


def _counts(rows: list[Row]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(row.verdict for row in rows).most_common())
