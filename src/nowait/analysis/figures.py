"""One plot per published figure of A-3PO: published values on the left, measured ones on the right, never in one axes.

A plot takes the tidy frame that is saved as CSV beside the picture (columns setup, method, seed, scale, clock, step, seconds, then metrics), so
`redraw` gives the same bytes without any training. Fewer than five seeds show as thin lines under their mean, or where there are more than four
methods as the range between the lowest and the highest; five and more as a bootstrap band.
"""

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from nowait import published
from nowait.analysis import oppo_figures, simulated_figures, tables
from nowait.analysis.drawing import LOOK, curve, finish, measured_curves, note, ordered, panels, spaced, styled


def curves(frame: pd.DataFrame, fact: str, column: str, label: str, x: str = "step", binned: str | None = "mean") -> Figure:
    """The published curves of `fact` and the measured ones of `column`; x is "step", or "seconds" (published: hours)."""
    figure, rows = _grid(frame, label)
    for setup, (left, right) in rows.items():
        facts = _facts(fact, setup)
        steps = np.array(facts["steps"]) if "steps" in facts else np.mean(facts["bins"], axis=1)
        hours, meaning = facts.get("hours"), "hours since the first evaluation"
        if hours is None:
            seconds = published.load("a3po")["tables"]["seconds_per_step"][setup]
            hours, meaning = {method: steps * value / 3600 for method, value in seconds.items()}, "hours (step x mean hours per step)"
        for method in ordered(facts.keys() & LOOK.keys()):
            curve(left, steps if x == "step" else hours[method], facts[method], method)
        left.set_xlabel("training step" if x == "step" else meaning)
        measured_curves(right, frame[frame["setup"] == setup], x, column, binned)
    return finish(figure)


def importance_weight(frame: pd.DataFrame, extreme: str) -> Figure:
    """Largest ("max") or smallest ("min") weight of a step: r = theta/prox as published, then rho = prox/behav, the paper's formula."""
    figure, rows = _grid(frame, f"{extreme} r = theta / prox", columns=3)
    for setup, (left, middle, right) in rows.items():
        _published_extremes(left, _facts(f"ratio_{extreme}", setup), _facts("setups", setup)["steps"])
        measured = frame[frame["setup"] == setup]
        summary = "max" if extreme == "max" else "mean"  # a mean would hide the spikes; the published smallest weights are means
        measured_curves(middle, measured, "step", f"train/ratio_{extreme}", summary)
        measured_curves(right, measured, "step", f"train/behave_weight_{extreme}", summary)
        right.set_ylabel(f"{extreme} rho = prox / behav")
        for ax in (left, middle, right) if extreme == "max" else ():
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(LogFormatter())
            ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    return finish(figure)


def proximal_seconds(frame: pd.DataFrame) -> Figure:
    """Seconds to obtain log pi_prox: forward pass against interpolation (columns as of `tables.proximal_seconds` and `simulated.forward_beside`)."""
    figure, ((top,), (middle,), (bottom,)) = panels(3, 1, 7, 8, sharex=True, height_ratios=[4, 2, 5])
    facts = published.load("a3po")["figures"]["proximal_seconds"]
    known = {f"{spaced(setup)}: {method}": (method, value) for setup in ("setup1", "setup2") for method, value in facts[setup].items()}
    _dots(top, {name: (method, value.get("typical", value.get("mean")), value.get("range")) for name, (method, value) in known.items()})
    top.set_title("published (digitised), seconds per step\nloglinear: the timer of an early return")
    rows = sorted(frame.itertuples(), key=lambda row: row.setup == "-")  # tensors of no setup last
    named = {f"{row.tensors if row.setup == '-' else spaced(row.setup)}: {row.method}": row for row in rows}
    _dots(middle, {name: (row.method, row.simulated, None) for name, row in named.items() if row.simulated > 0})
    middle.set_title("simulated at the paper's scale, seconds per step\nby data sheets alone")
    _dots(bottom, {name: (row.method, row.seconds, None) for name, row in named.items()})
    bottom.set_title(f"measured, seconds per batch, {note(frame)}")
    bottom.set_xlabel("seconds")
    return figure


TRAIN = {"fact": "train_reward", "column": "rollout/reward_mean", "label": "training reward"}
EVAL = {"fact": "eval_reward", "column": "eval/reward", "label": "evaluation reward", "binned": None}
CONTENTS: dict[str, Callable[[pd.DataFrame], Figure | str]] = {  # a picture, or the Markdown of a table
    "a3po_proximal_seconds": proximal_seconds,
    "a3po_train_reward_steps": partial(curves, **TRAIN),
    "a3po_train_reward_time": partial(curves, **TRAIN, x="seconds"),
    "a3po_eval_reward_steps": partial(curves, **EVAL),
    "a3po_eval_reward_time": partial(curves, **EVAL, x="seconds"),
    "a3po_importance_weight_max": partial(importance_weight, extreme="max"),
    "a3po_importance_weight_min": partial(importance_weight, extreme="min"),
    "a3po_clipped_tokens": partial(curves, fact="clipped_tokens", column="train/clipped_tokens", label="clipped tokens per step"),
    "a3po_entropy": partial(curves, fact="entropy", column="train/entropy", label="entropy (nats per token)"),
    **tables.CONTENTS,
    **oppo_figures.CONTENTS,
    **simulated_figures.CONTENTS,
}


