"""Overcommitment Δ of OPPO (arXiv 2509.25762): how many requests beyond the batch are kept in flight, adapted to the course of the reward.

R_t is the mean reward of the batch of training step t, w the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from nowait.runtime.device import resolve

SIGNIFICANCE = 0.05  # one-sided, of the rise that rule trend asks for
TAIL_WORTH = 0.1  # rule trend overcommits where at least this share of the generation time has fewer than half of the slots live


class OvercommitController:
    """Δ within [minimum, maximum], changed once per training step.

    slope: the paper's text: +1 if (R_t - R_{t-w}) / w > 0, else -1. Two noisy rewards decide, so on a plateau Δ wanders about the middle.
    algorithm1: the paper's Algorithm 1: the step is max(1, Δ // 4); the definition of its d is not known to us, so the direction is slope's.
    trend: ours: +1 where the rise of the last w rewards (least squares) is significant and there is a tail to remove, else -1.
    fixed: always `initial`.
    module:function: the user's, called once per step as soon as window + 1 rewards are there: (rewards, Δ, tail fraction) -> change of Δ.
    Raises ValueError for limits or a window that make no sense, and for a reward that is NaN.
    """

    def __init__(self, initial: int, minimum: int, maximum: int, window: int, rule: str = "slope") -> None:
        if not 0 <= minimum <= initial <= maximum:
            raise ValueError(f"0 <= minimum <= initial <= maximum must hold: minimum {minimum}, initial {initial}, maximum {maximum}")
        if rule not in RULES and ":" not in rule:
            raise ValueError(f"unknown rule {rule!r}: choose slope, algorithm1, trend or fixed, or write module:function for your own")
        if window < (shortest := 3 if rule == "trend" else 1):
            raise ValueError(f"rule {rule} needs a window of at least {shortest} training steps, got {window}")
        self.delta, self.minimum, self.maximum = initial, minimum, maximum
        self._change: Rule = RULES[rule] if rule in RULES else resolve(rule)
        self._needed = window if rule == "trend" else window + 1
        self._rewards: list[float] = []  # the last ones needed, oldest first

    def update(self, mean_reward: float, tail_fraction: float | None = None) -> int:
        """Δ of the next step. `tail_fraction`, for trend: share of the generation time with under half the slots live; None counts as large."""
        if not math.isfinite(mean_reward):
            raise ValueError(f"the mean reward is {mean_reward}")
        self._rewards = [*self._rewards, float(mean_reward)][-self._needed :]
        if len(self._rewards) == self._needed:
            step = self._change(self._rewards, self.delta, tail_fraction)
            self.delta = min(self.maximum, max(self.minimum, self.delta + step))
        return self.delta

    def get_state(self) -> dict:
        return {"delta": self.delta, "rewards": list(self._rewards)}

    def set_state(self, state: dict) -> None:
        self.delta, self._rewards = state["delta"], list(state["rewards"])


def _slope(rewards: list[float], delta: int, tail_fraction: float | None) -> int:
    return 1 if rewards[-1] > rewards[0] else -1


def _algorithm1(rewards: list[float], delta: int, tail_fraction: float | None) -> int:
    return max(1, delta // 4) * _slope(rewards, delta, tail_fraction)


def _trend(rewards: list[float], delta: int, tail_fraction: float | None) -> int:
    worth = tail_fraction is None or tail_fraction >= TAIL_WORTH
    return 1 if worth and rise_probability(rewards) < SIGNIFICANCE else -1


Rule = Callable[[list[float], int, float | None], int]  # the last rewards, oldest first; Δ; tail fraction -> change of Δ, before its limits
RULES: dict[str, Rule] = {"slope": _slope, "algorithm1": _algorithm1, "trend": _trend, "fixed": lambda rewards, delta, tail_fraction: 0}


def rise_probability(values: list[float]) -> float:
    """Probability that values without a trend rise at least as significantly: one-sided t-test of the least-squares slope, at least 3 values."""
    n = len(values)
    centred = [i - (n - 1) / 2 for i in range(n)]
    mean, squares = sum(values) / n, sum(x * x for x in centred)
    slope = sum(x * y for x, y in zip(centred, values, strict=True)) / squares
    residual = sum((y - mean - slope * x) ** 2 for x, y in zip(centred, values, strict=True))
    return _student_upper_tail(math.atan2(slope, math.sqrt(residual / squares)), n - 2)


def _student_upper_tail(angle: float, freedom: int) -> float:
    """P(T > t) of Student's t where angle = atan(t / sqrt(freedom)), by the finite sums 26.7.3 and 26.7.4 of Abramowitz and Stegun."""
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return (1 - inside) / 2
