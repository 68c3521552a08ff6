"""Figures and tables of the simulated studies; frames are those of `studies`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from nowait.analysis.drawing import LOOK, curve, finish, ordered, styled
from nowait.analysis.studies import BASELINES, PAYS
from nowait.analysis.tables import markdown

AXES = {"devices": "devices", "billions": "billions of parameters", "batch": "requests per batch, B", "longest": "longest response, tokens",
        "delta": "requests beyond the batch, Δ", "chunk": "tokens per decode round, C"}  # fmt: skip
OUTCOMES = {  # column: label, factor, format
    "seconds_per_step": ("seconds per step", 1, "{:.0f}"),
    "busy_frac": ("devices busy, %", 100, "{:.0f}"),
    "occupancy": ("slots in use, %", 100, "{:.0f}"),
    "mean_staleness": ("staleness, steps", 1, "{:.2f}"),
}


@styled
def systems(frame: pd.DataFrame) -> Figure:
    """Bars of every system, one panel per outcome; published seconds in a panel of their own."""
    figure = Figure(figsize=(11, 1.1 + 0.4 * len(frame)), layout="constrained")
    rows, (left, *panels) = np.arange(len(frame)), figure.subplots(1, 5, sharey=True)
    known = frame["published"].notna()
    texts = frame["published"][known].astype(str)
    left.bar_label(left.barh(rows[known], texts.str.split().str[0].astype(float), color="#999999"), texts, padding=2, fontsize=9)
    left.set(title="published", xlabel="seconds per step", ylim=(len(frame) - 0.4, -0.6))
    left.set_yticks(rows, [f"{row.system} ({row.devices})" for row in frame.itertuples()])
    for ax, (name, (label, factor, form)) in zip(panels, OUTCOMES.items(), strict=True):
        bars = ax.barh(rows, factor * frame[name], color="#0072B2")
        ax.bar_label(bars, [form.format(factor * value) for value in frame[name]], padding=2, fontsize=9)
        ax.set(title="simulated", xlabel=label)
    for ax in figure.axes:
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.35)
    figure.suptitle(f"{frame['setup'].iloc[0]}, in brackets: devices", fontsize=11)
    return figure


@styled
def maps(frame: pd.DataFrame) -> Figure:
    """Seconds per step and busy share of every method over the two columns of the grid; what does not fit is hatched."""
    x, y = _grid(frame)
    methods = ordered(frame["method"].unique())
    figure = Figure(figsize=(10, 0.4 + 2.6 * len(methods)), layout="constrained")
    for axes, method in zip(figure.subplots(len(methods), 2, squeeze=False), methods, strict=True):
        part = frame[frame["method"] == method]
        for ax, name, colours in zip(axes, ("seconds_per_step", "busy_frac"), ("viridis_r", "cividis"), strict=True):
            label, factor, _ = OUTCOMES[name]
            norm = Normalize(0, 100) if name == "busy_frac" else LogNorm(frame[name].min(), frame[name].max())
            figure.colorbar(_heat(ax, factor * part.pivot(index=y, columns=x, values=name), norm, colours), ax=ax, label=label)
            ax.set_title(f"{LOOK[method][0]}: {part['reason'].notna().sum()} of {len(part)} do not fit, simulated", fontsize=10)
    return figure


@styled
def gains(frame: pd.DataFrame) -> Figure:
    """Speed-up of every method over its baseline, a row per map (column `map`); the line is where 5 % are gained."""
    methods, kinds = [method for method in BASELINES if (frame["method"] == method).any()], list(frame["map"].unique())
    figure = Figure(figsize=(4.2 * len(methods), 1.2 + 3 * len(kinds)), layout="constrained")
    for column, method in zip(figure.subplots(len(kinds), len(methods), squeeze=False).T, methods, strict=True):
        own = frame[frame["method"] == method]
        reach = max(1.1, own["speedup"].max(), 1 / own["speedup"].min())
        for ax, kind in zip(column, kinds, strict=True):
            x, y = _grid(part := own[own["map"] == kind])
            drawn = _heat(ax, table := part.pivot(index=y, columns=x, values="speedup"), LogNorm(1 / reach, reach), "RdBu")
            if table.min(axis=None) < PAYS < table.max(axis=None):
                ax.contour(np.ma.masked_invalid(table), [PAYS], colors="black", linewidths=2)
            ax.set_title(f"{LOOK[method][0]} over {LOOK[BASELINES[method]][0]}\nsimulated; line: {PAYS:g}")
        ticks = np.geomspace(1 / reach, reach, 5)
        figure.colorbar(drawn, ax=column, location="bottom", label="speed-up", ticks=ticks, format="%.2f").minorticks_off()
    return figure


@styled
def hours(frame: pd.DataFrame) -> Figure:
    """Device-hours over hours of a whole training, a panel per setup, a point per number of devices."""
    setups = list(frame["setup"].unique())
    figure = Figure(figsize=(5 * len(setups), 4.2), layout="constrained")
    for ax, setup in zip(figure.subplots(1, len(setups), squeeze=False)[0], setups, strict=True):
        part = frame[frame["setup"] == setup].dropna(subset=["seconds_per_step"]).sort_values("devices")
        for method in ordered(part["method"].unique()):
            own = part[part["method"] == method]
            time = own["seconds_per_step"] * own["training_steps"] / 3600
            curve(ax, time, time * own["devices"], method)
        for count, place in zip(own["devices"], zip(time, time * own["devices"], strict=True), strict=True):
            ax.annotate(count, place, xytext=(-4, -4), textcoords="offset points", ha="right", va="top", fontsize=8)
        ax.set(xscale="log", yscale="log", xlabel="hours", ylabel="device-hours", xmargin=0.12)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=StrMethodFormatter("{x:g}"), minor_locator=NullLocator())
        ax.set_title(f"{setup}, {part['model'].iloc[0]}: {part['training_steps'].iloc[0]} steps\nsimulated; numbers: devices")
    return finish(figure)


def _grid(frame: pd.DataFrame) -> tuple[str, str]:
    """The two columns that vary in a method's map: those of the x and the y axis."""
    return tuple(name for name in AXES if name in frame and frame.groupby("method")[name].nunique().max() > 1)


