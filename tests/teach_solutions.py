"""Right answers to the exercises of notebooks/teach, which CI puts into the notebooks, and wrong ones that must get a hint."""

from __future__ import annotations

import math

import numpy as np


def weights(logp_behav, logp_theta, d):
    log_w = logp_theta - logp_behav
    return math.exp(log_w / d), math.exp(log_w * (1 - 1 / d))


def clipped(w, d, epsilon, advantage):
    r = w ** (1 / d)
    return bool(r > 1 + epsilon if advantage > 0 else r < 1 - epsilon)


def largest(cap, d):
    return math.inf if d == 1 else cap ** (d / (d - 1))


def capacity(batch, eta, version, accepted, running):
    return max(0, (eta + version + 1) * batch - accepted - running)


def ages(step, versions):
    return np.bincount(step - versions[versions >= 0])


def effective(weights):
    return weights.sum() ** 2 / (len(weights) * (weights**2).sum())


def idle(calls, total):
    return 1 - sum(b - a for a, b in calls) / total


def last_read(writing, reading):
    written = read = 0.0
    for seconds, more in zip(writing, reading, strict=True):
        written += seconds
        read = max(read, written) + more
    return read


SOLUTIONS = {  # MODULE/NAME: function, named as in the notebook; it uses its arguments, math and np
    "anchors/weights": weights,
    "anchors/clipped": clipped,
    "anchors/largest": largest,
    "staleness/capacity": capacity,
    "staleness/ages": ages,
    "staleness/effective": effective,
    "bubbles/idle": idle,
    "bubbles/last_read": last_read,
}
WRONG = {  # MODULE/NAME: plausible mistakes
    "anchors/weights": [
        lambda b, t, d: weights(b, t, d)[::-1],
        lambda b, t, d: (math.exp((t - b) * (1 - 1 / d)), 1),
        lambda b, t, d: math.exp(t - b),
    ],
    "anchors/clipped": [lambda w, d, e, a: not 1 - e < w < 1 + e, lambda w, d, e, a: not 1 - e < w ** (1 / d) < 1 + e, lambda w, d, e, a: False],
    "anchors/largest": [lambda cap, d: cap ** (d / (d - 1)), lambda cap, d: cap**d, lambda cap, d: cap],
    "staleness/capacity": [
        lambda b, eta, v, accepted, running: (eta + v + 1) * b - accepted - running,
        lambda b, eta, v, accepted, running: max(0, (eta + v + 1) * b - running),
        lambda b, eta, v, accepted, running: max(0, (eta + v) * b - accepted - running),
    ],
    "staleness/ages": [lambda step, versions: np.bincount((step - versions).ravel()), lambda step, versions: np.bincount(versions[versions >= 0])],
    "staleness/effective": [lambda w: w.sum() ** 2 / (w**2).sum(), lambda w: w.mean(), lambda w: 1.0],
    "bubbles/idle": [lambda calls, end: sum(b - a for a, b in calls) / end, lambda calls, end: end - sum(b - a for a, b in calls)],
    "bubbles/last_read": [lambda w, r: sum(w) + sum(r), lambda w, r: max(sum(w), sum(r)), lambda w, r: sum(w) + r[-1]],
}
