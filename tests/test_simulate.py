"""The real schedules in simulated time: closed forms on a toy device without overheads, and the shipped setups."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scripted import experiment

from nowait import published
from nowait.config import Experiment, LearnerConfig
from nowait.config_files import ConfigError
from nowait.runtime.hardware import DoesNotFit
from nowait.simulate import (
    METHODS,
    Assumptions,
    Calibration,
    Simulation,
    assumptions,
    compare,
    evaluation_seconds,
    fit,
    load,
    seconds_per_step,
    simulate,
)
from nowait.workers.simulated import Lengths, RewardCurve

ROOT = Path(__file__).parents[1]
# A pass over the weights takes 1 s, as do 4 tokens of arithmetic: 1 s per decode step of up to 4 rows, 0.25 s per token that is read.
# Training takes 1 s per token and 14 s for the optimiser, new weights 0.5 s. Attention, cache, latency and overheads cost nothing.
HARDWARE = """{name: toy, flops: 8.0e+9, memory: 1.0e+12, bandwidth: 2.0e+9, link: 4.0e+9, network: 4.0e+9, node: 64, latency: 0,
               forward_efficiency: 1, train_efficiency: 0.75, bandwidth_efficiency: 1, decode_overhead: 0, pass_overhead: 0}"""
MODELS = "toy: {parameters: 1.0e+9, layers: 1, hidden: 1, heads: 0, kv_heads: 0, head_dim: 1}"
LENGTHS = Lengths(median=8, cap=99, prompt=1)  # 2 requests of 2 samples: 9 s to generate with the prompts, 36 tokens to train on
TAIL = Lengths(median=12, sigma=0.8, cap=99, prompt=1)


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    """Settings of one's own, in the working directory."""
    for name, text in (("hardware/toy", HARDWARE), ("simulation/models", MODELS)):
        file = tmp_path / "paper_configs" / f"{name}.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shipped(monkeypatch):
    monkeypatch.chdir(ROOT)


def assumed(
    lengths: Lengths = LENGTHS, reward_model: str | None = None, devices: str = "ab", rewards: RewardCurve | None = None, **calibration: float
):
    return Assumptions(hardware="toy", actor="toy", reward_model=reward_model, devices=dict.fromkeys(devices, 1), lengths=lengths,
                       rewards=rewards or RewardCurve(), calibration=Calibration(**calibration))  # fmt: skip


def training(kind: str, **settings) -> Experiment:
    """Two requests of two samples a step, in one minibatch; no more in flight, and each in one decode round."""
    small = {"batch_size": 2, "group_size": 2, "slots": 4, "chunk": 99, "max_concurrent": 2, "anchor": "behave"}
    return experiment(kind, **small | settings).model_copy(update={"learner": LearnerConfig(minibatches=1)})


def ppo(three: bool = False, **settings) -> Experiment:
    """Two requests of one sample a step, in rounds of 8 tokens, read by a reward model and a reference on a device of their own (or two)."""
    small = {"batch_size": 2, "group_size": 1, "advantage": "gae", "slots": 6, "delta": 1, "delta_max": 1, "chunk": 8, "steps": 6}
    x = experiment("overlapped", **small | {"intra": False, "inter": False, "anchor": "behave"} | settings)
    frozen = {"b": ["reward"], "c": ["reference"]} if three else {"b": ["reward", "reference"]}
    runtime = x.runtime.model_copy(update={"placement": {"a": ["sampler", "learner"], **frozen}})
    return x.model_copy(update={"runtime": runtime, "learner": LearnerConfig(minibatches=1)})


def column(found: Simulation, name: str = "time/step") -> list[float]:
    return [row[name] for row in found.rows]


# Closed forms: s seconds to generate with new weights, f to compute log-probs, u to update


def test_a_synchronous_step_is_generation_and_update_and_from_the_second_on_the_transfer():
    found = simulate(training("synchronous"), assumed(update=0.2))
    assert column(found) == pytest.approx([9 + 10] + [0.5 + 9 + 10] * 11)
    assert column(found, "time/generate") == pytest.approx([9] * 12) and column(found, "time/train") == pytest.approx([10] * 12)
    assert column(found, "time/sync") == pytest.approx([0] + [0.5] * 11)


def test_rounds_are_of_the_assumed_chunk_which_is_the_same_work():
    fine = simulate(training("synchronous", steps=1), assumed().model_copy(update={"chunk": 2}))
    assert [span.end - span.start for span in fine.timeline.spans if span.method == "decode"] == pytest.approx([3, 2, 2, 2])
    assert column(fine) == pytest.approx(column(simulate(training("synchronous", steps=1), assumed())))


