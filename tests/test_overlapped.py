"""OPPO's schedule under the model clock with scripted workers, which check every token, reward and log-prob that they are given."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import scripted_workers
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import BOUNDS, RandomCosts, Scripted, experiment, train
from scripted_workers import LONGEST, response_length

from nowait import checkpoint
from nowait.schedules.overcommit import OvercommitController
from nowait.workers.scorers import GraderFailed

SEQUENTIAL, BOTH = {"intra": False, "inter": False}, {"intra": True, "inter": True}
MODES = [SEQUENTIAL, {"intra": True, "inter": False}, {"intra": False, "inter": True}, BOTH]
RULE_ONLY = {"path": None, "kl_coef": 0.0}  # nothing but the task's rule: no frozen model


class LinearCosts:
    """Seconds of decoding and of the update; those of reading per token of the longest piece (`depth`) or per token (`token`)."""

    def __init__(self, decode: float = 1.0, update: float = 2.0, depth: float = 0.0, token: float = 0.0, reference: float = 0.0) -> None:
        self.decode, self.update, self.depth, self.token, self.reference = decode, update, depth, token, reference

    def __call__(self, worker: str, method: str, args: tuple, result: object) -> float:
        if method == "decode":
            return self.decode * np.diff(result.offset).max()
        if method == "prefill":
            longest, tokens = np.diff(args[0].offset).max(), len(args[0].token)
            return self.depth * longest + self.token * tokens if worker == "reward" else self.reference * longest
        return self.update if method == "update" else 0.0


@pytest.fixture
def lengths(monkeypatch):
    """Set the response length of each request, for both of its samples."""

    def use(*by_request: int) -> None:
        monkeypatch.setattr(scripted_workers, "response_length", lambda sequence, tail: (*by_request, *[LONGEST - 1] * 99)[sequence // 2])

    return use


# Time


def timed(costs: LinearCosts, **changes):
    """A step of two responses of four tokens, decoded one by one."""
    return train(experiment("overlapped", batch_size=1, chunk=1, kl_coef=0.0, **{**changes, "inter": False}), costs, tail=0.0)


@pytest.mark.parametrize(
    ("depth", "sequential", "streamed"),
    [
        (0.75, 4 + 4 * 0.75 + 2, 4 + 0.75 + 2),  # every chunk but the last is read while the next one is written
        (2.25, 4 + 4 * 2.25 + 2, 1 + 4 * 2.25 + 2),  # reading is slower than writing: all but the first chunk is hidden, the other way round
    ],
)
def test_frozen_models_read_while_the_sampler_writes(depth, sequential, streamed):
    costs = LinearCosts(depth=depth)
    assert timed(costs, intra=False).column("time/step") == [sequential] * 12
    assert timed(costs, intra=True).column("time/step") == [streamed] * 12


def test_what_waits_is_read_in_one_call():
    run = timed(LinearCosts(depth=2.25), intra=True, steps=1)
    reads = [(s.start, s.end) for s in run.timeline.spans if (s.worker, s.method) == ("reward", "prefill")]
    assert reads == [(1, 3.25), (3.25, 7.75), (7.75, 10)]  # chunk 1; chunks 2 and 3, which came at 2 and 3; chunk 4


@pytest.mark.parametrize(
    ("overlap", "seconds"),
    [
        ({"intra": False}, 4 + 10 / 8 + 2),
        ({"intra": True, "unit": "response"}, 4 + 8 / 8 + 2),  # the short request is read beside the long one's last three tokens
        ({"intra": True, "unit": "chunk"}, 4 + 2 / 8 + 2),  # of the long one, too, all but the last token of its two samples
    ],
)
def test_streaming_by_response_lies_between_none_and_streaming_by_chunk(lengths, overlap, seconds):
    lengths(1, 4)
    run = train(experiment("overlapped", batch_size=2, chunk=1, kl_coef=0.0, steps=1, inter=False, **overlap), LinearCosts(token=1 / 8))
    assert run.column("time/step") == [seconds]


def test_two_frozen_models_on_two_devices_read_side_by_side_and_on_one_device_in_turn():
    costs, x = LinearCosts(depth=0.5, reference=1.0), experiment("overlapped", batch_size=1, chunk=4, inter=False, intra=False)
    apart = x.model_copy(
        update={"runtime": x.runtime.model_copy(update={"placement": {"a": ["sampler", "learner"], "b": ["reward"], "c": ["reference"]}})}
    )
    assert set(train(x, costs, tail=0.0).column("time/step")) == {4 + 4 * 0.5 + 4 * 1.0 + 2}
    run = train(apart, costs, tail=0.0)
    assert set(run.column("time/step")) == {4 + 4 * 1.0 + 2}
    assert set(run.column("time/reward")) == {2.0} and set(run.column("time/ref")) == {4.0}
    assert run.column("perf/busy_frac") == pytest.approx([(6 / 10 + 2 / 10 + 4 / 10) / 3] * 12)


def test_busy_fraction_counts_each_device_once_and_no_driver():
    costs = LinearCosts(depth=0.75)
    assert timed(costs, intra=False).column("perf/busy_frac") == pytest.approx([(6 / 9 + 3 / 9) / 2] * 12)
    assert timed(costs, intra=True).column("perf/busy_frac") == pytest.approx([(6 / 6.75 + 3 / 6.75) / 2] * 12)
    assert timed(costs, intra=True, path=None).column("perf/busy_frac") == [1.0] * 12  # the rule is graded on the driver


def test_the_batch_is_read_first_and_what_is_carried_over_beside_the_update(lengths):
    lengths(2, 4, 1)  # after two rounds requests 2 and 0 are complete, request 1 goes on
    run = train(experiment("overlapped", batch_size=2, delta=1, delta_max=1, chunk=1, kl_coef=0.0, steps=1), LinearCosts(token=0.125))
    reads = [(s.start, s.end) for s in run.timeline.spans if (s.worker, s.method) == ("reward", "prefill")]
    assert reads == [(1, 1.75), (2, 2.25), (2.25, 2.5)]  # all three; request 0; request 1
    (update,) = [(s.start, s.end) for s in run.timeline.spans if s.method == "update"]
    assert update == (2.25, 4.25) and run.column("time/step") == [4.25]


# Order


def test_a_run_worked_out_by_hand(lengths):
    """B = 2, delta = 1, one token a round; the batches are 2 0 | 1 4 | 3 5 | 7 8 | 9 6 | 10 11; request 10 was complete a step earlier."""
    lengths(2, 4, 1, 3, 2, 1, 5, 1, 1, 2, 3, 1, 9)
    run = train(experiment("overlapped", batch_size=2, delta=1, delta_max=1, chunk=1, steps=6), LinearCosts())
    assert run.column("rollout/requests") == [[0, 2], [1, 4], [3, 5], [7, 8], [6, 9], [10, 11]]
    assert run.column("time/step") == [2 + 2, 2 + 2, 1 + 2, 1 + 2, 3 + 2, 1 + 2]
    assert run.column("overlap/deferrals") == [[2], [1, 1], [1, 1], [2], [1, 0, 1], [1, 1]]
    assert run.column("rollout/reprefill_tokens") == [0, 4, 4, 2, 4, 0]
    assert run.column("stale/hist")[4] == [10, 2, 2]  # of the two samples of requests 9 and 6: the latter's first tokens are 2 and 1 updates old
    assert run.column("overlap/carried") == [1] * 6 and run.column("rollout/buffered_tokens") == [4, 4, 2, 4, 6, 2]
    assert run.column("overlap/delta_over_b") == [0.5] * 6 and run.column("overlap/tail_frac") == [0.0] * 6


def test_the_tail_is_the_share_of_generation_time_with_under_half_of_the_slots_live(lengths):
    lengths(1, 4, 1, 2)  # 8, 4, 2 and 2 live sequences
    shape = {"batch_size": 4, "chunk": 1, "steps": 1, "intra": False}
    assert train(experiment("overlapped", inter=False, **shape), LinearCosts()).column("overlap/tail_frac") == [2 / 4]
    assert train(experiment("overlapped", delta=0, delta_max=0, **shape), LinearCosts(decode=0.0)).column("overlap/tail_frac") == [0.0]


def test_batches_are_the_first_complete_requests_ties_by_id():
    run = train(experiment("overlapped", batch_size=2, delta=3, delta_max=3, steps=60), tail=2.0)
    ended, order = set(), []
    for sequences in run.completed:
        ended.update(sequences)
        order += sorted({s // 2 for s in sequences if ended >= {s, s ^ 1}})
    assert run.column("rollout/requests") == [sorted(order[2 * k : 2 * k + 2]) for k in range(60)]


def test_short_responses_come_first_but_none_is_left_out_in_the_long_run():
    size, delta, steps = 4, 4, 300
    run = train(experiment("overlapped", batch_size=size, delta=delta, delta_max=delta, slots=16, steps=steps, checkpoint_every=steps), tail=1.5)
    trained, state = sum(run.column("rollout/lengths"), []), run.records[-1].state

    def lengths(requests) -> list[int]:
        return [min(response_length(s, 1.5), LONGEST - 1) for r in requests for s in (2 * r, 2 * r + 1)]

    submitted, leftover = lengths(range(state["prompts"]["position"])), lengths(r for r, _ in state["admitted"])
    assert len(leftover) == 2 * delta and np.mean(trained[: 2 * size]) < 0.7 * np.mean(submitted)
    assert min(step for _, step in state["admitted"]) >= steps - LONGEST // 4  # none is left over for good: a step decodes 4 tokens of each
    assert sorted(trained + leftover) == sorted(submitted)
    for share in (0.25, 0.5, 0.75, 0.9):
        error = math.sqrt(share * (1 - share) / len(submitted))  # of the share of responses below a quantile
        low, high = np.quantile(submitted, [share - error, share + error])
        assert low <= np.quantile(trained, share) <= high


# Properties


@st.composite
def overlapped_runs(draw):
    """An experiment, its costs, and the tail of its lengths."""
    whole, size, group = st.integers, draw(st.integers(1, 5)), draw(st.integers(2, 3))
    most = draw(whole(0, 6))
    delta = draw(whole(0, most))
    x = experiment(
        "overlapped",
        steps=draw(whole(1, 12)),
        batch_size=size,
        group_size=group,
        slots=(size + most) * group + draw(whole(0, 3)),
        chunk=draw(whole(1, 60)),
        intra=draw(st.booleans()),
        unit=draw(st.sampled_from(["chunk", "response"])),
        inter=draw(st.booleans()),
        rule=draw(st.sampled_from(["fixed", "slope", "algorithm1"])),
        delta=delta,
        delta_min=draw(whole(0, delta)),
        delta_max=most,
        window=2,
        chunk_candidates=draw(st.sampled_from([[], [], [1, 7], [40, 3, 8]])),
        chunk_period=draw(whole(6, 9)),
        path=draw(st.sampled_from([None, "scripted"])),
        kl_coef=draw(st.sampled_from([0.0, 0.1])),
        anchor=draw(st.sampled_from(["ppo", "behave"])),
        eval_every=draw(whole(0, 3)),
        checkpoint_every=draw(whole(0, 3)),
    )
    bounds = st.sampled_from([(0.0, 0.0), (0.1, 0.1), (0.0, 1.0), (0.5, 5.0)])
    return x, RandomCosts(draw(whole(0, 99)), **{name: draw(bounds) for name in BOUNDS}), draw(st.sampled_from([0.0, 1.0, 2.0]))


@settings(max_examples=60, deadline=None)
@given(overlapped_runs())
def test_every_prompt_is_trained_once_no_token_is_lost_and_nobody_starves(drawn):
    x, costs, tail = drawn
    run, size = train(x, costs, tail=tail), x.schedule.batch_size
    assert run.leftover == [] and len(run.steps) == x.schedule.steps
    trained, carried, deltas = run.column("rollout/requests"), run.column("overlap/carried"), run.column("overlap/delta")
    assert all(len(set(requests)) == size for requests in trained)
    everything = sum(trained, [])
    assert len(set(everything)) == len(everything) and max(everything) < len(everything) + carried[-1]  # ids are given in data-set order
    for before, delta, after in zip([0, *carried], deltas, carried, strict=False):
        assert after == max(before, size + delta) - size  # filled up to B + delta, and never evicted
    most = x.overlap.delta_max if x.overlap.inter else 0
    assert max(carried) <= most and set(deltas) <= set(range(x.overlap.delta_min if x.overlap.inter else 0, most + 1))
    assert run.generated[-1] == sum(run.column("train/trained")) + run.column("rollout/buffered_tokens")[-1]
    deferrals = run.column("overlap/deferrals")
    assert all(sum(counts) == size for counts in deferrals)
    for counts, oldest in zip(deferrals, run.column("stale/d_max"), strict=True):
        assert oldest <= len(counts) - 1  # no token is older than its request was carried
    if most < size:
        assert max(map(len, deferrals)) - 1 <= math.ceil(LONGEST / min(x.overlap.chunk_candidates or [x.sampler.chunk]))


@settings(max_examples=25, deadline=None)
@given(overlapped_runs())
def test_streaming_changes_no_training_data(drawn):
    x, costs, tail = drawn
    runs = []
    for intra in (False, True):
        overlap = x.overlap.model_copy(update={"intra": intra, "chunk_candidates": []})
        runs.append(train(x.model_copy(update={"overlap": overlap}), costs, tail=tail))
    assert runs[0].chain == runs[1].chain
    assert runs[0].column("overlap/deferrals") == runs[1].column("overlap/deferrals")


@pytest.mark.parametrize("intra", [False, True])
def test_without_carrying_over_the_chunk_changes_no_training_data(intra):
    runs = [train(experiment("overlapped", inter=False, intra=intra, chunk=chunk), tail=1.5) for chunk in (1, 4, 5, 48)]
    assert len({run.chain for run in runs}) == 1


def test_streamed_models_read_prompts_and_responses_once():
    one_by_one, whole = (train(experiment("overlapped", inter=False, intra=intra, chunk=3)) for intra in (True, False))
    assert one_by_one.read == whole.read and set(one_by_one.read) == {"reward", "reference"}
    calls = [sum((s.worker, s.method) == ("reward", "prefill") for s in run.timeline.spans) for run in (one_by_one, whole)]
    assert calls[0] > calls[1] == 12


@pytest.mark.parametrize("intra", [False, True])
@pytest.mark.parametrize(("batch_size", "group_size", "slots", "chunk"), [(3, 2, 6, 4), (4, 3, 12, 1), (1, 2, 8, 48)])
def test_without_overlap_it_is_the_synchronous_schedule_to_the_bit_and_the_second(batch_size, group_size, slots, chunk, intra):
    shape = {"batch_size": batch_size, "group_size": group_size, "slots": slots, "chunk": chunk, "anchor": "behave"}
    costs = RandomCosts(scorer_prefill=(0.0, 0.0))
    plain = train(experiment("synchronous", **shape), costs, broken=30, rows=60)
    for changes in ({"inter": False}, {"inter": True, "delta": 0, "delta_max": 0}):
        run = train(experiment("overlapped", intra=intra, **RULE_ONLY, **shape, **changes), costs, broken=30, rows=60)
        assert run.chain == plain.chain and run.ended == plain.ended
    assert any(plain.column("train/dropped")) == (batch_size > 1)


@pytest.mark.parametrize("frozen", [{}, RULE_ONLY])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumed_after_any_step_equals_the_uninterrupted_one(mode, frozen, tmp_path):
    changing = {"rule": "slope", "window": 2, "delta": 1, "delta_max": 2, "chunk_candidates": [2, 5], "chunk_period": 5}
    x = experiment("overlapped", checkpoint_every=1, eval_every=4, **mode, **frozen, **changing)
    slow = RandomCosts(7, reward_prefill=(0.0, 3.0))  # what is carried over has not been read when the update ends
    options = {"costs": slow, "tail": 1.2, "broken": 30, "rows": 60}
    whole = train(x, **options)
    for record in whole.records[1:-1]:
        checkpoint.save(tmp_path, record.step, record.state)
        rest = train(x, state=checkpoint.latest(tmp_path)[1], **options)
        left = whole.records[record.step + 1 :]
        assert [r.metrics for r in rest.records] == [r.metrics for r in left] and rest.ended == whole.ended
        assert [r.rewards["eval"].tobytes() for r in rest.records if r.rewards] == [r.rewards["eval"].tobytes() for r in left if r.rewards]
    carried = [len(r.state["rollouts"]["requests"]["id"]) for r in whole.records[1:]]
    assert (max(carried) > 0) == mode["inter"] and carried == whole.column("overlap/carried")
    assert [len(r.state["admitted"]) for r in whole.records[1:]] == carried
    assert [pickle.dumps(r.state) for r in whole.records[1:]] == whole.states  # snapshots, no views


@pytest.mark.parametrize("stop", [{"eval_every": 1}, {"checkpoint_every": 1}])
def test_reading_that_outlasts_the_update_lies_within_the_steps_even_where_something_stops_them(stop):
    run = train(experiment("overlapped", **stop), RandomCosts(7, grain=2.0**-20, reward_prefill=(0.0, 3.0)), tail=1.2)
    for role, name in (("reward", "time/reward"), ("reference", "time/ref"), ("sampler", "time/generate")):
        methods = ("decode",) if role == "sampler" else ("prefill", "finish")
        assert sum(run.column(name)) == sum(s.end - s.start for s in run.timeline.spans if s.worker == role and s.method in methods)


def test_neither_length_nor_content_of_an_evaluation_touches_training():
    def run(evaluator: float, prompts: int = 5, **every):
        costs = RandomCosts(3, grain=2.0**-20, evaluator_decode=(evaluator, 2 * evaluator))
        return train(experiment("overlapped", steps=15, **every), costs, prompts=prompts)

    barrier = run(0.0, checkpoint_every=4)
    for other in (run(0.0, eval_every=4), run(100.0, 9, eval_every=4), run(1.0, eval_every=4, checkpoint_every=4)):
        assert other.steps == barrier.steps
    assert barrier.column("time/elapsed")[-1] == sum(barrier.column("time/step"))


def test_workers_in_processes_train_exactly_like_workers_in_place():
    x = experiment("overlapped", steps=6, eval_every=3, checkpoint_every=4)
    inline, process = train(x), train(x, process=True)
    assert process.steps == inline.steps and process.timeline.spans == inline.timeline.spans


# Controllers


@pytest.mark.parametrize("rule", ["slope", "algorithm1", "trend"])
def test_delta_follows_the_mean_reward_and_the_tail_of_each_step(rule):
    limits = {"delta": 4, "delta_min": 1, "delta_max": 5, "window": 3}
    run = train(experiment("overlapped", steps=40, slots=16, rule=rule, **RULE_ONLY, **limits), tail=1.5, broken=20, rows=80)
    assert any(run.column("train/dropped"))  # rewards of failed graders do not count
    controller, expected = OvercommitController(4, 1, 5, 3, rule), [4]
    for metrics in run.steps:
        expected.append(controller.update(metrics["rollout/reward_mean"], metrics["overlap/tail_frac"]))
    assert run.column("overlap/delta") == expected[:-1] and len(set(expected)) > 2


def test_steps_without_a_single_grade_leave_delta_alone(monkeypatch):
    monkeypatch.setattr("scripted.DigitTask.reward", lambda *args: 1 / 0)
    x = experiment("overlapped", **RULE_ONLY, steps=8, rule="slope", window=2)
    assert train(x).column("overlap/delta") == [2] * 8


def test_the_chunk_is_judged_by_the_seconds_until_a_batch_is_scored():
    tried = {"chunk_candidates": [4, 1], "chunk_period": 7, "steps": 14}
    trial, reading = [4, 1, 4, 1], LinearCosts(depth=1.0)  # a long chunk leaves its reading to the end: 4 + 4 seconds against 4 + 1
    assert timed_chunks(reading, intra=True, **tried) == [*trial, 1, 1, 1] * 2
    calls = RandomCosts(sampler_decode=(1.0, 1.0), reward_prefill=(0.0, 0.0))  # seconds per round, however long
    assert timed_chunks(calls, intra=True, **tried) == [*trial, 4, 4, 4] * 2


def timed_chunks(costs, **changes) -> list[int]:
    return train(experiment("overlapped", batch_size=1, inter=False, kl_coef=0.0, **changes), costs, tail=0.0).column("overlap/chunk")


# Failures


@pytest.mark.parametrize("call", range(1, 6))
def test_a_model_that_fails_while_it_reads_surfaces_at_once_as_itself_and_leaves_no_task(lengths, call):
    lengths(2, 4, 1, 3, 2, 1, 5)
    x = experiment("overlapped", batch_size=2, delta=1, delta_max=1, chunk=1, steps=3)
    costs = {"costs": LinearCosts(token=0.125, reference=0.25)}
    whole = train(x, **costs)
    for worker in ("reward", "reference"):
        run = train(x, fail_read={worker: call}, catch=Scripted, **costs)
        assert isinstance(run.error, Scripted) and run.error.args == (f"prefill {call}",)
        reads = [s.start for s in whole.timeline.spans if (s.worker, s.method) == (worker, "prefill")]
        assert run.ended == reads[call - 1] and run.leftover == []
        assert run.steps == whole.steps[: len(run.steps)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("failure", "message"), [({"fail_round": 1}, "round 1"), ({"fail_round": 9}, "round 9"), ({"fail_step": 3}, "step 3")])
def test_a_failing_sampler_or_learner_surfaces_as_itself_and_leaves_no_task(mode, failure, message):
    run = train(experiment("overlapped", **mode), catch=Scripted, **failure)
    assert isinstance(run.error, Scripted) and run.error.args == (message,) and run.leftover == []


def test_too_many_failing_grades_stop_the_run_with_the_reason():
    run = train(experiment("overlapped", **RULE_ONLY, steps=40), broken=4, rows=60, catch=GraderFailed)
    assert isinstance(run.error, GraderFailed) and "no grade" in str(run.error) and run.leftover == []


def test_a_reference_of_the_wrong_lengths_is_named(monkeypatch):
    monkeypatch.setattr(scripted_workers, "logp_ref_of", lambda response: np.zeros(len(response) + 1, np.float32))
    run = train(experiment("overlapped"), catch=ValueError)
    assert "step 0: the reference's log-probs do not have the lengths of the responses" in str(run.error)


def test_a_consumer_that_stops_early_leaves_no_task():
    run = train(experiment("overlapped"), stop_after=4)
    assert len(run.steps) == 4 and run.leftover == []
