from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from nowait import cli, simulate
from nowait.analysis import figures, oppo, report, simulated
from nowait.config import load
from nowait.simulate import Assumptions, Calibration
from nowait.workers.simulated import Lengths


def test_a_small_error_of_two_times_is_a_large_one_of_their_difference():
    rows = [
        ("setup1", "recompute", 21.9, 21.9),
        ("setup1", "loglinear", 18.4, 17.6),
        ("setup2", "recompute", 52.7, 52.7),
        ("setup2", "loglinear", 47.6, 45.7),
    ]
    named = [(f"tables.seconds_per_step.{setup}.{method}", told, found, found / told - 1) for setup, method, told, found in rows]
    frame = simulated.saving(pd.DataFrame(named, columns=["entry", "published", "simulated", "error"])).set_index("setup")
    assert frame.loc["setup1", ["published_s", "simulated_s"]].tolist() == pytest.approx([3.5, 4.3])
    assert frame.loc["setup1", ["error_of_time", "error_of_saving"]].tolist() == pytest.approx([-0.0435, 0.2286], abs=1e-4)
    assert frame.loc["setup2", "error_of_saving"] == pytest.approx(7.0 / 5.1 - 1)


@pytest.fixture(scope="module")
def a3po() -> pd.DataFrame:
    return simulated.study("a3po", steps=24, variations=[]).set_index("entry")


def test_what_the_calibration_was_made_to_meet_is_called_fitted_and_met(a3po):
    fitted = a3po[(a3po["role"] == "fitted") & (a3po["unit"] == "s")]
    assert set(fitted.index) == {
        *(f"tables.seconds_per_step.{s}.{m}" for s in ("setup1", "setup2") for m in ("sync", "recompute")),
        "figures.proximal_seconds.setup1.recompute.typical",
        "figures.proximal_seconds.setup2.recompute.mean",
    }
    assert fitted["error"].abs().max() < 0.03
    assert a3po.loc[[f"tables.seconds_per_step.{s}.loglinear" for s in ("setup1", "setup2")], "role"].eq("predicted").all()


def test_hours_steps_and_speedups_of_the_simulation_agree(a3po):
    seconds = a3po["simulated"].filter(like="seconds_per_step.setup2")
    assert a3po.loc["tables.training_hours.setup2.sync", "simulated"] == pytest.approx(seconds.iloc[0] * 1100 / 3600)
    assert a3po.loc["tables.speedup_over_recompute.setup2.loglinear", "simulated"] == pytest.approx(seconds.iloc[1] / seconds.iloc[2])


def test_the_range_reaches_over_the_changed_assumptions_each_calibrated_anew(monkeypatch):
    fitted = []
    task, sigma = "oppo/stackexchange_7b", simulate.assumptions("oppo/stackexchange_7b").lengths.sigma
    monkeypatch.setattr(simulated, "fit", lambda *arguments: fitted.append(arguments) or simulate.assumptions(task).calibration)
    frame = simulated.study("oppo", steps=12, variations=["heavier tail"]).set_index("entry")
    assert fitted == [(task, [f"lengths.sigma={1.25 * sigma}"])]  # whose factor serves all tasks
    row = frame.loc["tables.minutes_to_target.stackexchange_7b.speedup"]
    assert row["low"] < row["high"] and row["simulated"] in (row["low"], row["high"])  # of two values


def test_a3po_s_range_does_not_calibrate_anew_since_the_fit_would_absorb_every_change(monkeypatch):
    monkeypatch.delattr(simulated, "fit")
    frame = simulated.study("a3po", steps=24, variations=["heavier tail", "decoding a quarter slower"]).set_index("entry")
    assert (frame["low"] <= frame["simulated"]).all() and (frame["simulated"] <= frame["high"]).all()
    slower = frame.loc["tables.seconds_per_step.setup1.sync"]  # of which decoding is a third
    assert slower["high"] > 1.05 * slower["simulated"] and frame.loc["tables.speedup_over_sync.setup1.loglinear", "high"] > 1.65


