from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.algorithms.advantages import gae, group_relative, token_rewards, whiten

NAN = math.nan


def close(a, b):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype))


def ragged(seed: int, lengths: list[int], width: int):
    """Random rewards, values and bootstrap with NaN in the padding."""
    random = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    rewards, values = (torch.randn(len(lengths), width, generator=random).where(mask, torch.tensor(NAN)) for _ in range(2))
    return rewards, values, mask, torch.randn(len(lengths), generator=random)


def test_token_rewards_are_the_weighted_kl_everywhere_and_the_score_on_the_last_token():
    kl, mask = torch.tensor([[0.5, -0.25, 1.0], [2.0, NAN, NAN], [NAN] * 3]), torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    rewards = token_rewards(torch.tensor([3.0, -1.0, NAN]), kl, mask, kl_coef=0.1)
    close(rewards, [[-0.05, 0.025, 2.9], [-1.2, 0, 0], [0, 0, 0]])
    close(rewards.sum(1), [3 - 0.1 * 1.25, -1 - 0.1 * 2, 0])  # score minus beta times the response's KL


def test_the_score_stands_on_the_last_token_that_counts_also_behind_a_hole():
    close(token_rewards(torch.tensor([5.0]), torch.zeros(1, 5), torch.tensor([[0, 1, 0, 1, 0]]), kl_coef=1.0), [[0.0, 0, 0, 5, 0]])


@pytest.mark.parametrize(("reward", "kl", "name"), [(NAN, 0.0, "reward"), (0.0, NAN, "kl")])
def test_a_score_or_kl_that_is_no_number_is_named(reward, kl, name):
    with pytest.raises(FloatingPointError, match=f"{name} is nan"):
        token_rewards(torch.tensor([reward]), torch.tensor([[kl]]), torch.ones(1, 1), kl_coef=0.0)


def test_gae_of_a_response_that_stopped():
    # gamma 1, lam 1/2.  delta = 0+2-1, 0+3-2, 5+0-3 = 1, 1, 2;  A2 = 2, A1 = 1 + 2/2 = 2, A0 = 1 + 2/2 = 2
    advantages, returns = gae(torch.tensor([[0.0, 0, 5]]), torch.tensor([[1.0, 2, 3]]), torch.ones(1, 3), gamma=1.0, lam=0.5)
    close(advantages, [[2.0, 2, 2]])
    close(returns, [[3.0, 4, 5]])


def test_gae_of_a_response_that_was_cut_off_continues_with_its_bootstrap():
    # gamma 1/2, lam 1/2, V(whole) = 4.  delta = 1-1, 1.5-2, 5+2-3 = 0, -1/2, 4;  A2 = 4, A1 = -1/2 + 4/4 = 1/2, A0 = 0 + 1/8
    rewards, values = torch.tensor([[0.0, 0, 5]]), torch.tensor([[1.0, 2, 3]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), gamma=0.5, lam=0.5, bootstrap=torch.tensor([4.0]))
    close(advantages, [[0.125, 0.5, 4]])
    close(returns, [[1.125, 2.5, 7]])


def test_only_cut_off_rows_see_their_bootstrap():
    rewards, values, mask, bootstrap = ragged(0, [3, 3], 5)
    stopped, _ = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    mixed, _ = gae(rewards, values, mask, gamma=1.0, lam=1.0, bootstrap=torch.tensor([0.0, 2.5]))
    close(mixed - stopped, [[0.0] * 5, [2.5, 2.5, 2.5, 0, 0]])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_without_discount_the_returns_are_the_rewards_to_go(seed, lengths):
    rewards, values, mask, bootstrap = ragged(seed, lengths, 6)
    _, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0, bootstrap=bootstrap)
    for i, length in enumerate(lengths):
        for t in range(length):
            assert returns[i, t].item() == pytest.approx(rewards[i, t:length].sum().item() + bootstrap[i].item(), abs=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 1.0), st.floats(0.0, 1.0))
def test_wider_padding_and_its_content_change_nothing(seed, gamma, lam):
    rewards, values, mask, bootstrap = ragged(seed, [4, 1, 3], 4)
    narrow = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap=bootstrap)
    wide = torch.full((3, 5), math.inf)
    widened = (torch.cat(pair, 1) for pair in ((rewards, wide), (values, wide), (mask, wide < 0)))
    padded = gae(*widened, gamma=gamma, lam=lam, bootstrap=bootstrap)
    for short, long in zip(narrow, padded, strict=True):
        assert torch.equal(short, long[:, :4]) and not long[:, 4:].any()


