"""Both methods at once: OPPO carries sequences over, so that one response was written by several versions of the weights, and A-3PO anchors each of
its tokens by its own staleness."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import tensor

from nowait.analysis.drawing import styled
from nowait.batch import pad
from nowait.teach.overcommit import course

AGES = ("#F0F0F0", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00")  # padding, d = 0, 1, 2, 3, 4 and more; colour-blind safe
TOKENS = 12  # of the sequence in `anchors` that each version wrote


def simulated(delta: int, step: int) -> np.ndarray:
    """Staleness d [8 sequences, tokens] of the batch of a training step (from 1) with B = 8; -1 on padding."""
    batch = course(delta, 8, 8, 8, 1, 24).of("learner", "update")[step - 1].args[0]
    rows = zip(batch.version, batch.token, batch.length, strict=True)  # by pieces, whose value is their number of tokens
    return pad([np.repeat(batch.step - version[:n], tokens[:n]) for version, tokens, n in rows], -1, np.int64)


@styled
def tiles(d: np.ndarray, batch: str) -> Figure:
    """The tokens of a batch, which the title names, one sequence per row, coloured by staleness d; d is -1 on padding."""
    figure = Figure(figsize=(7.6, 3.6))
    figure.subplots_adjust(0.08, 0.16, 1.02, 0.84)
    ax = figure.subplots()
    drawn = ax.imshow(d.clip(-1, 4), aspect="auto", interpolation="nearest", cmap=ListedColormap(AGES), vmin=-1.5, vmax=4.5)
    mixed = sum(len(set(row[row >= 0])) > 1 for row in d)
    ax.set(xlabel="token of the response", ylabel="sequence", yticks=range(len(d)))
    ax.grid(False)
    found = f"{mixed} of {len(d)} sequences have mixed versions; n = {(d >= 0).sum()} tokens, mean d {d[d >= 0].mean():.2f}"
    ax.set_title(f"{batch}\n{found}", loc="left")
    bar = figure.colorbar(drawn, ax=ax, ticks=range(-1, 5), pad=0.02)
    bar.ax.set_yticklabels(["no token", "d = 0", "1", "2", "3", "4 +"])
    return figure


def versions(delta: int = 4, step: int = 5) -> Figure:
    """`tiles` of a simulated batch with B = 8."""
    return tiles(simulated(delta, step), f"simulated, B = 8, Δ = {delta}, training step {step}")


@styled
def anchors(oldest: int = 3, drift: float = 0.1, epsilon: float = 0.1, seed: int = 0) -> Figure:
    """One sequence that `oldest` + 1 versions wrote, at the first minibatch: log-ratios, A-3PO's anchor, and the band in which it clips nothing.

    log(theta / behav) is drawn from a normal distribution with standard deviation drift * sqrt(d), a random walk of the weights.
    """
    d = np.repeat(np.arange(oldest, -1, -1), TOKENS)
    x, figure = drift * np.sqrt(d) * np.random.default_rng(seed).normal(size=len(d)), Figure(figsize=(7.6, 4))
    figure.subplots_adjust(0.1, 0.14, 0.99, 0.76)
    ax, t, power = figure.subplots(), np.arange(len(d)), d.clip(min=1)
    low, high = power * np.log(1 - epsilon), power * np.log(1 + epsilon)
    ax.fill_between(t, low, high, step="mid", color=AGES[3], alpha=0.2, linewidth=0, label="A-3PO does not clip")
    ax.plot(t, x, "o", color="#D55E00", label="θ, and recompute's anchor")
    ax.plot(t, (1 - 1 / power) * x, "s", color="#009E73", markersize=4, label="A-3PO's anchor")
    ax.axhline(0, color="#0072B2", label="behav")
    for age in range(oldest + 1):
        ax.text((oldest - age + 0.5) * TOKENS - 0.5, 0.02, f"d = {age}", ha="center", transform=ax.get_xaxis_transform())
    ax.set(xlabel="token of the response", ylabel="log(π / behav), nats", xlim=(-1, len(d)))
    clipped = [int(((x < m) | (x > n)).sum()) for m, n in ((low, high), (np.log(1 - epsilon), np.log(1 + epsilon)))]
    ax.set_title(f"outside A-3PO's band: {clipped[0]} of n = {len(d)} tokens; outside behave's, 1 ± ε: {clipped[1]}", loc="left", pad=44)
    ax.legend(loc="lower left", ncols=2, bbox_to_anchor=(0, 0.98))
    return figure


PICTURES = {"together_versions": versions, "together_anchors": anchors}
EXERCISES = {
    "histogram": [
        ((tensor([0, 0, 1, 2, 2]), 2), [2, 1, 2], "d is the step that trains a token minus the version that wrote it; count how often d is 0, 1, 2"),
        ((tensor([3, 3]), 5), [0, 0, 2], "the counts begin at d = 0, also where no token has it"),
    ],
    "anchor": [
        ((tensor([-1.0] * 3), tensor([-0.4] * 3), tensor([1, 3, 4]), 4), [-0.6, -1.0, -1.0], "alpha at d = 3, 1 and 0 is 1/3, 1 and 1"),
        ((tensor([-2.0, -1.0]), tensor([-1.0, -2.0]), tensor([0, 0]), 2), [-1.5, -1.5], "alpha behav + (1 - alpha) theta, with alpha = 1/2 at d = 2"),
    ],
}
