"""Intervals and paired differences against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.analysis.statistics import bootstrap_interval, mean_and_error, paired_difference, standard_error

numbers = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


def test_two_values_give_an_interval_from_one_to_the_other():
    low, high = bootstrap_interval(np.array([0.0, 1.0]), np.random.default_rng(0))  # a quarter of all resamples repeats one of them
    assert (low, high) == (0, 1)


def test_the_interval_of_a_large_sample_is_the_normal_one():
    values = np.random.default_rng(1).normal(3, 2, 400)
    low, high = bootstrap_interval(values, np.random.default_rng(0))
    half = 1.96 * values.std(ddof=1) / 20
    assert low == pytest.approx(values.mean() - half, abs=0.03)
    assert high == pytest.approx(values.mean() + half, abs=0.03)


@settings(max_examples=25, deadline=None)
@given(numbers, st.floats(0.5, 2), st.floats(-5, 5))
def test_an_interval_lies_within_the_data_moves_with_them_and_repeats(values, scale, shift):
    values = np.array(values)
    low, high = bootstrap_interval(values, np.random.default_rng(0), resamples=100)
    assert values.min() - 1e-9 <= low <= high <= values.max() + 1e-9
    moved = bootstrap_interval(scale * values + shift, np.random.default_rng(0), resamples=100)
    assert moved == pytest.approx((scale * low + shift, scale * high + shift), abs=1e-6)


def test_an_interval_keeps_the_other_axes():
    low, high = bootstrap_interval(np.stack([np.zeros(8), np.arange(8)], axis=1), np.random.default_rng(0))
    assert low[0] == high[0] == 0 and 0 < low[1] < 3.5 < high[1] < 7


def test_difference_of_one_seed_has_the_error_over_prompts():
    estimate = paired_difference(([[0.5, 0.7, 0.9]], [[0.5, 0.5, 0.5]]))
    assert estimate == pytest.approx((0.2, np.sqrt(0.04 / 3), 1, 3))


def test_the_error_has_a_part_from_prompts_and_a_part_from_seeds():
    prompts_differ = mean_and_error(np.array([[0.1, 0.3], [0.1, 0.3]]))
    seeds_differ = mean_and_error(np.array([[0.1, 0.1], [0.3, 0.3]]))
    assert prompts_differ == pytest.approx((0.2, 0.1, 2, 2)) == seeds_differ
    assert mean_and_error(np.array([[0.0, 0.2], [0.2, 0.4]])).se == pytest.approx(np.sqrt(0.01 + 0.01))


def test_pairing_removes_what_prompts_have_in_common():
    hardness = np.random.default_rng(0).random((3, 50))
    assert paired_difference((hardness + 0.01, hardness)).se < 1e-12 < 0.01 < mean_and_error(hardness).se


@pytest.mark.parametrize("bad", [[], [1.0, np.nan], [np.inf, 1.0]])
def test_empty_or_not_finite_values_raise(bad):
    for call in (standard_error, lambda values: bootstrap_interval(values, np.random.default_rng(0)), mean_and_error):
        with pytest.raises(ValueError, match="no values|not finite"):
            call(bad)


def test_prompts_of_several_sets_add_up_and_seeds_are_shared():
    prompts_differ, seeds_differ = np.array([[0.1, 0.3], [0.1, 0.3]]), np.array([[0.1, 0.1], [0.3, 0.3]])
    assert mean_and_error(prompts_differ, prompts_differ + 0.2) == pytest.approx((0.3, 0.1 / np.sqrt(2), 2, 4))
    assert mean_and_error(seeds_differ, seeds_differ + 0.2) == pytest.approx((0.3, 0.1, 2, 4))
    assert paired_difference((prompts_differ, seeds_differ), (seeds_differ, prompts_differ)).mean == pytest.approx(0)
    with pytest.raises(ValueError, match="same seeds in every set"):
        mean_and_error(prompts_differ, prompts_differ[:1])


def test_one_value_has_no_standard_error():
    assert np.isnan(standard_error([3.0])) and standard_error([1.0, 3.0]) == 1.0


def test_pairs_of_different_shape_raise():
    with pytest.raises(ValueError, match=r"\(1, 3\) and \(1, 2\)"):
        paired_difference(([[1, 2, 3]], [[1, 2]]))
    with pytest.raises(ValueError, match="at least two prompts"):
        mean_and_error(np.array([[1.0]]))