def test_left_padding_and_holes_are_skipped():
    compact = gae(torch.tensor([[1.0, 2, 3]]), torch.tensor([[0.5, 1, 2]]), torch.ones(1, 3), gamma=0.9, lam=0.8, bootstrap=torch.tensor([7.0]))
    spread, mask = torch.tensor([[NAN, 1.0, NAN, 2, 3, NAN]]), torch.tensor([[0.0, 1, 0, 1, 1, 0]])
    values = torch.tensor([[NAN, 0.5, NAN, 1, 2, NAN]])
    holes = gae(spread, values, mask, gamma=0.9, lam=0.8, bootstrap=torch.tensor([7.0]))
    for a, b in zip(compact, holes, strict=True):
        close(b[:, [1, 3, 4]], a)
        assert not b[mask == 0].any()


def test_a_score_on_the_last_token_reaches_every_token_and_no_padding():
    rewards, mask = torch.zeros(2, 6), torch.arange(6) < torch.tensor([[4], [2]])
    rewards[0, 3] = rewards[1, 1] = 1.0
    advantages, _ = gae(rewards, torch.zeros(2, 6), mask, gamma=1.0, lam=0.95)
    assert torch.equal(advantages != 0, mask)


def test_bootstrap_of_a_row_left_out_may_be_anything_and_of_a_live_row_may_not():
    zeros, mask = torch.zeros(2, 3), torch.tensor([[1, 1, 1], [0, 0, 0]])
    advantages, _ = gae(zeros, zeros, mask, gamma=1.0, lam=1.0, bootstrap=torch.tensor([1.0, NAN]))
    close(advantages, [[1.0, 1, 1], [0, 0, 0]])
    with pytest.raises(FloatingPointError, match="bootstrap is nan"):
        gae(zeros, zeros, mask, gamma=1.0, lam=1.0, bootstrap=torch.tensor([NAN, 1.0]))


@pytest.mark.parametrize("name", ["rewards", "values"])
def test_nan_at_a_token_that_counts_is_named(name):
    tensors = {"rewards": torch.zeros(1, 2), "values": torch.zeros(1, 2)}
    tensors[name] = torch.tensor([[0.0, NAN]])
    with pytest.raises(FloatingPointError, match=rf"{name} is nan at \(0, 1\)"):
        gae(**tensors, mask=torch.ones(1, 2), gamma=1.0, lam=1.0)


def test_advantages_are_constants_to_the_value_model():
    values = torch.zeros(1, 2, requires_grad=True)
    assert not any(x.requires_grad for x in gae(torch.ones(1, 2), values, torch.ones(1, 2), gamma=1.0, lam=1.0))


def test_group_relative_rewards_of_two_interleaved_groups():
    rewards, groups = torch.tensor([1.0, 4.0, 0.0, 2.0, 1.0]), torch.tensor([30, 7, 30, 7, 30])
    # group 30: 1, 0, 1, mean 2/3, variance (1/9 + 4/9 + 1/9)/2 = 1/3;  group 7: 4, 2, mean 3, variance (1 + 1)/1 = 2
    s30, s7 = math.sqrt(1 / 3) + 1e-5, math.sqrt(2) + 1e-5
    close(group_relative(rewards, groups), [1 / 3 / s30, 1 / s7, -2 / 3 / s30, -1 / s7, 1 / 3 / s30])
    close(group_relative(rewards, groups, std=False), [1 / 3, 1, -2 / 3, -1, 1 / 3])


@pytest.mark.parametrize("std", [True, False])
def test_equal_rewards_and_groups_of_one_give_exactly_zero(std):
    rewards = torch.tensor([0.1] * 7 + [1 / 3] * 3 + [5.0], dtype=torch.float64)  # their means are rounded
    groups = torch.tensor([0] * 7 + [1] * 3 + [2])
    assert not group_relative(rewards, groups, std=std).any()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=12), st.randoms())
def test_group_advantages_sum_to_zero_and_follow_a_permutation(rows, random):
    rewards, groups = torch.tensor([r for r, _ in rows], dtype=torch.float64), torch.tensor([g for _, g in rows])
    advantages = group_relative(rewards, groups)
    order = random.sample(range(len(rows)), len(rows))
    close(group_relative(rewards[order], groups[order]), advantages[order])
    for g in groups.unique():
        assert advantages[groups == g].sum().item() == pytest.approx(0, abs=1e-9)


def test_a_failed_reward_is_refused():
    with pytest.raises(FloatingPointError, match="rewards is nan"):
        group_relative(torch.tensor([1.0, NAN]), torch.tensor([0, 0]))


def test_whitening_ignores_what_is_masked():
    x, mask = torch.tensor([[2.0, 4, NAN], [6, math.inf, -9]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    # 2, 4, 6: mean 4, unbiased variance (4 + 0 + 4)/2 = 4
    close(whiten(x, mask), [[-1.0, 0, 0], [1, 0, 0]])


def test_whitening_of_equal_single_or_no_tokens_stays_finite():
    x = torch.full((1, 4), 0.1)
    for mask in (torch.ones(1, 4), torch.tensor([[1, 0, 0, 0]]), torch.zeros(1, 4)):
        close(whiten(x, mask), torch.zeros(1, 4))
