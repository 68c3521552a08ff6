from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.algorithms.losses import LOG_RATIO_MAX, decoupled_ppo_loss, finish_stats, merge_stats, ppo_loss, value_loss
from nowait.algorithms.proximal import alpha, interpolate, staleness

NAN, LN2 = math.nan, math.log(2)
D = [1, 2, 3, 4, 8]


def probs(*values: float) -> torch.Tensor:
    return torch.tensor([values]).log()


def random_batch(seed: int, rows: int = 6, width: int = 9, spread: float = 0.6) -> dict[str, torch.Tensor]:
    """Ragged, float64, NaN in the padding; log-weights of a stale batch."""
    random = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=random)
    behav = -torch.rand(rows, width, generator=random, dtype=torch.float64) * 3
    noise = torch.randn(3, rows, width, generator=random, dtype=torch.float64)
    batch = {"logp_theta": behav + spread * noise[0], "logp_prox": behav + spread * noise[1], "logp_behav": behav, "advantages": noise[2]}
    return {name: x.where(mask, torch.tensor(NAN)) for name, x in batch.items()} | {"mask": mask}


def with_gradient(loss_function, logp_theta, *args, **options):
    """(loss, gradient in logp_theta, stats)"""
    theta = logp_theta.clone().requires_grad_()
    loss, stats = loss_function(theta, *args, **options)
    loss.backward()
    return loss.detach(), theta.grad, stats


# behav   1/2   1/4   1/2   0.4        rho   1   2     1/2   1/2
# prox    1/2   1/2   1/4   0.2        r     1   3/2   1/2   5/2
# theta   1/2   3/4   1/8   1/2        A     1   2     -1    -1
# max(-A r, -A clip(r, 0.8, 1.2))  =  -1, -2.4 (clipped), 0.8 (clipped), 2.5;  times rho  =  -1, -4.8, 0.4, 1.25;  sum -4.15
FOUR = (probs(0.5, 0.75, 0.125, 0.5), probs(0.5, 0.5, 0.25, 0.2), probs(0.5, 0.25, 0.5, 0.4), torch.tensor([[1.0, 2, -1, -1]]))


def test_decoupled_loss_and_gradient_of_four_known_tokens():
    loss, gradient, _ = with_gradient(decoupled_ppo_loss, *FOUR, torch.ones(1, 4))
    assert loss.item() == pytest.approx(-4.15 / 4)
    # -A rho r / 4, and 0 where clipped: -1/4, 0, 0, 0.5 * 2.5/4
    torch.testing.assert_close(gradient, torch.tensor([[-0.25, 0, 0, 0.3125]]))


@pytest.mark.parametrize(
    ("options", "total", "gradient"),
    [
        # rho of the second token is 2: left out, it leaves -4.15 + 4.8 = 0.65; at 1.5, its loss is -3.6
        ({"behav_weight_cap": 1.5}, 0.65, [-0.25, 0, 0, 0.3125]),
        ({"behav_weight_cap": 1.5, "cap_mode": "clamp"}, -2.95, [-0.25, 0, 0, 0.3125]),
        # c |A| = 2 in place of 2.5, times rho 1/2: 1.0 in place of 1.25, and no gradient
        ({"dual_clip": 2.0}, -4.4, [-0.25, 0, 0, 0]),
        # up to r = 1.6: the second token gives -3, times 2, and is clipped no more: -2 * 2 * 1.5/4
        ({"clip_high": 0.6}, -5.35, [-0.25, -1.5, 0, 0.3125]),
        # down to r = 0.4: the third token gives 0.5, times 1/2: 0.25 in place of 0.4; 1 * 0.5 * 0.5/4
        ({"clip_low": 0.6}, -4.3, [-0.25, 0, 0.0625, 0.3125]),
        ({"denominator": 20}, -4.15 / 5, [-0.05, 0, 0, 0.0625]),
    ],
)
def test_options_change_the_known_loss_as_calculated(options, total, gradient):
    loss, grad, _ = with_gradient(decoupled_ppo_loss, *FOUR, torch.ones(1, 4), **options)
    assert loss.item() == pytest.approx(total / 4, rel=1e-5)
    torch.testing.assert_close(grad, torch.tensor([gradient]), rtol=1e-5, atol=1e-7)


