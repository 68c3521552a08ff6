"""Figures and tables of OPPO: published values where there are any, measured ones beside them, never in one axes. Frames are those of `oppo`."""

import textwrap
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nowait import published
from nowait.analysis.drawing import curve, finish, look, measured_curves, note, ordered, panels, spaced
from nowait.analysis.oppo import WORK
from nowait.analysis.tables import markdown


def timeline(frame: pd.DataFrame) -> Figure:
    """Gantt chart of a few steps, one panel per method on one time axis; a dotted line ends each training step."""
    methods = frame.groupby("method", sort=False)
    figure, axes = panels(len(methods), 1, 10, 1.2 + 1.6 * len(methods), sharex=True)
    for ax, (method, part) in zip(axes[:, 0], methods, strict=True):
        devices = sorted(part["device"].unique())
        colours = [WORK[work][1] for work in zip(part["worker"], part["call"], strict=True)]
        rows = part["device"].map(devices.index)
        ax.barh(rows, part["end"] - part["start"], 0.76, part["start"], color=colours, edgecolor="white", linewidth=0.3)
        for end in part.groupby("step")["end"].max():
            ax.axvline(end, color="#555555", linestyle=":", linewidth=1)
        ax.set_yticks(range(len(devices)), [f"device {device}" for device in devices])
        ax.set_ylim(len(devices) - 0.4, -0.6)
        first, last = part.iloc[0], part["end"].max()
        title = f"{method}: B = {first['batch_size']}, Δ = {first['delta']}, {last:.2f} s for {part['step'].nunique()} steps"
        ax.set_title(title, loc="left")
        ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"seconds, measured, {frame['scale'].iloc[0]} scale, clock = {frame['clock'].iloc[0]}")
    done = set(zip(frame["worker"], frame["call"], strict=True))
    handles = [Patch(color=colour, label=name) for work, (name, colour) in WORK.items() if work in done]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def reward(frame: pd.DataFrame, x: str = "step", held_out: bool = False, told: Callable[[str], str] | None = None) -> Figure:
    """Mean reward of the trained batches, or held-out exact match, a panel per task; x is "step" or "seconds". Columns as of `tables.tidy`.

    `told(task)` is what is published, in words: the few values known are of other units than ours.
    """
    figure, axes = _tasks(frame)
    column, label, binned = ("eval/reward", "held-out exact match", None) if held_out else ("rollout/reward_mean", "mean reward of a batch", "mean")
    for task, ax in axes.items():
        measured_curves(ax, frame[frame["setup"] == task], x, column, binned)
        ax.set_ylabel(label)
        if told:
            _words(ax, told(task))
    return finish(figure)


def _words(ax, text: str) -> None:
    """What is published, in a box of its own below the curves."""
    low, high = ax.get_ylim()
    ax.set_ylim(low - 0.3 * (high - low), high)
    box = {"facecolor": "#EEEEEE", "edgecolor": "none", "boxstyle": "round"}
    ax.text(0.98, 0.04, f"published: {text}", transform=ax.transAxes, ha="right", va="bottom", fontsize=10, bbox=box)


def _minutes(task: str) -> str:
    facts = published.load("oppo")
    known, target = facts["tables"]["minutes_to_target"].get(task, {}), facts["tasks"].get(task, {}).get("target_reward")
    if "trl" not in known:
        return f"target reached {known['speedup']} times sooner" if known else "nothing"
    return f"reward {target} in {known['oppo']:,} min (OPPO)\ninstead of {known['trl']:,} (TRL), {known['speedup']} times sooner"


def _rewards(task: str) -> str:
    known = published.load("oppo")["figures"]["reward_vs_step"].get(task, {})
    return ",\n".join(f"{value} at {f'the {key}' if isinstance(key, str) else f'step {key}'}" for key, value in known.items()) or "no values known"


def _claim(task: str) -> str:
    return textwrap.fill(published.load("oppo")["figures"]["staleness_5"]["claim"], 45)


