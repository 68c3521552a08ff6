"""Intervals and paired differences against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.analysis.statistics import bin_means, bootstrap_interval, iqm, mean, mean_and_error, paired_difference

numbers = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


def test_iqm_leaves_out_the_outer_quarters():
    assert iqm([100, 0, 1, 2, 3, 4, 5, -50]) == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert iqm([1, 2, 30]) == 11  # a quarter of three is no whole value
    assert iqm([[0, 1], [4, 1], [8, 1], [90, 1]]) == pytest.approx([6, 1])


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


def test_an_interval_takes_another_statistic_and_keeps_the_other_axes():
    values = np.stack([np.zeros(8), np.arange(8)], axis=1)
    low, high = bootstrap_interval(values, np.random.default_rng(0), statistic=iqm)
    assert low[0] == high[0] == 0 and 0 < low[1] < 3.5 < high[1] < 7


def test_difference_of_one_seed_has_the_error_over_prompts():
    estimate = paired_difference([[0.5, 0.7, 0.9]], [[0.5, 0.5, 0.5]])
    assert estimate == pytest.approx((0.2, np.sqrt(0.04 / 3), 1, 3))


def test_the_error_has_a_part_from_prompts_and_a_part_from_seeds():
    prompts_differ = mean_and_error(np.array([[0.1, 0.3], [0.1, 0.3]]))
    seeds_differ = mean_and_error(np.array([[0.1, 0.1], [0.3, 0.3]]))
    assert prompts_differ == pytest.approx((0.2, 0.1, 2, 2)) == seeds_differ
    assert mean_and_error(np.array([[0.0, 0.2], [0.2, 0.4]])).se == pytest.approx(np.sqrt(0.01 + 0.01))


def test_pairing_removes_what_prompts_have_in_common():
    hardness = np.random.default_rng(0).random((3, 50))
    assert paired_difference(hardness + 0.01, hardness).se < 1e-12 < 0.01 < mean_and_error(hardness).se


def test_means_of_bins_are_half_open_and_empty_bins_are_nan():
    means = bin_means([1, 2, 3, 4, 9], [10, 20, 30, 40, 90], [1, 3, 5, 7, 10])
    assert means == pytest.approx([15, 35, np.nan, 90], nan_ok=True)


def test_bins_average_each_column_by_itself():
    assert bin_means([1, 2], [[1, 10], [3, 30]], [1, 3]) == pytest.approx(np.array([[2, 20]]))


@pytest.mark.parametrize("bad", [[], [1.0, np.nan], [np.inf, 1.0]])
def test_empty_or_not_finite_values_raise(bad):
    for call in (mean, iqm, lambda values: bootstrap_interval(values, np.random.default_rng(0)), mean_and_error):
        with pytest.raises(ValueError, match="no values|not finite"):
            call(bad)


def test_pairs_of_different_shape_raise():
    with pytest.raises(ValueError, match=r"\(1, 3\) and \(1, 2\)"):
        paired_difference([[1, 2, 3]], [[1, 2]])
    with pytest.raises(ValueError, match="at least two prompts"):
        mean_and_error(np.array([[1.0]]))
    with pytest.raises(ValueError, match="3 steps for 2 values"):
        bin_means([1, 2, 3], [1, 2], [0, 4])
