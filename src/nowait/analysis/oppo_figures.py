"""Figures and tables of OPPO: published values where there are any, measured ones beside them, never in one axes. Frames are those of `oppo`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nowait import published
from nowait.analysis.drawing import curve, finish, measured_curves, ordered, seeds, styled
from nowait.analysis.oppo import SMOOTHED, TARGET_SHARE, WORK
from nowait.analysis.tables import markdown


@styled
def timeline(frame: pd.DataFrame) -> Figure:
    """Gantt chart of a few steps, one panel per method on one time axis; a dotted line ends each training step."""
    methods = list(frame["method"].unique())
    figure = Figure(figsize=(10, 1.2 + 1.6 * len(methods)), layout="constrained")
    for ax, method in zip(figure.subplots(len(methods), 1, sharex=True, squeeze=False)[:, 0], methods, strict=True):
        part = frame[frame["method"] == method]
        devices = sorted(part["device"].unique())
        for (worker, call), rows in part.groupby(["worker", "call"]):
            for device, own in rows.groupby("device"):
                bars = list(zip(own["start"], own["end"] - own["start"], strict=True))
                ax.broken_barh(bars, (devices.index(device) - 0.38, 0.76), color=WORK[worker, call][1], edgecolor="white", linewidth=0.3)
        for end in part.groupby("step")["end"].max():
            ax.axvline(end, color="#555555", linestyle=":", linewidth=1)
        ax.set_yticks(range(len(devices)), [f"device {device}" for device in devices])
        ax.set_ylim(len(devices) - 0.4, -0.6)
        first = part.iloc[0]
        ax.set_title(
            f"{method}: B = {first['batch_size']}, Δ = {first['delta']}, {part['end'].max():.2f} s for {part['step'].nunique()} steps", loc="left"
        )
        ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"seconds, measured, {frame['scale'].iloc[0]} scale, clock = {frame['clock'].iloc[0]}")
    drawn = [key for key in WORK if ((frame["worker"] == key[0]) & (frame["call"] == key[1])).any()]
    figure.legend(handles=[Patch(color=WORK[key][1], label=WORK[key][0]) for key in drawn], loc="outside lower center", ncols=3)
    return figure


@styled
def reward(frame: pd.DataFrame, x: str = "step", held_out: bool = False) -> Figure:
    """Mean reward of the trained batches, or held-out exact match, a panel per task; x is "step" or "seconds". Columns as of `tables.tidy`."""
    figure, axes = _panels(frame)
    column, label, binned = ("eval/reward", "held-out exact match", None) if held_out else ("rollout/reward_mean", "mean reward of a batch", "mean")
    for task, ax in axes.items():
        measured_curves(ax, frame[frame["setup"] == task], x, column, binned)
        ax.set_ylabel(label)
    return finish(figure)


@styled
def length_shares(frame: pd.DataFrame) -> Figure:
    """Share of the responses longer than so many tokens, in the first and last steps; a straight line would be an exponential tail."""
    figure, axes = _panels(frame)
    for task, ax in axes.items():
        for part, style in (("first", "-"), ("last", "--")):
            own = frame[(frame["setup"] == task) & (frame["part"] == part)]
            for method in ordered(own["method"].unique()):
                tokens = np.sort(own.loc[own["method"] == method, "tokens"])
                line = curve(ax, tokens, 1 - np.arange(1, len(tokens) + 1) / len(tokens), method, marker="", linestyle=style, drawstyle="steps-post")
                line.set_label(f"{line.get_label()}, {part} quarter of the steps")
        ax.set(yscale="log", xlabel="response tokens", ylabel="share of longer responses")
        ax.legend(fontsize=9)
    return figure


@styled
def utilisation(frame: pd.DataFrame) -> Figure:
    """Busy share of the devices and occupancy of the sampler's slots, sequential against both; columns of `speedups` and `simulated.beside`."""
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    left, simulated, middle, right = figure.subplots(1, 4, sharey=True)
    chosen = frame[frame["method"].isin(["sequential", "both"])]
    _bars(left, chosen.assign(percent=chosen["published_utilisation"]), "percent")
    _bars(simulated, chosen.assign(percent=100 * chosen["simulated_utilisation"]), "percent")
    simulated.set_title("simulated: devices busy, mean of 8\nassumed hardware")
    for ax, name in ((middle, "utilisation"), (right, "occupancy")):
        _bars(ax, chosen.assign(percent=100 * chosen[name]), "percent", errors=100 * chosen[f"{name}_se"])
    left.set(title="published: GPU utilisation", ylabel="%", ylim=(0, 115))
    middle.set_title(f"measured: devices busy, mean of both\n{_note(frame)}")
    right.set_title(f"measured: slots of the sampler in use\n{_note(frame)}")
    return _method_legend(figure, chosen)