def length_shares(frame: pd.DataFrame) -> Figure:
    """Share of the responses longer than so many tokens, in the first and last steps; a straight line would be an exponential tail."""
    figure, axes = _tasks(frame)
    for task, ax in axes.items():
        for part, style in (("first", "-"), ("last", "--")):
            own = frame[(frame["setup"] == task) & (frame["part"] == part)]
            for method in ordered(own["method"]):
                tokens = np.sort(own.loc[own["method"] == method, "tokens"])
                line = curve(ax, tokens, 1 - np.arange(1, len(tokens) + 1) / len(tokens), method, marker="", linestyle=style, drawstyle="steps-post")
                line.set_label(f"{line.get_label()}, {part} quarter of the steps")
        ax.set(yscale="log", xlabel="response tokens", ylabel="share of longer responses")
        ax.legend(fontsize=9)
    return figure


def utilisation(frame: pd.DataFrame) -> Figure:
    """Busy share of the devices and occupancy of the sampler's slots, sequential against both; columns of `speedups` and `simulated.beside`."""
    chosen = frame[frame["method"].isin(["sequential", "both"])]
    shares = ["simulated_utilisation", "utilisation", "utilisation_se", "occupancy", "occupancy_se"]
    titles = {
        "published_utilisation": "published: GPU utilisation",
        "simulated_utilisation": "simulated: devices busy, mean of 8\nassumed hardware",
        "utilisation": f"measured: devices busy, mean of both\n{note(frame)}",
        "occupancy": f"measured: slots of the sampler in use\n{note(frame)}",
    }
    figure = _bars(chosen.assign(**100 * chosen[shares]), titles, "{:.0f}")
    for ax in figure.axes:
        ax.set(ylabel="%", ylim=(0, 115))
    return finish(figure)


def ablation(frame: pd.DataFrame) -> Figure:
    """Speed-up over the sequential schedule: published by time to a target, measured per step and by time to a target (columns of `on_bench`)."""
    titles = {
        "published_speedup": "published: time to a target reward",
        "simulated_speedup": "simulated: per step\nassumed hardware",
        "speedup": f"measured: bench, {note(frame.drop(columns='seeds'))}",
        "target_speedup": f"measured: time to a target that all seeds reached\n{note(frame)}",
    }
    figure = _bars(frame, titles, "{:.2f}")
    for ax in figure.axes:
        ax.set_ylabel("speed-up over sequential")
        ax.axhline(1, color="#555555", linewidth=1)
    return finish(figure)


def _bars(frame: pd.DataFrame, titles: dict[str, str], form: str) -> Figure:
    """A panel per {column: title}: a group of bars per task, a bar per method, with the error in COLUMN_se; without a value there is none."""
    figure, axes = panels(2, 2, 10, 7.4)
    tasks, methods = list(frame["setup"].unique()), ordered(frame["method"])
    width = 0.8 / len(methods)
    names = [spaced(task).replace("stackexchange", "stack-\nexchange").replace(" ", "\n") for task in tasks]
    for ax, (column, title) in zip(axes.flat, titles.items(), strict=True):
        for i, method in enumerate(methods):
            part = frame[(frame["method"] == method) & frame[column].notna()]
            place = [tasks.index(task) + (i - (len(methods) - 1) / 2) * width for task in part["setup"]]
            error = part[f"{column}_se"].fillna(0) if f"{column}_se" in part else None
            bars = ax.bar(place, part[column], width, yerr=error, color=look(method)[1], gid=method)
            ax.bar_label(bars, [form.format(value) for value in part[column]], fontsize=9)
        ax.set_xticks(range(len(tasks)), names)
        ax.grid(axis="x", visible=False)
        ax.margins(y=0.15)  # room for labels
        ax.set_title(title)
    return figure


def overcommitment(frame: pd.DataFrame) -> Figure:
    """Reward over time, and Δ over the steps, of fixed degrees and of the rules; columns as of `tables.tidy`."""
    figure, ((left, right),) = panels(1, 2, 12, 4.2)
    measured_curves(left, frame, "seconds", "rollout/reward_mean", binned="mean")
    measured_curves(right, frame, "step", "overlap/delta")
    for ax, label in ((left, "mean reward of a batch"), (right, "Δ, requests beyond the batch")):
        ax.set(title=f"measured, {note(frame)}", ylabel=label)
    ranking = published.load("oppo")["figures"]["overcommitment"]["ranking"]
    best, *others = (name.replace("_early_only", " (good early only)").replace("_", " ") for name in ranking)
    _words(left, f"{best} best,\nthen {', then '.join(others)}")
    return finish(figure)