def test_metrics_of_four_known_tokens():
    _, stats = decoupled_ppo_loss(*FOUR, torch.ones(1, 4), behav_weight_cap=1.5, cap_mode="clamp", dual_clip=2.0)
    # k3(r) = r - 1 - log r sums to 1.5 - log(1 * 1.5 * 0.5 * 2.5), k3(rho) to 0 - log(2/4) = log 2;  ess = 4²/(4 * 5.5)
    # loss: -1 - 2.4 * 1.5 + 0.4 + 2 * 0.5
    expected = {
        "tokens": 4, "policy_loss": -3.2 / 4, "clipped_tokens": 2, "clip_frac": 0.5, "dual_clipped_tokens": 1, "clamped_ratios": 0,
        "ratio_mean": 5.5 / 4, "ratio_min": 0.5, "ratio_max": 2.5, "approx_kl": (1.5 - math.log(1.875)) / 4,
        "behave_weight_mean": 1.0, "behave_weight_min": 0.5, "behave_weight_max": 2.0, "behave_kl": LN2 / 4,
        "capped_frac": 0.25, "ess": 16 / 22,
    }  # fmt: skip
    assert finish_stats(stats) == pytest.approx(expected, rel=1e-5)


def test_coupled_loss_of_four_known_tokens_has_no_behaviour_weight():
    theta, prox, _, advantages = FOUR
    loss, gradient, stats = with_gradient(ppo_loss, theta, prox, advantages, torch.ones(1, 4))
    assert loss.item() == pytest.approx((-1 - 2.4 + 0.8 + 2.5) / 4, abs=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([[-0.25, 0, 0, 0.625]]))
    assert finish_stats(stats)["clip_frac"] == 0.5 and not any(name.startswith("behave") for name in finish_stats(stats))


@pytest.mark.parametrize("space", ["log", "prob"])
@pytest.mark.parametrize("d", [0, *D])
@pytest.mark.parametrize("fresh", ["behave", "theta"])
def test_t6_gradient_is_the_weighted_policy_gradient_for_every_anchor_and_zero_where_clipped(d, fresh, space):
    b = random_batch(d, rows=16, spread=1.2)
    prox = interpolate(b["logp_behav"], b["logp_theta"], alpha(torch.tensor(float(d)), fresh), space)
    _, gradient, stats = with_gradient(decoupled_ppo_loss, b["logp_theta"], prox, b["logp_behav"], b["advantages"], b["mask"])
    r, w = (b["logp_theta"] - prox).exp(), (b["logp_theta"] - b["logp_behav"]).exp()
    clipped = b["mask"] & torch.where(b["advantages"] > 0, r > 1.2, r < 0.8)
    expected = torch.where(b["mask"] & ~clipped, -b["advantages"] * w / b["mask"].sum(), 0)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)
    assert stats["clipped_tokens_sum"] == clipped.sum() and clipped.any() != (d == 0 and fresh == "theta")


def test_t6_detach_an_anchor_with_a_graph_gets_no_gradient_and_leaks_none():
    b = random_batch(3)
    leaf = b["logp_theta"].clone().requires_grad_()
    half = 0.5 * b["logp_behav"] + 0.5 * leaf  # d = 2, a graph left on the anchor by mistake
    leaks = [leaf, half, b["logp_behav"].clone().requires_grad_(), b["advantages"].clone().requires_grad_()]
    loss, stats = decoupled_ppo_loss(*leaks, b["mask"])
    loss.backward()
    _, gradient, _ = with_gradient(decoupled_ppo_loss, b["logp_theta"], half.detach(), b["logp_behav"], b["advantages"], b["mask"])
    assert stats["clipped_tokens_sum"] > 3 and torch.equal(leaf.grad, gradient)
    assert leaks[2].grad is None and leaks[3].grad is None
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("d", D)
def test_t7_gradient_equals_that_of_a_band_around_behaviour_raised_to_the_power_d(d):
    b = random_batch(40 + d, spread=1.2)
    prox = interpolate(b["logp_behav"], b["logp_theta"], 1 / d)
    _, gradient, stats = with_gradient(
        decoupled_ppo_loss, b["logp_theta"], prox, b["logp_behav"], b["advantages"], b["mask"], clip_low=0.2, clip_high=0.3
    )
    _, banded, band_stats = with_gradient(
        ppo_loss, b["logp_theta"], b["logp_behav"], b["advantages"], b["mask"], clip_low=1 - 0.8**d, clip_high=1.3**d - 1
    )
    torch.testing.assert_close(gradient, banded, rtol=1e-9, atol=0)
    assert stats["clipped_tokens_sum"] == band_stats["clipped_tokens_sum"] and (d > 4 or stats["clipped_tokens_sum"] > 0)


