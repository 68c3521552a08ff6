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

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatter
from PIL import Image

from nowait import published
from nowait.analysis.statistics import bootstrap_interval
from nowait.analysis.tables import TABLES

BAND_SEEDS = 5  # from this many seeds on an interval is drawn instead of the single seeds
LOOK = {  # label, colour, marker, line: the paper's blue circle, green square, red triangle in colour-blind-safe hues, extra methods muted
    "sync": ("sync", "#D55E00", "^", "-"),
    "recompute": ("recompute", "#0072B2", "o", "-"),
    "loglinear": ("A-3PO (loglinear)", "#009E73", "s", "-"),
    "sync_colocated": ("sync, colocated", "#C9A48C", "v", "--"),
    "loglinear_theta": ("A-3PO, fresh = theta", "#A9A9A9", "*", "-."),
    "linear": ("linear", "#B5A642", "d", "--"),
    "behave": ("behave", "#8F7BA6", "x", ":"),
    "reuse": ("reuse", "#6E7F8D", "P", "-."),
}
_OTHER = ("#555555", ".", ":")  # a method of the user's own
_STYLE = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


def _styled(plot: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in our style whatever the user's own settings are."""

    @functools.wraps(plot)
    def drawn(*args, **kwargs) -> Figure:
        with matplotlib.style.context(["default", _STYLE]):
            return plot(*args, **kwargs)

    return drawn


@_styled
def train_reward(frame: pd.DataFrame, x: str = "step") -> Figure:
    """Training reward, means over bins of steps; x is "step" or "seconds"."""
    figure, rows = _grid(frame, "training reward")
    for setup, (left, right) in rows.items():
        facts, centres = _facts("train_reward", setup), np.mean(_facts("train_reward", setup)["bins"], axis=1)
        seconds = published.load("a3po")["tables"]["seconds_per_step"][setup]
        for method in _methods(facts):
            _line(left, centres if x == "step" else centres * seconds[method] / 3600, facts[method], method)
        left.set_xlabel("training step" if x == "step" else "hours (step x mean hours per step)")
        _measured(right, frame[frame["setup"] == setup], x, "rollout/reward_mean", binned="mean")
    return _finish(figure)


@_styled
def eval_reward(frame: pd.DataFrame, x: str = "step") -> Figure:
    """Evaluation reward at each evaluation; x is "step" or "seconds"."""
    figure, rows = _grid(frame, "evaluation reward")
    for setup, (left, right) in rows.items():
        facts = _facts("eval_reward", setup)
        for method in _methods(facts):
            _line(left, facts["steps"] if x == "step" else facts["hours"][method], facts[method], method)
        left.set_xlabel("training step" if x == "step" else "hours since the first evaluation")
        _measured(right, frame[frame["setup"] == setup], x, "eval/reward")
    return _finish(figure)


@_styled
def clipped_tokens(frame: pd.DataFrame) -> Figure:
    """Tokens per training step whose gradient the clip removes, means over bins of steps; the frame also holds their fraction."""
    return _by_step(frame, "clipped_tokens", "train/clipped_tokens", "clipped tokens per step")


@_styled
def entropy(frame: pd.DataFrame) -> Figure:
    """Policy entropy per token in nats, means over bins of steps."""
    return _by_step(frame, "entropy", "train/entropy", "entropy (nats per token)")


@_styled
def importance_weight(frame: pd.DataFrame, extreme: str) -> Figure:
    """Largest ("max") or smallest ("min") weight of a step: r = theta/prox as published, then rho = prox/behav, the paper's formula."""
    figure, rows = _grid(frame, f"{extreme} r = theta / prox", columns=3)
    for setup, (left, middle, right) in rows.items():
        _published_extremes(left, _facts(f"ratio_{extreme}", setup), _facts("setups", setup)["steps"])
        measured = frame[frame["setup"] == setup]
        summary = "max" if extreme == "max" else "mean"  # a mean would hide the spikes; the published smallest weights are means
        _measured(middle, measured, "step", f"train/ratio_{extreme}", summary)
        _measured(right, measured, "step", f"train/behave_weight_{extreme}", summary)
        right.set_ylabel(f"{extreme} rho = prox / behav")
        for ax in (left, middle, right) if extreme == "max" else ():
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(LogFormatter())
            ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    return _finish(figure)


@_styled
def proximal_seconds(frame: pd.DataFrame) -> Figure:
    """Seconds to obtain log pi_prox: forward pass against interpolation (columns as of `tables.proximal_seconds`)."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    facts, place = published.load("a3po")["figures"]["proximal_seconds"], {}
    for setup in ("setup1", "setup2"):
        for method in ("recompute", "loglinear"):
            value = facts[setup][method]
            place[f"{_name(setup)}: {method}"] = (method, value.get("typical", value.get("mean")), value.get("range"))
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
}


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


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % bootstrap interval of the mean over seeds of values [seeds, points]; fewer than five seeds raise."""
    if len(values) < BAND_SEEDS:
        raise ValueError(f"a band needs at least {BAND_SEEDS} seeds, got {len(values)}; draw the single seeds")
    return bootstrap_interval(values, np.random.default_rng(0))


def _by_step(frame: pd.DataFrame, fact: str, column: str, label: str) -> Figure:
    figure, rows = _grid(frame, label)
    for setup, (left, right) in rows.items():
        facts = _facts(fact, setup)
        for method in _methods(facts):
            _line(left, np.mean(facts["bins"], axis=1), facts[method], method)
        _measured(right, frame[frame["setup"] == setup], "step", column, binned="mean")
    return _finish(figure)


def _grid(frame: pd.DataFrame, label: str, columns: int = 2) -> tuple[Figure, dict[str, np.ndarray]]:
    """Axes {setup: [columns]}: the first is titled published, the others measured."""
    setups = sorted(frame["setup"].unique())
    figure = Figure(figsize=(5 * columns, 0.6 + 3.1 * len(setups)), layout="constrained")
    rows = dict(zip(setups, figure.subplots(len(setups), columns, squeeze=False), strict=True))
    for setup, axes in rows.items():
        facts, part = _facts("setups", setup), frame[frame["setup"] == setup]
        axes[0].set_title(f"{_name(setup)}: {facts['model']}, {facts['data']}\npublished (digitised)")
        for ax in axes[1:]:
            scale, clock = ("/".join(part[name].unique()) for name in ("scale", "clock"))
            ax.set_title(f"{_name(setup)}: measured, {scale} scale\n{_seeds(part)}, clock = {clock}")
        for ax in axes:
            ax.set_xlabel("training step")
            ax.set_ylabel(label)
    return figure, rows


def _finish(figure: Figure) -> Figure:
    """One legend for all panels, below them."""
    drawn = {line.get_gid() for ax in figure.axes for line in ax.get_lines()}
    handles = [_line(figure.axes[0], [], [], method) for method in _methods(drawn)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def _line(ax, x, y, method: str, **options) -> Line2D:
    label, colour, marker, line = LOOK.get(method, (method, *_OTHER))
    options = {"marker": marker, "markersize": 5, "linestyle": line, "linewidth": 1.6, **options}
    return ax.plot(x, y, color=colour, label=label, gid=method, **options)[0]


def _measured(ax, frame: pd.DataFrame, x: str, column: str, binned: str | None = None) -> None:
    """Every method of a tidy frame of one setup over step or seconds; `binned` ("mean", "max") summarises twentieths of the run."""
    width = max(1, -(-int(frame["step"].max()) // 20)) if binned else 1
    ax.set_xlabel(("training step" if x == "step" else "seconds of training") + (f" ({binned} of {width} steps)" if width > 1 else ""))
    for method in sorted(_methods(frame["method"].unique()), key=list(LOOK)[:3].__contains__):  # the paper's methods last, on top
        runs = frame[frame["method"] == method].dropna(subset=[column])
        table = runs.pivot(index="step", columns="seed", values=column).dropna()
        at = runs.groupby("step")[x].mean().loc[table.index]
        if binned:
            bins = (table.index - 1) // width
            table, at = table.groupby(bins).agg(binned), at.groupby(bins).mean()
        _runs(ax, at.to_numpy(), table.to_numpy().T, method)


def _runs(ax, x: np.ndarray, values: np.ndarray, method: str) -> None:
    """Values [seeds, points]: their mean, over single seeds as thin lines or, from five on, a band."""
    if len(values) > 1:
        line = _line(ax, x, values.mean(0), method, markevery=max(1, len(x) // 10))
    if len(values) >= BAND_SEEDS:
        ax.fill_between(x, *band(values), color=line.get_color(), alpha=0.2, linewidth=0)
        return
    thin = {"alpha": 0.5, "marker": ""} if len(values) > 1 else {"markevery": max(1, len(x) // 10)}
    for seed in values:
        _line(ax, x, seed, method, linewidth=0.8, **thin)


def _published_extremes(ax, facts: dict, steps: int) -> None:
    """Curves where bins are known, else the first step, later ranges as bands and spikes as stems."""
    for method in _methods(facts):
        _line(ax, np.mean(facts["bins"], axis=1), facts[method], method)
    for method, value in facts.get("step1", {}).items():
        _line(ax, [1], [value], method, linestyle="")
    for method, (low, high) in facts.get("later", {}).items():
        start = 200 if "bins" not in facts and "recompute_spikes" not in facts else 2
        for edge in (low, high):
            colour = _line(ax, [start, steps], [edge, edge], method, marker="", linewidth=1).get_color()
        ax.fill_between([start, steps], low, high, color=colour, alpha=0.15, linewidth=0)
    for step, value in facts.get("recompute_spikes", {}).items():
        _line(ax, [step, step], [1, value], "recompute", markevery=[1], linewidth=1)
    if "recompute_spikes" in facts and "step1" not in facts:
        ax.text(0.32, 0.3, "loglinear, sync:\nnot visible\non this scale", transform=ax.transAxes, ha="center")
    ax.set_xlim(-0.03 * steps, 1.03 * steps)


def _dots(ax, place: dict[str, tuple]) -> None:
    """One row per {label: (method, seconds, range or None)} on a logarithmic axis."""
    for row, (method, value, interval) in enumerate(place.values()):
        if interval:
            _line(ax, interval, [row, row], method, marker="|")
        _line(ax, [value], [row], method, markersize=8)
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


def _methods(present) -> list[str]:
    """The methods among `present`, paper's methods first."""
    known = [method for method in LOOK if method in present]
    return known if isinstance(present, dict) else [*known, *sorted(set(present) - set(known))]


def _name(setup: str) -> str:
    return setup.replace("setup", "setup ")


def _seeds(frame: pd.DataFrame) -> str:
    counts = frame.groupby("method")["seed"].nunique()
    return f"n = {counts.min()}" if counts.min() == counts.max() else f"n = {counts.min()} to {counts.max()}"


@_styled
def _write(content: Figure | str, stem: Path, record: str) -> Path:
    if isinstance(content, str):
        path = stem.with_suffix(".md")
        path.write_text(f"{content}\n<!-- provenance {record} -->\n", encoding="utf-8")
    else:
        path = stem.with_suffix(".png")
        content.savefig(path, metadata={"Software": None, "provenance": record})
    return path
