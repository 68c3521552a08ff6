"""The schedules under the model clock with scripted workers, which check every batch that they are given (tests/scripted.py)."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import BOUNDS, DigitTask, RandomCosts, Scripted, encode, experiment, train

from nowait.batch import STOP, Request, Rollouts, Segments
from nowait.schedules.common import staleness_of
from nowait.tasks.prompts import Prompts
from nowait.workers.scorers import GraderFailed

GRAIN = 2.0**-20  # seconds: sums of its multiples are exact, so that runs shifted in time can be compared with ==


def constant(seconds: dict[str, float]) -> RandomCosts:
    return RandomCosts(**{name: (0.0, 0.0) for name in BOUNDS} | {name: (s, s) for name, s in seconds.items()})


@pytest.mark.parametrize(("eta", "size", "tail"), [(0, 3, 1.0), (1, 1, 2.0), (2, 3, 1.0), (4, 1, 1.5), (4, 4, 1.5), (8, 2, 1.0)])
@pytest.mark.parametrize("slow", ["learner", "sampler"])
def test_no_token_is_ever_older_than_eta_and_every_request_is_trained_on_once(eta, size, tail, slow):
    costs = RandomCosts(eta, learner_update=(1.0, 2.0)) if slow == "learner" else RandomCosts(eta, learner_update=(0.0, 0.1))
    run = train(experiment(max_staleness=eta, batch_size=size, steps=25, slots=10), costs, tail=tail)
    assert len(run.steps) == 25
    assert max(run.column("stale/d_max")) <= eta and run.column("stale/d_max") == run.column("train/oldest")
    trained = sum(run.column("rollout/requests"), [])
    assert len(trained) == len(set(trained)) == 25 * size


def test_a_learner_bound_run_is_as_stale_as_it_may_be_and_continues_sequences_under_new_weights():
    run = train(experiment(max_staleness=3, steps=20), RandomCosts(learner_update=(1.0, 2.0)))
    assert run.column("stale/d_max")[5:] == [3] * 15
    run = train(experiment(max_staleness=3, steps=20), RandomCosts(learner_update=(0.1, 0.3)))
    assert max(run.column("stale/mixed_frac")) > 0  # the learner checks the version of every token
    for metrics in run.steps:
        counts = metrics["stale/hist"]
        assert sum(counts) == metrics["train/trained"]
        assert metrics["stale/d_mean"] == pytest.approx(np.average(range(len(counts)), weights=counts))


def test_completion_order_takes_what_finished_first_breaks_the_bound_and_reports_it():
    shape, options = {"max_staleness": 2, "batch_size": 2, "steps": 40, "slots": 10}, {"costs": RandomCosts(learner_update=(0.1, 0.2)), "tail": 2.0}
    run, strict = (train(experiment(order=order, **shape), **options) for order in ("completion", "strict"))
    ended, order = set(), []
    for sequences in run.completed:
        ended.update(sequences)
        order += sorted({s // 2 for s in sequences if ended >= {s, s ^ 1}})
    assert run.column("rollout/requests") == [sorted(order[2 * k : 2 * k + 2]) for k in range(40)]
    assert run.column("stale/d_max") == run.column("train/oldest")
    assert max(run.column("stale/d_max")) > 2 == max(strict.column("stale/d_max"))


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous", "colocated"])
def test_every_generated_token_is_trained_on_or_buffered(kind):
    run = train(experiment(kind=kind, steps=15))
    buffered = run.column("rollout/buffered_tokens")
    assert run.generated == (np.cumsum(run.column("train/trained")) + buffered).tolist()
    assert any(buffered) == (kind == "asynchronous")


@pytest.mark.parametrize(
    ("batch_size", "group_size", "slots", "chunk", "tail"), [(3, 2, 6, 4, 1.0), (4, 3, 5, 1, 1.5), (1, 2, 8, 48, 1.0), (5, 2, 2, 3, 0.0)]
)
def test_eta_0_is_synchronous_to_the_bit_and_the_second(batch_size, group_size, slots, chunk, tail):
    shape = {"batch_size": batch_size, "group_size": group_size, "slots": slots, "chunk": chunk, "max_staleness": 0, "anchor": "behave"}
    together, apart = (train(experiment(kind=kind, max_concurrent=batch_size, **shape), tail=tail) for kind in ("asynchronous", "synchronous"))
    assert together.steps == apart.steps and together.ended == apart.ended
    assert together.column("rollout/buffered_tokens") == [0] * 12


def test_eta_0_trains_on_the_same_even_where_few_requests_run_at_once():
    runs = [train(experiment(kind=kind, max_staleness=0, anchor="behave", max_concurrent=1)) for kind in ("asynchronous", "synchronous")]
    assert runs[0].chain == runs[1].chain


@pytest.mark.parametrize("eval_every", [0, 3])
@pytest.mark.parametrize(
    ("kind", "order"), [("asynchronous", "strict"), ("asynchronous", "completion"), ("synchronous", "strict"), ("colocated", "strict")]
)
def test_a_resumed_run_equals_the_uninterrupted_one(kind, order, eval_every):
    eta = 3 if kind == "asynchronous" else 0
    x = experiment(kind=kind, order=order, max_staleness=eta, steps=14, checkpoint_every=4, eval_every=eval_every)
    options = {"costs": RandomCosts(7), "tail": 1.2, "broken": 30, "rows": 60}
    whole = train(x, **options)
    checkpoints = [i for i, record in enumerate(whole.records) if record.state]
    assert [whole.records[i].step for i in checkpoints] == [4, 8, 12, 14]
    for i in checkpoints[:3]:
        rest = train(x, state=pickle.loads(pickle.dumps(whole.records[i].state)), **options)
        assert [r.step for r in rest.records] == [r.step for r in whole.records[i + 1 :]]
        for ours, theirs in zip(rest.records, whole.records[i + 1 :], strict=True):
            assert ours.metrics == theirs.metrics
            assert {name: r.tobytes() for name, r in ours.rewards.items()} == {name: r.tobytes() for name, r in theirs.rewards.items()}
        assert rest.records[-1].state["scorer"]["graded"] == 14 * 6
        assert rest.chain == whole.chain and rest.ended == whole.ended
        assert pickle.dumps(rest.records[-1].state) == pickle.dumps(whole.records[-1].state)
    in_flight = [len(whole.records[i].state["sampler"]["running"]) for i in checkpoints] if kind == "asynchronous" else [1]
    assert max(in_flight) > 0 and any(whole.column("train/dropped"))


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_a_checkpoint_is_a_snapshot_and_no_view_of_the_running_training(kind):
    run = train(experiment(kind=kind, checkpoint_every=2))
    states = [record.state for record in run.records if record.state]
    assert len(states) == 6 and [pickle.dumps(state) for state in states] == run.states


def test_evaluation_costs_a_synchronous_run_no_time_and_changes_nothing():
    plain, evaluated = (train(experiment(kind="synchronous", eval_every=every), RandomCosts(grain=GRAIN)) for every in (0, 5))
    assert evaluated.steps == plain.steps
    assert [r.step for r in evaluated.records if "eval/reward" in r.metrics] == [0, 5, 10, 12]
    evaluating = sum(s.end - s.start for s in evaluated.timeline.spans if s.worker == "evaluator")
    assert evaluating > 4 and evaluated.ended == plain.ended + evaluating
    assert evaluated.column("time/elapsed")[-1] == sum(evaluated.column("time/step")) == plain.ended


@pytest.mark.parametrize("eta", [1, 4])
def test_neither_length_nor_content_of_an_evaluation_touches_asynchronous_training(eta):
    """It stops both loops like a checkpoint does; apart from that the run is the same."""

    def run(evaluator: float, prompts: int = 5, **every):
        costs = RandomCosts(eta, grain=GRAIN, evaluator_decode=(evaluator, 2 * evaluator))
        return train(experiment(max_staleness=eta, steps=15, **every), costs, prompts=prompts)

    barrier = run(0.0, checkpoint_every=4)
    for other in (run(0.0, eval_every=4), run(1.0, eval_every=4), run(100.0, 9, eval_every=4), run(1.0, eval_every=4, checkpoint_every=4)):
        assert other.steps == barrier.steps
    assert barrier.column("time/elapsed")[-1] == sum(barrier.column("time/step"))


def test_all_work_of_an_asynchronous_run_lies_within_its_steps_even_when_evaluations_stop_it():
    run = train(experiment(eval_every=4), RandomCosts(grain=GRAIN))
    work = {"sampler": run.column("time/generate") + run.column("time/sync"), "learner": run.column("time/train")}
    for worker, seconds in work.items():
        assert sum(seconds) == sum(s.end - s.start for s in run.timeline.spans if s.worker == worker)


def test_evaluation_samples_the_newest_weights_on_the_same_prompts_every_time():
    run = train(experiment(eval_every=4))
    rewards = [r.rewards["eval"] for r in run.records if r.rewards]
    assert [r.shape for r in rewards] == [(5, 2)] * 4
    assert len({r.tobytes() for r in rewards}) == 4  # tokens, and with them rewards, depend on the version
    for record in run.records:
        if record.rewards:
            assert record.metrics["eval/reward"] == pytest.approx(record.rewards["eval"].mean(), abs=1e-6)


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous", "colocated"])
@pytest.mark.parametrize("fail_round", [1, 9])
def test_a_failing_sampler_surfaces_as_itself_within_the_step_and_leaves_no_task(kind, fail_round):
    x = experiment(kind=kind)
    costs = {"costs": constant({"sampler_decode": 1.0, "learner_update": 3.0})}
    run, whole = train(x, fail_round=fail_round, catch=Scripted, **costs), train(x, **costs)
    assert isinstance(run.error, Scripted) and run.error.args == (f"round {fail_round}",)
    assert run.leftover == []
    rounds = [s for s in whole.timeline.spans if (s.device, s.method) == ("a", "decode")]
    assert rounds[fail_round - 1].start <= run.ended <= rounds[fail_round - 1].start + 3.0
    assert run.steps == whole.steps[: len(run.steps)]


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous", "colocated"])
def test_a_failing_learner_surfaces_as_itself_and_leaves_no_task(kind):
    run = train(experiment(kind=kind), fail_step=3, catch=Scripted)
    assert isinstance(run.error, Scripted) and run.error.args == ("step 3",)
    assert len(run.steps) == 3 and run.leftover == []


def test_a_consumer_that_stops_early_leaves_no_task():
    run = train(experiment(), stop_after=4)
    assert len(run.steps) == 4 and run.leftover == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_configuration_deadlocks(data):
    whole = st.integers
    group = data.draw(whole(2, 4), "group")
    kind = data.draw(st.sampled_from(["asynchronous"] * 4 + ["synchronous", "colocated"]), "kind")
    x = experiment(
        kind=kind,
        steps=data.draw(whole(1, 9), "steps"),
        batch_size=data.draw(whole(1, 5), "batch"),
        group_size=group,
        max_staleness=data.draw(whole(0, 5), "eta") if kind == "asynchronous" else 0,
        max_concurrent=data.draw(st.none() | whole(1, 12), "concurrent"),
        order=data.draw(st.sampled_from(["strict", "completion"]), "order"),
        slots=data.draw(whole(group, 12), "slots"),
        chunk=data.draw(whole(1, 60), "chunk"),
        eval_every=data.draw(whole(0, 3), "eval"),
        checkpoint_every=data.draw(whole(0, 3), "checkpoint"),
        anchor="behave" if kind == "colocated" else data.draw(st.sampled_from(["behave", "recompute"]), "anchor"),
    )
    bounds = st.sampled_from([(0.0, 0.0), (0.1, 0.1), (0.0, 1.0), (0.5, 5.0)])
    costs = RandomCosts(data.draw(whole(0, 99), "seed"), **{name: data.draw(bounds, name) for name in BOUNDS})
    tail = data.draw(st.sampled_from([0.0, 1.0, 2.0]), "tail")
    run = train(x, costs, tail=tail)
    assert run.leftover == []
    assert [r.step for r in run.records if r.step] == list(range(1, x.schedule.steps + 1))
    for state in [r.state for r in run.records if r.state and r.step < x.schedule.steps][:1]:
        assert train(x, costs, tail=tail, state=state).chain == run.chain


def test_colocated_and_disaggregated_synchronous_training_see_the_same_batches():
    apart, together = (train(experiment(kind=kind, slots=4)) for kind in ("synchronous", "colocated"))
    assert together.chain == apart.chain
    assert together.column("rollout/requests") == apart.column("rollout/requests")


def test_colocated_devices_sample_and_train_at_the_same_time():
    costs = constant({"sampler_decode": 1.0, "learner_gradient": 2.0})
    run = train(experiment(kind="colocated", batch_size=4), costs, tail=0.0)  # one round, then two minibatches
    assert run.column("time/step") == [1.0 + 2 * 2.0] * 12
    assert run.column("time/generate") == [1.0] * 12 and run.column("time/train") == [4.0] * 12
    assert run.column("time/idle_gen") == run.column("time/idle_train") == [0.0] * 12


@pytest.mark.parametrize(("s", "u", "f"), [(2.0, 3.0, 0.5), (3.0, 2.0, 0.5), (2.0, 2.0, 1.0), (3.0, 2.5, 1.0)])
def test_step_times_follow_the_papers_arithmetic(s, u, f):
    """With s, u, f the seconds of sampling, update and forward: s + u, max(s, u + f), max(s, u)."""
    costs = constant({"sampler_decode": s, "learner_update": u, "learner_logp": f})
    shape = {"batch_size": 4, "group_size": 2, "slots": 8, "steps": 16}  # a batch fills the slots for one round

    def steady(**changes) -> set[float]:
        return set(train(experiment(**shape, **changes), costs, tail=0.0).column("time/step")[6:])

    assert steady(kind="synchronous") == {s + u}
    assert steady(max_staleness=2, anchor="recompute") == {max(s, u + f)}
    assert steady(max_staleness=2, anchor="loglinear") == {max(s, u)}


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_busy_and_idle_seconds_of_a_step_add_up_to_it(kind):
    run = train(experiment(kind=kind, anchor="recompute", steps=15))
    for m in run.steps:
        assert m["time/generate"] + m["time/sync"] + m["time/idle_gen"] == pytest.approx(m["time/step"])
        assert m["time/prox_forward"] + m["time/train"] + m["time/idle_train"] == pytest.approx(m["time/step"])
        assert m["perf/busy_frac"] == pytest.approx(1 - (m["time/idle_gen"] + m["time/idle_train"]) / (2 * m["time/step"]))
    assert sum(run.column("time/idle_train")) > 0


def test_the_slower_side_is_never_idle():
    shape = {"batch_size": 4, "group_size": 2, "slots": 8, "max_staleness": 2}
    costs = [constant({"sampler_decode": s, "learner_update": u}) for s, u in ((3.0, 2.0), (2.0, 3.0))]
    sampler_bound, learner_bound = (train(experiment(**shape), c, tail=0.0) for c in costs)
    assert set(sampler_bound.column("time/idle_gen")[1:]) == {0.0} and set(sampler_bound.column("time/idle_train")[1:]) == {1.0}
    assert set(learner_bound.column("time/idle_train")[1:]) == {0.0} and learner_bound.column("time/idle_gen")[6:] == [1.0] * 6


def summary(run) -> list:
    return [run.chain, run.ended, run.column("time/step"), run.column("stale/hist")]


def test_two_processes_with_different_hash_seeds_train_exactly_alike():
    program = "import test_schedules as t; print(t.summary(t.train(t.experiment(max_staleness=3, eval_every=4))))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])

    def printed(hash_seed: str) -> str:
        environment = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": hash_seed}
        return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True).stdout

    assert printed("1") == printed("2") == f"{summary(train(experiment(max_staleness=3, eval_every=4)))}\n"


def test_workers_in_processes_train_exactly_like_workers_in_place():
    x = experiment(max_staleness=3, steps=6, eval_every=3, checkpoint_every=4)
    inline, process = train(x), train(x, process=True)
    assert process.steps == inline.steps and process.timeline.spans == inline.timeline.spans


def test_a_request_that_cannot_be_graded_keeps_its_place_and_leaves_the_loss():
    run, clean = (train(experiment(steps=25, checkpoint_every=25), broken=broken, rows=80) for broken in (20, None))
    assert run.column("rollout/requests") == clean.column("rollout/requests")
    assert 0 < run.records[-1].state["scorer"]["failed"] < sum(run.column("train/dropped"))
    for m in run.steps:
        assert m["rollout/grader_failed_frac"] == pytest.approx(m["train/dropped"] / 6)
        assert m["train/dropped"] % 2 == 0  # whole requests


def test_too_many_failing_grades_stop_the_run_with_the_reason():
    run = train(experiment(steps=40), broken=4, rows=60, catch=GraderFailed)
    assert isinstance(run.error, GraderFailed) and "no grade" in str(run.error) and run.leftover == []
    assert 100 / 6 - 1 < len(run.steps) < 30


def test_a_token_from_the_future_is_an_error():
    rollouts = Rollouts(1)
    rollouts.admit([Request(0, np.ones(1, np.int32), 1, 8)])
    rollouts.add(Segments(np.zeros(1, np.int64), np.array([0, 2]), np.zeros(2, np.int32), np.zeros(2, np.float32), np.array([STOP]), version=2))
    batch = rollouts.take([0], step=1)
    with pytest.raises(ValueError, match=r"step 1: token versions 2 to 2, which must lie in \[0, 1\]"):
        staleness_of(batch)


def test_prompts_shuffle_every_epoch_and_number_requests_for_ever():
    prompts = Prompts(DigitTask(rows=7), encode, seed=1, n=2, max_prompt_tokens=32, max_new_tokens=8)
    requests = prompts.next(10) + prompts.next(4)
    assert [r.id for r in requests] == list(range(14))
    rows = [r.row for r in requests]
    assert sorted(rows[:7]) == sorted(rows[7:]) == list(range(7)) and rows[:7] != rows[7:]
    restored = Prompts(DigitTask(rows=7), encode, seed=1, n=2, max_prompt_tokens=32, max_new_tokens=8)
    restored.set_state({"position": 5})
    assert [(r.id, r.row, r.prompt.tolist()) for r in restored.next(9)] == [(r.id, r.row, r.prompt.tolist()) for r in requests[5:]]
