"""Figures and tables of what is simulated, against what was published or measured. Frames are those of `simulated` and `studies`."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from nowait.analysis import oppo_figures
from nowait.analysis.drawing import curve, finish, look, note, ordered, panels, spaced
from nowait.analysis.simulated import MARGIN
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


def speedups(frame: pd.DataFrame) -> Figure:
    """Published ratios, each with the simulation by data sheets alone and calibrated; bars reach over the changed assumptions."""
    rows = frame[(frame["unit"] == "ratio")].reset_index(drop=True)
    figure, ((ax,),) = panels(1, 1, 9, 1.4 + 0.36 * len(rows))
    ax.hlines(rows.index, rows["low"], rows["high"], color="#009E73", alpha=0.35, linewidth=6, label="simulated, over changed assumptions")
    ax.plot(rows["simulated"], rows.index, "s", color="#009E73", label="simulated, calibrated on baselines")
    ax.plot(rows["alone"], rows.index, "o", color="#0072B2", fillstyle="none", label="simulated, data sheets alone")
    ax.plot(rows["published"], rows.index, "D", color="#D55E00", label="published")
    names = rows["entry"].str.removeprefix("tables.").str.replace("_", " ").str.replace(".", ", ")
    ax.set_yticks(rows.index, [f"{name} (fitted)" if role == "fitted" else name for name, role in zip(names, rows["role"], strict=True)])
    ax.invert_yaxis()
    ax.set(xlabel="ratio", title="published and simulated, no seeds: a simulation repeats exactly")
    ax.axvline(1, color="#555555", linewidth=1)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def here(frame: pd.DataFrame) -> Figure:
    """Simulated over measured seconds per step, a panel per setup, with the band that was asked for."""
    setups = frame.groupby("setup", sort=False)
    figure, axes = panels(len(setups), 1, 7, 0.8 + 0.7 * len(setups) + 0.3 * len(frame), sharex=True, height_ratios=setups.size() + 1)
    for ax, (setup, own) in zip(axes[:, 0], setups, strict=True):
        ax.axvspan(1 - MARGIN, 1 + MARGIN, color="#999999", alpha=0.25)
        for i, row in enumerate(own.itertuples()):
            curve(ax, [1 + row.error], [i], row.method, linestyle="", fillstyle="none" if row.role == "fitted" else "full", markersize=9)
        ax.axvline(1, color="#555555", linewidth=1)
        ax.set_yticks(range(len(own)), [look(method)[0] for method in own["method"]])
        ax.set(ylim=(len(own) - 0.4, -0.6), title=f"{spaced(setup)}, {note(own)}")
    ax.set_xlabel(f"seconds per step, simulated / measured\nhollow: fitted; grey: within {MARGIN:.0%}")
    return figure


def systems(frame: pd.DataFrame) -> Figure:
    """Bars of every system, one panel per outcome; published seconds in a panel of their own."""
    figure, ((left, *axes),) = panels(1, 5, 11, 1.1 + 0.4 * len(frame), sharey=True)
    rows = np.arange(len(frame))
    known = frame["published"].notna()
    texts = frame["published"][known].astype(str)
    left.bar_label(left.barh(rows[known], texts.str.split().str[0].astype(float), color="#999999"), texts, padding=2, fontsize=9)
    left.set(title="published", xlabel="seconds per step", ylim=(len(frame) - 0.4, -0.6))
    left.set_yticks(rows, [f"{row.system} ({row.devices})" for row in frame.itertuples()])
    for ax, (name, (label, factor, form)) in zip(axes, OUTCOMES.items(), strict=True):
        bars = ax.barh(rows, factor * frame[name], color="#0072B2")
        ax.bar_label(bars, [form.format(factor * value) for value in frame[name]], padding=2, fontsize=9)
        ax.set(title="simulated", xlabel=label)
    for ax in figure.axes:
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.35)
    figure.suptitle(f"{frame['setup'].iloc[0]}, in brackets: devices", fontsize=11)
    return figure


def maps(frame: pd.DataFrame) -> Figure:
    """Seconds per step and busy share of every method over the two columns of the grid; what does not fit is hatched."""
    x, y = _grid(frame)
    methods = ordered(frame["method"].unique())
    figure, rows = panels(len(methods), 2, 10, 0.4 + 2.6 * len(methods))
    for axes, method in zip(rows, methods, strict=True):
        part = frame[frame["method"] == method]
        for ax, name, colours in zip(axes, ("seconds_per_step", "busy_frac"), ("viridis_r", "cividis"), strict=True):
            label, factor, _ = OUTCOMES[name]
            norm = Normalize(0, 100) if name == "busy_frac" else LogNorm(frame[name].min(), frame[name].max())
            figure.colorbar(_heat(ax, factor * part.pivot(index=y, columns=x, values=name), norm, colours), ax=ax, label=label)
            ax.set_title(f"{look(method)[0]}: {part['reason'].notna().sum()} of {len(part)} do not fit, simulated", fontsize=10)
    return figure


def gains(frame: pd.DataFrame) -> Figure:
    """Speed-up of every method over its baseline, a row per map (column `map`); the line is where 5 % are gained."""
    methods, kinds = [method for method in BASELINES if (frame["method"] == method).any()], list(frame["map"].unique())
    figure, rows = panels(len(kinds), len(methods), 4.2 * len(methods), 1.2 + 3 * len(kinds))
    for column, method in zip(rows.T, methods, strict=True):
        own = frame[frame["method"] == method]
        reach = max(1.1, own["speedup"].max(), 1 / own["speedup"].min())
        for ax, kind in zip(column, kinds, strict=True):
            x, y = _grid(part := own[own["map"] == kind])
            drawn = _heat(ax, table := part.pivot(index=y, columns=x, values="speedup"), LogNorm(1 / reach, reach), "RdBu")
            if table.min(axis=None) < PAYS < table.max(axis=None):
                ax.contour(np.ma.masked_invalid(table), [PAYS], colors="black", linewidths=2)
            ax.set_title(f"{look(method)[0]} over {look(BASELINES[method])[0]}\nsimulated; line: {PAYS:g}")
        ticks = np.geomspace(1 / reach, reach, 5)
        figure.colorbar(drawn, ax=column, location="bottom", label="speed-up", ticks=ticks, format="%.2f").minorticks_off()
    return figure


def hours(frame: pd.DataFrame) -> Figure:
    """Device-hours over hours of a whole training, a panel per setup, a point per number of devices."""
    setups = list(frame["setup"].unique())
    figure, (axes,) = panels(1, len(setups), 5 * len(setups), 4.2)
    for ax, setup in zip(axes, setups, strict=True):
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
    return markdown(frame.assign(**{name: factor * frame[name] for name, (_, factor, _) in OUTCOMES.items()}), "systems")


def chunk_size(frame: pd.DataFrame) -> Figure:
    """Simulated seconds per step over the tokens of a decode round, by where the frozen models live (columns of `studies.chunk_sizes`)."""
    figure, ((ax,),) = panels(1, 1, 6, 3.8)
    for (place, own), (colour, marker) in zip(frame.groupby("place", sort=False), (("#009E73", "s"), ("#0072B2", "o")), strict=False):
        ax.plot(own["chunk"], own["seconds_per_step"], color=colour, marker=marker, label=f"frozen models: {place}")
    ax.set(xscale="log", xlabel="tokens per decode round", ylabel="seconds per training step", title="simulated, assumed hardware")
    ax.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def overcommitment(frame: pd.DataFrame) -> Figure:
    """Simulated Δ over training steps, a curve per rule (columns of `simulated.metrics`)."""
    figure, ((ax,),) = panels(1, 1, 6, 3.8)
    for method in ordered(frame["method"]):
        own = frame[frame["method"] == method]
        curve(ax, own["step"], own["overlap/delta"], method, markevery=max(1, len(own) // 10))
    ax.set(xlabel="training step", ylabel="Δ, requests beyond the batch", title="simulated, assumed hardware and reward curve")
    ax.locator_params(axis="y", integer=True)
    return finish(figure)


CONTENTS: dict[str, Callable[[pd.DataFrame], Figure | str]] = {
    "simulated_speedups": speedups,
    "simulated_here": here,
    "simulated_systems": systems,
    "simulated_scale_size": maps,
    "simulated_scale_work": maps,
    "simulated_scale_overlap": gains,
    "simulated_scale": gains,
    "simulated_scale_hours": hours,
    "simulated_chunk_size": chunk_size,
    "simulated_overcommitment": overcommitment,
    "simulated_deferrals": partial(oppo_figures.deferrals, title="simulated, assumed hardware"),
    "simulated_a3po": partial(markdown, table="simulated"),
    "simulated_oppo": partial(markdown, table="simulated"),
    "simulated_systems_table": systems_markdown,
}