@styled
def ablation(frame: pd.DataFrame) -> Figure:
    """Speed-up over the sequential schedule: published by time to a target, measured per step and by time to a target (columns of `on_bench`)."""
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    for ax, name, title in zip(
        figure.subplots(1, 4),
        ("published_speedup", "simulated_speedup", "speedup", "target_speedup"),
        (
            "published: time to a target reward",
            "simulated: per step\nassumed hardware",
            f"measured: bench, {frame['scale'].iloc[0]} scale\nn = {frame['blocks'].iloc[0]} blocks, clock = {frame['clock'].iloc[0]}",
            f"measured: time to a target reward\n{_note(frame)}",
        ),
        strict=True,
    ):
        _bars(ax, frame, name, "{:.2f}", frame.get(f"{name}_se"))
        ax.set(title=title, ylabel="speed-up over sequential")
        ax.axhline(1, color="#555555", linewidth=1)
    return _method_legend(figure, frame)


@styled
def overcommitment(frame: pd.DataFrame) -> Figure:
    """Reward over time, and Δ over the steps, of fixed degrees and of the rules; columns as of `tables.tidy`."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    measured_curves(left, frame, "seconds", "rollout/reward_mean", binned="mean")
    measured_curves(right, frame, "step", "overlap/delta")
    for ax, label in ((left, "mean reward of a batch"), (right, "Δ, requests beyond the batch")):
        ax.set(title=f"measured, {_note(frame)}", ylabel=label)
    return finish(figure)


@styled
def chunk_size(frame: pd.DataFrame) -> Figure:
    """Seconds per training step over the tokens of a decode round (columns chunk, seconds_per_step, scale, clock)."""
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    facts = published.load("oppo")["figures"]["chunk_size"]
    curve(left, [facts["best"]], [facts["best_seconds_per_step"]], "both", linestyle="")
    for size in facts["slower"]:
        left.annotate("slower,\nby how much is\nnot known", (size, facts["best_seconds_per_step"]), ha="center", va="bottom", fontsize=9)
    left.set(xlim=(50, 6000), ylim=(0, 260), title="published")
    for method, own in frame.groupby("method"):
        seconds = own.groupby("chunk")["seconds_per_step"]
        line = curve(right, seconds.mean().index, seconds.mean(), method)
        right.errorbar(seconds.mean().index, seconds.mean(), seconds.sem().fillna(0), fmt="none", color=line.get_color())
    right.set(title=f"measured, {_note(frame)}")
    right.set_ylim(bottom=0)
    for ax in (left, right):
        ax.set(xscale="log", xlabel="tokens per decode round", ylabel="seconds per training step")
    return _method_legend(figure, frame)


@styled
def deferrals(frame: pd.DataFrame) -> Figure:
    """Share of the trained requests by the number of updates that they were carried over; columns as of `deferral_shares`."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    ax, methods = figure.subplots(), list(frame["method"].unique())
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        part = frame[(frame["method"] == method) & (frame["share"] >= 5e-4)]
        bars = ax.bar(part["deferrals"] + (i - (len(methods) - 1) / 2) * width, 100 * part["share"], width)
        bars.set_label(f"{method}, mean Δ/B = {part['delta_over_b'].iloc[0]:.2f}")
        ax.bar_label(bars, [f"{100 * share:.3g}" for share in part["share"]], fontsize=8)
    ax.set(
        xlabel="updates that a request was carried over", ylabel="% of trained requests", ylim=(0, 112), xticks=range(frame["deferrals"].max() + 1)
    )
    ax.set_title(f"measured, {_note(frame)}; published: most never, nearly all others once")
    ax.legend()
    return figure


