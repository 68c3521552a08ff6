"""Frames of OPPO's runs and benches: what is saved as CSV beside a figure or table, and drawn by `oppo_figures`.

Results are {method: [RunResult per seed]} of one task, as in `tables`.
"""

import numpy as np
import pandas as pd

from nowait import published
from nowait.analysis.statistics import decided, standard_error
from nowait.analysis.tables import each, head_of, quality_rows, rounded, setup
from nowait.bench import added
from nowait.schedules.overcommit import OvercommitController

WORK = {  # call of a worker: its name and colour in charts, colour-blind safe
    ("sampler", "decode"): ("generate", "#0072B2"),
    ("sampler", "load"): ("load weights", "#56B4E9"),
    ("reward", "prefill"): ("reward model reads", "#D55E00"),
    ("reference", "prefill"): ("reference reads", "#E69F00"),
    ("learner", "logp"): ("old log-probs", "#CC79A7"),
    ("learner", "update"): ("update", "#009E73"),
}
STAGES = {"generate": "time/generate", "reward": "time/reward", "reference": "time/ref", "forward": "time/prox_forward", "update": "time/train"}
SHARES = {"generation": ["generate"], "scoring": ["reward", "reference"], "training": ["forward", "update"]}
TARGET_SHARE, SMOOTHED = 0.9, 10  # of the rise of the sequential run's reward, averaged over so many steps
TRL = {"trl": "sequential", "oppo": "both", "intra": "intra", "inter": "inter", "both": "both"}  # published name: method


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
    means = {"seconds_per_step": "time/step", **STAGES, "utilisation": "perf/busy_frac", "occupancy": "perf/occupancy"}
    means |= {"tail": "overlap/tail_frac", "delta_over_b": "overlap/delta_over_b"}
    rows = []
    for head, run in each(results):
        steps, target = _steps(run), targets[head["seed"]]
        found = {name: steps[column].mean() if column in steps else 0.0 for name, column in means.items()}
        found |= {"last_reward": steps["rollout/reward_mean"].tail(SMOOTHED).mean(), "target": target}
        reached = steps[_smooth(steps) >= target]  # the first of them is when; no step, NaN
        rows.append({**head, **found, "target_step": reached["step"].min(), "target_seconds": reached["time/elapsed"].min()})
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
    groups = {key: group.set_index("seed") for key, group in frame.groupby(["setup", "method"], sort=False)}
    for (task, method), own in groups.items():
        base = groups[task, "sequential"]
        minutes, busy = (_by_method(facts[name], task) for name in ("ablation_minutes", "gpu_utilisation_pct"))
        row = {"setup": task, "method": method, "scale": own["scale"].iloc[0], "clock": own["clock"].iloc[0], "seeds": len(own)}
        row |= {"published_minutes": minutes.get(method, np.nan), "published_utilisation": busy.get(method)}
        row["published_speedup"] = minutes.get("sequential", np.nan) / row["published_minutes"]
        row["published_main_speedup"] = facts["minutes_to_target"].get(task, {}).get("speedup") if method == "both" else np.nan
        ratios = {"speedup": base["seconds_per_step"] / own["seconds_per_step"], "target_speedup": base["target_seconds"] / own["target_seconds"]}
        ratios |= {f"{name}_gain": own[name] / base[name] for name in ("utilisation", "occupancy")}
        row |= {name: own[name].mean() for name in ("seconds_per_step", "utilisation", "occupancy", "target_seconds", "delta_over_b")}
        row |= {f"{name}_se": own[name].sem() for name in ("utilisation", "occupancy")}
        for name, ratio in ratios.items():  # none where a seed has none: the mean of those that reached the target would flatter
            row |= {name: ratio.mean(skipna=False), f"{name}_se": ratio.sem(skipna=False)}
        rows.append(row)
    return rounded(pd.DataFrame(rows))


def _by_method(table: dict, task: str) -> dict[str, float]:
    return {TRL[name]: value for name, value in table.get(task, {}).items() if name in TRL}


