"""How measured and published curves look, whatever the figure: one style, one look per method, single seeds or a band."""

from __future__ import annotations

import functools
from collections.abc import Callable

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nowait.analysis.statistics import bootstrap_interval

BAND_SEEDS = 5  # from this many seeds on an interval is drawn instead of the single seeds
LOOK = {  # label, colour, marker, line: A-3PO's blue circle, green square, red triangle in colour-blind-safe hues, extra methods muted; then OPPO's
    "sync": ("sync", "#D55E00", "^", "-"),
    "recompute": ("recompute", "#0072B2", "o", "-"),
    "loglinear": ("A-3PO (loglinear)", "#009E73", "s", "-"),
    "sync_colocated": ("sync, colocated", "#C9A48C", "v", "--"),
    "loglinear_theta": ("A-3PO, fresh = theta", "#A9A9A9", "*", "-."),
    "linear": ("linear", "#B5A642", "d", "--"),
    "behave": ("behave", "#8F7BA6", "x", ":"),
    "reuse": ("reuse", "#6E7F8D", "P", "-."),
    "sequential": ("sequential", "#D55E00", "^", "-"),
    "intra": ("intra only", "#CC79A7", "v", "-"),
    "inter": ("inter only", "#0072B2", "o", "-"),
    "both": ("OPPO (both)", "#009E73", "s", "-"),
    "inter_paper": ("inter only, Δ = 1", "#7FB8D8", "d", "--"),
    "both_paper": ("both, Δ = 1", "#7FCEB9", "P", "--"),
    "fixed 4": ("fixed 4", "#D55E00", "^", "--"),
    "fixed 8": ("fixed 8", "#E69F00", "v", "--"),
    "slope": ("slope (text)", "#0072B2", "o", "-"),
    "algorithm1": ("Algorithm 1", "#CC79A7", "d", "-"),
    "trend": ("trend (ours)", "#009E73", "s", "-"),
    "staleness 5": ("staleness up to 5", "#0072B2", "o", "-"),
    "staleness 16": ("staleness up to 16", "#CC79A7", "v", "-"),
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


def styled(plot: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draw in our style whatever the user's own settings are."""

    @functools.wraps(plot)
    def drawn(*args, **kwargs) -> Figure:
        with matplotlib.style.context(["default", _STYLE]):
            return plot(*args, **kwargs)

    return drawn


def finish(figure: Figure) -> Figure:
    """One legend for all panels, below them."""
    drawn = {line.get_gid() for ax in figure.axes for line in ax.get_lines()}
    handles = [curve(figure.axes[0], [], [], method) for method in ordered(drawn)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def curve(ax, x, y, method: str, **options) -> Line2D:
    label, colour, marker, line = LOOK.get(method, (method, *_OTHER))
    options = {"marker": marker, "markersize": 5, "linestyle": line, "linewidth": 1.6, **options}
    return ax.plot(x, y, color=colour, label=label, gid=method, **options)[0]


def measured_curves(ax, frame: pd.DataFrame, x: str, column: str, binned: str | None = None) -> None:
    """Every method of a tidy frame of one setup over step or seconds; `binned` ("mean", "max") summarises twentieths of the run."""
    width = max(1, -(-int(frame["step"].max()) // 20)) if binned else 1
    ax.set_xlabel(("training step" if x == "step" else "seconds of training") + (f" ({binned} of {width} steps)" if width > 1 else ""))
    for method in sorted(ordered(frame["method"].unique()), key=list(LOOK)[:3].__contains__):  # the paper's methods last, on top
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
        line = curve(ax, x, values.mean(0), method, markevery=max(1, len(x) // 10))
    if len(values) >= BAND_SEEDS:
        ax.fill_between(x, *band(values), color=line.get_color(), alpha=0.2, linewidth=0)
        return
    thin = {"alpha": 0.5, "marker": ""} if len(values) > 1 else {"markevery": max(1, len(x) // 10)}
    for seed in values:
        curve(ax, x, seed, method, linewidth=0.8, **thin)


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % bootstrap interval of the mean over seeds of values [seeds, points]; fewer than five seeds raise."""
    if len(values) < BAND_SEEDS:
        raise ValueError(f"a band needs at least {BAND_SEEDS} seeds, got {len(values)}; draw the single seeds")
    return bootstrap_interval(values, np.random.default_rng(0))


def ordered(present) -> list[str]:
    """The methods among `present`, paper's methods first."""
    known = [method for method in LOOK if method in present]
    return known if isinstance(present, dict) else [*known, *sorted(set(present) - set(known))]


def setup_name(setup: str) -> str:
    return setup.replace("setup", "setup ")


def seeds(frame: pd.DataFrame) -> str:
    counts = frame.groupby("method")["seed"].nunique()
    return f"n = {counts.min()}" if counts.min() == counts.max() else f"n = {counts.min()} to {counts.max()}"