def _panels(frame: pd.DataFrame) -> tuple[Figure, dict]:
    """A panel per task, two in a row."""
    tasks = list(frame["setup"].unique())
    rows = -(-len(tasks) // 2)
    figure = Figure(figsize=(10 if len(tasks) > 1 else 6, 0.8 + 3.1 * rows), layout="constrained")
    axes = figure.subplots(rows, min(2, len(tasks)), squeeze=False).ravel()
    for ax in axes[len(tasks) :]:
        ax.remove()
    for task, ax in zip(tasks, axes, strict=False):
        ax.set_title(f"{_task(task)}: measured, {_note(frame[frame['setup'] == task])}")
    return figure, dict(zip(tasks, axes, strict=False))


def _task(name: str) -> str:
    return name.replace("_", " ")


def _note(frame: pd.DataFrame) -> str:
    scale, clock = ("/".join(frame[name].unique()) for name in ("scale", "clock"))
    n = f"n = {frame['seeds'].min()}" if "seeds" in frame else seeds(frame)
    return f"{scale} scale\n{n}, clock = {clock}"


def _bars(ax, frame: pd.DataFrame, column: str, form: str = "{:.0f}", errors: pd.Series | None = None) -> None:
    """Bars of a column, a group per task, a bar per method; without a value there is none."""
    tasks, methods = list(frame["setup"].unique()), ordered(frame["method"].unique())
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        part = frame[(frame["method"] == method) & frame[column].notna()]
        place = [tasks.index(task) + (i - (len(methods) - 1) / 2) * width for task in part["setup"]]
        error = None if errors is None else errors[part.index].fillna(0)
        bars = ax.bar(place, part[column], width, yerr=error, color=curve(ax, [], [], method).get_color())
        ax.bar_label(bars, [form.format(value) for value in part[column]], fontsize=7 if len(methods) > 4 else 8)
    ax.set_xticks(range(len(tasks)), [_task(task).replace("stackexchange", "stack-\nexchange").replace(" ", "\n") for task in tasks], fontsize=9)
    ax.grid(axis="x", visible=False)


def _method_legend(figure: Figure, frame: pd.DataFrame) -> Figure:
    ax = figure.axes[0]
    patches = [Patch(color=(line := curve(ax, [], [], method)).get_color(), label=line.get_label()) for method in ordered(frame["method"].unique())]
    figure.legend(handles=patches, loc="outside lower center", ncols=4)
    return figure


def speedups_markdown(frame: pd.DataFrame) -> str:
    columns = {
        "setup": ("task", "{}"),
        "method": ("method", "{}"),
        "published_main_speedup": ("published, main table: speed-up", "{:.2f}x"),
        "published_minutes": ("published, ablation: minutes", "{:.0f}"),
        "published_speedup": ("published, ablation: speed-up", "{:.2f}x"),
        "simulated_speedup": ("simulated: speed-up per step", "{:.2f}x"),
        "seconds_per_step": ("measured: s per step", "{:.3f}"),
        "speedup": ("speed-up per step", "{:.2f}x"),
        "speedup_se": ("± s.e.", "{:.2f}"),
        "target_seconds": ("s to target", "{:.1f}"),
        "target_speedup": ("speed-up to target", "{:.2f}x"),
        "target_speedup_se": ("± s.e.", "{:.2f}"),
        "utilisation_gain": ("utilisation gain", "{:.2f}x"),
        "occupancy_gain": ("occupancy gain", "{:.2f}x"),
        "delta_over_b": ("mean Δ/B", "{:.2f}"),
        "seeds": ("n (seeds)", "{:d}"),
    }
    target = f"{TARGET_SHARE:.0%} of the rise of the sequential run's reward, mean of {SMOOTHED} steps"
    measured = f"{frame['scale'].iloc[0]} scale, clock = {frame['clock'].iloc[0]}"
    return f"{markdown(frame, columns)}\nPublished targets are absolute rewards. Measured: {measured}; the target is {target}.\n"


def quality_markdown(frame: pd.DataFrame) -> str:
    columns = {
        "setup": ("task", "{}"),
        "method": ("method", "{}"),
        "score": ("reward, last steps", "{:.3f}"),
        "score_se": ("± s.e. (seeds)", "{:.3f}"),
        "before": ("exact match before", "{:.3f}"),
        "reward": ("exact match after", "{:.3f}"),
        "se": ("± s.e.", "{:.3f}"),
        "difference": ("minus sequential", "{:+.3f}"),
        "difference_se": ("± s.e. (paired)", "{:.3f}"),
        "seeds": ("n (seeds)", "{:d}"),
        "prompts": ("prompts", "{:d}"),
    }
    note = "Published: five benchmarks of OPPO's 7B model, and that the baseline is nearly identical"
    return f"{markdown(frame, columns)}\nMeasured: {frame['scale'].iloc[0]} scale, held-out prompts. {note}.\n"


PLOTS: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "oppo_timeline": timeline,
    "oppo_lengths": length_shares,
    "oppo_staleness": functools.partial(reward, held_out=True),
    "oppo_time_to_reward": functools.partial(reward, x="seconds"),
    "oppo_reward_steps": reward,
    "oppo_utilisation": utilisation,
    "oppo_ablation": ablation,
    "oppo_overcommitment": overcommitment,
    "oppo_chunk_size": chunk_size,
    "oppo_deferrals": deferrals,
    "oppo_grpo": functools.partial(reward, x="seconds"),
}
TABLES = {"oppo_speedups": speedups_markdown, "oppo_quality": quality_markdown}
