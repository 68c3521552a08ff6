"""Right answers to the exercises of notebooks/teach, which CI puts into the notebooks, and wrong ones that must get a hint."""

from __future__ import annotations

import math

import numpy as np
import torch

from nowait.algorithms.proximal import alpha, interpolate, staleness


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


def next_delta(rewards, window, delta, most):
    step = max(1, delta // 4)
    return min(most, max(0, delta + (step if rewards[-1] > rewards[-1 - window] else -step)))


def most_deferrals(length, chunk, rounds):
    needed = -(-length // chunk)
    return -(-needed // rounds)


def first_batch(lengths, batch):
    return sum(sorted(lengths)[:batch]) / batch


def sequences(batch_size, group_size, minibatches):
    return batch_size * group_size // minibatches


def bound(s, u, f):
    return max(s, u + f) / max(s, u)


def difference(ours, theirs):
    pairs = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean = sum(pairs) / len(pairs)
    return mean, (sum((x - mean) ** 2 for x in pairs) / (len(pairs) - 1) / len(pairs)) ** 0.5


def histogram(versions, step):
    return torch.bincount(step - versions)


def anchor(behav, theta, versions, step):
    return interpolate(behav, theta, alpha(staleness(step, versions)))


SOLUTIONS = {  # MODULE/NAME: function, named as in the notebook; it uses its arguments and what that imports
    "anchors/weights": weights,
    "anchors/clipped": clipped,
    "anchors/largest": largest,
    "staleness/capacity": capacity,
    "staleness/ages": ages,
    "staleness/effective": effective,
    "bubbles/idle": idle,
    "bubbles/last_read": last_read,
    "overcommit/next_delta": next_delta,
    "overcommit/most_deferrals": most_deferrals,
    "overcommit/first_batch": first_batch,
    "training/sequences": sequences,
    "training/bound": bound,
    "training/difference": difference,
    "together/histogram": histogram,
    "together/anchor": anchor,
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
    "overcommit/next_delta": [
        lambda r, w, delta, most: delta + 1 if r[-1] > r[-1 - w] else delta - 1,
        lambda r, w, delta, most: min(most, max(0, delta + (max(1, delta // 4) if r[-1] >= r[-1 - w] else -max(1, delta // 4)))),
        lambda r, w, delta, most: next_delta(r, len(r) - 1, delta, most),
        lambda r, w, delta, most: next_delta(r, w, delta, math.inf),
    ],
    "overcommit/most_deferrals": [
        lambda length, chunk, rounds: math.ceil(length / chunk) // rounds,
        lambda length, chunk, rounds: math.ceil(length / chunk),
        lambda length, chunk, rounds: math.ceil(math.ceil(length / chunk) / rounds) - 1,
    ],
    "overcommit/first_batch": [
        lambda lengths, b: sum(lengths[:b]) / b,
        lambda lengths, b: np.mean(lengths),
        lambda lengths, b: sorted(lengths)[b - 1],
    ],
    "training/sequences": [lambda b, g, m: b * g, lambda b, g, m: b // m],
    "training/bound": [lambda s, u, f: (u + f) / u, lambda s, u, f: (s + u + f) / (s + u), lambda s, u, f: 1 + f],
    "training/difference": [
        lambda a, b: (np.mean(a) - np.mean(b), np.std(a, ddof=1) / math.sqrt(len(a))),
        lambda a, b: (np.mean(a) - np.mean(b), np.subtract(a, b).std() / math.sqrt(len(a))),
    ],
    "together/histogram": [lambda versions, step: torch.bincount(versions), lambda versions, step: torch.bincount(step - versions)[1:]],
    "together/anchor": [lambda b, t, v, step: (b + t) / 2, lambda b, t, v, step: b, lambda b, t, v, step: t],
}
