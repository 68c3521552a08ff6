from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.algorithms.kl import LOG_RATIO_LIMIT, k3, kl_clamped, kl_estimate

logps = st.floats(-1e4, 0, width=32)


@pytest.mark.parametrize(
    ("kind", "expected"),
    # pi = 1/2, ref = 1/4: x = log(1/4) - log(1/2) = -log 2;  k1 = log 2, k2 = (log 2)²/2, k3 = 1/2 - 1 + log 2
    [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", math.log(2) - 0.5)],
)
def test_estimates_of_a_token_twice_as_likely_as_under_the_reference(kind, expected):
    estimate = kl_estimate(torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), kind)
    assert estimate.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_average_to_the_divergence_from_policy_to_reference(kind):
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    # 0.7 log(0.7/0.2) + 0.2 log(0.2/0.5) + 0.1 log(0.1/0.3); the other direction would be 0.537
    divergence = 0.7 * math.log(3.5) + 0.2 * math.log(0.4) + 0.1 * math.log(1 / 3)
    assert (p * kl_estimate(p.log(), q.log(), kind)).sum().item() == pytest.approx(divergence, rel=1e-5)


def test_k3_keeps_its_digits_at_small_log_ratios():
    x = torch.tensor([1e-4, -1e-4])
    # x²/2 + x³/6 = 5e-9 ± 1.7e-13; exp(x) - 1 - x in float32 is off by its rounding error of 6e-8
    assert k3(x).tolist() == pytest.approx([5e-9, 5e-9], rel=2e-2)


@settings(max_examples=200, deadline=None)
@given(logps, st.floats(-(2**-10), 2**-10, width=32))
def test_k3_is_never_negative(logp, shift):
    logp = torch.tensor([logp])
    assert kl_estimate(logp, logp + shift, "k3").item() >= 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimates_and_gradients_stay_finite_where_one_side_has_no_mass(kind):
    logp = torch.tensor([-1.0, -math.inf, -500.0], requires_grad=True)
    estimate = kl_estimate(logp, torch.tensor([-math.inf, -1.0, -1.0]), kind)
    estimate[[0, 2]].sum().backward()
    assert estimate.isfinite().all() and logp.grad.isfinite().all()


def test_clamped_tokens_are_counted():
    logp_ref = torch.tensor([0.0, -LOG_RATIO_LIMIT, -20.5, -30.0, 25.0])
    assert kl_clamped(torch.zeros(5), logp_ref) == 3
    assert kl_estimate(torch.zeros(5), logp_ref).tolist() == [0.0, 20.0, 20.0, 20.0, -20.0]


def test_half_precision_inputs_are_compared_in_float32():
    assert kl_estimate(torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-2.0], dtype=torch.bfloat16)).dtype == torch.float32


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match=r"\(2, 1\).*\(2,\)"):
        kl_estimate(torch.zeros(2, 1), torch.zeros(2))
