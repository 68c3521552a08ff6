"""Token rewards and advantages: generalised advantage estimation, group-relative rewards, whitening. All results carry no gradient.

Token rewards: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2. GAE: Schulman et al. 2016 (arXiv 1506.02438), equation 16.
Group-relative: GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2.
Shapes: B sequences, T response tokens, arrays response-aligned [B, T]; values[t] = V(prefix before token t).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nowait.algorithms.losses import visible

GROUP_STD_EPS = 1e-5  # AReaL's value
WHITEN_VAR_EPS = 1e-8  # TRL's value


@torch.no_grad()
def token_rewards(reward: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """[B, T]: -kl_coef * kl at every token, plus the response's reward [B] at its last unmasked token; 0 where masked.

    `kl` [B, T] are estimates per token in nats. A row sums to its reward minus kl_coef times its summed KL. Raises FloatingPointError
    on NaN or Inf at unmasked tokens, or in `reward` of a row with any.
    """
    mask = mask.bool()
    (reward,), (kl,) = visible(mask.any(1), reward=reward), visible(mask, kl=kl)
    left = mask.flip(1).cumsum(1).flip(1)  # unmasked tokens from here on
    return torch.where(mask & (left == 1), reward[:, None], 0) - kl_coef * kl


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float, bootstrap: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Advantages and returns (= advantages + values), both [B, T] and 0 where masked.

    A_t = delta_t + gamma lam A_{t+1}, delta_t = rewards_t + gamma V_{t+1} - V_t, where t + 1 is the next unmasked token.
    `bootstrap` [B] stands in for the value after the last token: V(whole response) where the response was cut off, 0 where it
    stopped; None is 0 everywhere. Raises FloatingPointError on NaN or Inf at unmasked tokens, or in `bootstrap` of a row with any.
    """
    mask = mask.bool()
    rewards, values = visible(mask, rewards=rewards, values=values)
    advantage = torch.zeros_like(values[:, 0])
    next_value = advantage if bootstrap is None else visible(mask.any(1), bootstrap=bootstrap)[0]
    advantages = torch.zeros_like(values)
    for t in reversed(range(mask.shape[1])):
        live = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(live, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(live, values[:, t], next_value)
        advantages[:, t] = torch.where(live, advantage, 0)
    return advantages, advantages + values


@torch.no_grad()
def group_relative(rewards: Tensor, group_ids: Tensor, *, std: bool = True) -> Tensor:
    """Rewards [B] minus their group's mean, with `std` divided by the group's unbiased standard deviation + 1e-5.

    The members of a group share a number in `group_ids` [B], in any order. A group of equal rewards, or of one, gives exactly 0.
    The eps is AReaL's; Dr. GRPO (arXiv 2503.20783) argues for std=False. Raises FloatingPointError on NaN or Inf: leave out failed sequences.
    """
    (rewards,) = visible(torch.ones_like(group_ids, dtype=torch.bool), rewards=rewards)
    _, group, size = group_ids.unique(return_inverse=True, return_counts=True)
    lowest = torch.full(size.shape, torch.inf, dtype=torch.float64, device=rewards.device)
    lowest.scatter_reduce_(0, group, rewards.double(), "amin")
    # measured from the group's lowest reward, equal rewards leave no rounding error for the division to blow up
    above = rewards.double() - lowest[group]
    centred = above - (torch.zeros_like(lowest).index_add(0, group, above) / size)[group]
    if std:
        variance = torch.zeros_like(lowest).index_add(0, group, centred.square()) / (size - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + GROUP_STD_EPS)[group]
    return centred.to(rewards.dtype)


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x brought to mean 0 and unit unbiased variance (+ 1e-8) over the unmasked tokens, 0 where masked."""
    mask = mask.bool()
    (x,) = visible(mask, x=x)
    wide, n = x.double(), mask.sum()
    centred = torch.where(mask, wide - wide.sum() / n.clamp(min=1), 0)
    return (centred * (centred.square().sum() / (n - 1).clamp(min=1) + WHITEN_VAR_EPS).rsqrt()).to(x.dtype)
