"""Workers without tensors, against plain loops over sequences and tokens, on the toy device of test_hardware."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hardware import SHAPE, TOY

from nowait.batch import STOP, Rollouts, Segments, Weights
from nowait.runtime.hardware import Group
from nowait.workers.simulated import Lengths, RewardCurve, SimulatedLearner, SimulatedPrompts, SimulatedReader, SimulatedSampler, World

GROUP = Group(TOY, SHAPE, 1)
FREE = Group(replace(TOY, pass_overhead=0.0, bandwidth=1e9), SHAPE, 1)  # arithmetic alone counts


def world(*response: tuple[int, ...], prompt: int = 3) -> World:
    """Requests whose samples have these lengths."""
    lengths = np.array(response)
    made = World(Lengths(prompt=prompt), *lengths.shape, batch_size=1, steps=1, seed=0, curve=RewardCurve())
    made.response = lengths
    return made


def requests(count: int, first: int = 0):
    return SimulatedPrompts().next(first + count)[first:]


def brought(segments: Segments) -> dict[int, int]:
    """Tokens of each request."""
    return {int(i): int(segments.token[a:b].sum()) for i, (a, b) in zip(segments.sequence, pairwise(segments.offset), strict=True)}


# Lengths


def drawn(requests: int = 20000, samples: int = 2, steps: int = 1, **lengths) -> np.ndarray:
    batch = requests if steps == 1 else 100
    return World(Lengths(**{"cap": 10**6} | lengths), requests, samples, batch, steps, 0, RewardCurve()).response


def test_lengths_are_log_normal_about_their_median():
    log = np.log(drawn(median=300, sigma=0.8))
    assert np.exp(np.median(log)) == pytest.approx(300, rel=0.02) and log.std() == pytest.approx(0.8, rel=0.02)
    assert set(drawn(100, median=300.4).ravel()) == {300}


def test_lengths_lie_between_one_token_and_the_cap():
    lengths = drawn(median=100, sigma=2.0, cap=1000)
    assert (lengths.min(), lengths.max()) == (1, 1000)
    assert (lengths == 1000).mean() == pytest.approx(0.125, abs=0.01)  # of a normal distribution, beyond log(10) / 2 = 1.15 deviations


@pytest.mark.parametrize("difficulty", [0.0, 0.3, 1.0])
def test_difficulty_is_the_correlation_of_the_samples_of_a_prompt(difficulty):
    first, second = np.log(drawn(median=3000, sigma=0.5, difficulty=difficulty)).T
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(difficulty, abs=0.02)
    assert (first == second).all() == (difficulty == 1.0)


def test_the_median_grows_by_the_drift_over_the_training():
    lengths = drawn(501, steps=4, median=200, drift=0.5)[:, 0]  # 4 steps of 100 requests; what else is drawn comes after them
    assert lengths[[0, 100, 200, 300, 400, 500]].tolist() == [200, 225, 250, 275, 300, 300]


def test_observed_lengths_are_drawn_as_often_as_they_were_seen():
    lengths = drawn(median=50, observed=(3, 7, 7, 7))
    assert set(lengths.ravel()) == {3, 7} and (lengths == 7).mean() == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("lengths", [{"median": 100, "sigma": 0.7, "drift": 0.5}, {"observed": (1, 2, 3, 4, 5, 6)}])
def test_a_request_has_its_length_and_reward_whatever_else_is_drawn(lengths):
    """Schedules draw more or fewer requests than they train on, and are given the same work."""

    def made(count: int, seed: int = 1) -> World:
        return World(Lengths(**{"cap": 500} | lengths), count, 3, 4, 5, seed, RewardCurve(end=1.0, noise=0.5))

    few, many, other = made(20), made(57), made(20, seed=2)
    assert (few.response == many.response[:20]).all() and (few.reward == many.reward[:20]).all()
    assert (few.response != other.response).any() and (few.reward != other.reward).any()


def test_rewards_follow_their_curve():
    rewards = World(Lengths(), 41, 1, 2, 20, 0, RewardCurve(start=1.0, end=3.0, tau=10.0)).reward
    assert rewards[[0, 20]] == pytest.approx([1.0, 3.0 - 2.0 / np.e])  # request 20 belongs to step 10


# Sampler


@dataclass
class Row:
    request: int
    sample: int
    left: int
    context: int


def plain(work: World, group: Group, slots: int, chunk: int, admissions: list[int]):
    """Tokens by request, finished requests and seconds of each round, one token of one row at a time; a further admission precedes every round."""
    rows, waiting, admissions, admitted = [], deque(), deque(admissions), 0
    open_ = Counter({i: len(lengths) for i, lengths in enumerate(work.response)})
    while rows or waiting or admissions:
        count = admissions.popleft() if admissions else 0
        waiting += [Row(r, s, int(n), work.prompt) for r in range(admitted, admitted + count) for s, n in enumerate(work.response[r])]
        admitted += count
        started = [waiting.popleft() for _ in range(min(len(waiting), slots - len(rows)))]
        rows += started
        seconds, tokens = group.forward(np.array([float(work.prompt) for row in started if row.sample == 0])), Counter()
        for _ in range(chunk):
            if not (live := [row for row in rows if row.left]):
                break
            seconds += group.decode(np.array([len(live)]), np.array([sum(row.context for row in live)]))
            for row in live:
                row.left, row.context = row.left - 1, row.context + 1
                tokens[row.request] += 1
        open_.subtract(row.request for row in rows if not row.left)
        rows = [row for row in rows if row.left]
        yield dict(tokens), {r for r in tokens if not open_[r]}, seconds


@st.composite
def workloads(draw):
    """Lengths, slots, chunk, and how many requests come before each of the first rounds."""
    admissions = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(sum))
    samples = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.tuples(*[st.integers(1, 40)] * samples), min_size=sum(admissions), max_size=sum(admissions)))
    return lengths, draw(st.integers(1, 12)), draw(st.integers(1, 50)), admissions


def rounds(work: World, sampler: SimulatedSampler, chunk: int, admissions: list[int]):
    admitted, admissions = 0, deque(admissions)
    while work.open[:admitted].any() or admissions:
        if admissions:
            sampler.admit(requests(admissions[0], admitted))
            admitted += admissions.popleft()
        yield sampler.decode(chunk)


@settings(deadline=None)
@given(workloads())
def test_rounds_are_those_of_a_plain_loop_over_rows_and_tokens(workload):
    lengths, slots, chunk, admissions = workload
    work, reference = world(*lengths), plain(world(*lengths), GROUP, slots, chunk, admissions)
    for segments in rounds(work, SimulatedSampler(work, GROUP, slots), chunk, admissions):
        tokens, finished, seconds = next(reference)
        assert brought(segments) == tokens
        assert set(segments.sequence[segments.finish == STOP]) == finished
        assert work.take_seconds() == pytest.approx(seconds)
    assert not any(tokens for tokens, _, _ in reference)


@settings(deadline=None)
@given(workloads())
def test_every_token_is_generated_once_whatever_the_slots_and_the_chunk(workload):
    lengths, slots, chunk, admissions = workload
    work, total, ends = world(*lengths), Counter(), Counter()
    sampler, steps = SimulatedSampler(work, GROUP, slots), 0
    for segments in rounds(work, sampler, chunk, admissions):
        total.update(brought(segments))
        ends.update(segments.sequence[segments.finish == STOP].tolist())
        assert (sampler.steps - steps) <= chunk and sampler.tokens <= sampler.steps * slots
        assert all(count <= chunk * len(lengths[0]) for count in brought(segments).values())
        steps = sampler.steps
    assert dict(total) == {i: sum(samples) for i, samples in enumerate(lengths)} and sampler.tokens == total.total()
    assert dict(ends) == dict.fromkeys(range(len(lengths)), 1)


def test_a_round_worked_out_by_hand():
    """Prompts of 3 tokens: weights 4 s, a cached token 0.8 s, 0.125 s per decode step, 0.25 s per pass; memory-bound throughout."""
    work = world((1, 4), (2, 2))
    sampler = SimulatedSampler(work, GROUP, slots=3)
    sampler.admit(requests(2))
    first = sampler.decode(2)  # the second sample of request 1 waits; rows of 3 + 3 + 3 tokens, then 4 + 4
    assert brought(first) == {0: 3, 1: 2} and first.finish.tolist() == [0, 0]
    assert work.take_seconds() == pytest.approx(4.25 + (4.125 + 9 * 0.8) + (4.125 + 8 * 0.8))
    second = sampler.decode(2)  # 5 + 3, then 6 + 4; its prompt was read with the first sample
    assert brought(second) == {0: 2, 1: 2} and second.finish.tolist() == [STOP, STOP]
    assert work.take_seconds() == pytest.approx((4.125 + 8 * 0.8) + (4.125 + 10 * 0.8))
    assert (sampler.tokens, sampler.steps) == (9, 4)


def test_prompts_are_read_side_by_side_and_do_not_look_at_each_other():
    work = world((1,), (1,), prompt=60)
    sampler = SimulatedSampler(work, FREE, slots=2)
    sampler.admit(requests(2))
    sampler.decode(1)
    decoding = 2 * 0.2 + 120 * 0.08 + TOY.decode_overhead
    assert work.take_seconds() - decoding == pytest.approx(2 * (60 * 0.2 + 60 * 30 * 0.08))


def test_new_weights_are_transferred_and_void_the_cache():
    work = world((9,), (9,))
    sampler = SimulatedSampler(work, GROUP, slots=2, slowdown=2.0, transfer=7.0)
    assert sampler.load(Weights(0, None)) == 0 and work.take_seconds() == 0  # the first ones are there
    sampler.admit(requests(2))
    assert sampler.decode(4).version == 0
    work.take_seconds()
    assert sampler.load(Weights(1, None)) == 14  # two rows of 3 + 4 tokens
    assert work.take_seconds() == pytest.approx(7 + 2 * (14 * 0.2 + 2 * 7 * 3.5 * 0.08 + 0.25))
    assert sampler.decode(1).version == 1


def test_a_slowdown_multiplies_every_second_of_generation():
    def seconds(slowdown: float) -> float:
        work = world((5, 6))
        sampler = SimulatedSampler(work, GROUP, 2, slowdown)
        sampler.admit(requests(1))
        sampler.decode(3)
        return work.take_seconds()

    assert seconds(3.0) == pytest.approx(3 * seconds(1.0))


# Reader


@settings(deadline=None)
@given(workloads())
def test_a_reader_reads_every_prompt_and_token_once_streamed_or_whole(workload):
    lengths, slots, chunk, admissions = workload
    work, rollouts, whole, streamed = world(*lengths), Rollouts(1), 0, 0
    rollouts.admit(requests(len(lengths)))
    at_end, beside = SimulatedReader(work, GROUP), SimulatedReader(work, GROUP)
    for segments in rounds(work, SimulatedSampler(work, GROUP, slots), chunk, admissions):
        streamed += beside.prefill(segments)
        if done := rollouts.add(segments):
            whole += at_end.prefill(rollouts.segments(done))
    everything = sum(sum(samples) + 3 * len(samples) for samples in lengths)
    assert whole == streamed == everything


def test_a_reader_does_not_read_what_it_has_not_been_given():
    """The sampler is a round ahead when the reader comes to the previous one."""
    work = world((5, 9))
    sampler, reader = SimulatedSampler(work, GROUP, 2), SimulatedReader(work, GROUP)
    sampler.admit(requests(1))
    first, second, third = (sampler.decode(4) for _ in range(3))
    assert [reader.prefill(s) for s in (first, second, third)] == [6 + 8, 1 + 4, 1]


def test_reading_in_pieces_costs_the_same_arithmetic_as_reading_at_once():
    def seconds(chunk: int) -> float:
        work, total = world((20, 20)), 0.0
        sampler, reader = SimulatedSampler(work, FREE, 2), SimulatedReader(work, FREE)
        sampler.admit(requests(1))
        while work.open.any():
            segments = sampler.decode(chunk)
            work.take_seconds()
            reader.prefill(segments)
            total += work.take_seconds()
        return total

    # two sequences of 23 tokens, each of which looks at its own ones only
    assert seconds(20) == pytest.approx(2 * (23 * 0.2 + 23 * 11.5 * 0.08))
    assert seconds(7) == pytest.approx(seconds(20))


def test_a_rule_reads_for_nothing_and_a_model_for_its_slowdown():
    work = world((8,))
    sampler = SimulatedSampler(work, GROUP, 1)
    sampler.admit(requests(1))
    segments = sampler.decode(8)
    work.take_seconds()
    for reader, seconds in [(SimulatedReader(work), 0.0), (SimulatedReader(work, GROUP, 3.0), 3 * (11 * 0.2 + 11 * 5.5 * 0.08 + 0.25))]:
        assert reader.prefill(segments) == 11 and work.take_seconds() == pytest.approx(seconds)


def test_a_reader_answers_with_the_rewards_or_as_many_log_probs_as_it_read_pieces():
    work, rollouts = world((40,), (9,)), Rollouts(1)
    work.reward = np.array([0.5, 2.0])
    rollouts.admit(requests(2))
    sampler, reward, reference = SimulatedSampler(work, GROUP, 2), SimulatedReader(work), SimulatedReader(work, log_probs=True)
    sampler.admit(requests(2))
    while work.open.any():
        segments = sampler.decode(16)
        rollouts.add(segments)
        reference.prefill(segments)
    assert reward.finish([1, 0]) == [[2.0], [0.5]]
    assert [len(row) for (row,) in reference.finish([0, 1])] == rollouts.take([0, 1], 0).length.tolist()


# Learner


def learner(work: World, **settings) -> tuple[SimulatedLearner, object]:
    """One on two devices, and the batch of all requests."""
    rollouts = Rollouts(1)
    rollouts.admit(requests(len(work.open)))
    sampler = SimulatedSampler(work, GROUP, 8)
    sampler.admit(requests(len(work.open)))
    while work.open.any():
        rollouts.add(sampler.decode(99))
    work.take_seconds()
    training = {"minibatches": 2, "epochs": 1, "micro_batch_tokens": 5, "recompute": False} | settings
    return SimulatedLearner(work, Group(TOY, SHAPE, 2, training=True), **training), rollouts.take(list(range(len(work.open))), 0)


def test_an_update_costs_what_its_sequences_passes_and_optimiser_steps_do():
    """Sequences of 10 and 30 tokens, prompts included, on two devices: 4 passes of 2 x 5 tokens, 2 optimiser steps, as in test_hardware."""
    work = world((7,), (27,))
    trainer, batch = learner(work)
    stats = trainer.update(batch)
    assert work.take_seconds() == pytest.approx(144 + 56 + 1)
    assert stats == {"response_tokens": 34} and trainer.publish().version == 1


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"epochs": 2}, 288 + 112 + 2),
        ({"recompute": True}, 192 + 56 + 1),
        ({"update": 3.0}, 3 * 201),
        ({"minibatches": 8}, 144 + 4 * 56 + 2),  # no minibatch without a pass
        ({"micro_batch_tokens": 1000}, 144 + 56 + 0.5),
    ],
)
def test_settings_of_the_learner_reach_its_costs(settings, seconds):
    work = world((7,), (27,))
    trainer, batch = learner(work, **settings)
    trainer.update(batch)
    assert work.take_seconds() == pytest.approx(seconds)


def test_a_forward_pass_before_the_update_has_an_overhead_per_micro_batch():
    work = world((7,), (27,))
    trainer, batch = learner(work, forward=2.0)
    trainer.logp(batch)
    assert work.take_seconds() == pytest.approx(2 * (48 / 2 + 4 * 0.25))


def test_learners_that_share_a_batch_cost_their_sequences_and_together_one_version():
    work = world((7,), (27,), (7,), (27,))
    trainer, batch = learner(work)
    assert trainer.prepare(batch) == 2
    seconds = []
    for rank in range(2):  # 10 and 10 tokens, then 30 and 30
        for minibatch in range(2):
            trainer.gradient(minibatch, rank, 2)
        seconds.append(work.take_seconds())
    arithmetic = [3 * 2 * (n * 200 + n * n / 2 * 80) / 1000 for n in (10, 30)]
    assert seconds == pytest.approx([arithmetic[0] + 56 + 0.5, arithmetic[1] + 56 + 1.5])
    assert trainer.finish() == {"response_tokens": 68} and trainer.version == 1
