"""One plot per published figure of A-3PO: published values on the left, measured ones on the right, never in one axes.

A plot takes the tidy frame that is saved as CSV beside the picture (columns setup, method, seed, scale, clock, step, seconds, then metrics), so
`redraw` gives the same bytes without any training. Fewer than five seeds show as thin lines under their mean, five and more as a bootstrap band.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter
from PIL import Image

from nowait import published
from nowait.analysis import oppo_figures, simulated_figures, studies_figures
from nowait.analysis.drawing import curve, finish, measured_curves, ordered, seeds, setup_name, styled
from nowait.analysis.tables import TABLES as A3PO_TABLES


@styled
def train_reward(frame: pd.DataFrame, x: str = "step") -> Figure:
    """Training reward, means over bins of steps; x is "step" or "seconds"."""
    figure, rows = _grid(frame, "training reward")
    for setup, (left, right) in rows.items():
        facts, centres = _facts("train_reward", setup), np.mean(_facts("train_reward", setup)["bins"], axis=1)
        seconds = published.load("a3po")["tables"]["seconds_per_step"][setup]
        for method in ordered(facts):
            curve(left, centres if x == "step" else centres * seconds[method] / 3600, facts[method], method)
        left.set_xlabel("training step" if x == "step" else "hours (step x mean hours per step)")
        measured_curves(right, frame[frame["setup"] == setup], x, "rollout/reward_mean", binned="mean")
    return finish(figure)


@styled
def eval_reward(frame: pd.DataFrame, x: str = "step") -> Figure:
    """Evaluation reward at each evaluation; x is "step" or "seconds"."""
    figure, rows = _grid(frame, "evaluation reward")
    for setup, (left, right) in rows.items():
        facts = _facts("eval_reward", setup)
        for method in ordered(facts):
            curve(left, facts["steps"] if x == "step" else facts["hours"][method], facts[method], method)
        left.set_xlabel("training step" if x == "step" else "hours since the first evaluation")
        measured_curves(right, frame[frame["setup"] == setup], x, "eval/reward")
    return finish(figure)


@styled
def clipped_tokens(frame: pd.DataFrame) -> Figure:
    """Tokens per training step whose gradient the clip removes, means over bins of steps; the frame also holds their fraction."""
    return _by_step(frame, "clipped_tokens", "train/clipped_tokens", "clipped tokens per step")


@styled
def entropy(frame: pd.DataFrame) -> Figure:
    """Policy entropy per token in nats, means over bins of steps."""
    return _by_step(frame, "entropy", "train/entropy", "entropy (nats per token)")


@styled
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


@styled
def proximal_seconds(frame: pd.DataFrame) -> Figure:
    """Seconds to obtain log pi_prox: forward pass against interpolation (columns as of `tables.proximal_seconds`)."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    facts, place = published.load("a3po")["figures"]["proximal_seconds"], {}
    for setup in ("setup1", "setup2"):
        for method in ("recompute", "loglinear"):
            value = facts[setup][method]
            place[f"{setup_name(setup)}: {method}"] = (method, value.get("typical", value.get("mean")), value.get("range"))
    _dots(left, place)
    left.set_title("published (digitised), seconds per step\nloglinear: the timer of an early return")
    _dots(right, {f"{row.method},\n{row.tensors}": (row.method, row.seconds, None) for row in frame.itertuples()})
    scale, blocks, clock = frame[["scale", "blocks", "clock"]].iloc[0]
    right.set_title(f"measured, {scale} scale, seconds per batch\nn = {blocks}, clock = {clock}")
    return figure


PLOTS: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "a3po_proximal_seconds": proximal_seconds,
    "a3po_train_reward_steps": train_reward,
    "a3po_train_reward_time": functools.partial(train_reward, x="seconds"),
    "a3po_eval_reward_steps": eval_reward,
    "a3po_eval_reward_time": functools.partial(eval_reward, x="seconds"),
    "a3po_importance_weight_max": functools.partial(importance_weight, extreme="max"),
    "a3po_importance_weight_min": functools.partial(importance_weight, extreme="min"),
    "a3po_clipped_tokens": clipped_tokens,
    "a3po_entropy": entropy,
    **oppo_figures.PLOTS,
    **simulated_figures.PLOTS,
    **studies_figures.PLOTS,
}
TABLES = {
    **A3PO_TABLES,
    **oppo_figures.TABLES,
    **simulated_figures.TABLES,
    **studies_figures.TABLES,
}  # Markdown


