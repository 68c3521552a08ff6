"""Figures and tables from runs made up here: what is drawn, what is saved, what is refused."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from dataclasses import dataclass

import matplotlib
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from nowait import config
from nowait.analysis import drawing, figures, tables

METHODS = ("sync", "recompute", "loglinear")
NAMES = [name for name in figures.CONTENTS if name.startswith("a3po_")]
COLUMNS = {
    "a3po_train_reward_steps": ["rollout/reward_mean"],
    "a3po_train_reward_time": ["rollout/reward_mean"],
    "a3po_eval_reward_steps": ["eval/reward"],
    "a3po_eval_reward_time": ["eval/reward"],
    "a3po_importance_weight_max": ["train/ratio_max", "train/behave_weight_max"],
    "a3po_importance_weight_min": ["train/ratio_min", "train/behave_weight_min"],
    "a3po_clipped_tokens": ["train/clipped_tokens", "train/clip_frac"],
    "a3po_entropy": ["train/entropy"],
}
PROXIMAL_BENCH = {
    "config": "a3po/setup1",
    "scale": "cpu",
    "cpu_model": {"recompute_s": 0.1, "interpolate_s": 2e-4, "ratio": 500.0, "ratios": [490.0, 495.0, 500.0, 505.0, 510.0]},
    "paper_tensors": {"interpolate_s": 0.004, "bytes": 8_000_000},
    "blocks": 5,
}


@dataclass
class Run:
    metrics: pd.DataFrame
    manifest: dict
    evaluations: pd.DataFrame


def made_up_run(setup: str, method: str, seed: int, steps: int = 100, prompts: int = 32) -> Run:
    rng = np.random.default_rng([METHODS.index(method) if method in METHODS else 7, seed, setup == "setup2"])
    step = np.arange(1, steps + 1)
    drift, noise = step / steps, lambda scale: rng.normal(0, scale, steps)
    clipped = {"sync": 40 + 260 * drift, "recompute": 60 + 280 * drift, "loglinear": np.where(step < 6, 300.0, 8.0)}.get(method, 50 + 0 * drift)
    spikes = np.where(rng.random(steps) < 0.06, 40.0, 0.0) if method == "recompute" else 0.0
    metrics = pd.DataFrame(
        {
            "step": step,
            "time/elapsed": step * {"sync": 0.5, "recompute": 0.4}.get(method, 0.3),
            "rollout/reward_mean": 0.5 + 0.2 * drift + noise(0.03),
            "train/clipped_tokens": clipped + noise(2).clip(-3, 3),
            "train/clip_frac": clipped / 4000,
            "train/ratio_max": 1.5 + np.abs(noise(0.5)) + spikes,
            "train/ratio_min": 0.5 - 0.3 * drift * (method != "loglinear") + noise(0.02).clip(-0.05, 0.05),
            "train/behave_weight_max": 1.5 + np.abs(noise(0.5)),
            "train/behave_weight_min": 0.5 + noise(0.02),
            "train/entropy": 0.3 * np.exp(-(2 if method == "loglinear" else 3) * drift) + noise(0.003),
        }
    )
    at = np.linspace(0, steps, 11, dtype=int)
    evaluation = pd.DataFrame({"step": at, "eval/reward": 0.5 + 0.15 * at / steps + rng.normal(0, 0.005, 11)})
    row, name = np.arange(prompts), f"a3po/{setup}"
    last = [
        pd.DataFrame({"step": when, "set": which, "row": row, "reward": 0.4 + 0.001 * row + 0.2 * when / steps + rng.normal(0, 0.005, prompts)})
        for when in (0, steps)
        for which in ("eval", "longer", "longest")
    ]
    manifest = {
        "seed": seed,
        "config": {"name": name, "scale": "cpu", "method": method, "runtime": {"clock": "model"}},
        "code": "c0de",
    }
    return Run(metrics.merge(evaluation, on="step", how="outer"), manifest, pd.concat(last, ignore_index=True))


def made_up_results(setup: str, seeds=(1, 2, 3), methods=METHODS, **options) -> dict[str, list[Run]]:
    return {method: [made_up_run(setup, method, seed, **options) for seed in seeds] for method in methods}


def made_up_bench(setup: str = "setup1") -> dict:
    seconds = {"sync": 0.5, "recompute": 0.4, "loglinear": 0.3, "sync_colocated": 0.35}
    late = {"recompute": 3.0, "loglinear": 3.1}
    rows = [{"method": m, "seconds_per_step": s, "mean_staleness": late.get(m, 0.0), "blocks": [s * 0.95, s, s * 1.05]} for m, s in seconds.items()]
    stages = {"sampler_s": 0.2, "update_s": 0.3, "forward_s": 0.09, "forward_over_update": 0.3}
    return {"config": f"a3po/{setup}", "scale": "cpu", "clock": "measured", "overlap_efficiency": 0.93, "rows": rows, **stages}


def proximal_seconds() -> pd.DataFrame:
    return tables.proximal_seconds(PROXIMAL_BENCH).assign(simulated=[0.97, np.nan, np.nan])


def made_up_frames(results: list[dict[str, list[Run]]]) -> dict[str, pd.DataFrame]:
    """The data of every figure and table; `results` are those of setup1, and of setup2 if there are two."""
    setups = ["setup1", "setup2"][: len(results)]
    times = pd.concat([tables.training_time(made_up_bench(setup)) for setup in setups])
    frames = {
        **{name: times for name in NAMES if name.startswith("a3po_training_time")},
        "a3po_proximal_seconds": proximal_seconds(),
        "a3po_final_eval_reward": pd.concat([tables.final_eval_reward(result) for result in results]),
        "a3po_benchmarks": pd.concat([tables.benchmarks(result, ["longer", "longest"]) for result in results]),
    }
    for name, columns in COLUMNS.items():
        frame = pd.concat([tables.tidy(result, columns) for result in results])
        frames[name] = tables.on_bench_time(frame, times) if name.endswith("_time") else frame
    return frames


def provenance(png) -> dict:
    with Image.open(png) as image:
        return json.loads(image.info["provenance"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, results = tmp_path_factory.mktemp("figures"), [made_up_results("setup1")]
    for name, frame in made_up_frames(results).items():
        figures.save(figures.draw(name, frame), name, frame, tables.provenance(results), path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_redrawing_from_the_csv_alone_gives_the_same_bytes(folder, name):
    picture = folder / f"{name}{'.md' if name in tables.CONTENTS else '.png'}"
    before = picture.read_bytes()
    picture.unlink()
    with matplotlib.rc_context({"font.size": 30, "savefig.dpi": 40, "lines.linewidth": 9}):  # the user's own style must not matter
        assert figures.redraw(folder / f"{name}.csv") == picture
    assert picture.read_bytes() == before


def test_a_png_carries_its_provenance_and_no_date_or_version(folder):
    record = provenance(folder / "a3po_entropy.png")
    data = hashlib.sha256((folder / "a3po_entropy.csv").read_bytes()).hexdigest()
    assert set(record["config"]) == {f"setup1/{method}" for method in METHODS} and len(set(record["config"].values())) == 3
    assert {key: record[key] for key in record if key != "config"} == {"seeds": [1, 2, 3], "code": ["c0de"], "data": data}
    assert json.loads((folder / "provenance.json").read_text())["a3po_entropy"] == record
    with Image.open(folder / "a3po_entropy.png") as image:
        assert set(image.info) == {"provenance", "dpi"}


def test_provenance_has_the_digest_of_the_experiment():
    experiment = config.load("a3po/setup2", method="recompute")
    run = Run(pd.DataFrame(), {"seed": 7, "code": "c0de", "config": json.loads(experiment.model_dump_json())}, pd.DataFrame())
    assert tables.provenance([{"recompute": [run]}]) == {"seeds": [7], "code": ["c0de"], "config": {"setup2/recompute": config.digest(experiment)}}


def test_an_edited_csv_or_one_without_a_record_is_not_redrawn(tmp_path):
    frame = proximal_seconds()
    record = {"seeds": [1], "code": "c0de", "config": {}}
    figures.save(figures.draw("a3po_proximal_seconds", frame), "a3po_proximal_seconds", frame, record, tmp_path)
    csv = tmp_path / "a3po_proximal_seconds.csv"
    csv.write_text(csv.read_text().replace("0.1", "0.2"))
    with pytest.raises(ValueError, match="rerun the notebook"):
        figures.redraw(csv)


def test_redraw_all_touches_every_known_csv_and_leaves_others_alone(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    for name in ("a3po_eval_reward_time", "a3po_clipped_tokens", "a3po_importance_weight_max", "a3po_importance_weight_min"):
        (tmp_path / f"{name}.csv").unlink()  # for speed
    assert {path.stem for path in figures.redraw_all(tmp_path)} == {*NAMES} - {
        "a3po_eval_reward_time",
        "a3po_clipped_tokens",
        "a3po_importance_weight_max",
        "a3po_importance_weight_min",
    }


def test_where_many_methods_meet_a_few_seeds_are_the_range_between_the_lowest_and_the_highest():
    methods = [*METHODS, "behave", "linear"]
    frame = tables.tidy(made_up_results("setup1", (1, 2, 3), methods), ["train/entropy"])
    _, measured = figures.draw("a3po_entropy", frame).axes
    assert len(measured.collections) == len(measured.get_lines()) == len(methods) and "band: all seeds" in measured.get_xlabel()
    own = frame[(frame["method"] == "sync") & (frame["step"] <= 5)].groupby("seed")["train/entropy"].mean()
    colour = matplotlib.colors.to_rgb(drawing.LOOK["sync"][1])
    (band,) = [part for part in measured.collections if part.get_facecolor()[0, :3] == pytest.approx(colour)]
    x, y = band.get_paths()[0].vertices.T
    assert y[x == 3].min() == pytest.approx(own.min()) and y[x == 3].max() == pytest.approx(own.max())


def test_the_forward_pass_of_every_setup_is_shown_beside_published_and_simulated_ones():
    second = tables.proximal_seconds({**PROXIMAL_BENCH, "config": "a3po/setup2"}).assign(simulated=9.2)
    published, simulated, measured = figures.draw("a3po_proximal_seconds", pd.concat([proximal_seconds(), second.iloc[:1]])).axes
    names = [[label.get_text() for label in ax.get_yticklabels()] for ax in (published, simulated, measured)]
    assert names[1] == ["setup 1: recompute", "setup 2: recompute"] and len(names[0]) == 4
    assert names[2] == ["setup 1: recompute", "setup 1: loglinear", "setup 2: recompute", "tensors of the paper's size: loglinear"]


@pytest.mark.parametrize(("seeds", "bands", "lines"), [(1, 0, 1), (4, 0, 5), (5, 1, 1)])
def test_few_seeds_are_single_lines_and_five_become_a_band(seeds, bands, lines):
    frame = tables.tidy(made_up_results("setup1", range(seeds), ["loglinear"]), ["train/entropy"])
    _, measured = figures.draw("a3po_entropy", frame).axes
    assert len(measured.collections) == bands and len(measured.get_lines()) == lines
    assert f"n = {seeds}," in measured.get_title()


def test_published_and_measured_values_are_in_axes_of_their_own():
    frame = tables.tidy(made_up_results("setup1", (1,), ["loglinear"]), ["eval/reward"])
    left, right = figures.draw("a3po_eval_reward_steps", frame).axes
    assert "published" in left.get_title() and "measured, cpu scale" in right.get_title() and "clock = model" in right.get_title()
    (drawn,) = [line for line in left.get_lines() if line.get_gid() == "loglinear" and len(line.get_xdata())]
    assert drawn.get_xdata()[-1] == 300 and drawn.get_ydata()[-1] == 0.7913
    (ours,) = right.get_lines()
    assert list(ours.get_xdata()) == list(range(0, 101, 10)) and list(ours.get_ydata()) == list(frame["eval/reward"])


def test_measured_curves_are_means_of_a_twentieth_of_the_run():
    frame = tables.tidy(made_up_results("setup1", (1,), ["loglinear"]), ["train/entropy"])
    frame["train/entropy"] = frame["step"] * 1.0
    _, right = figures.draw("a3po_entropy", frame).axes
    assert list(right.get_lines()[0].get_ydata()) == [3 + 5 * i for i in range(20)]
    assert right.get_xlabel() == "training step (mean of 5 steps)"


def test_importance_weights_show_r_and_rho_and_keep_the_spikes():
    frame = tables.tidy(made_up_results("setup1", (1,), ["recompute"]), COLUMNS["a3po_importance_weight_max"])
    published, r, rho = figures.draw("a3po_importance_weight_max", frame).axes
    assert "theta / prox" in published.get_ylabel() and "theta / prox" in r.get_ylabel() and "prox / behav" in rho.get_ylabel()
    assert max(r.get_lines()[0].get_ydata()) == frame["train/ratio_max"].max()
    assert max(rho.get_lines()[0].get_ydata()) == frame["train/behave_weight_max"].max()


def test_the_papers_methods_keep_its_shapes_and_every_method_has_a_look_of_its_own():
    assert [drawing.LOOK[method][2] for method in METHODS] == ["^", "o", "s"]
    names = list(drawing.LOOK)
    oppo, rules = names.index("sequential"), names.index("fixed 4")
    for group in (names[:oppo], names[oppo:rules], names[rules : rules + 5]):
        looks = [drawing.LOOK[name] for name in group]
        assert len({look[1] for look in looks}) == len({look[2] for look in looks}) == len(looks)


def test_a_setup_without_published_values_is_refused():
    frame = tables.tidy(made_up_results("setup9", (1,)), ["train/entropy"])
    with pytest.raises(ValueError, match="setup9.*setup1, setup2"):
        figures.draw("a3po_entropy", frame)


def test_tidy_keeps_the_steps_that_have_a_value_and_survives_a_csv():
    frame = tables.tidy(made_up_results("setup2", (4,), ["sync"]), ["eval/reward", "train/entropy"])
    assert list(frame.columns) == ["setup", "method", "seed", "scale", "clock", "step", "seconds", "eval/reward", "train/entropy"]
    assert frame["step"].tolist() == list(range(101)) and frame["seconds"].iloc[[0, 1, 100]].tolist() == [0, 0.5, 50]
    assert tables.tidy(made_up_results("setup2", (4,), ["sync"]), ["eval/reward"])["step"].tolist() == list(range(0, 101, 10))
    again = pd.read_csv(io.StringIO(frame.to_csv(index=False)))
    pd.testing.assert_frame_equal(again, frame, check_dtype=False, check_exact=True)


def test_tidy_names_the_run_that_lacks_a_metric():
    with pytest.raises(ValueError, match="a3po/setup1 sync seed 1 has no metric train/kl"):
        tables.tidy(made_up_results("setup1", (1,)), ["train/kl", "train/entropy"])
    with pytest.raises(ValueError, match="no finished runs"):
        tables.tidy({"sync": []}, ["train/entropy"])


def test_training_time_is_medians_of_paired_ratios_with_the_bound():
    bench = made_up_bench("setup2")
    bench["rows"][0]["blocks"], bench["rows"][2]["blocks"] = [0.4, 0.6, 0.9], [0.4, 0.3, 0.5]  # ratios 1, 2, 1.8; of medians 1.5
    rows = tables.training_time(bench).set_index("method")
    assert rows.loc["loglinear", "speedup_over_sync"] == 1.8
    assert rows.loc["loglinear", "speedup_over_sync_se"] == pytest.approx(np.std([1, 2, 1.8], ddof=1) / np.sqrt(3), rel=1e-5)
    assert rows.loc["loglinear", "difference_se"] == pytest.approx(np.std([0.02, -0.1, 0.08], ddof=1) / np.sqrt(3), rel=1e-5)  # minus recompute
    assert rows.loc["loglinear", "f_over_u"] == 0.3 and rows.loc["loglinear", "bound"] == 1.3 and rows.loc["loglinear", "blocks"] == 3
    published = [f"published_{name}" for name in ("hours", "seconds_per_step", "speedup_over_sync", "speedup_over_recompute")]
    assert rows.loc["loglinear", published].tolist() == [14.54, 47.6, 1.8, 1.11]
    line = next(line for line in tables.training_time_markdown(rows.reset_index()).splitlines() if "sync_colocated" in line)
    assert line.startswith("| setup2 | sync_colocated | – | – | – | 0.350 |") and line.endswith("| 0.30 | 1.30x | – | 0.0 | 3 |")
    assert rows["overlap_efficiency"].dropna().to_dict() == {"loglinear": 0.93}, "the bench has it of the paper's own method"


@pytest.mark.parametrize(
    ("sampler", "said"), [(0.2, "s/u = 0.67; the bottleneck is the learner."), (0.39, "s/u = 1.30; the bottleneck is the sampler")]
)
def test_the_time_table_says_which_device_limits_and_how_much_could_be_gained(sampler, said):
    text = tables.training_time_markdown(tables.training_time({**made_up_bench(), "sampler_s": sampler}))
    assert f"setup1: s = {sampler:.3f}, u = 0.300, f = 0.090 seconds" in text and said in text
    assert "A-3PO is 1.33 times as fast as recompute (1 + f/u = 1.30), and 1.17 times as fast as sync colocated." in text


@pytest.mark.parametrize(("blocks", "said"), [(3, "medians over interleaved blocks,"), (1, "one pass over the methods, which shows no spread,")])
def test_the_time_table_says_whether_its_numbers_have_a_spread(blocks, said):
    bench = made_up_bench()
    bench["rows"] = [{**row, "blocks": row["blocks"][:blocks]} for row in bench["rows"]]
    frame = tables.training_time(bench)
    assert said in tables.training_time_markdown(frame)
    assert frame["speedup_over_sync_se"].isna().all() == frame["difference_se"].isna().all() == (blocks == 1)


def test_time_on_the_bench_is_steps_times_its_seconds_per_step():
    frame = tables.tidy(made_up_results("setup1", (1,)), ["eval/reward"])
    timed = tables.on_bench_time(frame, tables.training_time(made_up_bench()))
    last = timed[timed["step"] == 100].set_index("method")["seconds"]
    assert last.to_dict() == {"sync": 50, "recompute": 40, "loglinear": 30} and set(timed["clock"]) == {"measured (bench)"}
    with pytest.raises(ValueError, match="setup1.*linear"):
        tables.on_bench_time(frame.assign(method="linear"), tables.training_time(made_up_bench()))


def test_final_rewards_are_of_the_last_evaluation_and_paired_with_recompute():
    results = made_up_results("setup1", (1, 2))
    for run in results["loglinear"]:
        twin = next(other for other in results["recompute"] if other.manifest["seed"] == run.manifest["seed"])
        run.evaluations["reward"] = twin.evaluations["reward"] + 0.004 * (1 + run.evaluations["row"] % 2)  # +0.004, +0.008 in turn
    rows = tables.final_eval_reward(results).set_index("method")
    assert rows.loc["loglinear", "difference"] == pytest.approx(0.006)
    assert rows.loc["loglinear", "difference_se"] == pytest.approx(0.002 / np.sqrt(31), rel=1e-4)  # spread 0.002 over 32 prompts, none over seeds
    assert rows.loc["loglinear", "reward"] > 0.55 and rows.loc["loglinear", ["published", "seeds", "prompts"]].tolist() == [0.791, 2, 32]
    assert np.isnan(rows.loc["recompute", "difference"])


@pytest.mark.parametrize(
    ("seeds", "said"), [((1,), "± s.e. is over prompts only: one seed says nothing about others."), ((1, 2), "over prompts and seeds.")]
)
def test_tables_of_rewards_say_what_their_errors_cover(seeds, said):
    results = made_up_results("setup2", seeds)
    assert said in figures.draw("a3po_final_eval_reward", tables.final_eval_reward(results))
    assert said in figures.draw("a3po_benchmarks", tables.benchmarks(results, ["longer", "longest"]))


@pytest.mark.parametrize(("rises", "learned"), [((0.12, 0.12), "yes"), ((0.09, 0.09), "no"), ((0.10, 0.22), "no"), ((0.2, 0.22), "yes")])
def test_a_method_learned_if_its_prompts_rise_by_a_tenth_and_three_standard_errors(rises, learned):
    results = made_up_results("setup1", (1, 2))
    for run, rise in zip(results["sync"], rises, strict=True):
        before = run.evaluations.query("set == 'eval' and step == 0")["reward"].to_numpy()
        run.evaluations.loc[run.evaluations.eval("set == 'eval' and step == 100"), "reward"] = before + rise
    row = tables.final_eval_reward(results).set_index("method").loc["sync"]
    assert row["rise"] == pytest.approx(np.mean(rises)) and row["rise_se"] == pytest.approx(abs(rises[1] - rises[0]) / 2, abs=1e-9)
    assert row["learned"] == learned and row["reward"] - row["before"] == pytest.approx(row["rise"], abs=1e-5)


def test_benchmarks_average_over_sets_that_share_their_seeds():
    results = made_up_results("setup2", (1, 2))
    for seed, shift in enumerate((0.01, 0.03)):  # loglinear above recompute by 1 and 3 points, on every prompt of both sets
        results["loglinear"][seed].evaluations["reward"] = results["recompute"][seed].evaluations["reward"] + shift
    rows = tables.benchmarks(results, ["longer", "longest"]).set_index(["set", "method"])
    assert list(rows.index.get_level_values("set").unique()) == ["longer", "longest", "average"]
    average, both = rows.loc[("average", "loglinear")], rows.loc[["longer", "longest"]].xs("loglinear", level="method")
    assert average["reward"] == pytest.approx(both["reward"].mean(), rel=1e-5) and average["prompts"] == 64
    assert average["difference"] == pytest.approx(2, rel=1e-4)
    assert average["difference_se"] == pytest.approx(1, rel=1e-3)  # (1 and 3: sd √2, over √2 seeds); averaging sets does not shrink it


def test_methods_with_other_seeds_or_prompts_are_not_compared():
    results = made_up_results("setup1", (1, 2))
    with pytest.raises(ValueError, match="sync and recompute need the same seeds"):
        tables.final_eval_reward({**results, "sync": [made_up_run("setup1", "sync", seed) for seed in (1, 3)]})
    with pytest.raises(ValueError, match="sync: the seeds were evaluated on different prompts"):
        tables.final_eval_reward({"sync": [results["sync"][0], made_up_run("setup1", "sync", 2, prompts=16)]})
    with pytest.raises(ValueError, match="never evaluated on 'aime'"):
        tables.benchmarks(results, ["aime"])