@pytest.mark.parametrize(("advantage", "edge"), [(1.0, 1.2**3), (-1.0, 0.8**3)])
def test_t7_gate_opens_and_closes_at_the_edge_of_the_band(advantage, edge):
    # d = 3: clipped beyond 1.728 for A > 0, below 0.512 for A < 0, and never on the other side
    w = torch.tensor([[edge * 0.999, edge * 1.001, 1 / edge]], dtype=torch.float64)
    theta, behav = w.log(), torch.zeros_like(w)
    _, gradient, _ = with_gradient(decoupled_ppo_loss, theta, interpolate(behav, theta, 1 / 3), behav, torch.full_like(w, advantage), w > 0)
    assert (gradient == 0).tolist() == [[advantage < 0, advantage > 0, False]]


@pytest.mark.parametrize("d", [0, 1])
def test_t5_tokens_of_staleness_one_or_fresh_ones_give_coupled_ppo_on_behaviour(d):
    b = random_batch(5)
    prox = interpolate(b["logp_behav"], b["logp_theta"], alpha(staleness(7, torch.full(b["mask"].shape, 7 - d))))
    decoupled = with_gradient(decoupled_ppo_loss, b["logp_theta"], prox, b["logp_behav"], b["advantages"], b["mask"], behav_weight_cap=5.0)
    coupled = with_gradient(ppo_loss, b["logp_theta"], b["logp_behav"], b["advantages"], b["mask"])
    assert torch.equal(decoupled[0], coupled[0]) and torch.equal(decoupled[1], coupled[1])
    assert all(torch.equal(value, decoupled[2][name]) for name, value in coupled[2].items())


def test_t5_fresh_tokens_anchored_on_theta_are_never_clipped():
    b = random_batch(6)
    prox = interpolate(b["logp_behav"], b["logp_theta"], alpha(torch.tensor(0), "theta"))
    metrics = finish_stats(decoupled_ppo_loss(b["logp_theta"], prox, b["logp_behav"], b["advantages"], b["mask"])[1])
    weight = (b["logp_theta"] - b["logp_behav"]).exp()[b["mask"]]
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1 and metrics["clip_frac"] == 0
    assert metrics["behave_weight_mean"] == pytest.approx(weight.mean().item())


def test_t12_versions_mixed_within_a_sequence_are_clipped_each_in_its_own_band():
    # log-weight log 2 everywhere, A = 1; r = 2, 2, 2^(1/2), 2^(1/4) = 1.19 at d = 0, 1, 2, 4: the last is inside 1.2; then padding
    prox_alpha = alpha(staleness(9, torch.tensor([[9, 8, 7, 5, -1]])))
    behav, theta = torch.full((1, 5), -2.0), torch.full((1, 5), -2.0 + LN2)
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    _, gradient, stats = with_gradient(decoupled_ppo_loss, theta, interpolate(behav, theta, prox_alpha), behav, torch.ones(1, 5), mask)
    torch.testing.assert_close(gradient, torch.tensor([[0, 0, 0, -2 / 4, 0]]))
    metrics = finish_stats(stats)
    assert (metrics["clip_frac"], metrics["ratio_max"]) == (0.75, pytest.approx(2)) and metrics["ratio_min"] == pytest.approx(2**0.25)


def test_stale_data_is_clipped_around_behaviour_and_never_around_recomputed_current_weights():
    b = random_batch(8)
    clip_frac = {}
    for name, prox in {"behave": b["logp_behav"], "a3po": interpolate(b["logp_behav"], b["logp_theta"], 0.5), "current": b["logp_theta"]}.items():
        _, stats = decoupled_ppo_loss(b["logp_theta"], prox, b["logp_behav"], b["advantages"], b["mask"], clip_low=0.05, clip_high=0.05)
        clip_frac[name] = finish_stats(stats)["clip_frac"]
    assert clip_frac["behave"] > 0.3 and clip_frac["a3po"] > 0.3 and clip_frac["current"] == 0


