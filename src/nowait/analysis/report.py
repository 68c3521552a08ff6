"""figures/report.md: every published number beside what we measured, judged by published/targets.yaml, and the shape targets for both setups."""

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nowait import published
from nowait.analysis import shapes as targets
from nowait.analysis.statistics import decided, standard_error
from nowait.analysis.tables import REFERENCE, grid
from nowait.published import Entry


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
    if (times := frames.get("a3po_training_time")) is not None:  # the first version's headline is a change in percent
        over, error = times["speedup_over_recompute"], times["speedup_over_recompute_se"]
        frames["a3po_training_time"] = times.assign(change_pct=100 / over - 100, change_pct_se=100 * error / over**2)
    scales = f"scale {', '.join(_scales(frames))}" if frames else "nothing yet"
    text = Path(__file__).with_name("report.md").read_text(encoding="utf-8").format(scale=scales)
    for paper in published.PAPERS:
        simulated = {row.entry: row for row in frames.get(f"simulated_{paper}", pd.DataFrame()).itertuples()}
        text += _paper(paper, frames, judge(paper, measured(paper, frames), withheld(frames)), simulated)
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
    entries, rules = published.entries(paper), published.load("targets")[paper]["entries"]
    numbers = {entry.id: entry.value for entry in entries}
    chosen = [next(rule for rule in rules if fnmatchcase(entry.id, rule["match"])) for entry in entries]
    return [_judge(entry, rule, numbers, values, reason) for entry, rule in zip(entries, chosen, strict=True)]


def shapes(paper: str, frames: dict[str, pd.DataFrame]) -> Iterator[tuple[str, str, str, str]]:
    """(target, setup, verdict, numbers) for every shape target of a paper in each setup, or task, that it is claimed for; then our own."""
    facts, rules = published.load(paper), published.load("targets")[paper]
    for target, rule in [*zip(facts["shape_targets"], rules["shapes"], strict=True), *((f"ours: {rule['target']}", rule) for rule in rules["own"])]:
        for setup in rule.get("setups", facts.get("setups") or facts["tasks"]):
            yield target, setup, *_shape(frames, setup, rule)


def _judge(entry: Entry, rule: dict, numbers: dict[str, float], values: dict[str, Measured], unjudged: str) -> Row:
    measured = values.get(entry.id)
    if "judge" not in rule:
        return Row(entry, measured, rule.get("verdict", "not judged"), rule["reason"])
    if measured is None or unjudged:
        return Row(entry, measured, "not judged" if measured else "not run", unjudged if measured else "")
    slack, se, reason = _slack(rule, entry, measured, numbers, values)
    verdict = "not judged" if slack is None else decided(slack, se)
    reason = f"{reason}; {rule['differs']}" if verdict == "fail" and "differs" in rule else reason
    return Row(entry, measured, verdict + (LIMITED.get(rule["judge"], "") if verdict in ("pass", "fail") else ""), reason)


def _shape(frames: dict[str, pd.DataFrame], setup: str, rule: dict) -> tuple[str, str]:
    if "judge" not in rule:
        return rule["verdict"], rule["reason"]
    try:
        conditions, numbers = getattr(targets, rule["judge"])(frames, setup, rule)
    except LookupError as missing:
        return "not run", str(missing.args[0])
    if reason := withheld(frames):
        return "not judged", f"{reason}; {numbers}"
    found = [decided(*condition) for condition in conditions]
    verdict = next((verdict for verdict in ("fail", "not resolved") if verdict in found), "pass")
    return verdict, f"{numbers}; {rule['differs']}" if verdict == "fail" and "differs" in rule else numbers


def _slack(rule: dict, entry: Entry, found: Measured, numbers: dict, values: dict) -> tuple[float | None, float, str]:
    """By how much a value lies inside what was asked, with its standard error, or None where it cannot be judged; and what was asked.

    "difference" and "side" are about the gap to recompute: its size (margin) or its direction (resolution).
    """
    if rule["judge"] == "ratio":
        gap = found.value / entry.value - 1
        return rule["tolerance"] - abs(gap), found.se / entry.value, f"{gap:+.0%}, tolerance {rule['tolerance']:.0%}"
    if rule["judge"] == "range":
        low, high = rule["range"]
        return min(found.value - low, high - found.value), found.se, f"asked: {low} to {high}"
    reference = ".".join(REFERENCE if part in targets.METHODS else part for part in entry.id.split("."))
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


