"""OPPO's frames, figures and verdicts from runs made up here, with numbers worked out by hand."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import matplotlib
import numpy as np
import pandas as pd
import pytest

from nowait import config, published
from nowait.analysis import figures, oppo, oppo_figures, tables
from nowait.analysis.report import Measured, judge, report, shapes
from nowait.runtime.timeline import Span, Timeline

METHODS = ("sequential", "intra", "inter", "both")
SECONDS = {"sequential": 1.0, "intra": 0.8, "inter": 0.6, "both": 0.5}  # per step; the target is reached in the same step
BUSY = {"sequential": 0.4, "intra": 0.5, "inter": 0.5, "both": 0.64}
TASKS = list(published.load("oppo")["tasks"])
TASK = "stackexchange_7b"
OWN = published.load("targets")["oppo"]["own"]
TARGETS = [*published.load("oppo")["shape_targets"], *(f"ours: {rule['target']}" for rule in OWN)]
RULES = [*published.load("targets")["oppo"]["shapes"], *OWN]
NAN = float("nan")


@functools.cache
def settings(task: str, method: str) -> dict:
    return json.loads(config.load(f"oppo/{task}", method=method if method in METHODS else "both").model_dump_json())


def made_up_run(method: str, seed: int = 1, steps: int = 40, task: str = TASK, **columns) -> SimpleNamespace:
    """Columns by their names with _ for /; of seeds 1, 2, 3 all but the sequential runs take 2 % less, the same, and 2 % more time."""
    step = np.arange(1, steps + 1)
    seconds = SECONDS.get(method, 0.5) * (1 + 0.02 * (seed - 2) * (method != "sequential"))
    overlapped = method not in ("sequential", "intra")
    rng = np.random.default_rng(seed)
    metrics = {"step": step, "time/elapsed": step * seconds, "time/step": seconds, "time/generate": 0.65, "time/reward": 0.15, "time/ref": 0.05}
    metrics |= {"time/prox_forward": 0.02, "time/train": 0.13, "train/explained_variance": 0.5, "train/kl": 0.1 * step}
    metrics |= {"perf/busy_frac": BUSY.get(method, 0.5), "perf/occupancy": 0.5 + 0.25 * overlapped}
    metrics |= {"overlap/tail_frac": 0.1, "overlap/delta": 4 * overlapped, "overlap/delta_over_b": 0.25 * overlapped}
    metrics["overlap/deferrals"] = [[16] if not overlapped else [13, 3] if t % 10 else [12, 3, 1] for t in step]
    metrics["rollout/reward_mean"] = 1 - np.exp(-step / 10) + rng.normal(0, 0.01, steps)
    metrics["rollout/lengths"] = rng.geometric(0.05, (steps, 16)).tolist()
    metrics |= {name.replace("_", "/", 1): value for name, value in columns.items()}
    at = np.unique(np.linspace(0, steps, 5, dtype=int))
    evaluation = pd.DataFrame({"step": at, "eval/reward": 0.5 + 0.2 * at / steps})
    row = np.arange(8)
    rewards = [pd.DataFrame({"step": t, "set": "eval", "row": row, "reward": 0.5 + 0.2 * t / steps + rng.normal(0, 0.01, 8)}) for t in (0, steps)]
    return SimpleNamespace(
        manifest={"seed": seed, "code": "c0de", "config": settings(task, method)},
        metrics=pd.DataFrame(metrics).merge(evaluation, on="step", how="outer"),
        evaluations=pd.concat(rewards, ignore_index=True),
        timeline=spans(overlapped),
    )


def spans(overlapped: bool) -> Timeline:
    """Five steps of a second: half of it generation, then or meanwhile the reward model, then the update."""
    calls = [("a", "sampler", "decode", 0.0, 0.5), ("b", "reward", "prefill", 0.1 if overlapped else 0.5, 0.7), ("a", "learner", "update", 0.7, 1.0)]
    calls += [("driver", "reward", "prefill", 0.7, 0.7), ("a", "learner", "publish", 1.0, 1.0)]
    return Timeline([Span(device, worker, call, step + start, step + end, step) for step in range(5) for device, worker, call, start, end in calls])


def made_up_results(task: str = TASK, seeds=(1, 2, 3), methods=METHODS) -> dict[str, list]:
    return {method: [made_up_run(method, seed, task=task) for seed in seeds] for method in methods}


def made_up_bench() -> dict:
    """Two blocks, in the second of which all but `sequential` take twice as long."""
    shared = {"overcommit_share": 0.25, "utilisation": 0.5, "occupancy": 0.6}
    rows = [{"variant": m, "seconds_per_step": s, "speedup": 1 / s, "blocks": [s, 2 * s], **shared} for m, s in SECONDS.items()]
    rows[0]["blocks"] = [1.0, 1.0]
    return {"config": f"oppo/{TASK}", "scale": "cpu", "clock": "measured", "blocks": 2, "overlap_efficiency": 0.91, "rows": rows}


def chunk_sizes(seconds: list[float], spread: float = 0.01) -> pd.DataFrame:
    """Seconds per step at 1, 8 and 64 tokens of three seeds, which differ by a factor at 1 token."""
    rows = [(chunk, seed, s * (1 + spread * (seed - 2) * (chunk == 1))) for chunk, s in zip((1, 8, 64), seconds, strict=True) for seed in (1, 2, 3)]
    frame = pd.DataFrame(rows, columns=["chunk", "seed", "seconds_per_step"])
    return tables.rounded(frame.assign(setup=TASK, method="both", scale="cpu", clock="measured"))


def made_up_frames(results: list[dict[str, list]]) -> dict[str, pd.DataFrame]:
    every = pd.concat([oppo.per_run(result) for result in results], ignore_index=True)
    reached = oppo.speedups(every).assign(simulated_speedup=1.3, simulated_utilisation=0.9)
    learned = ["rollout/reward_mean", "train/explained_variance", "train/kl"]
    rewards = pd.concat([tables.tidy(result, learned) for result in results], ignore_index=True)
    ablation = oppo.on_bench(reached[reached["setup"] == TASK], oppo.bench_rows(made_up_bench())).assign(simulated_speedup=1.3)
    first, (rules, stale) = results[0], (made_up_results(methods=names) for names in (("fixed 4", "slope"), ("sync", "staleness 5")))
    return {
        "oppo_timeline": oppo.calls(first, range(1, 3)),
        "oppo_lengths": oppo.lengths({"sequential": first["sequential"]}),
        "oppo_staleness": tables.tidy(stale, ["eval/reward"]),
        **dict.fromkeys(("oppo_time_to_reward", "oppo_reward_steps", "oppo_grpo"), rewards),
        **dict.fromkeys(("oppo_speedups", "oppo_utilisation"), reached),
        **dict.fromkeys(("oppo_ablation", "oppo_ablation_table"), ablation),
        "oppo_stages": oppo.stage_shares(every).assign(simulated=0.6),
        "oppo_overcommitment": tables.tidy(rules, ["rollout/reward_mean", "overlap/delta"]),
        "oppo_chunk_size": chunk_sizes([0.9, 0.5, 0.7]),
        "oppo_deferrals": oppo.deferral_shares({"both": first["both"]}),
        "oppo_quality": oppo.quality(first),
    }


@pytest.fixture(scope="module")
def frames() -> dict[str, pd.DataFrame]:
    return made_up_frames([made_up_results(task) for task in TASKS])


@pytest.fixture(scope="module")
def folder(frames, tmp_path_factory):
    """One task, as CSV, picture or table, and provenance."""
    path, record = tmp_path_factory.mktemp("figures"), tables.provenance([made_up_results()])
    for name, frame in frames.items():
        own = frame[frame["setup"] == TASK] if "setup" in frame else frame
        figures.save(figures.draw(name, own), name, own, record, path)
    return path


def test_a_run_is_summed_up_by_the_means_over_its_steps_and_by_when_it_reached_the_target_of_its_seed():
    # mean rewards of ten steps are t - 4.5, from 5.5 at step 10 to 20.5 at step 25: the target is 5.5 + 0.9 * 15 = 19, reached at 19.5
    step = np.arange(1, 26)
    stages = {"time_generate": 3.0, "time_reward": 1.0, "time_ref": 0.5, "time_prox_forward": 0.25, "time_train": 2.0}
    means = {"time_step": 7.0, **stages, "perf_busy_frac": 0.5, "perf_occupancy": 0.25, "overlap_tail_frac": 0.75, "overlap_delta_over_b": 0.125}
    grown = {name: value * step / 13 for name, value in means.items()}  # their mean over steps 1 to 25 is the value
    results = {
        "sequential": [made_up_run("sequential", seed, 25, rollout_reward_mean=1.0 * seed * step, **grown) for seed in (1, 2)],
        "both": [made_up_run("both", seed, 25, rollout_reward_mean=seed * step + 2.0) for seed in (1, 2)],
        "inter": [made_up_run("inter", 1, 25, rollout_reward_mean=step - 6.0)],
    }
    del results["inter"][0].metrics["time/ref"]  # without a reference model there is no such column
    frame = oppo.per_run(results).set_index(["method", "seed"])
    names = ["seconds_per_step", *oppo.STAGES, "utilisation", "occupancy", "tail", "delta_over_b"]
    assert frame.loc[("sequential", 1), names].tolist() == pytest.approx(list(means.values()), rel=1e-5)
    assert frame.loc[("inter", 1), "reference"] == 0 and (frame["setup"] == TASK).all() and (frame["clock"] == "measured").all()
    assert frame["target"].tolist() == [19, 38, 19, 38, 19]  # twice the rewards, twice the target
    assert frame["last_reward"].tolist() == [20.5, 41, 22.5, 43, 14.5]
    assert frame["target_step"].tolist()[:4] == [24, 24, 22, 23]  # t - 2.5 >= 19; 2 t - 7 >= 38
    assert frame["target_seconds"].tolist()[:4] == pytest.approx([24, 24, 22 * 0.49, 23 * 0.5])
    assert frame.loc[("inter", 1), ["target_step", "target_seconds"]].isna().all()  # at most 14.5


def runs_frame(**seconds: list[float]) -> pd.DataFrame:
    """As of `per_run`: seconds per step by method and seed; occupancy is half of them, the target takes ten steps."""
    rows = [(method, seed, s) for method, several in seconds.items() for seed, s in enumerate(several)]
    frame = pd.DataFrame(rows, columns=["method", "seed", "seconds_per_step"]).assign(setup=TASK, scale="cpu", clock="measured", delta_over_b=0.25)
    busy = frame["method"].map({"sequential": 0.25}).fillna(0.5)
    return frame.assign(utilisation=busy, occupancy=frame["seconds_per_step"] / 2, target_seconds=10 * frame["seconds_per_step"])


def test_speedups_are_ratios_of_a_seed_then_means_and_errors_over_seeds():
    rows = oppo.speedups(runs_frame(sequential=[1.0, 1.2], both=[0.5, 0.4])).set_index("method")
    both = rows.loc["both"]  # 1/0.5 and 1.2/0.4: mean 2.5 (of means: 2.44), sd sqrt(1/2), over sqrt(2) seeds
    assert both[["speedup", "speedup_se", "target_speedup", "target_speedup_se"]].tolist() == pytest.approx([2.5, 0.5, 2.5, 0.5])
    assert both[["utilisation_gain", "utilisation_gain_se"]].tolist() == [2, 0]
    assert both["occupancy_gain"] == pytest.approx((1 / 2 + 1 / 3) / 2, rel=1e-5)
    assert both[["seconds_per_step", "target_seconds", "utilisation", "seeds"]].tolist() == pytest.approx([0.45, 4.5, 0.5, 2])
    assert rows.loc["sequential", ["speedup", "speedup_se", "target_speedup"]].tolist() == [1, 0, 1]
    alone = oppo.speedups(runs_frame(sequential=[1.0], both=[0.5])).set_index("method").loc["both"]
    assert alone["speedup"] == 2 and alone[["speedup_se", "target_speedup_se"]].isna().all()


def test_a_target_that_not_every_seed_reached_has_no_speedup():
    frame = runs_frame(sequential=[1.0, 1.2], intra=[0.8, 1.0], inter=[0.6, 0.7], both=[0.5, 0.4])
    frame.loc[7, "target_seconds"] = NAN
    rows = oppo.speedups(frame)
    both = rows.set_index("method").loc["both"]
    assert both[["target_speedup", "target_speedup_se"]].isna().all() and both["speedup"] == 2.5
    assert verdict("time_to_target", {"oppo_speedups": rows}) == "fail"  # not reached is no missing data


@pytest.mark.parametrize(
    ("task", "minutes", "utilisation", "speedups", "main"),
    [
        (TASK, [4200, 3500, 2700, 2300], [50.6, NAN, NAN, 71], [1, 1.2, 1.55556, 1.82609], 1.9),  # 4200 over the others; the main table has 4300
        ("stackexchange_3b", [13000, 10000, 6300, 5200], [38.7, NAN, NAN, 73.6], [1, 1.3, 2.06349, 2.5], 2.5),
        ("opencoder_3b", [NAN] * 4, [35.7, NAN, NAN, 74.1], [NAN] * 4, 2.4),
        ("two_nodes", [NAN] * 4, [NAN] * 4, [NAN] * 4, NAN),
    ],
)
def test_published_values_of_the_task_stand_beside_and_are_missing_where_there_are_none(task, minutes, utilisation, speedups, main):
    frame = runs_frame(**{method: [s] for method, s in SECONDS.items()}, fixed=[1.0]).assign(setup=task)
    rows = (
        oppo.speedups(frame)
        .set_index("method")[["published_minutes", "published_utilisation", "published_speedup", "published_main_speedup"]]
        .astype(float)
    )
    for column, expected in zip(rows.columns, (minutes, utilisation, speedups, [NAN, NAN, NAN, main]), strict=True):
        np.testing.assert_allclose(rows[column], [*expected, NAN], rtol=1e-5, err_msg=column)


def test_the_bench_replaces_the_seconds_and_keeps_what_runs_alone_know():
    rows = oppo.on_bench(oppo.speedups(runs_frame(sequential=[1.0, 1.2], both=[0.5, 0.4])), oppo.bench_rows(made_up_bench())).set_index("method")
    assert rows.loc["both", ["seconds_per_step", "speedup", "target_speedup", "blocks", "seeds"]].tolist() == pytest.approx([0.5, 2, 2.5, 2, 2])
    assert rows.loc["both", "speedup_se"] == pytest.approx(0.5)  # 2 and 1: sd sqrt(1/2), over sqrt(2) blocks
    assert rows.loc["intra", "speedup"] == 1.25 and np.isnan(rows.loc["intra", "target_speedup"])
    assert rows["overlap_efficiency"].dropna().to_dict() == {"both": 0.91}
    text = figures.draw("oppo_ablation_table", rows.reset_index())
    assert "| overlap efficiency |" in text and "(asked: at least 0.9)" in text and "medians of 2 interleaved blocks" in text


@pytest.mark.parametrize(
    ("generate", "verdicts"),
    [([0.7, 0.7, 0.7], ["pass"] * 3), ([0.5, 0.5, 0.5], ["fail", "pass", "pass"]), ([0.5, 0.6, 0.8], ["not resolved", "pass", "pass"])],
)
def test_the_stages_of_a_sequential_step_have_shares_that_were_asked_for(generate, verdicts):
    sequential = [made_up_run("sequential", seed, time_generate=seconds) for seed, seconds in enumerate(generate)]
    frame = oppo.stage_shares(oppo.per_run({"sequential": sequential, "both": [made_up_run("both", seed) for seed in range(3)]}))
    assert frame["stage"].tolist() == ["generation", "scoring", "training"] and frame["verdict"].tolist() == verdicts
    assert frame["measured"].tolist() == pytest.approx([np.mean(generate), 0.2, 0.15]) and set(frame["seeds"]) == {3}
    assert verdict("stage_shares", {"oppo_stages": frame}) == verdicts[0]
    assert f"| {TASK} | scoring | 18% to 25% | 20.0% |" in figures.draw("oppo_stages", frame)


def test_lengths_are_those_of_the_first_and_last_quarter_of_the_steps():
    lengths = [[step, 10 * step] for step in range(1, 9)]
    frame = oppo.lengths({"both": [made_up_run("both", 4, 8, rollout_lengths=lengths)]})
    assert frame.groupby("part")["tokens"].apply(list).to_dict() == {"first": [1, 10, 2, 20], "last": [7, 70, 8, 80]}
    assert frame.drop(columns=["part", "tokens"]).drop_duplicates().to_numpy().tolist() == [[TASK, "both", 4, "cpu", "measured"]]


def test_deferrals_are_counted_over_all_runs_and_steps():
    runs = [made_up_run("both", 1, 2, overlap_deferrals=[[16], [10, 5, 1]]), made_up_run("both", 2, 2, overlap_deferrals=[[12, 4], [14, 2]])]
    runs[1].metrics["overlap/delta_over_b"] = 0.75
    frame = oppo.deferral_shares({"both": runs})
    assert frame["deferrals"].tolist() == [0, 1, 2] and frame["share"].tolist() == pytest.approx([52 / 64, 11 / 64, 1 / 64], rel=1e-5)
    assert frame[["requests", "seeds", "delta_over_b"]].drop_duplicates().to_numpy().tolist() == [[64, 2, 0.5]]


def test_quality_compares_with_the_sequential_run_of_the_same_seed():
    results = made_up_results(seeds=(1, 2), methods=("sequential", "both"))
    for run, twin, shift, level in zip(results["both"], results["sequential"], (0.01, 0.03), (1.0, 2.0), strict=True):
        run.evaluations["reward"] = twin.evaluations["reward"] + shift
        run.metrics["rollout/reward_mean"] = level + (run.metrics["step"] <= 30)  # the last ten steps are the score
    rows = oppo.quality(results).set_index("method")
    assert rows.loc["both", ["difference", "difference_se"]].tolist() == pytest.approx([0.02, 0.01], rel=1e-4)
    assert rows.loc["both", ["score", "score_se", "before", "prompts"]].tolist() == pytest.approx([1.5, 0.5, 0.5, 8])
    assert np.isnan(rows.loc["sequential", "difference"]) and rows.loc["sequential", "reward"] == pytest.approx(0.7, abs=0.01)


def test_calls_are_those_of_the_devices_in_the_chosen_steps_from_their_start():
    results = made_up_results(seeds=(1, 2), methods=("sequential", "both"))
    results["both"][1].timeline = Timeline()  # of several runs the first one is shown
    frame = oppo.calls(results, range(1, 3)).set_index("method")
    columns = ["device", "worker", "call", "start", "end", "step"]
    first = [["a", "sampler", "decode", 0, 0.5, 1], ["b", "reward", "prefill", 0.5, 0.7, 1], ["a", "learner", "update", 0.7, 1, 1]]
    assert frame.loc["sequential", columns].to_numpy().tolist() == first + [[*row[:3], row[3] + 1, row[4] + 1, 2] for row in first]
    assert frame.loc["both", "start"].tolist() == [0, 0.1, 0.7, 1, 1.1, 1.7]
    assert frame[["batch_size", "clock"]].drop_duplicates().to_numpy().tolist() == [[16, "measured"]]


def test_the_rules_climb_alike_and_only_trend_comes_to_rest_on_a_plateau():
    # a rise far above the noise: slope waits for 4 rewards, then adds 1: 4, 4, 4, 5 to 11; algorithm1 adds a quarter from 8 on; trend waits for 3
    frame = oppo.plateaus(courses=2, window=3, rise=10, plateau=4, slope=1000.0)
    assert frame["mean Δ, rising"].to_dict() == pytest.approx({"slope": 6.8, "algorithm1": 7.5, "trend": 7.6})
    late = oppo.plateaus(courses=4, plateau=200)
    assert late.loc["trend", "share of Δ = 0, plateau"] > 0.7 and late.loc["trend", "mean Δ, plateau"] < 1
    assert late.loc["slope", "share of Δ = 0, plateau"] < 0.2 and 4 < late.loc["slope", "mean Δ, plateau"] < 12


@pytest.mark.parametrize("name", oppo_figures.CONTENTS)
def test_redrawing_from_the_csv_alone_gives_the_same_bytes(folder, name):
    picture = folder / f"{name}{'.png' if name in AXES else '.md'}"
    before = picture.read_bytes()
    picture.unlink()
    with matplotlib.rc_context({"font.size": 30, "savefig.dpi": 40, "lines.linewidth": 9}):
        assert figures.redraw(folder / f"{name}.csv") == picture
    assert picture.read_bytes() == before


REWARDS = [("seconds of training (mean of 2 steps)", "mean reward of a batch")] * 4  # a panel per task
SPEEDUP, NOTE = ("", "speed-up over sequential"), "cpu scale\nn = 3, clock = measured"
AXES = {  # labels of the axes, whose units they name; what the titles of measured axes say
    "oppo_timeline": ([("", "")] * 3 + [("seconds, measured, cpu scale, clock = measured", "")], "B = 16, Δ = "),
    "oppo_lengths": ([("response tokens", "share of longer responses")], NOTE),
    "oppo_staleness": ([("training step", "held-out exact match")], NOTE),
    "oppo_time_to_reward": (REWARDS, NOTE),
    "oppo_reward_steps": ([("training step (mean of 2 steps)", REWARDS[0][1])] * 4, NOTE),
    "oppo_utilisation": ([("", "%")] * 4, NOTE),
    "oppo_ablation": ([SPEEDUP] * 4, "clock = measured"),
    "oppo_overcommitment": ([REWARDS[0], ("training step", "Δ, requests beyond the batch")], NOTE),
    "oppo_chunk_size": ([("tokens per decode round", "seconds per training step")] * 2, NOTE),
    "oppo_deferrals": ([("updates that a request was carried over", "% of trained requests")], NOTE),
    "oppo_grpo": (REWARDS, NOTE),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_name_their_units_and_measured_ones_scale_n_and_clock(frames, name):
    axes, (labels, note) = figures.draw(name, frames[name]).axes, AXES[name]
    assert [(ax.get_xlabel(), ax.get_ylabel()) for ax in axes] == labels
    titles = [ax.get_title() + ax.get_title("left") for ax in axes]
    assert all(note in title for title in titles if not title.startswith(("published", "simulated"))) and any(note in title for title in titles)


def heights(ax) -> list[float]:
    return [bar.get_height() for bar in ax.patches]


def test_published_simulated_and_measured_bars_are_in_axes_of_their_own(frames):
    only = {name: frame[frame["setup"] == TASK] for name, frame in frames.items() if name in ("oppo_utilisation", "oppo_ablation")}
    assert [h for ax in figures.draw("oppo_utilisation", only["oppo_utilisation"]).axes for h in heights(ax)] == pytest.approx(
        [50.6, 71, 90, 90, 40, 64, 50, 75]
    )
    left, simulated, middle, right = figures.draw("oppo_ablation", only["oppo_ablation"]).axes
    assert heights(left) == pytest.approx([1, 1.2, 1.55556, 1.82609]) and heights(middle) == pytest.approx([1, 1.25, 1 / 0.6, 2], rel=1e-5)
    assert heights(right) == pytest.approx([1, 1.25, 1 / 0.6, 2], rel=1e-3) and set(heights(simulated)) == {1.3}


def test_a_chart_of_calls_draws_each_where_and_when_it_ran(frames):
    axes = oppo_figures.timeline(frames["oppo_timeline"]).axes
    bars = [bar.get_bbox() for bar in axes[0].patches]
    found = sorted((round(bar.x0, 3), round(bar.x1, 3), round((bar.y0 + bar.y1) / 2, 3)) for bar in bars)
    assert found == [(0, 0.5, 0), (0.5, 0.7, 1), (0.7, 1, 0), (1, 1.5, 0), (1.5, 1.7, 1), (1.7, 2, 0)]  # device a is row 0
    assert axes[0].get_title("left") == "sequential: B = 16, Δ = 0, 2.00 s for 2 steps"


def test_step_latency_over_chunk_size_is_a_mean_over_seeds():
    frame = chunk_sizes([0.9, 0.5, 0.7], spread=0.5)
    _, measured = oppo_figures.chunk_size(frame).axes
    lines = [list(line.get_ydata()) for line in measured.get_lines() if len(line.get_xdata()) == 3]
    assert any(line == pytest.approx([0.9, 0.5, 0.7]) for line in lines)


def test_the_table_of_speedups_has_published_columns_before_measured_ones():
    rows = figures.draw("oppo_speedups", oppo.speedups(runs_frame(sequential=[1.0, 1.2], both=[0.5, 0.4]))).splitlines()
    assert rows[-1].endswith("Measured: cpu scale, clock = measured; the target is 90% of the rise of the sequential run's reward, mean of 10 steps.")
    assert rows[3] == f"| {TASK} | both | 1.90x | 2300 | 1.83x | 0.450 | 2.50x | 0.50 | 4.5 | 2.50x | 0.50 | 2.00x | 0.42x | 0.25 | 2 |"


def verdict(name: str, frames: dict[str, pd.DataFrame]) -> str:
    """On the shape target with the rule `name`, of the first task."""
    target = TARGETS[[rule["judge"] for rule in RULES].index(name)]
    (found,) = [verdict for claimed, task, verdict, _ in shapes("oppo", frames) if (claimed, task) == (target, TASK)]
    return found


def test_shape_targets_hold_for_runs_that_behave_as_published(frames):
    results = list(shapes("oppo", frames))
    scored = ["stackexchange_7b", "stackexchange_3b"]
    tasks = [scored, TASKS, TASKS, [TASK], [TASK], TASKS, TASKS, scored]
    assert [row[:2] for row in results] == [(target, task) for target, several in zip(TARGETS, tasks, strict=True) for task in several]
    assert {verdict for *_, verdict, _ in results} == {"pass"}


@pytest.mark.parametrize(("one", "other"), [("sequential", "intra"), ("intra", "inter"), ("inter", "both")])
def test_each_overlap_must_reach_the_target_before_the_one_that_does_less(frames, one, other):
    rows = frames["oppo_speedups"]
    assert verdict("time_to_target", {"oppo_speedups": rows.assign(method=rows["method"].replace({one: other, other: one}))}) == "fail"


@pytest.mark.parametrize(("gain", "expected"), [(1.35, "fail"), (1.5, "pass"), (2.0, "pass"), (2.15, "fail"), (1.405, "not resolved")])
def test_utilisation_must_rise_by_as_much_as_published(frames, gain, expected):
    rows = frames["oppo_speedups"].assign(utilisation_gain=gain, utilisation_gain_se=0.01)
    assert verdict("utilisation", {"oppo_speedups": rows}) == expected


@pytest.mark.parametrize(
    ("shifts", "expected"),
    [([0, 0, 0], "pass"), ([0.04, 0.05, 0.05], "pass"), ([0.2] * 3, "fail"), ([-0.2] * 3, "fail"), ([-0.3, 0, 0.3], "not resolved")],
)
def test_the_reward_per_step_must_not_depend_on_overlap(frames, shifts, expected):
    """Within a tenth of the sequential rise, which is that of 1 - exp(-t/10) from its first to its last quarter: 0.57."""
    rows = frames["oppo_reward_steps"].copy()
    rows["rollout/reward_mean"] += rows["seed"].map(dict(zip((1, 2, 3), shifts, strict=True))) * (rows["method"] == "both")
    assert verdict("reward_per_step", {"oppo_reward_steps": rows}) == expected


@pytest.mark.parametrize(
    ("seconds", "spread", "expected"),
    [([0.9, 0.5, 0.7], 0.01, "pass"), ([0.5, 0.9, 0.7], 0.01, "fail"), ([0.9, 0.7, 0.5], 0.01, "fail"), ([0.5, 0.48, 0.9], 0.2, "not resolved")],
)
def test_the_best_chunk_size_must_lie_inside(seconds, spread, expected):
    assert verdict("chunk_size", {"oppo_chunk_size": chunk_sizes(seconds, spread)}) == expected


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([800, 195, 5], "pass"), ([195, 800, 5], "fail"), ([800, 100, 100], "fail"), ([510, 480, 10], "not resolved"), ([16, 3, 1], "not resolved")],
)
def test_most_requests_must_never_be_deferred_and_nearly_all_others_once(counts, expected):
    frame = oppo.deferral_shares({"both": [made_up_run("both", 1, 1, overlap_deferrals=[counts])]})
    assert verdict("deferrals", {"oppo_deferrals": frame}) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [({}, "pass"), ({"train/explained_variance": 0.2}, "fail"), ({"train/kl": np.inf}, "fail")],
)
def test_the_critic_must_explain_the_returns_and_the_kl_stay_finite(frames, changed, expected):
    rows = frames["oppo_reward_steps"].assign(**changed)
    rows.loc[rows["step"] == 40, "train/explained_variance"] = -50.0  # one batch without variance says nothing
    assert verdict("critic", {"oppo_reward_steps": rows}) == expected
    without_reference = rows.drop(columns="train/kl")
    assert verdict("critic", {"oppo_reward_steps": without_reference}) == ("pass" if "train/kl" in changed else expected)


@pytest.mark.parametrize(("sign", "expected"), [(1, "pass"), (-1, "fail"), (0, "not resolved")])
def test_ppo_must_end_above_its_start(frames, sign, expected):
    rows = frames["oppo_reward_steps"].copy()
    rows["rollout/reward_mean"] = rows["rollout/reward_mean"] * sign if sign else (rows["seed"] - 2) * rows["step"]  # seeds that disagree
    assert verdict("learning", {"oppo_reward_steps": rows}) == expected


def test_what_is_published_stands_as_words_in_panels_of_measured_curves(frames):
    def words(name: str) -> list[str]:
        return [text.get_text() for ax in figures.draw(name, frames[name]).axes for text in ax.texts]

    times, rewards = words("oppo_time_to_reward"), words("oppo_reward_steps")
    assert times[0] == "published: reward 4.17 in 2,300 min (OPPO)\ninstead of 4,300 (TRL), 1.9 times sooner"
    assert times[2] == "published: target reached 2.8 times sooner"
    assert rewards[0] == "published: 2.0 at step 150,\n4.1 at step 600" and rewards[1] == "published: no values known"
    assert words("oppo_overcommitment") == ["published: dynamic best,\nthen fixed 8 (good early only), then fixed 4"]
    assert words("oppo_staleness") == ["published: slower reward per step and a lower final\nreward than synchronous"] and words("oppo_grpo") == []


def test_one_seed_resolves_nothing_but_counts():
    alone = made_up_frames([made_up_results(seeds=(1,))]) | {"oppo_chunk_size": chunk_sizes([0.9, 0.5, 0.7]).query("seed == 1")}
    found = {rule["judge"]: verdict(rule["judge"], alone) for rule in RULES}
    assert found.pop("deferrals") == "pass" and set(found.values()) == {"not resolved"}


def test_without_data_nothing_is_judged(frames):
    partly = {name: frames[name][frames[name]["method"] != "both"] for name in ("oppo_speedups", "oppo_reward_steps")}
    for found in ({}, partly):
        assert {verdict for target, _, verdict, _ in shapes("oppo", found) if not (found and target.startswith("ours"))} == {"not run"}


def test_numbers_are_judged_against_the_published_ones_with_their_reasons():
    def judged(identifier: str, value: float, se: float = 0.0) -> tuple[str, str]:
        (row,) = [row for row in judge("oppo", {identifier: Measured(value, 3, se)}) if row.entry.id == identifier]
        return row.verdict, row.reason

    speedup, gain = f"tables.minutes_to_target.{TASK}.speedup", f"tables.gpu_utilisation_pct.{TASK}.gain"
    assert judged(speedup, 1.9 * 0.76) == ("pass", "-24%, tolerance 25%") and judged(speedup, 1.9 * 0.74)[0] == "fail"
    assert judged(gain, 1.4 * 1.2)[0] == "pass" and judged(gain, 1.4 * 1.2, 0.04)[0] == "not resolved"
    reasons = {row.entry.id: (row.verdict, row.reason) for row in judge("oppo", {})}
    assert reasons[speedup] == ("not run", "") and reasons["tables.two_nodes_seconds_per_step.trl"] == ("not attempted", "needs two nodes")
    assert reasons[f"tables.minutes_to_target.{TASK}.trl"][0] == "not judged"


def test_the_report_has_a_row_for_every_published_number_and_the_measured_ones_beside(folder):
    text = report(folder).split("\n## ")[2]
    assert text.startswith("OPPO")
    for entry in published.entries("oppo"):
        part, name, *rest = entry.id.split(".")
        (section,) = [section for section in text.split("\n### ") if section.startswith(f"{part[:-1].capitalize()}: {name.replace('_', ' ')}\n")]
        assert section.count(f"\n| {'.'.join(rest)} | {entry.source} | {entry.value:.5g}") == 1, entry.id
    assert f"\n| {TASK}.speedup | note | 1.9 | - | 2.001 ± 0.023 | 3 | pass | +5%, tolerance 25% |" in text
    assert f"\n| {TASK}.gain | note | 1.4 | - | 1.6 ± 0 | 3 | pass | +14%, tolerance 25% |" in text
    assert "\n| gsm8k_7b.speedup | note | 2.8 | - | - | - | not run |  |" in text and text.count("| not attempted |") == 6
    # the other tasks: rewards, the second order of times, utilisation; learning, the critic, the second shares of a step
    assert text.count("| not run | no rows of ") == 3 + 1 + 3 + 3 + 3 + 1
