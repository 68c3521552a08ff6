"""The simulated studies: what is compared does the same work, maps scale as they say and count what does not fit."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from nowait import simulate
from nowait.analysis import simulated_figures, studies
from nowait.workers import simulated

OPPO, A3PO = "oppo/stackexchange_7b", "a3po/setup2"


def test_every_schedule_is_given_the_same_responses(monkeypatch):
    drawn, world = [], simulate.World
    monkeypatch.setattr(simulate, "World", lambda *arguments: drawn.append(world(*arguments)) or drawn[-1])
    frame = studies.systems(OPPO, steps=1)
    assert len(drawn) == 9 + 3 * 7 and len({w.response[: 112 * 11].tobytes() for w in drawn}) == 1
    rows = frame.set_index("system")
    assert (rows.loc[["sequential", "synchronous, colocated", "intra", "intra, by response"], "mean_staleness"] == 0).all()
    assert all(rows.loc[f"asynchronous, η = {eta}", "mean_staleness"] <= eta for eta in studies.ETAS)
    assert rows["published"].dropna().to_dict() == {"synchronous, colocated": "125.3 to 126.3", "both": "99.84"}
    assert rows.loc[["sequential", "synchronous, colocated", "both, 2 score"], "devices"].tolist() == ["7 + 1", "8", "6 + 2"]


def test_asynchronous_systems_read_as_much_as_the_others():
    def device_seconds(experiment, assumed) -> float:
        spans = simulate.simulate(experiment, assumed, 2).timeline.spans
        read = [s for s in spans if s.step == 0 and s.worker != "sampler" and s.method in ("prefill", "logp")]
        return sum((s.end - s.start) * assumed.devices[s.device] for s in read if s.device in assumed.devices)

    setup = simulate.load(OPPO, "sequential", [*studies.FIXED, "lengths.sigma=0", "lengths.drift=0"])
    every_pass_has_a_price = 0.05
    assert device_seconds(*studies._asynchronous(*setup, 1, 4, 4)) == pytest.approx(device_seconds(*setup), rel=every_pass_has_a_price)


@pytest.mark.parametrize(("point", "expected"), [
    ({"devices": 16}, {"devices": {"a": 14, "b": 2}, "chunk": 256}),
    ({"batch": 224}, {"slots": 232, "delta": 8}),  # 4 of 112
    ({"longest": 4096}, {"chunk": 512, "median": 805.0, "cap": 4096}),  # 700, and half of a drift of 30 %
    ({"delta": 32, "chunk": 64}, {"slots": 144, "delta": 32, "chunk": 64}),
    ({"model": "qwen2.5-72b"}, {"devices": {"a": 6, "b": 2}, "tensor_parallel": {"a": 2, "b": 2}}),  # 145 GB of 127 usable ones
    ({"model": "llama-3.1-405b", "devices": 1024}, {"devices": {"a": 896, "b": 128}, "tensor_parallel": {"a": 8, "b": 8}}),
])  # fmt: skip
def test_a_setup_scales_in_proportion(point, expected):
    experiment, assumed = studies.scaled(*simulate.load(OPPO, "both", studies.FIXED), 2, **point)
    found = {**assumed.model_dump(), "median": round(assumed.lengths.median, 6), "cap": assumed.lengths.cap}
    found |= {"slots": experiment.sampler.slots, "delta": experiment.overlap.delta}
    assert {name: found[name] for name in expected} == expected and assumed.reward_model == assumed.actor


def test_slots_of_a3po_are_what_the_cache_holds_and_a_batch_of_oppo_must_fit():
    group = {"batch": 8192, "longest": 32768}
    experiment, _ = studies.scaled(*simulate.load(A3PO, "loglinear"), 2, **group)
    # 4 devices x 126.9 GB minus weights of 16.4 GB, 147,456 bytes a token, mean of exp(N(ln 11040, 0.49)) and 200 prompt tokens
    assert experiment.sampler.slots == int(int(4 * (126.9e9 - 16.38e9) / 147456) / (200 + 11040 * 2.718281828459045 ** (0.49 / 2)))
    grid = {"devices": [1, 8, 16], "model": ["qwen2.5-7b", "llama-3.1-405b"], "batch": [112, 8192], "longest": [2048]}
    frame = studies.sweep([OPPO], grid, steps=4)
    reasons = frame[frame["method"] == "both"].set_index(["devices", "billions", "batch"])["reason"]
    assert set(reasons[1]) == {"too few devices"} and reasons[8, 405.0, 112] == "too few devices"
    assert reasons[16, 405.0, 112] == "weights and optimiser" and reasons[16, 405.0, 8192] == "keys and values" and pd.isna(reasons[8, 7.62, 112])
    counted = studies.unfit(frame)
    assert counted["points"].tolist() == [12, 12] and counted.drop(columns="points").sum(axis=1).tolist() == [frame["reason"].count() // 2] * 2


FRAME = pd.DataFrame({
    "setup": "setup2", "method": ["sync", "recompute", "loglinear"] * 4, "devices": [1] * 6 + [2] * 6, "batch": ([32] * 3 + [64] * 3) * 2,
    "billions": 8.19, "model": "qwen3-8b", "training_steps": 3600, "reason": [None] * 9 + ["too few devices"] * 3, "busy_frac": 0.5,
    "seconds_per_step": [4.0, 2.0, 1.6, 4.0, 2.0, 1.96, 3.0, 1.5, 1.2, None, None, None],
})  # fmt: skip


def test_gains_are_over_the_baseline_of_each_method_and_blank_where_one_does_not_fit():
    found = studies.gains(FRAME).pivot(index=["devices", "batch"], columns="method", values="speedup")
    assert found["recompute"].tolist()[:3] == [2.0, 2.0, 2.0] and found["loglinear"].tolist()[:3] == [1.25, 1.02041, 1.25]
    assert found.loc[(2, 64)].isna().all() and list(found) == ["loglinear", "recompute"]


def test_figures_show_what_does_not_fit_the_line_and_device_hours():
    maps = simulated_figures.maps(FRAME)
    assert [ax.get_title() for ax in maps.axes[:2]] == ["sync: 1 of 4 do not fit, simulated"] * 2 and maps.axes[0].get_xlabel() == "devices"
    gains = simulated_figures.gains(studies.gains(FRAME).assign(map="work"))
    lines = {ax.get_title().split()[0]: len(ax.collections) for ax in gains.axes[:2]}
    assert lines == {"recompute": 0, "A-3PO": 1}, "A-3PO gains 2 % at one point and 25 % at others, recompute pays everywhere"
    hours = simulated_figures.hours(FRAME[FRAME["batch"] == 32])
    curves = {line.get_gid(): line.get_xydata().tolist() for line in hours.axes[0].get_lines() if len(line.get_xdata())}
    assert curves["loglinear"] == [[1.6, 1.6], [1.2, 2.4]]  # hours of 3,600 steps; on two devices twice as many device-hours


def test_long_rounds_come_in_longer_pieces():
    offset, pieces = simulated._pieces(np.array([1000, 20]))
    assert offset.tolist() == [0, 32, 33] and pieces.tolist() == [*[32] * 31, 8, 20]  # 1,000 tokens in 32 pieces at most
    assert simulated._pieces(np.array([20]))[1].tolist() == [8, 8, 4]