LIMITED = {"range": " (range only)", "side": " (sign only)"}


def _scales(frames: dict[str, pd.DataFrame]) -> list[str]:
    return sorted({scale for frame in frames.values() if "scale" in frame for scale in frame["scale"].unique()})


def measured(paper: str, frames: dict[str, pd.DataFrame]) -> dict[str, Measured]:
    """What was measured of the published numbers, by entry id: the place that targets.yaml names for an entry, in its own setup and method."""
    facts, places = published.load(paper), published.load("targets")[paper]["measured"]
    known = {"setup": facts.get("setups") or facts["tasks"], "method": facts.get("methods", ())}
    values = {}
    for entry in published.entries(paper):
        place = next((place for place in places if fnmatchcase(entry.id, place["match"])), None)
        if place is None or place["csv"] not in frames:
            continue
        frame, parts = frames[place["csv"]], entry.id.split(".")[2:]
        row = {column: part for part in parts for column, names in known.items() if part in names and column in frame} | place.get("row", {})
        if "step" in frame:
            label = ".".join(part for part in parts if part not in row.values())
            found = _on_curve(frame, row, place["column"], label, facts["setups"][row["setup"]]["steps"])
        else:
            found = _in_table(frame, row, place["column"])
        if found and np.isfinite(found.value):
            values[entry.id] = found
    return values


def _in_table(frame: pd.DataFrame, row: dict[str, str], column: str) -> Measured | None:
    rows = _rows(frame, row)
    if rows.empty:
        return None
    found = rows.iloc[0]
    error = found.get(f"{column}_se", found.get("se", np.nan))
    return Measured(found[column], int(found["seeds" if "seeds" in rows else "blocks"]), error, found.get("difference_se", np.nan))


def _on_curve(frame: pd.DataFrame, row: dict[str, str], column: str, label: str, published_steps: int) -> Measured | None:
    found, reference = (_matching(_rows(frame, row | change), column, label, published_steps) for change in ({}, {"method": REFERENCE}))
    shared = (found - reference).dropna()
    return Measured(found.mean(), len(found), standard_error(found), standard_error(shared) if len(shared) else np.nan) if len(found) else None


def _rows(frame: pd.DataFrame, row: dict[str, str]) -> pd.DataFrame:
    return frame[(frame[list(row)] == pd.Series(row)).all(axis=1)]


def _matching(rows: pd.DataFrame, column: str, label: str, published_steps: int) -> pd.Series:
    """Mean per seed over our steps that match a published label; empty where none do."""
    runs = rows.dropna(subset=[column])
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
    text += "\n### Shape targets\n\n" + grid(["target", "setup", "verdict", "numbers"], shapes(paper, frames))
    for part, group in groupby(rows, key=lambda row: row.entry.id.split(".")[:2]):
        text += _section(part, list(group), simulated)
    text += "\n### Where the paper contradicts itself\n\n" + "".join(f"- {item}\n" for item in facts["known_inconsistencies"])
    if differences := published.load("deviations").get(paper, []):
        text += "\n### What we do differently\n\n" + grid(differences[0], [item.values() for item in differences])
    return text + "\nSources: " + "; ".join(f"*{tag}* {meaning}" for tag, meaning in facts["sources"].items()) + ".\n"


def _section(part: list[str], rows: list[Row], simulated: dict[str, Any]) -> str:
    text = f"\n### {part[0].removesuffix('s').capitalize()}: {part[1].replace('_', ' ')}\n\n<details><summary>{_counts(rows)}</summary>\n\n"
    cells = []
    for entry, measured, verdict, reason in rows:
        name, unit = ".".join(entry.id.split(".")[2:]), "" if entry.unit in ("ratio", "reward") else f" {entry.unit}"
        found, n = (f"{measured}{unit}", str(measured.n)) if measured else ("-", "-")
        beside = _simulated(simulated[entry.id], unit) if entry.id in simulated else "-"
        cells.append((name, entry.source, f"{entry.value:.5g}{unit}", beside, found, n, verdict, reason))
    headings = ["number", "source", "published", "simulated", "measured", "n", "verdict", "reason"]
    return f"{text}{grid(headings, cells)}\n</details>\n"


def _simulated(row, unit: str) -> str:
    value = f"{row.simulated:.4g}{unit}"
    return f"{value} (fitted)" if row.role == "fitted" else f"{value} ({row.low:.3g} to {row.high:.3g})"


def _counts(rows: list[Row]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(row.verdict for row in rows).most_common())