@pytest.mark.parametrize(
    ("options", "loss", "gradient", "counted"),
    # A = -1, rho = 50, r = 1
    [
        ({}, 50, 50, 0),
        ({"behav_weight_cap": 5.0}, 0, 0, 1),
        ({"behav_weight_cap": 5.0, "cap_mode": "clamp"}, 5, 5, 1),
        ({"behav_weight_cap": 50.1}, 50, 50, 0),
    ],
)
def test_a_large_behaviour_weight_on_a_bad_token_is_capped_and_counted(options, loss, gradient, counted):
    theta, behav = probs(0.5), probs(0.01)
    value, grad, stats = with_gradient(decoupled_ppo_loss, theta, theta, behav, torch.tensor([[-1.0]]), torch.ones(1, 1), **options)
    assert (value.item(), grad.item()) == (pytest.approx(loss, rel=1e-5), pytest.approx(gradient, rel=1e-5))
    assert finish_stats(stats)["capped_frac"] == counted
    assert finish_stats(stats)["behave_weight_max"] == pytest.approx(50, rel=1e-5)  # the raw weight, whatever the cap


@pytest.mark.parametrize(("dual_clip", "loss", "gradient", "counted"), [(None, 50, 50, 0), (3.0, 3, 0, 1)])
def test_a_large_ratio_on_a_bad_token_is_bounded_by_the_dual_clip_only(dual_clip, loss, gradient, counted):
    theta, prox = probs(0.5), probs(0.01)
    value, grad, stats = with_gradient(ppo_loss, theta, prox, torch.tensor([[-1.0]]), torch.ones(1, 1), dual_clip=dual_clip)
    assert (value.item(), grad.item()) == (pytest.approx(loss, rel=1e-5), pytest.approx(gradient, rel=1e-5))
    assert stats["dual_clipped_tokens_sum"] == counted and stats["clipped_tokens_sum"] == 0


def test_dual_clip_leaves_good_tokens_alone():
    value, _, stats = with_gradient(ppo_loss, probs(0.5), probs(0.01), torch.tensor([[1.0]]), torch.ones(1, 1), dual_clip=3.0)
    assert value.item() == pytest.approx(-1.2) and stats["dual_clipped_tokens_sum"] == 0 and stats["clipped_tokens_sum"] == 1


def test_tokens_dropped_by_the_cap_stay_in_the_denominator():
    # rho = 1 and 50, A = -1, r = 1: (1 + 0)/2
    theta, behav = probs(0.5, 0.5), probs(0.5, 0.01)
    loss, stats = decoupled_ppo_loss(theta, theta, behav, torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2), behav_weight_cap=5.0)
    assert loss.item() == pytest.approx(0.5) and stats["tokens_sum"] == 2


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratios_beyond_float_range_stay_finite_and_are_counted(advantage):
    theta, prox, behav = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-300.0, -1.0]]), torch.tensor([[-1e4, -1.5]])
    loss, gradient, stats = with_gradient(decoupled_ppo_loss, theta, prox, behav, torch.full((1, 2), advantage), torch.ones(1, 2))
    metrics = finish_stats(stats)
    assert loss.isfinite() and gradient.isfinite().all() and all(map(math.isfinite, metrics.values()))
    assert metrics["clamped_ratios"] == 2  # r and rho of the first token
    assert metrics["ratio_max"] == pytest.approx(math.exp(LOG_RATIO_MAX), rel=1e-5)
    assert gradient[0, 0] == 0 and gradient[0, 1] != 0


def test_a_published_ratio_of_1e17_is_computed_as_it_is():
    value, grad, stats = with_gradient(ppo_loss, torch.tensor([[-1.0]]), torch.tensor([[-42.0]]), torch.tensor([[-1.0]]), torch.ones(1, 1))
    assert value.item() == pytest.approx(math.exp(41), rel=1e-4) and grad.item() == pytest.approx(math.exp(41), rel=1e-4)
    assert stats["clamped_ratios_sum"] == 0


@pytest.mark.parametrize("junk", [NAN, math.inf, -math.inf, 1e30])
def test_what_stands_at_masked_places_is_invisible_in_value_gradient_and_stats(junk):
    b = random_batch(11)
    plain, odd = ({name: x if name == "mask" else x.where(b["mask"], torch.tensor(fill)) for name, x in b.items()} for fill in (0.0, junk))
    for function, names in ((decoupled_ppo_loss, list(b)), (ppo_loss, ["logp_theta", "logp_prox", "advantages", "mask"])):
        (v0, g0, s0), (v1, g1, s1) = (with_gradient(function, *(x[name] for name in names), dual_clip=3.0) for x in (plain, odd))
        assert torch.equal(v0, v1) and torch.equal(g0, g1) and s0 == s1
        assert not g1[~b["mask"]].any() and g1[b["mask"]].any()