@styled
def draw(name: str, frame: pd.DataFrame) -> Figure | str:
    """The figure, or the Markdown of the table, `name`."""
    return CONTENTS[name](frame)


@styled
def save(content: Figure | str, name: str, frame: pd.DataFrame, provenance: dict, folder: str | Path = "figures") -> Path:
    """Write NAME.png (or, for a table's text, NAME.md), NAME.csv and the record in provenance.json; returns the picture's path.

    `provenance` is seeds, code and config (digests); the SHA-256 of the CSV is added and all of it stands in the PNG, which carries no date.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = frame.to_csv(index=False, lineterminator="\n").encode()
    (folder / f"{name}.csv").write_bytes(data)
    known = records(folder)
    known[name] = record = {**provenance, "data": hashlib.sha256(data).hexdigest()}
    (folder / "provenance.json").write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    told, path = json.dumps(record, sort_keys=True), folder / f"{name}{'.md' if isinstance(content, str) else '.png'}"
    if isinstance(content, str):
        path.write_text(f"{content}\n<!-- provenance {told} -->\n", encoding="utf-8")
    else:
        content.savefig(path, metadata={"Software": None, "provenance": told})
    return path


def records(folder: Path) -> dict[str, dict]:
    """What provenance.json says about every figure in a folder; empty where nothing was saved."""
    file = folder / "provenance.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def redraw(csv: str | Path) -> Path:
    """Draw the figure or table of a saved CSV again, without training: the same bytes as `save` wrote."""
    csv = Path(csv)
    record = records(csv.parent).get(csv.stem, {})
    if hashlib.sha256(csv.read_bytes()).hexdigest() != record.pop("data", None):
        raise ValueError(f"{csv} is not the data that provenance.json beside it names; rerun the notebook that makes it")
    frame = pd.read_csv(csv)
    return save(draw(csv.stem, frame), csv.stem, frame, record, csv.parent)


def redraw_all(folder: str | Path = "figures") -> list[Path]:
    """Redraw every figure and table of ours whose CSV lies in `folder`."""
    return [redraw(csv) for csv in sorted(Path(folder).glob("*.csv")) if csv.stem in CONTENTS]


def _grid(frame: pd.DataFrame, label: str, columns: int = 2) -> tuple[Figure, dict[str, np.ndarray]]:
    """Axes {setup: [columns]}: the first is titled published, the others measured. A setup is a row of two, or a column of more."""
    setups = sorted(frame["setup"].unique())
    rows, wide = (len(setups), columns) if columns == 2 else (columns, len(setups))
    figure, axes = panels(rows, wide, 5 * wide, 0.6 + 3.1 * rows)
    axes = axes if columns == 2 else axes.T
    for setup, row in zip(setups, axes, strict=True):
        facts = _facts("setups", setup)
        row[0].set_title(f"{spaced(setup)}: {facts['model']}, {facts['data']}\npublished (digitised)")
        for ax in row[1:]:
            ax.set_title(f"{spaced(setup)}: measured, {note(frame[frame['setup'] == setup])}")
        for ax in row:
            ax.set(xlabel="training step", ylabel=label)
    return figure, dict(zip(setups, axes, strict=True))


def _published_extremes(ax, facts: dict, steps: int) -> None:
    """Curves where bins are known, else the first step, later ranges as bands and spikes as stems."""
    for method in ordered(facts.keys() & LOOK.keys()):
        curve(ax, np.mean(facts["bins"], axis=1), facts[method], method)
    for method, value in facts.get("step1", {}).items():
        curve(ax, [1], [value], method, linestyle="")
    for method, (low, high) in facts.get("later", {}).items():
        start = 200 if "bins" not in facts and "recompute_spikes" not in facts else 2
        for edge in (low, high):
            colour = curve(ax, [start, steps], [edge, edge], method, marker="", linewidth=1).get_color()
        ax.fill_between([start, steps], low, high, color=colour, alpha=0.15, linewidth=0)
    for step, value in facts.get("recompute_spikes", {}).items():
        curve(ax, [step, step], [1, value], "recompute", markevery=[1], linewidth=1)
    if "recompute_spikes" in facts and "step1" not in facts:
        ax.text(0.32, 0.3, "loglinear, sync:\nnot visible\non this scale", transform=ax.transAxes, ha="center")
    ax.set_xlim(-0.03 * steps, 1.03 * steps)


def _dots(ax, place: dict[str, tuple]) -> None:
    """One row per {label: (method, seconds, range or None)} on a logarithmic axis."""
    for row, (method, value, interval) in enumerate(place.values()):
        if interval:
            curve(ax, interval, [row, row], method, marker="|")
        curve(ax, [value], [row], method, markersize=8)
        ax.annotate(f"{value:.2g} s", (value, row), xytext=(0, 7), textcoords="offset points", ha="center")
    ax.set_yticks(range(len(place)), list(place))
    ax.set(xscale="log", ylim=(len(place) - 0.4, -0.8))
    ax.margins(x=0.25)


def _facts(figure: str, setup: str) -> dict:
    facts = published.load("a3po")
    section = facts["setups"] if figure == "setups" else facts["figures"][figure]
    if setup not in section:
        raise ValueError(f"nothing is published for setup {setup!r}; there are {', '.join(facts['setups'])}")
    return section[setup]
