"""Properties T1-T12 of the interpolated anchor that need no loss; those with a loss are in test_losses.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.algorithms.proximal import alpha, interpolate, staleness

SPACES = ["log", "prob"]
logps = st.floats(-30, 0)
d_values = st.integers(1, 64)


def scalar(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)


def anchor(behav: float, theta: float, d: int, space: str = "log", fresh: str = "behave") -> float:
    return interpolate(scalar(behav), scalar(theta), alpha(scalar(d), fresh), space).item()


def test_staleness_is_counted_in_training_steps_and_zero_on_padding():
    versions = torch.tensor([[7, 7, 5, 3], [4, 6, -1, -1]], dtype=torch.int32)
    assert staleness(7, versions).tolist() == [[0, 0, 2, 4], [3, 1, 0, 0]]


@pytest.mark.parametrize("version", [8, -2])
def test_a_version_that_cannot_exist_is_named(version):
    with pytest.raises(ValueError, match=rf"\[{version}\].*7"):
        staleness(7, torch.tensor([[7, version, -1]]))


def test_alpha_is_one_over_d_and_fresh_tokens_follow_the_chosen_rule():
    d = torch.tensor([0, 1, 2, 4, 8])
    assert alpha(d).tolist() == [1.0, 1.0, 0.5, 0.25, 0.125]
    assert alpha(d, "theta").tolist() == [0.0, 1.0, 0.5, 0.25, 0.125]


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="negative"):
        alpha(torch.tensor([2, -1]))
    with pytest.raises(ValueError, match="behaviour"):
        alpha(torch.tensor([2]), "behaviour")
    with pytest.raises(ValueError, match="linear"):
        interpolate(torch.zeros(1), torch.zeros(1), 0.5, "linear")


@pytest.mark.parametrize(
    ("space", "d", "expected"),
    # behav 1/2, theta 1/8.  log: sqrt(1/16) = 1/4 and 2^-(1/3) 2^-(2) = 2^-(7/3);  prob: (1/2 + 1/8)/2 = 5/16 and 1/6 + 1/12 = 1/4
    [("log", 2, 1 / 4), ("log", 3, 2 ** (-7 / 3)), ("prob", 2, 5 / 16), ("prob", 3, 1 / 4)],
)
def test_anchor_of_a_known_token(space, d, expected):
    assert anchor(math.log(1 / 2), math.log(1 / 8), d, space) == pytest.approx(math.log(expected), rel=1e-12)


@pytest.mark.parametrize("space", SPACES)
def test_anchor_is_exact_at_both_ends(space):
    behav, theta = torch.tensor([-0.1, -300.0, -2.7182817]), torch.tensor([-5.3, -0.7, -2.7182820])
    assert torch.equal(interpolate(behav, theta, 1.0, space), behav)
    assert torch.equal(interpolate(behav, theta, 0.0, space), theta)


@pytest.mark.parametrize("space", SPACES)
def test_anchor_carries_no_gradient(space):
    theta = torch.tensor([-1.0], requires_grad=True)
    assert not interpolate(torch.tensor([-2.0]), theta, 0.5, space).requires_grad


def test_alpha_broadcasts_over_tokens():
    behav, theta = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.zeros(2, 2)
    assert interpolate(behav, theta, torch.tensor([[1.0], [0.5]])).tolist() == [[-1.0, -2.0], [-1.5, -2.0]]


def test_versions_mixed_within_a_sequence_get_one_anchor_each():
    # learner at 6; tokens sampled at 6, 5, 4 and 2: alpha 1, 1, 1/2, 1/4;  anchor = -4 alpha, then padding
    d = staleness(6, torch.tensor([[6, 5, 4, 2, -1]]))
    assert interpolate(torch.full((1, 5), -4.0), torch.zeros(1, 5), alpha(d))[0, :4].tolist() == [-4.0, -4.0, -2.0, -1.0]


def test_half_precision_log_probs_are_interpolated_in_float32():
    # bfloat16 has 8 bits: -1.0078125 would round to -1.0078125 or -1.0, not to the middle
    behav, theta = torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-1.0078125], dtype=torch.bfloat16)
    assert interpolate(behav, theta, 0.5).item() == -1.00390625


@pytest.mark.parametrize("fresh", ["behave", "theta"])
@pytest.mark.parametrize("space", SPACES)
@settings(max_examples=60, deadline=None)
@given(behav=logps, theta=logps, d=st.integers(0, 64))
def test_t1_anchor_lies_between_behaviour_and_current_policy(space, fresh, behav, theta, d):
    slack = 1e-12 if space == "prob" else 0.0  # logaddexp rounds
    assert min(behav, theta) - slack <= anchor(behav, theta, d, space, fresh) <= max(behav, theta) + slack


@settings(max_examples=100, deadline=None)
@given(behav=logps, theta=logps, d=d_values)
def test_t2_t8_log_ratios_split_the_log_weight_into_shares_1_over_d_and_the_rest(behav, theta, d):
    log_w, prox = theta - behav, anchor(behav, theta, d)
    assert theta - prox == pytest.approx(log_w / d, abs=1e-12)
    assert prox - behav == pytest.approx(log_w * (1 - 1 / d), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(behav=st.floats(-5, 0), theta=st.floats(-5, 0), d=st.integers(1, 32))
def test_t3_ratio_moves_towards_one_as_tokens_get_older(behav, theta, d):
    distance = [abs(math.expm1(theta - anchor(behav, theta, age))) for age in (1, d, d + 1)]
    assert distance[0] + 1e-12 >= distance[1] and distance[1] + 1e-12 >= distance[2]


@pytest.mark.parametrize("d", [1, 2, 3, 4, 8, 16, 64])
def test_t4_variance_of_the_ratio_is_at_most_that_of_the_weight_on_exact_distributions(d):
    logits = torch.randn(2, 500, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(d)) * 2
    behav, theta = logits.log_softmax(-1)
    r, w = (theta - interpolate(behav, theta, 1 / d)).exp(), (theta - behav).exp()

    def variance(x):
        mean = (behav.exp() * x).sum(-1, keepdim=True)
        return (behav.exp() * (x - mean).square()).sum(-1)

    assert (variance(r) <= variance(w) + 1e-12).all()


@pytest.mark.parametrize("d", [2, 3, 8])
def test_t9_anchor_has_mass_below_one_unless_nothing_moved_or_d_is_one(d):
    behav, theta = torch.randn(2, 200, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(d)).log_softmax(-1)
    assert (interpolate(behav, theta, 1 / d).exp().sum(-1) < 1).all()
    for whole in (interpolate(behav, theta, 1.0), interpolate(behav, behav, 1 / d)):
        torch.testing.assert_close(whole.exp().sum(-1), torch.ones(200, dtype=torch.float64))


@settings(max_examples=100, deadline=None)
@given(behav=logps, theta=logps, d=d_values)
def test_t10_loglinear_anchor_is_at_most_the_linear_one(behav, theta, d):
    assert anchor(behav, theta, d, "log") <= anchor(behav, theta, d, "prob") + 1e-12


def test_t11_with_growing_staleness_the_ratio_goes_to_one_and_the_weight_does_not():
    prox = anchor(-3.0, -1.0, 10**6)
    assert math.exp(-1.0 - prox) == pytest.approx(1, abs=1e-5)
    assert math.exp(prox + 3.0) == pytest.approx(math.exp(2), rel=1e-5)
