from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.schedules.overcommit import OvercommitController, rise_probability

RULES = ["slope", "algorithm1", "trend", "fixed"]


def follow(controller: OvercommitController, rewards, tail: float | None = None) -> list[int]:
    return [controller.update(float(r), tail) for r in rewards]


def noise(steps: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=steps)


def test_slope_compares_the_reward_with_that_of_a_window_ago():
    # window 2: nothing before the third reward, then 3 > 1, 2 = 2, 4 > 3, 2 = 2 (not a rise), 5 > 4
    assert follow(OvercommitController(2, 0, 4, 2), [1, 2, 3, 2, 4, 2, 5]) == [2, 2, 3, 2, 3, 2, 3]


def test_algorithm1_moves_by_a_quarter_and_at_least_one():
    falling, rising = OvercommitController(16, 0, 16, 1, "algorithm1"), OvercommitController(1, 0, 16, 1, "algorithm1")
    assert follow(falling, [0] * 12) == [16, 12, 9, 7, 6, 5, 4, 3, 2, 1, 0, 0]
    assert follow(rising, range(14)) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 16, 16, 16]


def test_fixed_stays():
    assert follow(OvercommitController(3, 0, 9, 2, "fixed"), noise(50, 0)) == [3] * 50


@pytest.mark.parametrize("rule", ["slope", "trend"])
@pytest.mark.parametrize(("delta", "minimum"), [(6, 0), (7, 3)])
def test_a_constant_reward_brings_delta_to_its_minimum_by_one_a_step(rule, delta, minimum):
    controller = OvercommitController(delta, minimum, 9, 4, rule)
    waiting = 4 if rule == "slope" else 3  # the slope needs one reward more than the window has
    assert follow(controller, [0.5] * 12) == [delta] * waiting + [max(minimum, delta - k) for k in range(1, 13 - waiting)]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RULES), st.lists(st.floats(-5, 5), max_size=40), st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.data())
def test_delta_stays_within_its_limits_moves_by_bounded_steps_and_goes_on_from_its_state(rule, rewards, minimum, more, span, data):
    initial, window = minimum + min(more, span), data.draw(st.integers(3, 6))
    controller = OvercommitController(initial, minimum, minimum + span, window, rule)
    before, cut = initial, data.draw(st.integers(0, 40))
    for i, reward in enumerate(rewards):
        if i == cut:
            copy = OvercommitController(initial, minimum, minimum + span, window, rule)
            copy.set_state(controller.get_state())
            controller = copy
        delta = controller.update(reward, 0.3)
        assert delta == controller.delta and minimum <= delta <= minimum + span
        assert abs(delta - before) <= (max(1, before // 4) if rule == "algorithm1" else rule != "fixed")
        assert i >= window - (rule == "trend") or delta == initial
        before = delta
    whole = OvercommitController(initial, minimum, minimum + span, window, rule)
    assert before == ([initial, *follow(whole, rewards, 0.3)])[-1]


def test_a_state_is_a_snapshot():
    controller = OvercommitController(2, 0, 4, 2)
    controller.update(1.0)
    state = controller.get_state()
    controller.update(2.0)
    assert state == {"delta": 2, "rewards": [1.0]}


# What noise does to the rules, 4,000 steps on a plateau or 200 with a rise


@pytest.mark.parametrize("window", [5, 10, 20])
def test_on_a_noisy_plateau_slope_wanders_about_the_middle_and_trend_settles_at_the_minimum(window):
    rewards = noise(4000, window)
    slope, trend = (np.array(follow(OvercommitController(8, 0, 16, window, rule), rewards)[100:]) for rule in ("slope", "trend"))
    assert 6 < slope.mean() < 10 and (slope == 0).mean() < 0.12
    assert trend.mean() < 0.6 and (trend == 0).mean() > 0.85


def test_under_the_same_noise_trend_overcommits_while_the_reward_rises():
    """A rise by a tenth of the noise's standard deviation per step, over a window of 20."""
    rewards = noise(200, 1) + 0.1 * np.arange(200)
    trend = np.array(follow(OvercommitController(2, 0, 16, 20, "trend"), rewards))
    assert trend[-50:].mean() > 13


def test_trend_overcommits_only_where_there_is_a_tail_to_remove():
    def last(tail: float | None) -> int:
        return follow(OvercommitController(2, 0, 16, 10, "trend"), np.arange(40) + 0.1 * noise(40, 2), tail)[-1]

    assert last(None) == last(0.1) == last(1.0) == 16 and last(0.09) == last(0.0) == 0


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 6.3138), (2, 2.9200), (3, 2.3534), (4, 2.1318), (5, 2.0150), (8, 1.8595), (9, 1.8331), (18, 1.7341), (29, 1.6991)]
)
def test_a_rise_at_students_95_percent_quantile_has_probability_5_percent(freedom, quantile):
    """Quantiles of published tables; the values have residuals orthogonal to constant and line, scaled so that t is the quantile."""
    n = freedom + 2
    x, residual = np.arange(n) - (n - 1) / 2, noise(n, freedom)
    residual -= residual.mean() + x * (residual @ x) / (x @ x)
    error = math.sqrt(residual @ residual / freedom / (x @ x))
    for sign, probability in ((1, 0.05), (-1, 0.95), (0, 0.5)):
        assert rise_probability((3.0 + sign * quantile * error * x + residual).tolist()) == pytest.approx(probability, abs=2e-5)


def test_values_on_a_line_or_all_equal_leave_no_doubt():
    assert rise_probability([1.0, 2.0, 3.0, 4.0]) == pytest.approx(0)
    assert rise_probability([4.0, 3.0, 2.0, 1.0]) == pytest.approx(1)
    assert rise_probability([0.5] * 7) == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 4, 9, 5), "minimum <= initial <= maximum must hold: minimum 4, initial 3, maximum 9"),
        ((3, 0, 2, 5), "minimum <= initial <= maximum must hold"),
        ((3, 0, 9, 0), "at least 1 training step"),
        ((3, 0, 9, 2, "trend"), "rule trend needs a window of at least 3 training steps, got 2"),
        ((3, 0, 9, 2, "slopes"), "unknown rule 'slopes': choose slope, algorithm1, trend or fixed"),
    ],
)
def test_impossible_controllers_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        OvercommitController(*arguments)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
@pytest.mark.parametrize("rule", RULES)
def test_a_reward_that_is_no_number_is_an_error(rule, reward):
    with pytest.raises(ValueError, match=f"the mean reward is {reward}"):
        OvercommitController(2, 0, 4, 3, rule).update(reward)
