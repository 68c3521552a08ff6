"""Figures of the simulation against what was published and what was measured here. Frames are those of `simulated` and `validation`."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from nowait.analysis.drawing import LOOK, curve, styled
from nowait.analysis.simulated import simulated_markdown


@styled
def speedups(frame: pd.DataFrame) -> Figure:
    """Published ratios, each with the simulation by data sheets alone and calibrated; bars reach over the changed assumptions."""
    rows = frame[(frame["unit"] == "ratio")].reset_index(drop=True)
    figure = Figure(figsize=(9, 1.4 + 0.36 * len(rows)), layout="constrained")
    ax = figure.subplots()
    ax.hlines(rows.index, rows["low"], rows["high"], color="#009E73", alpha=0.35, linewidth=6, label="simulated, over four changed assumptions")
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


@styled
def here(frame: pd.DataFrame) -> Figure:
    """Predicted over measured seconds per step, a panel per setup, with the band that was asked for."""
    setups = list(frame["setup"].unique())
    figure = Figure(figsize=(4.2 * len(setups), 4), layout="constrained")
    for ax, setup in zip(figure.subplots(1, len(setups), sharey=True, squeeze=False)[0], setups, strict=True):
        own = frame[frame["setup"] == setup].reset_index(drop=True)
        ax.axhspan(0.85, 1.15, color="#999999", alpha=0.25)
        for i, row in own.iterrows():
            curve(ax, [i], [1 + row["error"]], row["method"], linestyle="", fillstyle="none" if row["role"] == "fitted" else "full", markersize=8)
        ax.axhline(1, color="#555555", linewidth=1)
        ax.set_xticks(range(len(own)), [LOOK.get(method, (method,))[0] for method in own["method"]], rotation=40, ha="right", fontsize=9)
        ax.set_title(f"{setup.replace('_', ' ')}, {own['scale'].iloc[0]} scale\nn = {own['blocks'].iloc[0]} blocks, clock = {own['clock'].iloc[0]}")
    figure.axes[0].set_ylabel("seconds per step, simulated / measured")
    figure.supxlabel("hollow: fitted; grey: within 15 %", fontsize=9)
    return figure


PLOTS: dict[str, Callable[[pd.DataFrame], Figure]] = {"simulated_speedups": speedups, "simulated_here": here}
TABLES: dict[str, Callable[[pd.DataFrame], str]] = {f"simulated_{paper}": simulated_markdown for paper in ("a3po", "oppo")}