def test_wider_padding_and_a_float_mask_change_nothing():
    b = random_batch(12)
    wide = {name: torch.nn.functional.pad(x.double(), (0, 3), value=0.0 if name == "mask" else -7.0) for name, x in b.items()}
    (v0, g0, s0), (v1, g1, s1) = (with_gradient(decoupled_ppo_loss, *x.values(), behav_weight_cap=2.0) for x in (b, wide))
    torch.testing.assert_close(v0, v1)
    torch.testing.assert_close(g0, g1[:, :9])
    assert finish_stats(s0) == pytest.approx(finish_stats(s1))


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["logp_theta", "logp_prox", "logp_behav", "advantages"])
def test_nan_or_inf_at_a_token_that_counts_is_named(name, bad):
    b = random_batch(13)
    b[name][2, 0] = bad
    with pytest.raises(FloatingPointError, match=rf"{name} is {bad} at \(2, 0\)"):
        decoupled_ppo_loss(**b)


def test_a_batch_without_tokens_has_loss_zero_a_graph_and_no_gradient():
    junk, mask = torch.full((2, 3), NAN), torch.zeros(2, 3)
    for function, n in ((decoupled_ppo_loss, 4), (ppo_loss, 3), (value_loss, 3)):
        for denominator in (None, 0, 17):
            loss, gradient, stats = with_gradient(function, *[junk] * n, mask, denominator=denominator)
            assert loss == 0 and torch.equal(gradient, torch.zeros(2, 3))
    metrics = finish_stats(decoupled_ppo_loss(*[junk] * 4, mask)[1])
    assert metrics["tokens"] == 0 and all(math.isnan(metrics[name]) for name in ("policy_loss", "clip_frac", "ratio_max", "behave_weight_min", "ess"))
    full = decoupled_ppo_loss(*FOUR, torch.ones(1, 4))[1]
    assert merge_stats([decoupled_ppo_loss(*[junk] * 4, mask)[1], full]) == full


def test_misuse_is_refused():
    with pytest.raises(ValueError, match=r"advantages has shape \(1,\).*\(1, 4\)"):
        decoupled_ppo_loss(*FOUR[:3], torch.ones(1), torch.ones(1, 4))
    with pytest.raises(ValueError, match="drop"):
        decoupled_ppo_loss(*FOUR, torch.ones(1, 4), cap_mode="drop")
    with pytest.raises(ValueError, match=r"c > 1"):
        decoupled_ppo_loss(*FOUR, torch.ones(1, 4), dual_clip=0.5)


def in_parts(function, batch, parts, **options):
    """Loss, gradient and metrics summed over groups of rows, each padded only to its own longest."""
    n = batch["mask"].sum()
    first = next(iter(batch))
    theta = batch[first].clone().requires_grad_()
    results = []
    for rows in parts:
        longest = int(batch["mask"][rows].sum(1).max())
        part = {name: (theta if name == first else x)[rows, :longest] for name, x in batch.items()}
        results.append(function(**part, denominator=n, **options))
    loss = sum(r[0] for r in results)
    loss.backward()
    return loss.detach(), theta.grad, finish_stats(merge_stats(r[1] for r in results))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.permutations(range(8)))
def test_micro_batches_add_up_to_the_batch(seed, size, order):
    b = random_batch(seed, rows=8)
    value_batch = {"values": b["logp_theta"], "values_before": b["logp_prox"], "returns": b["advantages"], "mask": b["mask"]}
    for function, batch, options in (
        (decoupled_ppo_loss, b, {"behav_weight_cap": 2.0, "dual_clip": 3.0}),
        (value_loss, value_batch, {"clip": 0.2}),
    ):
        whole = in_parts(function, batch, [list(range(8))], **options)
        split = in_parts(function, batch, [order[i : i + size] for i in range(0, 8, size)], **options)
        torch.testing.assert_close(split[0], whole[0])
        torch.testing.assert_close(split[1], whole[1], equal_nan=False)
        assert split[2] == pytest.approx(whole[2], nan_ok=True)


def test_two_shards_of_unequal_token_counts_add_up_to_the_batch_and_local_means_do_not():
    b = random_batch(21, rows=6)
    shards = [[0, 1, 2, 3, 4], [5]]
    whole, split = in_parts(decoupled_ppo_loss, b, [list(range(6))]), in_parts(decoupled_ppo_loss, b, shards)
    torch.testing.assert_close(split[:2], whole[:2])
    local = [decoupled_ppo_loss(**{name: x[rows] for name, x in b.items()})[0] for rows in shards]
    assert abs((sum(local) / 2 - whole[0]).item()) > 1e-3