@pytest.mark.parametrize(("update", "seconds"), [(0.1, 9.5), (0.18, 9.5), (0.2, 10), (0.4, 20)])
def test_an_asynchronous_step_takes_as_long_as_the_slower_of_sampler_and_learner(update, seconds):
    """s = 9.5, u = 50 update."""
    found = simulate(training("asynchronous", steps=30), assumed(update=update))
    assert column(found)[0] == pytest.approx(9 + 50 * update)
    assert column(found)[8:] == pytest.approx([seconds] * 22)


@pytest.mark.parametrize(("forward", "seconds"), [(0.25, 9.5), (0.4, 9.5), (1.0, 14), (2.0, 23)])
def test_a_forward_pass_before_the_update_counts_only_where_the_learner_is_the_slower(forward, seconds):
    """s = 9.5, u = 5, f = 9 forward."""
    found = simulate(training("asynchronous", steps=30, anchor="recompute"), assumed(update=0.1, forward=forward))
    assert column(found)[8:] == pytest.approx([seconds] * 22)
    assert found.summary(8)["forward"] == pytest.approx(9 * forward)


def test_without_staleness_asynchrony_gains_nothing():
    what = assumed(TAIL, update=0.2)
    sync, strict, stale = (simulate(x, what) for x in (training("synchronous"), *(training("asynchronous", max_staleness=eta) for eta in (0, 1))))
    assert column(strict) == pytest.approx(column(sync))
    assert sum(column(stale)) < 0.8 * sum(column(sync))


@pytest.mark.parametrize("eta", [0, 1, 3])
@pytest.mark.parametrize("update", [0.05, 0.2, 0.8])
def test_no_token_is_older_than_eta(eta, update):
    x = training("asynchronous", max_staleness=eta, chunk=4, steps=40, max_concurrent=None)
    oldest = max(column(simulate(x, assumed(TAIL, update=update)), "stale/d_max"))
    assert oldest <= eta and (update < 0.8 or oldest == eta)  # a slow learner meets the bound


def test_colocated_devices_both_generate_and_both_train():
    """A request each: with a row less to wait for, and half of the tokens to train on."""
    found = simulate(training("colocated"), assumed(update=0.2))
    assert column(found) == pytest.approx([9 + 6.4] + [0.5 + 9 + 6.4] * 11)  # (18 + 14) x 0.2
    assert column(found, "perf/busy_frac") == pytest.approx([1.0] * 12)
    for method in ("load", "decode", "gradient"):
        assert {span.device for span in found.timeline.spans if span.method == method} == {"a", "b"}


# Overlap

LONG = Lengths(median=24, cap=99, prompt=2)  # 2 rows in 3 rounds: 1 s for the prompts, 8 s a round; 52 tokens to read and to train on


@pytest.mark.parametrize(
    ("score", "sequential", "streamed"),
    [
        (1.0, 25 + 13, 25 + 4),  # a chunk is read in 4 s while the next one is written: the last one remains
        (1.6, 25 + 20.8, 25 + 6.4),
        (2.0, 25 + 26, 25 + 10),  # the first chunk brings the prompts and takes 10 s: 2 s late from there on
        (4.0, 25 + 52, 9 + 52),  # reading is the slowest: all is hidden behind it but the first chunk's generation
    ],
)
def test_a_pipeline_of_sampler_readers_and_learner_takes_its_slowest_stage_and_the_ends(score, sequential, streamed):
    what = assumed(LONG, reward_model="toy", devices="abc", update=0.1, score=score)  # u = (52 + 14) x 0.1
    for intra, seconds in ((False, sequential), (True, streamed)):
        found = simulate(ppo(three=True, intra=intra), what)
        assert column(found) == pytest.approx([seconds + 6.6] + [seconds + 0.5 + 6.6] * 5)
        assert column(found, "time/reward") == column(found, "time/ref") == pytest.approx([13 * score] * 6)


def test_two_readers_on_one_device_take_turns():
    apart = column(simulate(ppo(three=True), assumed(LONG, reward_model="toy", devices="abc")))
    assert column(simulate(ppo(), assumed(LONG, reward_model="toy"))) == pytest.approx([seconds + 13 for seconds in apart])


def test_a_scorer_that_costs_nothing_leaves_nothing_to_overlap_within_a_step():
    def steps(intra: bool, **costs) -> list[float]:
        return column(simulate(ppo(intra=intra), assumed(TAIL, update=0.1, **costs)))

    for free in ({"reward_model": "toy", "score": 0.0}, {"reward_model": None, "score": 0.0}):
        assert steps(True, **free) == steps(False, **free)
    assert sum(steps(True, reward_model="toy")) < 0.9 * sum(steps(False, reward_model="toy"))