def chunk_size(frame: pd.DataFrame) -> Figure:
    """Seconds per training step over the tokens of a decode round (columns chunk, seconds_per_step, scale, clock)."""
    figure, ((left, right),) = panels(1, 2, 8, 3.8)
    facts = published.load("oppo")["figures"]["chunk_size"]
    curve(left, [facts["best"]], [facts["best_seconds_per_step"]], "both", linestyle="")
    for size in facts["slower"]:
        left.annotate("slower,\nhow much\nis not\nknown", (size, facts["best_seconds_per_step"]), ha="center", va="bottom", fontsize=9)
    left.set(xlim=(50, 6000), ylim=(0, 260), title="published")
    for method, own in frame.groupby("method"):
        seconds = own.groupby("chunk")["seconds_per_step"].agg(["mean", "sem"])
        line = curve(right, seconds.index, seconds["mean"], method)
        right.errorbar(seconds.index, seconds["mean"], seconds["sem"].fillna(0), fmt="none", color=line.get_color())
    right.set(title=f"measured, {note(frame)}")
    right.set_ylim(bottom=0)
    for ax in (left, right):
        ax.set(xscale="log", xlabel="tokens per decode round", ylabel="seconds per training step")
    return finish(figure)


def deferrals(frame: pd.DataFrame, title: str | None = None) -> Figure:
    """Share of the trained requests by the number of updates that they were carried over; columns as of `deferral_shares`."""
    figure, ((ax,),) = panels(1, 1, 9, 3.6)
    frame = frame[frame["share"] >= 5e-4]
    methods = frame.groupby("method", sort=False)
    width = 0.8 / len(methods)
    for i, (method, part) in enumerate(methods):
        colour = look(("both", "both_paper")[i % 2])[1]  # Δ as it is, and near the paper's
        bars = ax.bar(part["deferrals"] + (i - (len(methods) - 1) / 2) * width, 100 * part["share"], width, color=colour)
        bars.set_label(f"{method}, mean Δ/B = {part['delta_over_b'].iloc[0]:.2f}")
        ax.bar_label(bars, [f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.0f}" for share in part["share"]], fontsize=8)
    ax.set(xlabel="updates that a request was carried over", ylabel="% of trained requests", ylim=(0, 112))
    ax.set_xticks(range(frame["deferrals"].max() + 1))
    ax.set_title(title or f"measured, {note(frame)}; published: most never, nearly all others once")
    ax.legend()
    return figure


def _tasks(frame: pd.DataFrame) -> tuple[Figure, dict]:
    """A panel per task, two in a row."""
    tasks = list(frame["setup"].unique())
    rows = -(-len(tasks) // 2)
    figure, axes = panels(rows, min(2, len(tasks)), 10 if len(tasks) > 1 else 6, 0.8 + 3.1 * rows)
    for ax in axes.flat[len(tasks) :]:
        ax.remove()
    for task, ax in zip(tasks, axes.flat, strict=False):
        ax.set_title(f"{spaced(task)}: measured, {note(frame[frame['setup'] == task])}")
    return figure, dict(zip(tasks, axes.flat, strict=False))


CONTENTS: dict[str, Callable[[pd.DataFrame], Figure | str]] = {
    "oppo_timeline": timeline,
    "oppo_lengths": length_shares,
    "oppo_staleness": partial(reward, held_out=True, told=_claim),
    "oppo_time_to_reward": partial(reward, x="seconds", told=_minutes),
    "oppo_reward_steps": partial(reward, told=_rewards),
    "oppo_utilisation": utilisation,
    "oppo_ablation": ablation,
    "oppo_overcommitment": overcommitment,
    "oppo_chunk_size": chunk_size,
    "oppo_deferrals": deferrals,
    "oppo_grpo": partial(reward, x="seconds"),
    "oppo_speedups": partial(markdown, table="speedups"),
    "oppo_ablation_table": partial(markdown, table="ablation"),
    "oppo_stages": partial(markdown, table="stages"),
    "oppo_quality": partial(markdown, table="quality"),
}
