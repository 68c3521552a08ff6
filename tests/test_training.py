from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import exact, experiment, fingerprint, train

from nowait import checkpoint, runs
from nowait.bench import short_training
from nowait.config import load
from nowait.runs import RunFailed
from nowait.workers.scorers import GraderFailed

TIMES = ("time/", "perf/")
LEARNER_BOUND = ("runtime.costs.update_token=1.0e-3", "schedule.max_staleness=4", "schedule.steps=12")


def steps(records) -> list[dict]:
    return [record.metrics for record in records if "train/lr" in record.metrics]


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_training_raises_the_reward_and_numbers_requests_through_all_epochs(tiny, tmp_path):
    records, _ = train(experiment(tiny, "sync", "schedule.steps=12", "schedule.batch_size=4", "sampler.slots=16"), tmp_path)
    rewards = [metrics["rollout/reward_mean"] for metrics in steps(records)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.25
    assert [number for metrics in steps(records) for number in metrics["rollout/requests"]] == list(range(48))  # of 40 rows


def test_asynchrony_repeats_bit_for_bit_in_another_process(tiny, tmp_path):
    overrides = ("schedule.eval_every=3",)
    call = f"tiny.fingerprint(tiny.experiment({tiny!r}, 'loglinear', *{overrides}), {str(tmp_path / 'other')!r})"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    other = subprocess.Popen([sys.executable, "-c", f"import tiny; print({call})"], stdout=subprocess.PIPE, text=True, env=env)
    with other:
        here = fingerprint(experiment(tiny, "loglinear", *overrides), tmp_path / "here")
        assert other.stdout.read().split()[-1] == here


def test_another_seed_is_another_training_on_the_same_evaluation(tiny, tmp_path):
    (one, weights), (other, others) = (train(experiment(tiny, "sync", "schedule.eval_every=6"), tmp_path, seed=seed) for seed in (0, 1))
    assert weights != others and all(a["rollout/reward_mean"] != b["rollout/reward_mean"] for a, b in zip(steps(one), steps(other), strict=True))
    assert exact(one[:1]) == exact(other[:1]) and one[0].step == 0  # untrained: equal weights, prompts and draws


@pytest.mark.parametrize("method", ["behave", "loglinear"])
def test_asynchronous_with_eta_0_is_synchronous(tiny, tmp_path, method):
    settings = ("schedule.eval_every=2",)
    synchronous, expected = train(experiment(tiny, "sync", *settings), tmp_path)
    asynchronous, weights = train(experiment(tiny, method, "schedule.max_staleness=0", *settings), tmp_path)
    assert weights == expected and len(steps(asynchronous)) == 6
    assert exact(asynchronous, TIMES) == exact(synchronous, TIMES)


@pytest.mark.parametrize("method", ["sync", "loglinear", "recompute"])
def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(tiny, tmp_path, method):
    x = experiment(tiny, method, "schedule.steps=8", "schedule.checkpoint_every=2", "schedule.eval_every=4", "learner.warmup_steps=6")
    records, weights = train(x, tmp_path / "whole")
    for step in (2, 4):  # 4: with an evaluation
        (record,) = (r for r in records if r.step == step)
        checkpoint.save(tmp_path / f"{step}", step, record.state)  # after the end: the state is a snapshot
        done, state = checkpoint.latest(tmp_path / f"{step}")
        if method != "sync":
            assert len(state["sampler"]["token"]) and len(set(state["rollouts"]["parts"][:, 2].tolist())) > 1
        rest, resumed = train(x, tmp_path / "resumed", state=state)
        assert done == step and exact(rest) == exact(records[-len(rest) :])
        assert resumed == weights and [r.step for r in rest] == list(range(step + 1, 9))


def test_evaluation_does_not_touch_a_synchronous_training(tiny, tmp_path):
    with_evaluation, without = (train(experiment(tiny, "sync", f"schedule.eval_every={every}"), tmp_path) for every in (1, 0))
    assert with_evaluation[1] == without[1]
    stripped = exact([r for r in with_evaluation[0] if r.step], ("eval/",))
    assert [json.loads(line)[:2] for line in stripped] == [json.loads(line)[:2] for line in exact(without[0])]
    assert [r.step for r in with_evaluation[0] if "eval/reward" in r.metrics] == list(range(7))
    assert all(r.rewards["eval"].shape == (6, 2) for r in with_evaluation[0])


def test_colocated_training_reaches_the_weights_of_the_disaggregated_one(tiny, tmp_path):
    settings = ("learner.lr=1.0e-3", "learner.eps=1.0e-5", "schedule.steps=4")  # Adam divides the noise of tiny gradients by eps
    for method in ("sync", "sync_colocated"):
        train(experiment(tiny, method, *settings), tmp_path / method)
    one, two = (load_file(tmp_path / method / "model.safetensors") for method in ("sync", "sync_colocated"))
    torch.testing.assert_close(two, one, atol=1e-5, rtol=0)


def test_a_bound_learner_trains_on_stale_tokens_and_recompute_clips(tiny, tmp_path):
    """Where this failed, asynchronous training would be synchronous, or clipping silently off."""
    records, _ = train(experiment(tiny, "recompute", *LEARNER_BOUND), tmp_path)
    late = steps(records)[6:]
    assert np.mean([m["stale/d_mean"] for m in late]) >= 2 and max(m["stale/d_max"] for m in steps(records)) == 4
    assert all(m["train/clip_frac"] > 0 for m in late)


def test_methods_train_on_the_same_rollouts_until_their_anchors_differ(tiny, tmp_path):
    """The model clock charges no proximal forward, so the anchor is all that differs."""
    first = [steps(train(experiment(tiny, method, "schedule.steps=1"), tmp_path)[0])[0] for method in ("recompute", "loglinear", "behave")]
    assert len({json.dumps([m["rollout/requests"], m["rollout/reward_mean"], m["time/step"]]) for m in first}) == 1


@pytest.mark.slow
def test_workers_in_processes_train_like_workers_here_and_closing_leaves_nothing_behind(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where published weights go
    settings, before, seen = ("schedule.eval_every=3", "schedule.checkpoint_every=3", "schedule.steps=1000"), threads(), []
    for executor in ("inline", "process"):
        with closing(runs.steps(experiment(tiny, "loglinear", *settings, f"runtime.executor={executor}"), 0)) as records:
            seen.append([next(records) for _ in range(7)])
            assert len(multiprocessing.active_children()) == (2 if executor == "process" else 0)
            start = time.monotonic()
        assert time.monotonic() - start < 10
        assert not multiprocessing.active_children() and threads() == before and not list(tmp_path.iterdir())
    inline, processes = seen
    assert exact(processes) == exact(inline)
    for name, weights in inline[-1].state["learner"]["model"].items():
        np.testing.assert_array_equal(processes[-1].state["learner"]["model"][name], weights)


def test_a_failing_grader_is_counted_and_its_requests_are_left_out(tiny, tmp_path):
    records, _ = train(experiment(tiny, "sync", "task.options={broken: 7}", "schedule.eval_every=6", "schedule.steps=8"), tmp_path)
    failed = [m["rollout/grader_failed_frac"] for m in steps(records)]
    assert set(failed) == {0, 0.5} and all(np.isfinite(m["rollout/reward_mean"]) for m in steps(records))
    evaluation = records[0]
    assert np.isnan(evaluation.rewards["eval"][0]).all() and np.isfinite(evaluation.rewards["eval"][1:]).all()  # row 0 of 6
    assert evaluation.metrics["eval/reward"] == pytest.approx(np.mean(evaluation.rewards["eval"][1:]))


def test_a_grader_that_fails_on_more_than_5_percent_stops_the_training(tiny, tmp_path):
    x = experiment(tiny, "sync", "task.options={broken: 2}", "schedule.batch_size=8", "sampler.slots=32", "schedule.steps=20")
    with pytest.raises(GraderFailed, match=r"failed on \d+ of 1\d\d responses, last on train row \d+: LookupError\('no answer to row"):
        train(x, tmp_path)


def test_a_run_folder_is_read_again_and_refuses_another_run_whether_finished_or_not(tiny, tmp_path):
    x = experiment(tiny, "sync", "schedule.steps=2")
    first, again = (runs.run(x, 0, tmp_path / "done", use_wandb=False) for _ in range(2))
    assert again.manifest == first.manifest and again.metrics.equals(first.metrics) and again.metrics["step"].tolist() == [1, 2]
    assert again.evaluations.empty and list(again.evaluations) == ["step", "set", "row", "reward"]
    broken = experiment(tiny, "sync", "task.options={broken: 1}", "schedule.steps=20")
    with pytest.raises(RunFailed, match="run tiny .sync. stopped after step 1[0-9]: GraderFailed"):
        runs.run(broken, 0, tmp_path / "failed", use_wandb=False)
    for folder in ("done", "failed"):
        with pytest.raises(RunFailed, match=f"{folder} holds a run of other settings, seed or code .sync, seed 0.: choose another folder"):
            runs.run(x, 1, tmp_path / folder, use_wandb=False)


OVERLAPPED = ("schedule.max_staleness=0", "algorithm.advantage=gae", "schedule.group_size=1", "overlap.delta=1", "overlap.delta_max=2")
SCORED = ('reward.path="asset:reward_small"', "runtime.placement={a: [sampler, learner], b: [reward]}", "algorithm.anchor=behave")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more", "place", "call"),
    [("loglinear", (), min, "sampler\\."), ("both", (*OVERLAPPED, *SCORED), max, "reward\\.")],  # the device that is placed first, and the last one
)
def test_a_killed_worker_ends_the_run_with_its_name_and_a_second_call_continues(tiny, tmp_path, method, more, place, call):
    settings = ("runtime.executor=process", "runtime.clock=wall", "schedule.checkpoint_every=2", "schedule.steps=16", *more)
    x, folder, failure = experiment(tiny, method, *settings), tmp_path / "run", []

    def attempt() -> None:
        try:
            runs.run(x, 0, folder, use_wandb=False)
        except RunFailed as error:
            failure.append(str(error))

    thread = threading.Thread(target=attempt)
    thread.start()
    while not (folder / "checkpoint").exists():
        assert thread.is_alive()
        time.sleep(0.02)
    victim = place(multiprocessing.active_children(), key=lambda process: process.pid)
    os.kill(victim.pid, signal.SIGKILL)
    start = time.monotonic()
    thread.join(30)
    assert not thread.is_alive() and time.monotonic() - start < 10 and not multiprocessing.active_children()
    recorded, (done, _) = runs.RunResult(folder).metrics, checkpoint.latest(folder / "checkpoint")
    assert f"run tiny ({method}) stopped after step {recorded['step'].max()}" in failure[0]
    assert re.search(f"died while running {call}", failure[0]) and "Run the same command again: it continues after step 2" in failure[0]
    assert runs.RunResult(folder).manifest["status"] == "failed" and 2 <= done <= recorded["step"].max() < 16
    result = runs.run(x, 0, folder, use_wandb=False)
    assert result.finished and result.metrics["step"].tolist() == list(range(1, 17))
    kept = ["step", "train/grad_norm", "time/elapsed"]
    assert result.metrics[kept][:done].equals(recorded[kept][:done])


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["a3po/setup1", "a3po/setup2"])
def test_at_cpu_scale_the_learner_is_the_bottleneck_so_that_tokens_grow_stale_and_recompute_clips(setup):
    experiment = load(setup, method="recompute")
    eta = experiment.schedule.max_staleness
    rows, _ = short_training(experiment, "model", steps=3 * eta, seed=0)
    late = rows[2 * eta :]
    assert np.mean([row["stale/d_mean"] for row in late]) > 2  # at d = 1 A-3PO would be coupled PPO
    assert np.mean([row["train/clip_frac"] for row in late]) > 0
