"""How measured and published curves look, whatever the figure: one style, one look per method, single seeds or a band."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib.style
import numpy as np
import pandas as pd
import yaml
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from nowait.analysis.statistics import bootstrap_interval

BAND_SEEDS = 5  # from this many seeds on an interval is drawn instead of the single seeds
CROWDED = 4  # more methods than these, and fewer seeds show as the range from the lowest to the highest
LOOK = yaml.safe_load(Path(__file__).with_name("looks.yaml").read_text(encoding="utf-8"))  # of a method: label, colour, marker, line
OWN = ["#555555", "#332288", "#117733", "#882255", "#44AA99", "#999933", "#661100"]  # of methods that it does not know
# a decorator of what draws, or saves: in our style whatever the user's own settings are
styled = matplotlib.style.context(["default", Path(__file__).with_name("nowait.mplstyle")])


def panels(rows: int, columns: int, width: float, height: float, **options) -> tuple[Figure, np.ndarray]:
    """A figure of so many inches and its axes [rows, columns]."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def finish(figure: Figure) -> Figure:
    """One legend for all panels, below them: of the methods by which curves and bars are marked (gid)."""
    drawn = {artist.get_gid(): artist for ax in figure.axes for artist in [*ax.lines, *ax.patches] if artist.get_gid()}
    bars = {method for method, artist in drawn.items() if isinstance(artist, Patch)}
    handles = [Patch(color=look(m)[1], label=look(m)[0]) if m in bars else curve(figure.axes[0], [], [], m) for m in ordered(drawn)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure


def look(method: str) -> tuple[str, str, str, str]:
    """Label, colour, marker and line of a method, also of a user's own."""
    return LOOK.get(method, (method, OWN[sum(map(ord, method)) % len(OWN)], ".", ":"))


def curve(ax, x, y, method: str, **options) -> Line2D:
    label, colour, marker, line = look(method)
    options = {"marker": marker, "markersize": 5, "linestyle": line, "linewidth": 1.6, **options}
    return ax.plot(x, y, color=colour, label=label, gid=method, **options)[0]


def measured_curves(ax, frame: pd.DataFrame, x: str, column: str, binned: str | None = None) -> None:
    """Every method of a tidy frame of one setup over step or seconds; `binned` ("mean", "max") summarises twentieths of the run."""
    width = max(1, -(-int(frame["step"].max()) // 20)) if binned else 1
    crowded = frame["method"].nunique() > CROWDED and 1 < frame["seed"].nunique() < BAND_SEEDS
    told = [f"{binned} of {width} steps"] * (width > 1) + ["band: all seeds"] * crowded
    ax.set_xlabel(("training step" if x == "step" else "seconds of training") + (f" ({', '.join(told)})" if told else ""))
    for method in sorted(ordered(frame["method"].unique()), key=list(LOOK)[:3].__contains__):  # the paper's methods last, on top
        runs = frame[frame["method"] == method].dropna(subset=[column])
        table = runs.pivot(index="step", columns="seed", values=column).dropna()
        at = runs.groupby("step")[x].mean().loc[table.index]
        if binned:
            bins = (table.index - 1) // width
            table, at = table.groupby(bins).agg(binned), at.groupby(bins).mean()
        _runs(ax, at.to_numpy(), table.to_numpy().T, method, crowded)


def _runs(ax, x: np.ndarray, values: np.ndarray, method: str, crowded: bool) -> None:
    """Values [seeds, points]: their mean, over single seeds as thin lines, from five on a bootstrap band, or where it is crowded their range."""
    if len(values) > 1:
        line = curve(ax, x, values.mean(0), method, markevery=max(1, len(x) // 10))
    if len(values) >= BAND_SEEDS or (crowded and len(values) > 1):
        band = bootstrap_interval(values, np.random.default_rng(0)) if len(values) >= BAND_SEEDS else (values.min(0), values.max(0))
        ax.fill_between(x, *band, color=line.get_color(), alpha=0.15 if crowded else 0.2, linewidth=0)
        return
    thin = {"alpha": 0.5, "marker": ""} if len(values) > 1 else {"markevery": max(1, len(x) // 10)}
    for seed in values:
        curve(ax, x, seed, method, linewidth=0.8, **thin)


def ordered(present: Iterable[str]) -> list[str]:
    """Methods in the order of LOOK, a user's own after them."""
    return sorted(set(present), key=lambda method: (list(LOOK).index(method) if method in LOOK else len(LOOK), method))


def spaced(name: str) -> str:
    """A setup or task as it is written in titles."""
    return name.replace("_", " ").replace("setup", "setup ")


def note(frame: pd.DataFrame) -> str:
    """What the title of measured axes says: scale, how many seeds or, for a bench, blocks, and clock."""
    scale, clock = ("/".join(frame[name].unique()) for name in ("scale", "clock"))
    of = next(name for name in ("seed", "seeds", "blocks") if name in frame)
    counts = frame.groupby("method")["seed"].nunique() if of == "seed" else frame[of]
    n = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    return f"{scale} scale\nn = {n}{' blocks' if of == 'blocks' else ''}, clock = {clock}"