def test_the_forward_pass_by_data_sheets_stands_beside_the_paper_s_own_setups_only():
    rows = [("setup1", "recompute"), ("setup1", "loglinear"), ("setup2", "recompute"), ("mine", "recompute"), ("-", "loglinear")]
    found = simulated.forward_beside(pd.DataFrame(rows, columns=["setup", "method"]))["simulated"]
    assert found[0] == pytest.approx(4.3 / simulate.assumptions("a3po/setup1").calibration.forward, rel=0.01)  # what the calibration makes 4.3 s
    assert found[2] > 5 * found[0] and found[[1, 3, 4]].isna().all()


def test_the_simulated_shares_of_a_step_make_a_whole():
    frame = pd.DataFrame({"setup": ["gsm8k_7b"] * 3 + ["mine"], "stage": ["generation", "scoring", "training", "scoring"]})
    found = simulated.shares_beside(frame)["simulated"]
    assert found[:3].sum() == pytest.approx(1, abs=1e-5) and found[0] > 0.5 and np.isnan(found[3])


def test_simulated_metrics_are_those_of_every_step_and_variant():
    variants = {"fixed": ["overlap.rule=fixed", "overlap.delta=2"], "slope": ["overlap.rule=slope"]}
    frame = simulated.metrics("oppo/stackexchange_7b", variants, 4)
    assert frame[["method", "step"]].to_numpy().tolist() == [[name, step] for name in variants for step in (1, 2, 3, 4)]
    fixed = frame[frame["method"] == "fixed"]
    assert (fixed["overlap/delta"] == 2).all() and set(frame["setup"]) == {"stackexchange_7b"}
    counts = oppo.counted_deferrals(fixed)
    assert counts["share"].sum() == pytest.approx(1, abs=1e-5) and counts["requests"][0] == 4 * 112
    for name, data in (("simulated_overcommitment", frame), ("simulated_deferrals", counts.assign(method="fixed"))):
        (ax,) = figures.draw(name, data).axes
        assert ax.get_title().startswith("simulated")


def test_the_report_shows_a_prediction_with_its_range_and_a_fit_as_such(tmp_path):
    rows = [
        ("tables.seconds_per_step.setup1.sync", 28.4, 28.4, 28.4, "fitted"),
        ("tables.seconds_per_step.setup1.loglinear", 17.6, 17.4, 17.9, "predicted"),
    ]
    pd.DataFrame(rows, columns=["entry", "simulated", "low", "high", "role"]).to_csv(tmp_path / "simulated_a3po.csv", index=False)
    text = report.report(tmp_path)
    assert "| setup1.sync | derived | 28.4 s | 28.4 s (fitted) | - |" in text
    assert "| setup1.loglinear | derived | 18.4 s | 17.6 s (17.4 to 17.9) | - |" in text
    assert "| setup1.recompute | derived | 21.9 s | - | - |" in text


def test_only_the_papers_own_setups_and_methods_get_a_simulated_column():
    frame = pd.DataFrame({"setup": ["gsm8k_7b", "gsm8k_7b", "mine"], "method": ["sequential", "both_paper", "sequential"]})
    found = simulated.beside(frame, "oppo")
    assert found["simulated_speedup"].tolist()[0] == 1 and np.isnan(found["simulated_speedup"].tolist()[1:]).all()
    assert 0 < found["simulated_utilisation"][0] < 1


def test_both_benches_name_the_stages_that_are_compared():
    a3po = {"rows": [{"method": "sync", "seconds_per_step": 3.0, "sampler_s": 1.0, "update_s": 2.0, "forward_s": 0.5}]}
    row = {"variant": "both", "seconds_per_step": 3.0, "generate": 1.0, "train": 2.0, "forward": 0.5, "reward": 0.25, "reference": 0.125}
    stages = {"step": 3.0, "generate": 1.0, "forward": 0.5, "update": 2.0}
    assert simulated.measured(a3po) == {"sync": stages | {"reward": 0.0, "reference": 0.0}}
    assert simulated.measured({"rows": [row]}) == {"both": stages | {"reward": 0.25, "reference": 0.125}}