def test_responses_of_one_length_leave_nothing_to_overlap_between_steps():
    def steps(lengths: Lengths, inter: bool) -> list[float]:
        return column(simulate(ppo(inter=inter, rule="fixed", steps=40), assumed(lengths, update=0.1, score=0.0)))

    assert steps(LENGTHS, True) == steps(LENGTHS, False)
    assert sum(steps(TAIL, True)) < 0.9 * sum(steps(TAIL, False))


def test_a_chunk_is_chosen_by_its_seconds_per_token():
    def chosen(candidates: list[int], **settings) -> list[int]:
        x = ppo(chunk_candidates=candidates, chunk_period=20, steps=8, **settings)
        return column(simulate(x, assumed(LONG, update=0.25)), "overlap/chunk")

    assert chosen([24, 8])[4:] == [24] * 4 and chosen([8, 24])[4:] == [8] * 4  # nothing depends on it: the first one, however few its rounds
    assert chosen([24, 8], intra=True)[4:] == [8] * 4  # less is left to read at the end


def test_rules_for_delta_see_the_reward_curve():
    def delta(start: float, end: float) -> int:
        x = ppo(inter=True, rule="slope", window=2, delta=2, delta_max=4, steps=12)
        return column(simulate(x, assumed(TAIL, rewards=RewardCurve(start=start, end=end, tau=20.0))), "overlap/delta")[-1]

    assert (delta(0.0, 1.0), delta(1.0, 0.0)) == (4, 0)


# Accounts


def stages(found: Simulation, x: Experiment, device: str) -> float:
    """Seconds per step of the stages that a device hosts (of two that host the same: their mean)."""
    mean, roles = found.summary(), x.runtime.placement[device]
    by_role = {"sampler": ("generate", "transfer"), "learner": ("forward", "update"), "reward": ("reward",), "reference": ("reference",)}
    return sum(mean[stage] for role in roles for stage in by_role[role])


RUNS = {
    "synchronous": (training("synchronous", chunk=4, anchor="recompute"), assumed(TAIL, update=0.2)),
    "colocated": (training("colocated", chunk=4), assumed(TAIL, update=0.2)),
    "asynchronous": (training("asynchronous", chunk=4, anchor="recompute", max_concurrent=None), assumed(TAIL, update=0.2)),
    "long rounds": (training("asynchronous", max_concurrent=None), assumed(TAIL, update=0.01)),
    "overlapped": (ppo(intra=True, inter=True, anchor="ppo"), assumed(TAIL, reward_model="toy", update=0.1)),
    "three devices": (ppo(three=True, inter=True), assumed(TAIL, reward_model="toy", devices="abc", update=0.1)),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_device_is_busy_with_its_stages_and_idle_for_the_rest_of_the_wall_time(run):
    x, what = RUNS[run]
    found = simulate(x, what)
    mean, step = found.summary(), np.mean(column(found))
    assert column(found, "time/elapsed")[-1] == pytest.approx(step * len(found.rows)) and mean["seconds_per_step"] == pytest.approx(step)
    for name, roles in x.runtime.placement.items():
        busy = np.mean([mean[f"busy_{other}"] for other, same in x.runtime.placement.items() if same == roles])
        assert busy * step == pytest.approx(stages(found, x, name)) and 0 < busy <= 1 + 1e-9
        for idle in [key for role, key in (("sampler", "time/idle_gen"), ("learner", "time/idle_train")) if role in roles]:
            assert busy * step + np.mean(column(found, idle)) == pytest.approx(step)
        calls = sorted((span.start, span.end) for span in found.timeline.spans if span.device == name)
        assert all(end <= start for (_, end), (start, _) in pairwise(calls))  # one thing at a time


def test_shares_weigh_devices_by_what_they_stand_for():
    what = assumed(LONG, reward_model="toy", update=0.1).model_copy(update={"devices": {"a": 7, "b": 1}})
    mean = simulate(ppo(), what).summary()
    assert mean["busy_a"] + mean["busy_b"] == pytest.approx(1) and 0 < mean["busy_b"] < 1  # in turn
    assert mean["busy_frac"] == pytest.approx((7 * mean["busy_a"] + mean["busy_b"]) / 8)
    assert mean["device_seconds"] == pytest.approx(8 * mean["seconds_per_step"])


def test_occupancy_is_tokens_per_slot_and_decode_step():
    for slots, occupancy in ((8, 1.0), (16, 0.5)):
        found = simulate(training("synchronous", slots=slots, batch_size=4), assumed())  # 8 rows of 8 tokens
        assert column(found, "perf/occupancy") == [occupancy] * 12
        assert found.summary()["tokens_per_s"] == pytest.approx(64 / np.mean(column(found)))


def test_methods_are_given_the_same_work():
    def tokens(x: Experiment) -> list[float]:
        return column(simulate(x, assumed(TAIL)), "train/response_tokens")

    synchronous = tokens(training("synchronous"))
    assert len(set(synchronous)) > 6
    for x in (training("colocated"), training("asynchronous", max_staleness=0), training("asynchronous", max_staleness=3)):
        assert tokens(x) == synchronous


def test_a_model_that_does_not_fit_is_reported_before_anything_runs():
    with pytest.raises(DoesNotFit, match=r"weights of 3000 GB exceed .* of a replica on toy: take tensor_parallel 4 or more"):
        Path("paper_configs/simulation/models.yaml").write_text(MODELS.replace("1.0e+9", "1.5e+12"))
        simulate(training("synchronous"), assumed())


def test_an_evaluation_generates_its_prompts_once():
    """5 prompts of 2 samples in 4 slots: waves of 4, 4 and 2 rows, 8 s each; prompts are prefilled as they come, 1 s a wave."""
    x = training("synchronous")
    x = x.model_copy(update={"evaluation": x.evaluation.model_copy(update={"prompts": 5, "samples": 2})})
    assert evaluation_seconds(x, assumed()) == pytest.approx(3 * 9)
    every = x.model_copy(update={"schedule": x.schedule.model_copy(update={"eval_every": 6})})
    assert seconds_per_step(every, assumed(), 12)[0] - seconds_per_step(x, assumed(), 12)[0] == pytest.approx(27 / 6)


# Repetition

AGAIN = """
import json
from nowait.simulate import load, simulate
runs = [simulate(*load("a3po/setup1", "recompute", ["schedule.batch_size=16"]), steps=6, seed=3),
        simulate(*load("oppo/stackexchange_7b", "both", ["schedule.batch_size=16"]), steps=8, seed=3)]
print(json.dumps([[run.rows, run.summary(2), [vars(span) for span in run.timeline.spans]] for run in runs]))
"""


def test_a_simulation_gives_the_same_bytes_again_and_in_another_process(shipped, capsys):
    for _ in range(2):
        exec(AGAIN, {})
    first, second = capsys.readouterr().out.splitlines()
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, env=env, check=True, timeout=120).stdout.strip()
    assert first == second == other and len(json.loads(other)) == 2