def save(content: Figure | str, name: str, frame: pd.DataFrame, provenance: dict, folder: str | Path = "figures") -> Path:
    """Write NAME.png (or, for a table's text, NAME.md), NAME.csv and the record in provenance.json; returns the picture's path.

    `provenance` needs seeds, code and config (digests); the SHA-256 of the CSV is added and all of it stands in the PNG, which carries no date.
    """
    missing = {"seeds", "code", "config"} - set(provenance)
    if missing:
        raise ValueError(f"the provenance of {name} lacks {', '.join(sorted(missing))}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    data = frame.to_csv(index=False, lineterminator="\n").encode()
    (folder / f"{name}.csv").write_bytes(data)
    known = records(folder)
    known[name] = record = {**provenance, "data": hashlib.sha256(data).hexdigest()}
    (folder / "provenance.json").write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return _write(content, folder / name, json.dumps(record, sort_keys=True))


def read_provenance(png: str | Path) -> dict:
    """The record that `save` put into a PNG: seeds, code, config, data (SHA-256 of the CSV)."""
    with Image.open(png) as image:
        if "provenance" not in image.info:
            raise ValueError(f"{png} carries no provenance; it was not written by nowait")
        return json.loads(image.info["provenance"])


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
    return save({**PLOTS, **TABLES}[csv.stem](frame), csv.stem, frame, record, csv.parent)


def redraw_all(folder: str | Path = "figures") -> list[Path]:
    """Redraw every figure and table of ours whose CSV lies in `folder`."""
    return [redraw(csv) for csv in sorted(Path(folder).glob("*.csv")) if csv.stem in {**PLOTS, **TABLES}]


def _by_step(frame: pd.DataFrame, fact: str, column: str, label: str) -> Figure:
    figure, rows = _grid(frame, label)
    for setup, (left, right) in rows.items():
        facts = _facts(fact, setup)
        for method in ordered(facts):
            curve(left, np.mean(facts["bins"], axis=1), facts[method], method)
        measured_curves(right, frame[frame["setup"] == setup], "step", column, binned="mean")
    return finish(figure)


def _grid(frame: pd.DataFrame, label: str, columns: int = 2) -> tuple[Figure, dict[str, np.ndarray]]:
    """Axes {setup: [columns]}: the first is titled published, the others measured."""
    setups = sorted(frame["setup"].unique())
    figure = Figure(figsize=(5 * columns, 0.6 + 3.1 * len(setups)), layout="constrained")
    rows = dict(zip(setups, figure.subplots(len(setups), columns, squeeze=False), strict=True))
    for setup, axes in rows.items():
        facts, part = _facts("setups", setup), frame[frame["setup"] == setup]
        axes[0].set_title(f"{setup_name(setup)}: {facts['model']}, {facts['data']}\npublished (digitised)")
        for ax in axes[1:]:
            scale, clock = ("/".join(part[name].unique()) for name in ("scale", "clock"))
            ax.set_title(f"{setup_name(setup)}: measured, {scale} scale\n{seeds(part)}, clock = {clock}")
        for ax in axes:
            ax.set_xlabel("training step")
            ax.set_ylabel(label)
    return figure, rows


def _published_extremes(ax, facts: dict, steps: int) -> None:
    """Curves where bins are known, else the first step, later ranges as bands and spikes as stems."""
    for method in ordered(facts):
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
    ax.set(xscale="log", xlabel="seconds", ylim=(len(place) - 0.4, -0.8))
    ax.margins(x=0.25)


def _facts(figure: str, setup: str) -> dict:
    facts = published.load("a3po")
    section = facts["setups"] if figure == "setups" else facts["figures"][figure]
    if setup not in section:
        raise ValueError(f"nothing is published for setup {setup!r}; there are {', '.join(facts['setups'])}")
    return section[setup]


@styled
def _write(content: Figure | str, stem: Path, record: str) -> Path:
    if isinstance(content, str):
        path = stem.with_suffix(".md")
        path.write_text(f"{content}\n<!-- provenance {record} -->\n", encoding="utf-8")
    else:
        path = stem.with_suffix(".png")
        content.savefig(path, metadata={"Software": None, "provenance": record})
    return path