def test_measurements_of_the_simulator_itself_are_predicted():
    experiments = {m: load("oppo/stackexchange_3b", "cpu", ["overlap.rule=fixed"], m) for m in ("sequential", "intra", "inter")}
    lengths = [5, 5, 5, 8, 8, 60]
    factors = Calibration(generate=3.0, forward=2.0, update=0.5, score=4.0)
    assumed = Assumptions(hardware="cpu", actor="policy_small", reward_model="reward_small", devices={"a": 1, "b": 1}, calibration=factors,
                          lengths=Lengths(prompt=20, observed=tuple(lengths)))  # fmt: skip
    found = {m: simulate.simulate(e, assumed, steps=40).summary(2) for m, e in experiments.items()}
    seconds = {m: row | {"step": row["seconds_per_step"]} for m, row in found.items()}
    frame = simulated.predicted(experiments, seconds, pd.DataFrame({"rollout/lengths": [lengths]}))
    assert frame["role"].tolist() == ["fitted", "predicted", "predicted"]
    assert frame["error"].abs().max() < 0.1  # the draws of 12 steps and the mean prompt differ
    assert frame["verdict"].tolist() == ["within 15 %"] * 3
    wrong = simulated.predicted(experiments, seconds | {"inter": seconds["inter"] | {"step": 2 * seconds["inter"]["step"]}},
                                pd.DataFrame({"rollout/lengths": [lengths]}), steps=20)  # fmt: skip
    assert wrong["verdict"].tolist()[1:] == ["within 15 %", "misses"]


def test_simulate_prints_one_object_that_repeats(capsys):
    def said() -> str:
        assert cli.main(["simulate", "oppo/gsm8k_7b", "--steps", "12", "--json", "--set", "lengths.sigma=0.3"]) == 0
        return capsys.readouterr().out

    first = said()
    assert first == said() and list(json.loads(first)) == ["sequential", "intra", "inter", "both"]


def test_simulate_writes_a_trace_of_every_method(tmp_path, capsys):
    assert cli.main(["simulate", "a3po/setup1", "--steps", "12", "--trace", str(tmp_path)]) == 0
    assert {file.stem for file in tmp_path.glob("*.json")} == {"sync", "sync_colocated", "recompute", "loglinear"}
    assert "seconds_per_step" in capsys.readouterr().out


def test_a_plan_multiplies_steps_by_seconds_and_devices(capsys):
    found = simulate.plan(*simulate.load("a3po/setup2", "loglinear"))
    seconds, _ = simulate.seconds_per_step(*simulate.load("a3po/setup2", "loglinear"))
    assert found["minutes"] == pytest.approx(seconds * 1100 / 60) and found["device_hours"] == pytest.approx(8 * found["minutes"] / 60)
    assert found["memory_b"] == pytest.approx(8.19e9 * 16 / 4) and found["disk"] == pytest.approx(8.19e9 * 2)
    assert cli.main(["plan", "a3po/setup2"]) == 0 and "memory_b: 32.8 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "a3po/setup2", "--set", "devices.b=1"], "take 2 devices or more"),
        (["plan", "a3po/setup2", "--set", "tensor_parallel={a: 3}"], "take one of 1, 2, 4"),
        (
            ["plan", "oppo/stackexchange_7b", "--set", "sampler.slots=8190"],
            "GB on each of a's devices, which have 141 GB: raise",
        ),
        (["simulate", "a3po/setup2", "--hardware", "h100"], "hardware/h100: path: no such file or shipped config"),
        (["simulate", "a3po/setup2", "--set", "actor=gpt"], "gpt: is not in this file; there are"),
        (["simulate", "a3po/setup9"], "setup9"),
        (["simulate", "mine/setup1"], "no setup of a paper; it begins with a3po/ or oppo/"),
        (["plan", "mine/setup1"], "no setup of a paper"),
    ],
)
def test_what_cannot_be_simulated_ends_in_one_message(arguments, said, capsys):
    assert cli.main(arguments) == 1
    assert said in capsys.readouterr().err