def _heat(ax, table: pd.DataFrame, norm, colours: str):
    """Cells of a table [y, x]; missing ones are hatched."""
    ax.set_facecolor("#EEEEEE")
    ax.patch.set(hatch="///", edgecolor="#BBBBBB")
    drawn = ax.imshow(table, origin="lower", aspect="auto", norm=norm, cmap=colours, interpolation="nearest")
    for axis, index in ((ax.xaxis, table.columns), (ax.yaxis, table.index)):
        axis.set_ticks(range(len(index)), [f"{v // 1024:g}k" if v >= 1024 and v % 1024 == 0 else f"{v:g}" for v in index], fontsize=9)
        axis.set_label_text(AXES[index.name])
    ax.grid(visible=False)
    return drawn


def systems_markdown(frame: pd.DataFrame) -> str:
    columns = {"system": ("system", "{}"), "devices": ("devices", "{}"), "published": ("published: seconds per step", "{}")}
    columns |= {name: (f"simulated: {label}", form) for name, (label, _, form) in OUTCOMES.items()}
    shown = frame.assign(**{name: factor * frame[name] for name, (_, factor, _) in OUTCOMES.items()})
    note = f"Simulated: {frame['setup'].iloc[0]} on the hardware that is assumed for it. Published: on which task and machine is not known."
    return f"{markdown(shown, columns)}\n{note}\n"


@styled
def chunk_size(frame: pd.DataFrame) -> Figure:
    """Simulated seconds per step over the tokens of a decode round, by where the frozen models live (columns of `studies.chunk_sizes`)."""
    figure = Figure(figsize=(6, 3.8), layout="constrained")
    ax = figure.subplots()
    for (place, own), (colour, marker) in zip(frame.groupby("place", sort=False), (("#009E73", "s"), ("#0072B2", "o")), strict=False):
        ax.plot(own["chunk"], own["seconds_per_step"], color=colour, marker=marker, label=f"frozen models: {place}")
    ax.set(xscale="log", xlabel="tokens per decode round", ylabel="seconds per training step", title="simulated, assumed hardware")
    ax.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


PLOTS: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "simulated_systems": systems,
    "simulated_scale_size": maps,
    "simulated_scale_work": maps,
    "simulated_scale_overlap": gains,
    "simulated_scale": gains,
    "simulated_scale_hours": hours,
    "simulated_chunk_size": chunk_size,
}
TABLES = {"simulated_systems_table": systems_markdown}
