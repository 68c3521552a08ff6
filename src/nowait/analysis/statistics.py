"""Means, intervals and paired differences over seeds and prompts."""

from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A mean with its standard error, and over how many seeds and prompts."""

    mean: float
    se: float
    seeds: int
    prompts: int


def bootstrap_interval(values: np.ndarray, rng: np.random.Generator, resamples: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """95 % percentile interval of the mean over axis 0 of values [n, ...]; the other axes are resampled together."""
    values = _finite(values)
    draws = rng.integers(len(values), size=(resamples, len(values)))
    return tuple(np.quantile(values[draws].mean(1), [0.025, 0.975], axis=0))


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean of values [n], one per seed or block; NaN for a single one."""
    values = _finite(values)
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def decided(slack: float, se: float) -> str:
    """By how much a value lies inside what was asked (outside: negative), against two of its standard errors."""
    resolved = abs(slack) > 2 * se  # false where there is no standard error
    return ("pass" if slack > 0 else "fail") if resolved else "not resolved"


def mean_and_error(*sets: np.ndarray) -> Estimate:
    """Mean of values [seeds, prompts], or of the means of several sets with different prompts and the same seeds.

    The variance is the sum of the one over prompts, which are drawn anew in each set, and, from two seeds on, the one over seeds, which the
    sets share. Either alone would take the other as fixed. Their sum counts the interaction twice, so the error is rather too wide.
    """
    sets = tuple(_finite(np.atleast_2d(values)) for values in sets)
    if len({len(values) for values in sets}) > 1 or min(values.shape[1] for values in sets) < 2:
        raise ValueError("a standard error needs at least two prompts, and the same seeds in every set")
    by_seed = np.mean([values.mean(1) for values in sets], axis=0)
    variance = sum(values.mean(0).var(ddof=1) / values.shape[1] for values in sets) / len(sets) ** 2
    variance += standard_error(by_seed) ** 2 if len(by_seed) > 1 else 0.0
    return Estimate(float(by_seed.mean()), float(np.sqrt(variance)), len(by_seed), sum(values.shape[1] for values in sets))


def paired_difference(*pairs: tuple[np.ndarray, np.ndarray]) -> Estimate:
    """Mean of a - b with its error, paired by prompt and seed: (a, b) of every set, both [seeds, prompts] in the same order."""
    arrays = [(np.atleast_2d(a), np.atleast_2d(b)) for a, b in pairs]
    for a, b in arrays:
        if a.shape != b.shape:
            raise ValueError(f"pairs need the same seeds and prompts, got {a.shape} and {b.shape} [seeds, prompts]")
    return mean_and_error(*(a - b for a, b in arrays))


def _finite(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, float)
    if values.size == 0:
        raise ValueError("no values")
    if not np.isfinite(values).all():
        raise ValueError(f"{int((~np.isfinite(values)).sum())} of {values.size} values are not finite")
    return values
