"""figures/report.md: every published number beside what we measured, judged by published/targets.yaml, and the shape targets for both setups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nowait import published
from nowait.analysis import report_oppo
from nowait.analysis.statistics import standard_error
from nowait.analysis.tables import REFERENCE, markdown, rows_of
from nowait.published import Entry

METHODS = ("sync", "recompute", "loglinear")
OTHERS = ["sync", "recompute"]
CURVES = {  # published figure: CSV and column of its measured counterpart
    "eval_reward": ("a3po_eval_reward_steps", "eval/reward"),
    "train_reward": ("a3po_train_reward_steps", "rollout/reward_mean"),
    "clipped_tokens": ("a3po_clipped_tokens", "train/clipped_tokens"),
    "ratio_min": ("a3po_importance_weight_min", "train/ratio_min"),
    "ratio_max": ("a3po_importance_weight_max", "train/ratio_max"),
    "entropy": ("a3po_entropy", "train/entropy"),
}
INTRODUCTION = """# Published, simulated, measured

Made from the CSV files beside this page; provenance.json names the runs behind them. *Simulated*: assumed hardware (paper_configs/simulation), with
the range over four changed assumptions; (fitted) where the calibration was made to meet the number.
*Measured* here: {scale}. It is judged only on what has no unit, by rules fixed before the runs (`published/targets.yaml`). n counts seeds, or
blocks of a bench for times; published steps are matched by the fraction of the run. ± is one standard error over seeds or blocks, for rewards
over prompts as well, and over prompts only where n = 1.
Verdicts: pass and fail, where the value lies inside or outside what was asked by more than two standard errors; not resolved, where it does not
or has no standard error (one seed, one block); not judged (the reason says why); not run (no data in this folder); not attempted. "Sign only"
asks for the side of recompute, "range only" for a wide range: neither asks for the published size.
"""


class Measured(NamedTuple):
    value: float
    n: int
    se: float = float("nan")
    difference_se: float = float("nan")  # of the difference from recompute, paired

    def __str__(self) -> str:
        return f"{self.value:.4g}" + (f" ± {self.se:.{2 if self.se < 100 else 4}g}" if np.isfinite(self.se) else "")


class Row(NamedTuple):
    entry: Entry
    measured: Measured | None
    verdict: str
    reason: str


def report(folder: str | Path = "figures") -> str:
    """Write report.md into `folder` from the CSV files there, whichever exist; returns its text."""
    folder = Path(folder)
    frames = {csv.stem: pd.read_csv(csv) for csv in sorted(folder.glob("*.csv"))}
    own = {key: Measured(*value) for key, value in report_oppo.values(frames).items()}
    values, reason = {**_table_values(frames), **_curve_values(frames), **own}, withheld(frames)
    text = INTRODUCTION.format(scale=f"scale {', '.join(_scales(frames))}" if frames else "nothing yet")
    for paper in published.PAPERS:
        simulated = {row.entry: row for row in frames.get(f"simulated_{paper}", pd.DataFrame()).itertuples()}
        text += _paper(paper, frames, judge(paper, values, reason), simulated)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def withheld(frames: dict[str, pd.DataFrame]) -> str:
    """Why nothing that was measured is judged: scale smoke, or figures of several scales in one folder. Empty where verdicts can be given."""
    scales = _scales(frames)
    if len(scales) > 1:
        return f"figures of several scales ({', '.join(scales)}): make them anew at one"
    return "at scale smoke the numbers mean nothing" if scales == ["smoke"] else ""


def judge(paper: str, values: dict[str, Measured], reason: str = "") -> list[Row]:
    """One row per published number of a paper; `values` holds what was measured, by entry id. With a reason `withheld` there is no verdict."""
    entries, rules = published.entries(paper), published.targets()[paper]["entries"]
    numbers = {entry.id: entry.value for entry in entries}
    chosen = [next(rule for rule in rules if fnmatchcase(entry.id, rule["match"])) for entry in entries]
    return [_judge(entry, rule, numbers, values, reason) for entry, rule in zip(entries, chosen, strict=True)]


def shapes(paper: str, frames: dict[str, pd.DataFrame]) -> Iterator[tuple[str, str, str, str]]:
    """(target, setup, verdict, numbers) for every shape target of a paper in each setup, or task, that it is claimed for."""
    facts = published.load(paper)
    for target, rule in zip(facts["shape_targets"], published.targets()[paper]["shapes"], strict=True):
        for setup in rule.get("setups", facts.get("setups") or facts["tasks"]):
            yield target, setup, *_shape(frames, setup, rule)


def _judge(entry: Entry, rule: dict, numbers: dict[str, float], values: dict[str, Measured], unjudged: str) -> Row:
    measured = values.get(entry.id)
    if "judge" not in rule:
        return Row(entry, measured, rule.get("verdict", "not judged"), rule["reason"])
    if measured is None or unjudged:
        return Row(entry, measured, "not judged" if measured else "not run", unjudged if measured else "")
    slack, se, reason = RULES[rule["judge"]](rule, entry, measured, numbers, values)
    verdict = "not judged" if slack is None else _decided(slack, se)
    reason = f"{reason}; {rule['differs']}" if verdict == "fail" and "differs" in rule else reason
    return Row(entry, measured, verdict + (LIMITED.get(rule["judge"], "") if verdict in ("pass", "fail") else ""), reason)


def _decided(slack: float, se: float) -> str:
    """By how much a value lies inside what was asked (outside: negative), against two of its standard errors."""
    resolved = abs(slack) > 2 * se  # false where there is no standard error
    return ("pass" if slack > 0 else "fail") if resolved else "not resolved"


def _shape(frames: dict[str, pd.DataFrame], setup: str, rule: dict) -> tuple[str, str]:
    if "judge" not in rule:
        return rule["verdict"], rule["reason"]
    try:
        conditions, numbers = SHAPES[rule["judge"]](frames, setup, rule)
    except LookupError as missing:
        return "not run", str(missing.args[0])
    if reason := withheld(frames):
        return "not judged", f"{reason}; {numbers}"
    decided = [_decided(*condition) for condition in conditions]
    verdict = next((verdict for verdict in ("fail", "not resolved") if verdict in decided), "pass")
    return verdict, numbers


def _ratio(rule: dict, entry: Entry, found: Measured, *_) -> tuple[float, float, str]:
    gap = found.value / entry.value - 1
    return rule["tolerance"] - abs(gap), found.se / entry.value, f"{gap:+.0%}, tolerance {rule['tolerance']:.0%}"


def _range(rule: dict, entry: Entry, found: Measured, *_) -> tuple[float, float, str]:
    low, high = rule["range"]
    return min(found.value - low, high - found.value), found.se, f"asked: {low} to {high}"


def _against_reference(rule: dict, entry: Entry, found: Measured, numbers: dict, values: dict) -> tuple[float | None, float, str]:
    """Gap to recompute, judged by its size ("difference": margin) or its direction ("side": resolution)."""
    reference = ".".join(REFERENCE if part in METHODS else part for part in entry.id.split("."))
    if reference == entry.id or reference not in values:
        return None, np.nan, f"{REFERENCE} is what the others are compared with"
    expected, gap, se = entry.value - numbers[reference], found.value - values[reference].value, found.difference_se
    if rule["judge"] == "difference":
        text = f"minus {REFERENCE}: {gap:+.3f} ± {se:.2g}, published {expected:+.3f}, margin {rule['margin']}"
        return rule["margin"] - abs(gap - expected), se, text
    if abs(expected) < rule["resolution"] * numbers[reference]:
        return None, np.nan, f"published gap to {REFERENCE} under {rule['resolution']:.0%}"
    text = f"published {'above' if expected > 0 else 'below'} {REFERENCE}; measured minus {REFERENCE}: {gap:+.3g} ± {se:.2g}"
    return gap * np.sign(expected), se, text


RULES = {"ratio": _ratio, "range": _range, "difference": _against_reference, "side": _against_reference}
LIMITED = {"range": " (range only)", "side": " (sign only)"}


# Each shape returns its conditions, every one a slack and its standard error, and the numbers behind them.


def _shape_seconds(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "a3po_training_time", setup).set_index("method")
    sync, recompute, loglinear = (_at(rows["seconds_per_step"], method) for method in METHODS)
    forward, (low, high) = rows["forward_s"].iloc[0], rule["share_of_forward"]
    share = (recompute - loglinear) / forward
    conditions = [(min(share - low, high - share), rows["difference_se"]["loglinear"] / forward)]
    conditions += [(rows["speedup_over_sync"][method] - 1, rows["speedup_over_sync_se"][method]) for method in METHODS[1:]]
    numbers = f"s per step: loglinear {loglinear:.3g}, recompute {recompute:.3g}, sync {sync:.3g}"
    return conditions, f"{numbers}; loglinear under recompute by {share:.0%} of the forward pass (asked: {low:.0%} to {high:.0%})"


def _shape_clipped(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    frame = rows_of(frames, "a3po_clipped_tokens", setup)
    settled, settling = (_windows(frame, "train/clip_frac", rule[name]) for name in ("settled", "settling"))
    conditions = [_over_seeds(rule["under"] * settled[OTHERS].min(axis=1) - settled["loglinear"])]
    if setup in rule["settling_setups"]:
        conditions.append(_above_others(settling))
    return conditions, f"clipped fraction settled: {_listed(settled)} (asked: under {rule['under']} of either); settling: {_listed(settling)}"


def _shape_weights(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    largest, low = rows_of(frames, "a3po_importance_weight_max", setup), rows_of(frames, "a3po_importance_weight_min", setup)
    peak, median = (_windows(largest, "train/ratio_max", rule["settled"], how) for how in ("max", "median"))
    late = _windows(low, "train/ratio_min", rule["late"])
    spiky, flat = peak["recompute"] / peak["loglinear"], peak["loglinear"] / median["loglinear"]
    asked = f"recompute over loglinear {spiky.mean():.3g} (asked: {rule['spiky']})"
    asked += f", loglinear over its median {flat.mean():.3g} (asked: {rule['flat']} at most)"
    conditions = [_over_seeds(spiky - rule["spiky"]), _over_seeds(rule["flat"] - flat), _above_others(late)]
    return conditions, f"largest r: {_listed(peak)}; {asked}; smallest r late: {_listed(late)}"


def _shape_entropy(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    late = _windows(rows_of(frames, "a3po_entropy", setup), "train/entropy", rule["late"])
    return [_above_others(late)], f"nats late: {_listed(late)}"


def _shape_final(frames: dict, setup: str, rule: dict) -> tuple[list, str]:
    rows = rows_of(frames, "a3po_final_eval_reward", setup).set_index("method")
    difference, se = _at(rows["difference"], "loglinear"), _at(rows["difference_se"], "loglinear")
    return [(rule["margin"] - abs(difference), se)], f"loglinear minus recompute {difference:+.4f} ± {se:.4f} (asked: {rule['margin']} at most)"


SHAPES = {
    "seconds_per_step": _shape_seconds,
    "clipped_tokens": _shape_clipped,
    "importance_weights": _shape_weights,
    "entropy": _shape_entropy,
    "final_eval_reward": _shape_final,
    **report_oppo.SHAPES,
}


def _scales(frames: dict[str, pd.DataFrame]) -> list[str]:
    return sorted({scale for frame in frames.values() if "scale" in frame for scale in frame["scale"].unique()})


def _at(column: pd.Series, method: str) -> float:
    if not np.isfinite(column.get(method, np.nan)):
        raise LookupError(f"no {column.name} of {method}")
    return float(column[method])


def _windows(frame: pd.DataFrame, column: str, window: list[float], how: str = "mean") -> pd.DataFrame:
    """Summary [seed, method] over the steps in [from, to), fractions of the run; to = 1 includes the last step."""
    runs = frame[frame["method"].isin(METHODS)].dropna(subset=[column])
    last = runs.groupby("method")["step"].transform("max")
    inside = runs[(runs["step"] >= window[0] * last) & ((runs["step"] < window[1] * last) | (window[1] == 1))]
    table = inside.groupby(["seed", "method"])[column].agg(how).unstack().reindex(columns=list(METHODS)).dropna()
    if table.empty:
        raise LookupError(f"no seed has {column} of {', '.join(METHODS)} in {window} of the run")
    return table


def _over_seeds(slack: pd.Series) -> tuple[float, float]:
    return slack.mean(), standard_error(slack)


def _above_others(table: pd.DataFrame) -> tuple[float, float]:
    return _over_seeds(table["loglinear"] - table[OTHERS].max(axis=1))


def _listed(table: pd.DataFrame) -> str:
    return ", ".join(f"{method} {value:.3g}" for method, value in table.mean().items())


def _table_values(frames: dict[str, pd.DataFrame]) -> dict[str, Measured]:
    values = {}
    for row in frames.get("a3po_training_time", pd.DataFrame()).itertuples():
        for name in ("seconds_per_step", "speedup_over_sync", "speedup_over_recompute"):
            error = getattr(row, f"{name}_se", np.nan)
            values[f"tables.{name}.{row.setup}.{row.method}"] = Measured(getattr(row, name), row.blocks, error, row.difference_se)
        if (row.setup, row.method) == ("setup2", "loglinear"):
            values["tables.v3_headline.speedup"] = Measured(row.speedup_over_sync, row.blocks, row.speedup_over_sync_se)
        if (row.setup, row.method) == ("setup1", "loglinear"):
            change, error = 100 / row.speedup_over_recompute - 100, 100 * row.speedup_over_recompute_se / row.speedup_over_recompute**2
            values["tables.v1_headline.training_time_change_pct"] = Measured(change, row.blocks, error)
    rewards = {"final_eval_reward.{}": frames.get("a3po_final_eval_reward", pd.DataFrame())}
    rewards |= {"benchmarks_{}.average": frames["a3po_benchmarks"].query("set == 'average'")} if "a3po_benchmarks" in frames else {}
    for table, rows in rewards.items():
        for row in rows.itertuples():
            error = getattr(row, "difference_se", np.nan)
            values[f"tables.{table.format(row.setup)}.{row.method}"] = Measured(row.reward, row.seeds, row.se, error)
    if "a3po_proximal_seconds" in frames:
        rows = frames["a3po_proximal_seconds"][lambda frame: frame["tensors"] == "cpu model"].set_index("method")
        seconds, n = rows["seconds"], rows["blocks"].iloc[0]
        values |= {f"figures.proximal_seconds.setup1.{method}.typical": Measured(seconds[method], n) for method in seconds.index}
        ratio, error = rows.loc[REFERENCE, ["over_loglinear", "over_loglinear_se"]]
        values["tables.proximal_seconds_headline.text.ratio"] = Measured(ratio, n, error)
    return values


def _curve_values(frames: dict[str, pd.DataFrame]) -> dict[str, Measured]:
    setups, values = published.load("a3po")["setups"], {}
    for entry in published.entries("a3po"):
        _, figure, setup, *rest = entry.id.split(".")
        name, column = CURVES.get(figure, (None, None))
        if not entry.id.startswith("figures.") or name not in frames or len(rest) != 2:
            continue
        method, label = rest if rest[0] in METHODS else reversed(rest)
        rows = frames[name][frames[name]["setup"] == setup]
        found, reference = (_matching(rows, m, column, label, setups[setup]["steps"]) for m in (method, REFERENCE))
        if len(found):
            shared = (found - reference).dropna()
            values[entry.id] = Measured(found.mean(), len(found), standard_error(found), standard_error(shared) if len(shared) else np.nan)
    return values


def _matching(frame: pd.DataFrame, method: str, column: str, label: str, published_steps: int) -> pd.Series:
    """Mean per seed over our steps that match a published label; empty where none do."""
    runs = frame[frame["method"] == method].dropna(subset=[column])
    low, high = _edges(label, published_steps, runs["step"].max())
    return runs[(runs["step"] >= low) & (runs["step"] < high)].groupby("seed")[column].mean()


def _edges(label: str, published_steps: int, steps: int) -> tuple[float, float]:
    """Our steps [from, to) that match a published label: a bin 30-60, a step 30, step1, end; NaN for anything else."""
    low, _, high = label.partition("-")
    if not low.isdigit():
        return {"step1": (1, 2), "end": (0.95 * steps, steps + 1)}.get(label, (np.nan, np.nan))
    scale = steps / published_steps
    if not high:
        return int(low) * scale - 0.5, int(low) * scale + 0.5
    return int(low) * scale, steps + 1 if int(high) == published_steps else int(high) * scale


def _paper(paper: str, frames: dict[str, pd.DataFrame], rows: list[Row], simulated: dict[str, Any]) -> str:
    facts = published.load(paper)
    text = f"\n## {facts['paper']['title']} (arXiv {facts['paper']['arxiv']})\n\n{len(rows)} published numbers: {_counts(rows)}.\n"
    text += "\n### Shape targets\n\n| target | setup | verdict | numbers |\n| --- | --- | --- | --- |\n"
    text += "".join(f"| {' | '.join(row)} |\n" for row in shapes(paper, frames))
    for part, group in groupby(rows, key=lambda row: row.entry.id.split(".")[:2]):
        text += _section(part, list(group), simulated)
    text += "\n### Where the paper contradicts itself\n\n" + "".join(f"- {item}\n" for item in facts["known_inconsistencies"])
    if differences := published.deviations(paper):
        text += "\n### What we do differently\n\n" + markdown(pd.DataFrame(differences), {name: (name, "{}") for name in differences[0]})
    return text + "\nSources: " + "; ".join(f"*{tag}* {meaning}" for tag, meaning in facts["sources"].items()) + ".\n"


def _section(part: list[str], rows: list[Row], simulated: dict[str, Any]) -> str:
    text = f"\n### {part[0].removesuffix('s').capitalize()}: {part[1].replace('_', ' ')}\n\n<details><summary>{_counts(rows)}</summary>\n\n"
    text += "| number | source | published | simulated | measured | n | verdict | reason |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
    for entry, measured, verdict, reason in rows:
        name, unit = ".".join(entry.id.split(".")[2:]), "" if entry.unit in ("ratio", "reward") else f" {entry.unit}"
        found, n = (f"{measured}{unit}", str(measured.n)) if measured else ("-", "-")
        beside = _simulated(simulated[entry.id], unit) if entry.id in simulated else "-"
        text += f"| {name} | {entry.source} | {entry.value:.5g}{unit} | {beside} | {found} | {n} | {verdict} | {reason} |\n"
    return text + "\n</details>\n"


def _simulated(row, unit: str) -> str:
    value = f"{row.simulated:.4g}{unit}"
    return f"{value} (fitted)" if row.role == "fitted" else f"{value} ({row.low:.3g} to {row.high:.3g})"


def _counts(rows: list[Row]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(row.verdict for row in rows).most_common())
