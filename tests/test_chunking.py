from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.schedules.chunking import ChunkTuner


def run(tuner: ChunkTuner, steps: range, cost, tokens=lambda step: 10) -> list[int]:
    """Sizes chosen when a step with chunks of `size` takes cost(step, size) seconds per token."""
    sizes = []
    for step in steps:
        sizes.append(tuner.choose(step))
        tuner.record(sizes[-1], cost(step, sizes[-1]) * tokens(step), tokens(step))
    return sizes


def test_each_period_tries_the_candidates_twice_in_turn_and_keeps_the_best():
    trial = [128, 256, 512] * 2
    sizes = run(ChunkTuner([128, 256, 512], 10), range(20), lambda step, size: abs(size - (256 if step < 10 else 512)) + 1)
    assert sizes == [*trial, 256, 256, 256, 256, *trial, 512, 512, 512, 512]


def test_a_period_may_be_nothing_but_the_trial():
    assert run(ChunkTuner([4, 8], 4), range(8), lambda step, size: size) == [4, 8, 4, 8] * 2


def test_steps_with_longer_responses_do_not_count_against_the_chunk_that_met_them():
    """Seconds of a step: 8 with chunks of 4, 20 with chunks of 16; per token 0.8 and 0.5."""
    sizes = run(ChunkTuner([4, 16], 6), range(6), lambda step, size: {4: 0.8, 16: 0.5}[size], lambda step: 40 if step % 2 else 10)
    assert sizes[4:] == [16, 16]


def test_seconds_and_tokens_are_summed_over_the_trials():
    tuner = ChunkTuner([4, 16], 5)
    for step, (seconds, tokens) in enumerate(
        [(9.0, 1), (8.0, 10), (11.0, 19), (12.0, 9)]
    ):  # 20 / 20 against 20 / 19, though the mean of 9 and 0.58 is worse
        tuner.record(tuner.choose(step), seconds, tokens)
    assert tuner.choose(4) == 4


def test_a_candidate_that_generated_nothing_is_not_best():
    assert run(ChunkTuner([4, 16], 5), range(5), lambda step, size: size, lambda step: 10 * (step % 2))[4] == 16


def test_what_happens_while_the_best_serves_does_not_change_it():
    tuner = ChunkTuner([4, 16], 9)
    assert run(tuner, range(9), lambda step, size: size if step < 4 else 100)[4:] == [4] * 5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True), st.integers(0, 9), st.integers(0, 40), st.data())
def test_the_served_chunk_has_the_least_seconds_per_token_and_a_restored_tuner_goes_on(candidates, more, cut, data):
    costs = {size: data.draw(st.floats(0.01, 10)) for size in candidates}
    period, steps = 2 * len(candidates) + more, 42
    whole = run(ChunkTuner(candidates, period), range(steps), lambda step, size: costs[size])
    assert set(whole) <= set(candidates)
    assert all(costs[size] <= min(costs.values()) * (1 + 1e-9) for step, size in enumerate(whole) if step % period >= 2 * len(candidates))
    first, second = ChunkTuner(candidates, period), ChunkTuner(candidates, period)
    head = run(first, range(cut), lambda step, size: costs[size])
    second.set_state(first.get_state())
    assert head + run(second, range(cut, steps), lambda step, size: costs[size]) == whole


def test_a_state_is_a_snapshot():
    tuner = ChunkTuner([4, 16], 5)
    state = tuner.get_state()
    run(tuner, range(5), lambda step, size: 20 - size)
    assert state == ChunkTuner([4, 16], 5).get_state() != tuner.get_state()