def test_default_denominator_is_the_token_count():
    b = random_batch(22)
    torch.testing.assert_close(decoupled_ppo_loss(**b)[0], decoupled_ppo_loss(**b, denominator=float(b["mask"].sum()))[0])


# before 1, returns 2; clip 0.5 bounds V to [0.5, 1.5].  V = 1.2, 1.9, 0, 4:  0.5 max((V - 2)², (V_clipped - 2)²) =
# 0.5 * 0.64, 0.5 * max(0.01, 0.25) (clipped), 0.5 * max(4, 2.25), 0.5 * max(4, 0.25)
VALUES = (torch.tensor([[1.2, 1.9, 0.0, 4.0]]), torch.ones(1, 4), torch.full((1, 4), 2.0), torch.ones(1, 4))


def test_clipped_value_loss_and_gradient_of_four_known_tokens():
    loss, gradient, stats = with_gradient(value_loss, *VALUES, clip=0.5)
    assert loss.item() == pytest.approx((0.32 + 0.125 + 2 + 2) / 4)
    torch.testing.assert_close(gradient, torch.tensor([[-0.8, 0, -2, 2]]) / 4)  # (V - R)/4, 0 where clipped
    metrics = finish_stats(stats)
    assert metrics["value_clip_frac"] == 0.25 and metrics["value_loss"] == pytest.approx(4.445 / 4)


def test_value_loss_without_clip_is_half_the_squared_error():
    loss, gradient, stats = with_gradient(value_loss, *VALUES)
    assert loss.item() == pytest.approx((0.32 + 0.005 + 2 + 2) / 4)
    torch.testing.assert_close(gradient, torch.tensor([[-0.8, -0.1, -2, 2]]) / 4)
    assert stats["value_clipped_tokens_sum"] == 0


def test_value_loss_gradient_flows_through_the_new_values_only():
    leaves = [x.clone().requires_grad_() for x in VALUES[:3]]
    value_loss(*leaves, VALUES[3])[0].backward()
    assert leaves[1].grad is None and leaves[2].grad is None


@pytest.mark.parametrize("name", ["values", "values_before", "returns"])
def test_value_loss_names_a_nan_that_counts_and_ignores_one_that_does_not(name):
    tensors = dict(zip(("values", "values_before", "returns"), (x.clone() for x in VALUES[:3]), strict=True))
    tensors[name][0, 3] = NAN
    mask = torch.tensor([[1, 1, 1, 0]])
    assert value_loss(**tensors, mask=mask, clip=0.5)[0].item() == pytest.approx((0.32 + 0.125 + 2) / 3)
    with pytest.raises(FloatingPointError, match=rf"{name} is nan at \(0, 3\)"):
        value_loss(**tensors, mask=torch.ones(1, 4))


def test_explained_variance_is_one_for_perfect_predictions_and_ignores_a_constant_error():
    returns, mask = torch.tensor([[1.0, 2, 3, 4]]), torch.ones(1, 4)

    def explained(before):
        return finish_stats(value_loss(before, before, returns, mask)[1])["explained_variance"]

    assert explained(returns) == 1 and explained(returns + 3) == pytest.approx(1)
    assert explained(torch.zeros(1, 4)) == pytest.approx(0)
    # errors 0, 0, 1, -1: variance 1/2 against 5/4 of the returns
    assert explained(torch.tensor([[1.0, 2, 2, 5]])) == pytest.approx(0.6)


def test_explained_variance_of_equal_returns_is_not_a_number():
    equal = torch.full((1, 3), 0.1, dtype=torch.float64)  # three times 0.1² is not 0.3²/3 in floating point
    _, stats = value_loss(torch.zeros(1, 3), torch.zeros(1, 3), equal, torch.ones(1, 3))
    assert math.isnan(finish_stats(stats)["explained_variance"])


def test_merging_adds_sums_and_keeps_the_extremes():
    a = {"tokens_sum": torch.tensor(3.0), "ratio_min": torch.tensor(0.5), "ratio_max": torch.tensor(2.0)}
    b = {"tokens_sum": torch.tensor(4.0), "ratio_min": torch.tensor(0.7), "ratio_max": torch.tensor(9.0)}
    assert merge_stats([a, b]) == {"tokens_sum": 7, "ratio_min": 0.5, "ratio_max": 9}
