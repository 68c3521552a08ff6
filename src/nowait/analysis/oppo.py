"""Figures and tables of OPPO: published values where there are any, measured ones beside them, never in one axes.

Results are {method: [RunResult per seed]} of one task, as in `tables`; the frames made here are what is saved as CSV beside a picture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nowait import published
from nowait.analysis.drawing import curve, finish, measured_curves, ordered, seeds, styled
from nowait.analysis.statistics import standard_error
from nowait.analysis.tables import markdown, quality_rows, rounded, setup
from nowait.schedules.overcommit import OvercommitController

WORK = {  # call of a worker: its name and colour in charts, colour-blind safe
    ("sampler", "decode"): ("generate", "#0072B2"),
    ("sampler", "load"): ("load weights", "#56B4E9"),
    ("reward", "prefill"): ("reward model reads", "#D55E00"),
    ("reference", "prefill"): ("reference reads", "#E69F00"),
    ("learner", "logp"): ("old log-probs", "#CC79A7"),
    ("learner", "update"): ("update", "#009E73"),
}
STAGES = {"generate": "time/generate", "reward": "time/reward", "reference": "time/ref", "forward": "time/prox_forward", "train": "time/train"}
TARGET_SHARE, SMOOTHED = 0.9, 10  # of the rise of the sequential run's reward, averaged over so many steps
PUBLISHED = {"sequential": "trl", "intra": "intra", "inter": "inter", "both": "both"}  # names in the published tables


def calls(results: dict[str, list], steps: range) -> pd.DataFrame:
    """What the devices did in some training steps (from 0) of the first run of each method; seconds since the first of them began."""
    rows = []
    for method, several in results.items():
        config = several[0].manifest["config"]
        spans = [s for s in several[0].timeline.spans if s.step in steps and (s.worker, s.method) in WORK and s.device != "driver"]
        start = min(s.start for s in spans)
        delta = config["overlap"]["delta"] if config["overlap"]["inter"] else 0
        head = (method, config["scale"], config["runtime"]["clock"], config["schedule"]["batch_size"], delta)
        rows += [(*head, s.device, s.worker, s.method, s.start - start, s.end - start, s.step) for s in spans]
    columns = ["method", "scale", "clock", "batch_size", "delta", "device", "worker", "call", "start", "end", "step"]
    return rounded(pd.DataFrame(rows, columns=columns))


def per_run(results: dict[str, list]) -> pd.DataFrame:
    """One row per run: seconds per training step and of its stages (means over the steps), busy share of the devices, occupancy of the slots,
    tail, Δ / B, and when the reward reached the target.

    The target is `TARGET_SHARE` of the way from the first to the best mean reward of the sequential run of the same seed; both are means
    over `SMOOTHED` steps (half of a shorter run). NaN where it was not reached.
    """
    targets = {run.manifest["seed"]: _target(run) for run in results["sequential"]}
    rows = []
    for method, several in results.items():
        for run in several:
            config, seed, steps = run.manifest["config"], run.manifest["seed"], _steps(run)
            head = {"setup": setup(config["name"]), "method": method, "seed": seed, "scale": config["scale"], "clock": config["runtime"]["clock"]}
            means = {"seconds_per_step": "time/step", **STAGES, "utilisation": "perf/busy_frac", "occupancy": "perf/occupancy"}
            means |= {"tail": "overlap/tail_frac", "delta_over_b": "overlap/delta_over_b", "last_reward": "rollout/reward_mean"}
            found = {name: steps[column].mean() if column in steps else 0.0 for name, column in means.items()}
            found["last_reward"] = steps["rollout/reward_mean"].tail(SMOOTHED).mean()
            reached = steps[_smooth(steps) >= targets[seed]].head(1)
            when = {name: reached[column].iloc[0] if len(reached) else np.nan for name, column in (("step", "step"), ("seconds", "time/elapsed"))}
            rows.append({**head, **found, "target": targets[seed], **{f"target_{name}": value for name, value in when.items()}})
    return rounded(pd.DataFrame(rows))


def _steps(run) -> pd.DataFrame:
    return run.metrics[run.metrics["step"] > 0]


def _smooth(steps: pd.DataFrame) -> pd.Series:
    return steps["rollout/reward_mean"].rolling(min(SMOOTHED, max(1, len(steps) // 2))).mean()


def _target(run) -> float:
    curve = _smooth(_steps(run)).dropna()
    return curve.iloc[0] + TARGET_SHARE * (curve.max() - curve.iloc[0])


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """From `per_run`: each method against the sequential run of the same seed, means and standard errors over seeds, published values beside."""
    facts, rows = published.load("oppo")["tables"], []
    for (task, method), group in frame.groupby(["setup", "method"], sort=False):
        base = frame[(frame["setup"] == task) & (frame["method"] == "sequential")].set_index("seed")
        own = group.set_index("seed")
        minutes, gains = facts["ablation_minutes"].get(task, {}), facts["gpu_utilisation_pct"].get(task, {})
        row = {"setup": task, "method": method, "scale": group["scale"].iloc[0], "clock": group["clock"].iloc[0], "seeds": len(own)}
        row |= {
            "published_minutes": minutes.get(PUBLISHED.get(method)),
            "published_utilisation": gains.get({"sequential": "trl", "both": "oppo"}.get(method)),
        }
        row |= {"published_speedup": minutes["trl"] / minutes[PUBLISHED[method]] if method in PUBLISHED and minutes else np.nan}
        if method == "both":
            row["published_speedup"] = facts["minutes_to_target"].get(task, {}).get("speedup", np.nan)
        ratios = {"speedup": base["seconds_per_step"] / own["seconds_per_step"], "target_speedup": base["target_seconds"] / own["target_seconds"]}
        ratios |= {f"{name}_gain": own[name] / base[name] for name in ("utilisation", "occupancy")}
        row |= {name: own[name].mean() for name in ("seconds_per_step", "utilisation", "occupancy", "target_seconds", "delta_over_b")}
        for name, ratio in ratios.items():  # none where a seed has none: the mean of those that reached the target would flatter
            row |= {name: ratio.mean(skipna=False), f"{name}_se": standard_error(ratio) if ratio.notna().all() else np.nan}
        rows.append(row)
    return rounded(pd.DataFrame(rows))


def bench_rows(bench: dict) -> pd.DataFrame:
    """From the JSON of the overlap bench, a row per variant: seconds per step and speed-up over sequential, median and s.e. over blocks, Δ / B."""
    base, rows = np.array(next(row["blocks"] for row in bench["rows"] if row["variant"] == "sequential")), []
    for row in bench["rows"]:
        shown = {name: row[name] for name in ("seconds_per_step", "speedup", "utilisation", "occupancy")}
        head = {
            "setup": setup(bench["config"]),
            "method": row["variant"],
            "scale": bench["scale"],
            "clock": bench["clock"],
            "blocks": bench["blocks"],
        }
        rows.append(head | shown | {"speedup_se": standard_error(base / np.array(row["blocks"])), "delta_over_b": row["overcommit_share"]})
    return rounded(pd.DataFrame(rows))


def on_bench(reached: pd.DataFrame, timed: pd.DataFrame) -> pd.DataFrame:
    """`speedups` with what the bench says of the seconds per step in the place of the runs' own, and with the bench's further variants."""
    kept = reached[["setup", "method", "published_minutes", "published_speedup", "target_speedup", "target_speedup_se", "seeds"]]
    return timed.merge(kept, on=["setup", "method"], how="left").assign(seeds=reached["seeds"].iloc[0])


def lengths(results: dict[str, list], share: float = 0.25) -> pd.DataFrame:
    """Response lengths, in tokens, of the batches in the first and the last `share` of the steps."""
    rows = []
    for method, several in results.items():
        for run in several:
            steps = _steps(run)
            ends = {"first": steps.head(int(len(steps) * share)), "last": steps.tail(int(len(steps) * share))}
            config = run.manifest["config"]
            head = (setup(config["name"]), method, run.manifest["seed"], config["scale"], config["runtime"]["clock"])
            rows += [(*head, part, n) for part, some in ends.items() for row in some["rollout/lengths"] for n in row]
    return pd.DataFrame(rows, columns=["setup", "method", "seed", "scale", "clock", "part", "tokens"])


def deferral_shares(results: dict[str, list]) -> pd.DataFrame:
    """Share of the trained requests by number of deferrals, over all runs and steps of each method, with the mean Δ / B."""
    rows = []
    for method, several in results.items():
        metrics = pd.concat([_steps(run) for run in several])
        counts = metrics["overlap/deferrals"].tolist()
        total = np.sum([np.pad(c, (0, max(map(len, counts)) - len(c))) for c in counts], 0)
        config = several[0].manifest["config"]
        head = (
            setup(config["name"]),
            method,
            config["scale"],
            config["runtime"]["clock"],
            len(several),
            int(total.sum()),
            metrics["overlap/delta_over_b"].mean(),
        )
        rows += [(*head, d, n / total.sum()) for d, n in enumerate(total.tolist())]
    return rounded(pd.DataFrame(rows, columns=["setup", "method", "scale", "clock", "seeds", "requests", "delta_over_b", "deferrals", "share"]))


def plateaus(courses: int = 20, window: int = 20, rise: int = 100, plateau: int = 400, slope: float = 0.1, maximum: int = 16) -> pd.DataFrame:
    """What each rule makes of rewards with unit noise that rise by `slope` per step and then stay: mean Δ of both parts over many courses, and the
    share of the plateau's second half with Δ = 0."""
    rng, rows = np.random.default_rng(0), {}
    rewards = slope * np.minimum(np.arange(rise + plateau), rise) + rng.normal(size=(courses, rise + plateau))
    for rule in ("slope", "algorithm1", "trend"):
        controllers = [OvercommitController(4, 0, maximum, window, rule) for _ in range(courses)]
        delta = np.array([[controller.update(reward) for reward in course] for controller, course in zip(controllers, rewards.tolist(), strict=True)])
        late = delta[:, rise + plateau // 2 :]
        rows[rule] = {"mean Δ, rising": delta[:, :rise].mean(), "mean Δ, plateau": late.mean(), "share of Δ = 0, plateau": (late == 0).mean()}
    return pd.DataFrame(rows).T


def quality(results: dict[str, list]) -> pd.DataFrame:
    """Of every method the score in training (mean of the last steps), exact match held out, and its difference from the sequential run."""
    rows = quality_rows(results, ["eval"], "sequential")
    for row, several in zip(rows, results.values(), strict=True):
        scores = [_steps(run)["rollout/reward_mean"].tail(SMOOTHED).mean() for run in several]
        row |= {"before": several[0].metrics["eval/reward"].iloc[0], "score": np.mean(scores), "score_se": standard_error(scores)}
    return rounded(pd.DataFrame(rows))


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
def reward(frame: pd.DataFrame, x: str = "step") -> Figure:
    """Mean reward of the trained batches, a panel per task; x is "step" or "seconds". Columns as of `tables.tidy`."""
    figure, axes = _panels(frame)
    for task, ax in axes.items():
        measured_curves(ax, frame[frame["setup"] == task], x, "rollout/reward_mean", binned="mean")
        ax.set_ylabel("mean reward of a batch")
    return finish(figure)


@styled
def staleness(frame: pd.DataFrame) -> Figure:
    """Held-out exact match of training on tokens of different age; columns as of `tables.tidy`."""
    figure, axes = _panels(frame)
    for task, ax in axes.items():
        measured_curves(ax, frame[frame["setup"] == task], "step", "eval/reward")
        ax.set_ylabel("held-out exact match")
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
    """Busy share of the devices and occupancy of the sampler's slots, sequential against both; columns as of `speedups`."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True)
    chosen = frame[frame["method"].isin(["sequential", "both"])]
    _bars(left, chosen.assign(percent=chosen["published_utilisation"]), "percent")
    _bars(middle, chosen.assign(percent=100 * chosen["utilisation"]), "percent")
    _bars(right, chosen.assign(percent=100 * chosen["occupancy"]), "percent")
    left.set(title="published: GPU utilisation", ylabel="%", ylim=(0, 115))
    middle.set_title(f"measured: devices busy, mean of both\n{_note(frame)}")
    right.set_title(f"measured: slots of the sampler in use\n{_note(frame)}")
    return _method_legend(figure, chosen)


@styled
def ablation(frame: pd.DataFrame) -> Figure:
    """Speed-up over the sequential schedule: published by time to a target, measured per step and by time to a target (columns of `on_bench`)."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    for ax, name, title in zip(
        figure.subplots(1, 3),
        ("published_speedup", "speedup", "target_speedup"),
        (
            "published: time to a target reward",
            f"measured: bench, {frame['scale'].iloc[0]} scale\nn = {frame['blocks'].iloc[0]} blocks, clock = {frame['clock'].iloc[0]}",
            f"measured: time to a target reward\n{_note(frame)}",
        ),
        strict=True,
    ):
        _bars(ax, frame, name, "{:.2f}x", frame.get(f"{name}_se"))
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
        means = own.groupby("chunk")["seconds_per_step"].mean()
        curve(right, means.index, means, method)
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
        bars = ax.bar(part["deferrals"] + (i - (len(methods) - 1) / 2) * width, 100 * part["share"], width, label=method)
        bars.set_label(f"{method}, mean Δ/B = {part['delta_over_b'].iloc[0]:.2f}")
        ax.bar_label(bars, [f"{100 * share:.3g}" for share in part["share"]], fontsize=8)
    ax.set(xlabel="updates that a request was carried over", ylabel="% of trained requests", ylim=(0, 112))
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
        ax.bar_label(bars, [form.format(value) for value in part[column]], fontsize=8)
    ax.set_xticks(range(len(tasks)), [_task(task).replace(" ", "\n") for task in tasks])
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
        "published_minutes": ("published: minutes to target", "{:.0f}"),
        "published_speedup": ("published: speed-up", "{:.2f}x"),
        "seconds_per_step": ("measured: s per step", "{:.3f}"),
        "speedup": ("speed-up per step", "{:.2f}x"),
        "target_seconds": ("s to target", "{:.1f}"),
        "target_speedup": ("speed-up to target", "{:.2f}x"),
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
    "oppo_staleness": staleness,
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