def test_another_seed_is_another_run():
    assert len({simulate(training("synchronous"), assumed(TAIL), seed=seed).rows[-1]["time/elapsed"] for seed in range(5)}) == 5


@pytest.mark.slow
def test_1100_asynchronous_steps_of_setup_2_take_seconds(shipped):
    """Asked: 5 s of processor time; it takes 3.6."""
    x, what = load("a3po/setup2", "loglinear", ["schedule.steps=1100"])
    start = time.process_time()
    assert len(simulate(x, what).rows) == 1100
    assert time.process_time() - start < 8  # a slow machine


SWEEP = r"""
import json, re, resource, time
from pathlib import Path
from nowait.simulate import load, simulate
simulate(*load("oppo/stackexchange_7b", "both"), steps=2)  # imports and files are paid for once
start = time.process_time()
for delta in (2, 4, 6, 8, 12):
    run = simulate(*load("oppo/stackexchange_7b", "both", [f"overlap.{key}={delta}" for key in ("delta", "delta_max")]), steps=100)
    assert len(run.rows) == 100
took = (time.process_time() - start) / 5
status = Path("/proc/self/status")  # on Linux, ru_maxrss is at least the parent's
peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) if status.exists() else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([took, peak]))
"""


@pytest.mark.slow
def test_a_sweep_over_oppo_configurations_takes_about_a_second_each_and_under_500_mb(shipped):
    """Asked: 0.6 s a configuration, so that 200 take 2 minutes; a slow machine may need twice that."""
    out = subprocess.run([sys.executable, "-c", SWEEP], capture_output=True, text=True, check=True, timeout=120).stdout
    seconds, memory = json.loads(out)
    assert seconds < 1.5 and memory < 500e6


def test_a_simulation_runs_inside_an_event_loop_too():
    async def notebook() -> Simulation:
        return simulate(training("synchronous"), assumed())

    assert asyncio.run(notebook()).rows == simulate(training("synchronous"), assumed()).rows


