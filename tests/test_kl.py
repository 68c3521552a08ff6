from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import generate, requests

from nowait.algorithms.kl import LOG_RATIO_LIMIT, adapted_kl_coef, k3, kl_clamped, kl_estimate
from nowait.batch import Batch
from nowait.config import AlgorithmConfig, LearnerConfig
from nowait.workers.learner import HFLearner
from nowait.workers.sampler import HFSampler

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


@pytest.mark.parametrize(
    ("kl", "expected"),
    # beta 0.2, target 6, horizon 10,000, 500 responses: beta * (1 + error * 0.05)
    [(6.0, 0.2), (6.6, 0.201), (5.4, 0.199), (7.2, 0.202), (60.0, 0.202), (0.0, 0.198), (-3.0, 0.198)],
)
def test_the_kl_coefficient_follows_the_distance_to_its_target_by_a_fifth_at_most(kl, expected):
    assert adapted_kl_coef(0.2, kl, target=6.0, horizon=10_000, responses=500) == pytest.approx(expected, rel=1e-12)


def test_half_precision_inputs_are_compared_in_float32():
    assert kl_estimate(torch.tensor([-1.0], dtype=torch.bfloat16), torch.tensor([-2.0], dtype=torch.bfloat16)).dtype == torch.float32


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(ValueError, match=r"\(2, 1\).*\(2,\)"):
        kl_estimate(torch.zeros(2, 1), torch.zeros(2))


# In the reward of a learner without a critic


def learner(folder: str, **algorithm) -> HFLearner:
    return HFLearner(folder, LearnerConfig(minibatches=1), AlgorithmConfig(anchor="behave", **algorithm), temperature=1.0, seed=0)


@pytest.fixture(scope="module")
def fresh(tiny) -> Batch:
    """Four requests of four samples, with scores that differ within every group."""
    batch = generate(HFSampler(tiny, slots=16, capacity=64, seed=1), requests(4, n=4))
    return dataclasses.replace(batch, reward=(batch.sequence * 7 % 5).astype(np.float32))


def gradient(worker: HFLearner, batch: Batch) -> np.ndarray:
    worker.prepare(batch)
    return worker.gradient(0)[0].copy()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_reward_of_a_response_is_its_score_less_beta_times_its_summed_kl(tiny, fresh, kind):
    shift = (0.5 * (fresh.sequence % 3)).astype(np.float32)  # the reference is this much below at every token
    referred = dataclasses.replace(fresh, logp_ref=np.where(fresh.mask, fresh.logp_behav - shift[:, None], np.nan).astype(np.float32))
    per_token = shift if kind == "k1" else np.exp(-shift) - 1 + shift
    by_hand = dataclasses.replace(fresh, reward=(fresh.reward - 0.5 * per_token * fresh.length).astype(np.float32))
    found, expected = learner(tiny, kl_coef=0.5, kl_estimator=kind), learner(tiny)
    np.testing.assert_allclose(gradient(found, referred), gradient(expected, by_hand), atol=1e-5)
    assert not np.allclose(gradient(expected, fresh), gradient(expected, by_hand), atol=1e-2)
    found.apply([found.gradient(0)])
    stats = found.finish()
    assert stats["kl"] == pytest.approx((per_token * fresh.length).mean(), rel=1e-4) and stats["kl_coef"] == 0.5


def test_clamped_log_ratios_to_the_reference_are_counted_where_tokens_count(tiny, fresh):
    referred = fresh.logp_behav.copy()
    referred[[0, 3], 0] -= 21
    referred[~fresh.mask] = -99
    assert learner(tiny).update(dataclasses.replace(fresh, logp_ref=referred))["kl_clamped"] == 2


def test_the_adaptive_coefficient_rises_above_its_target_and_belongs_to_the_state(tiny, fresh):
    options = {"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 160}
    worker = learner(tiny, **options)
    above = dataclasses.replace(fresh, logp_ref=fresh.logp_behav - 1)  # one nat per token: beta (1 + 0.2 * 16/160) per step
    coefs = [worker.update(dataclasses.replace(above, step=step))["kl_coef"] for step in range(2)]
    restored = learner(tiny, **options)
    restored.set_state(worker.get_state())
    assert [*coefs, restored.kl_coef] == pytest.approx([0.1, 0.102, 0.10404], rel=1e-9)