def bench_rows(bench: dict) -> pd.DataFrame:
    """From the JSON of the overlap bench, a row per variant: seconds per step and speed-up over sequential, median and s.e. over blocks, Δ / B; for
    OPPO the overlap efficiency, work of the busiest device by itself over elapsed time."""
    base, rows = np.array(next(row["blocks"] for row in bench["rows"] if row["variant"] == "sequential")), []
    for row in bench["rows"]:
        head = {"setup": setup(bench["config"]), "method": row["variant"], **{name: bench[name] for name in ("scale", "clock", "blocks")}}
        shown = {name: row[name] for name in ("seconds_per_step", "speedup", "utilisation", "occupancy")}
        shown |= {"speedup_se": standard_error(base / np.array(row["blocks"])), "delta_over_b": row["overcommit_share"]}
        rows.append(head | shown | {"overlap_efficiency": bench["overlap_efficiency"] if row["variant"] == "both" else np.nan})
    return rounded(pd.DataFrame(rows))


def on_bench(reached: pd.DataFrame, timed: pd.DataFrame) -> pd.DataFrame:
    """`speedups` with what the bench says of the seconds per step in the place of the runs' own, and with the bench's further variants."""
    kept = reached[["setup", "method", "published_minutes", "published_speedup", "target_speedup", "target_speedup_se", "seeds"]]
    return timed.merge(kept, on=["setup", "method"], how="left").assign(seeds=reached["seeds"].iloc[0])


def stage_shares(frame: pd.DataFrame) -> pd.DataFrame:
    """From `per_run`: the share of a sequential step that each kind of work takes, mean and standard error over seeds, and whether it lies where
    targets.yaml asks."""
    rows, asked = [], next(rule for rule in published.load("targets")["oppo"]["own"] if rule["judge"] == "stage_shares")["shares"]
    for task, own in frame[frame["method"] == "sequential"].groupby("setup", sort=False):
        head = {"setup": task, "method": "sequential", "scale": own["scale"].iloc[0], "clock": own["clock"].iloc[0], "seeds": len(own)}
        for stage, names in SHARES.items():
            share, (low, high) = own[names].sum(axis=1) / own["seconds_per_step"], asked[stage]
            slack, se = min(share.mean() - low, high - share.mean()), standard_error(share)
            found = {"stage": stage, "asked": f"{low:.0%} to {high:.0%}", "measured": share.mean(), "se": se, "verdict": decided(slack, se)}
            rows.append(head | found | {"slack": slack})
    return rounded(pd.DataFrame(rows))


def lengths(results: dict[str, list], share: float = 0.25) -> pd.DataFrame:
    """Response lengths, in tokens, of the batches in the first and the last `share` of the steps."""
    rows = []
    for head, run in each(results):
        steps = _steps(run)
        ends = {"first": steps.head(int(len(steps) * share)), "last": steps.tail(int(len(steps) * share))}
        rows += [{**head, "part": part, "tokens": n} for part, some in ends.items() for row in some["rollout/lengths"] for n in row]
    return pd.DataFrame(rows, columns=["setup", "method", "seed", "scale", "clock", "part", "tokens"])


def deferral_shares(results: dict[str, list]) -> pd.DataFrame:
    """Share of the trained requests by number of deferrals, over all runs and steps of each method, with the mean Δ / B."""
    rows = []
    for method, several in results.items():
        head = head_of(method, several[0]) | {"seeds": len(several)}
        counted = counted_deferrals(pd.concat([_steps(run) for run in several]))
        rows.append(counted.assign(**head)[[*head, *counted]])
    return pd.concat(rows, ignore_index=True).drop(columns="seed")


def counted_deferrals(metrics: pd.DataFrame) -> pd.DataFrame:
    """Of the metrics of some training steps: share of the trained requests by number of deferrals, and the mean Δ / B."""
    total = np.array(added(metrics["overlap/deferrals"]))
    frame = pd.DataFrame({"deferrals": range(len(total)), "share": total / total.sum(), "requests": total.sum()})
    return rounded(frame.assign(delta_over_b=metrics["overlap/delta_over_b"].mean()))


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