# Assumptions


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ("a3po/setup3", [], r"setup3: is not in this file; there are setup1, setup2"),
        ("a4po/setup1", [], "no such file or shipped config"),
        ("a3po/setup1", ["hardwear=h200"], "hardwear: "),
        ("a3po/setup1", ["lengths.mean=200"], r"lengths\.mean: "),
        ("a3po/setup1", ["devices.a=some"], r"devices\.a: .*integer"),
        ("a3po/setup1", ["devices.a=0"], r"devices\.a: .*greater"),
        ("a3po/setup1", ["lengths.median=long"], r"lengths\.median: .*number"),
        ("a3po/setup1", ["lengths.median=0"], r"lengths\.median: .*greater"),
        ("a3po/setup1", ["lengths.difficulty=2"], r"lengths\.difficulty: .*less"),
        ("a3po/setup1", ["rewards.tau=0"], r"rewards\.tau: .*greater"),
        ("a3po/setup1", ["calibration.update=-1"], r"calibration\.update: .*greater"),
        ("a3po/setup1", ["chunk"], "write key=value"),
    ],
)
def test_assumptions_that_make_no_sense_are_reported_with_their_key(config, overrides, message, shipped):
    with pytest.raises(ConfigError, match=message):
        assumptions(config, overrides)


def test_an_override_reaches_experiment_or_assumptions_by_its_first_word(shipped):
    x, what = load("a3po/setup1", "recompute", ["schedule.max_staleness=3", "lengths.median=500", "devices.b=12", "sampler.slots=64", "chunk=5"])
    plain_x, plain = load("a3po/setup1", "recompute")
    assert (x.schedule.max_staleness, x.sampler.slots, x.algorithm.anchor) == (3, 64, "recompute")
    assert (what.lengths.median, what.devices, what.chunk) == (500, {"a": 4, "b": 12}, 5)
    assert what.lengths.sigma == plain.lengths.sigma and x.schedule.batch_size == plain_x.schedule.batch_size  # the rest stays
    with pytest.raises(ConfigError, match="schedule.stepz"):
        load("a3po/setup1", "recompute", ["schedule.stepz=3"])


@pytest.mark.parametrize("setup", ["a3po/setup1", "a3po/setup2", *(f"oppo/{name}" for name in published.load("oppo")["tasks"]), "oppo/two_nodes"])
def test_every_method_of_every_shipped_setup_runs(setup, shipped):
    paper, small = setup.split("/")[0], ["schedule.batch_size=8"]
    found = compare(setup, [*small, "sampler.slots=32", "schedule.max_concurrent=8"] if paper == "a3po" else small, steps=3)
    assert list(found) == list(METHODS[paper])
    first = found[METHODS[paper][0]]["seconds_per_step"]
    for row in found.values():
        assert row["speedup"] == pytest.approx(first / row["seconds_per_step"]) and 0 < row["busy_frac"] <= 1 + 1e-9


# Calibration


@pytest.mark.parametrize("method", ["sync", "recompute"])
def test_the_committed_calibration_meets_the_published_baselines_of_a3po(method, shipped):
    facts = published.load("a3po")
    seconds, found = seconds_per_step(*load("a3po/setup1", method))
    assert seconds == pytest.approx(facts["tables"]["seconds_per_step"]["setup1"][method], rel=0.01)
    if method == "recompute":
        assert found["forward"] == pytest.approx(facts["figures"]["proximal_seconds"]["setup1"]["recompute"]["typical"], rel=0.01)


def test_the_committed_calibration_meets_the_published_baseline_of_oppo(shipped):
    seconds, _ = seconds_per_step(*load("oppo/stackexchange_7b", "sequential"))
    assert seconds * 600 / 60 == pytest.approx(published.load("oppo")["tables"]["minutes_to_target"]["stackexchange_7b"]["trl"], rel=0.01)


def test_fitting_meets_the_published_baselines_whatever_is_assumed(shipped):
    small = ["schedule.batch_size=16", "schedule.max_concurrent=16", "evaluation.prompts=64", "lengths.median=300"]
    facts, found = published.load("a3po"), fit("a3po/setup1", small, rounds=5)
    for method in ("sync", "recompute"):
        x, what = load("a3po/setup1", method, small)
        seconds, _ = seconds_per_step(x, what.model_copy(update={"calibration": found}))
        assert seconds == pytest.approx(facts["tables"]["seconds_per_step"]["setup1"][method], rel=0.002)
    x, what = load("oppo/stackexchange_7b", "sequential", ["schedule.batch_size=16"])
    found = fit("oppo/stackexchange_7b", ["schedule.batch_size=16"], rounds=3)
    assert len(set(found.model_dump().values())) == 1
    assert seconds_per_step(x, what.model_copy(update={"calibration": found}))[0] * 10 == pytest.approx(4300, rel=0.002)
