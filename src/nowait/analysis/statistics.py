"""Means, intervals and paired differences over seeds and prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A mean with its standard error, and over how many seeds and prompts."""

    mean: float
    se: float
    seeds: int
    prompts: int


def mean(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Arithmetic mean; empty or not finite input raises ValueError."""
    return _finite(values).mean(axis)


def iqm(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Interquartile mean: the floor(n/4) smallest and largest values are left out (Agarwal et al. 2021, as their library computes it)."""
    ordered = np.moveaxis(np.sort(_finite(values), axis), axis, 0)
    cut = len(ordered) // 4
    return ordered[cut : len(ordered) - cut].mean(0)


def bootstrap_interval(
    values: np.ndarray, rng: np.random.Generator, statistic: Callable = mean, level: float = 0.95, resamples: int = 2000
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of `statistic(sample, axis)` over axis 0 of values [n, ...]; the other axes are resampled together."""
    values = _finite(values)
    draws = rng.integers(len(values), size=(resamples, len(values)))
    low, high = np.quantile(statistic(values[draws], 1), [(1 - level) / 2, (1 + level) / 2], axis=0)
    return low, high


def mean_and_error(values: np.ndarray) -> Estimate:
    """Mean of values [seeds, prompts]; its variance is the sum of the variance over prompts and, from two seeds on, the one over seeds.

    Either alone would take the other as fixed. Their sum counts the interaction twice, so the error is rather too wide.
    """
    values = _finite(np.atleast_2d(values))
    seeds, prompts = values.shape
    if prompts < 2:
        raise ValueError("a standard error needs at least two prompts")
    variance = values.mean(0).var(ddof=1) / prompts + (values.mean(1).var(ddof=1) / seeds if seeds > 1 else 0.0)
    return Estimate(float(values.mean()), float(np.sqrt(variance)), seeds, prompts)


def paired_difference(a: np.ndarray, b: np.ndarray) -> Estimate:
    """Mean of a - b with its error, paired by prompt and seed; both [seeds, prompts] in the same order."""
    a, b = np.atleast_2d(a), np.atleast_2d(b)
    if a.shape != b.shape:
        raise ValueError(f"pairs need the same seeds and prompts, got {a.shape} and {b.shape} [seeds, prompts]")
    return mean_and_error(a - b)


def bin_means(steps: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean of values [n, ...] at steps [n] in each bin [edges[i], edges[i + 1]); NaN where a bin holds no step."""
    steps, values = np.asarray(steps), _finite(values)
    if len(steps) != len(values):
        raise ValueError(f"{len(steps)} steps for {len(values)} values")
    inside = [(steps >= low) & (steps < high) for low, high in zip(edges[:-1], edges[1:], strict=True)]
    return np.array([values[chosen].mean(0) if chosen.any() else np.full(values.shape[1:], np.nan) for chosen in inside])


def _finite(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, float)
    if values.size == 0:
        raise ValueError("no values")
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} of {values.size} values are not finite")
    return values
