"""One plot per published figure of OPPO: published values where there are any, measured ones beside them, never in one axes.

Frames are those of `tables.tidy` (methods sequential, intra, inter, both), or made by the functions here; each is saved as CSV beside its picture.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nowait import published
from nowait.analysis.figures import _finish, _line, _measured, _name, _seeds, _styled

WORK = {  # worker: colour of its calls in a Gantt chart, colour-blind safe
    ("sampler", "decode"): ("decode", "#0072B2"),
    ("sampler", "load"): ("prefill again", "#56B4E9"),
    ("reward", "prefill"): ("reward model reads", "#D55E00"),
    ("reference", "prefill"): ("reference reads", "#E69F00"),
    ("learner", "logp"): ("old log-probs", "#CC79A7"),
    ("learner", "update"): ("update", "#009E73"),
}


def calls(results: dict[str, list], steps: range) -> pd.DataFrame:
    """What the devices did in some training steps of the first run of each method; seconds since the first of these steps began."""
    rows = []
    for method, several in results.items():
        spans = [s for s in several[0].timeline.spans if s.step in steps and (s.worker, s.method) in WORK]
        start = min(s.start for s in spans)
        clock = several[0].manifest["config"]["runtime"]["clock"]
        rows += [(method, s.device, s.worker, s.method, round(s.start - start, 6), round(s.end - start, 6), s.step, clock) for s in spans]
    return pd.DataFrame(rows, columns=["method", "device", "worker", "call", "start", "end", "step", "clock"])


@_styled
def timeline(frame: pd.DataFrame) -> Figure:
    """Gantt chart of a few steps, one panel per method, on one time axis; a dotted line ends each training step."""
    methods = list(frame["method"].unique())
    figure = Figure(figsize=(10, 1.0 + 1.5 * len(methods)), layout="constrained")
    for ax, method in zip(figure.subplots(len(methods), 1, sharex=True, squeeze=False)[:, 0], methods, strict=True):
        part = frame[frame["method"] == method]
        devices = sorted(part["device"].unique())
        for (worker, call), rows in part.groupby(["worker", "call"]):
            bars = list(zip(rows["start"], rows["end"] - rows["start"], rows["device"].map(devices.index), strict=True))
            for start, width, row in bars:
                ax.broken_barh([(start, width)], (row - 0.38, 0.76), color=WORK[worker, call][1], linewidth=0)
        for end in part.groupby("step")["end"].max():
            ax.axvline(end, color="#555555", linestyle=":", linewidth=1)
        ax.set_yticks(range(len(devices)), [f"device {d}" for d in devices])
        ax.invert_yaxis()
        ax.set_title(f"{method}: {part['end'].max():.2f} s for {part['step'].nunique()} steps", loc="left")
        ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"seconds, clock = {frame['clock'].iloc[0]}")
    drawn = [key for key in WORK if ((frame["worker"] == key[0]) & (frame["call"] == key[1])).any()]
    figure.legend(handles=[Patch(color=WORK[k][1], label=WORK[k][0]) for k in drawn], loc="outside lower center", ncols=len(drawn))
    return figure


@_styled
def reward(frame: pd.DataFrame, x: str = "step") -> Figure:
    """Mean score of the trained batches, a panel per task; x is "step" or "seconds" of the run's clock."""
    tasks = sorted(frame["setup"].unique())
    rows = -(-len(tasks) // 2)
    figure = Figure(figsize=(10, 0.6 + 3.1 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).ravel()
    for ax, task in zip(axes, tasks, strict=False):
        part = frame[frame["setup"] == task]
        _measured(ax, part, x, "rollout/reward_mean", binned="mean")
        scale, clock = ("/".join(part[name].unique()) for name in ("scale", "clock"))
        ax.set_title(f"{_name(task)}: measured, {scale} scale\n{_seeds(part)}, clock = {clock}")
        ax.set_ylabel("mean score of a batch")
    for ax in axes[len(tasks) :]:
        ax.remove()
    return _finish(figure)


@_styled
def deferrals(frame: pd.DataFrame) -> Figure:
    """Share of trained requests by the number of updates that they were carried over (columns method, deferrals, share, delta_over_b)."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    ax, methods = figure.subplots(), list(frame["method"].unique())
    for i, method in enumerate(methods):
        part = frame[frame["method"] == method]
        bars = ax.bar(part["deferrals"] + (i - (len(methods) - 1) / 2) * 0.4, part["share"], 0.4, color=_line(ax, [], [], method).get_color())
        bars.set_label(f"{method}, Δ/B = {part['delta_over_b'].iloc[0]:.2f}")
        for bar, share in zip(bars, part["share"], strict=True):
            ax.annotate(f"{share:.1%}", (bar.get_x() + bar.get_width() / 2, share), ha="center", va="bottom", fontsize=9)
    ax.set(xlabel="updates that a request was carried over", ylabel="share of trained requests", ylim=(0, 1.1))
    ax.set_title("measured; published: most never, nearly all others once")
    ax.legend()
    return figure


def deferral_shares(results: dict[str, list]) -> pd.DataFrame:
    """Trained requests by deferrals, over all runs and steps of each method, with the mean Δ / B."""
    rows = []
    for method, several in results.items():
        metrics = pd.concat([run.metrics[run.metrics["step"] > 0] for run in several])
        counts = metrics["overlap/deferrals"].tolist()
        total = np.sum([np.pad(c, (0, max(map(len, counts)) - len(c))) for c in counts], 0)
        rows += [(method, d, n / total.sum(), metrics["overlap/delta_over_b"].mean()) for d, n in enumerate(total.tolist())]
    return pd.DataFrame(rows, columns=["method", "deferrals", "share", "delta_over_b"])


def published_speedups() -> pd.DataFrame:
    """Minutes to the target reward and speed-ups of the ablation, one row per task and method."""
    table = published.load("oppo")["tables"]["ablation_minutes"]
    rows = [(task, method, minutes, row["trl"] / minutes) for task, row in table.items() if task != "source" for method, minutes in row.items()]
    return pd.DataFrame(rows, columns=["task", "method", "minutes", "speedup"])


PLOTS: dict[str, Callable[[pd.DataFrame], Figure]] = {"oppo_timeline": timeline, "oppo_reward_steps": reward, "oppo_deferrals": deferrals}
