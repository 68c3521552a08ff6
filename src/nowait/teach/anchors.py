"""One token under three policies: what A-3PO's exponent 1/d does to its ratio, its weight and its clip band (arXiv 2512.06547).

w = theta/behav = rho r, with r = theta/prox and rho = prox/behav. Only w matters here, so log pi_behav is taken as 0.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from nowait.algorithms.losses import decoupled_ppo_loss
from nowait.algorithms.proximal import alpha, interpolate
from nowait.analysis.drawing import styled

BEHAV, PROX, THETA = "#0072B2", "#009E73", "#D55E00"


def split(w: Tensor, d: Tensor, fresh: str = "behave") -> tuple[Tensor, Tensor]:
    """r and rho of tokens with theta/behav = w and staleness d; all of one shape."""
    log_rho = interpolate(torch.zeros_like(w), w.log(), alpha(d, fresh))
    return (w.log() - log_rho).exp(), log_rho.exp()


def band(d: Tensor, epsilon: float, fresh: str = "behave") -> tuple[Tensor, Tensor]:
    """Between which values of theta/behav no token of staleness d is clipped: (1 - epsilon)^d and (1 + epsilon)^d; all where r is always 1."""
    power = alpha(d, fresh).reciprocal()
    return (1 - epsilon) ** power, (1 + epsilon) ** power


def push(w: Tensor, d: Tensor, advantage: float, epsilon: float = 0.2, leak: Literal["ratio", "both"] | None = None) -> Tensor:
    """Each token's gradient of the loss with respect to log pi_theta. `leak`: what happens if the anchor is not detached, in r alone or in both."""
    theta = w.log().requires_grad_()
    if leak:
        prox = (1 - alpha(d)) * theta
        r, rho = (theta - prox).exp(), (prox if leak == "both" else prox.detach()).exp()
        loss = (rho * torch.maximum(-advantage * r, -advantage * r.clamp(1 - epsilon, 1 + epsilon))).sum()
    else:
        behav, each = torch.zeros_like(w), torch.ones_like(w)
        prox = interpolate(behav, theta, alpha(d))
        loss, _ = decoupled_ppo_loss(theta, prox, behav, advantage * each, each, clip_low=epsilon, clip_high=epsilon, denominator=1)
    return torch.autograd.grad(loss, theta)[0]


@styled
def token(d: int = 3, epsilon: float = 0.2, log_w: float = 0.47, fresh: str = "behave") -> Figure:
    """The three policies of one token on a line, with the clip range around the anchor; and its w in the band of every staleness."""
    figure = Figure(figsize=(8.4, 3.6))
    figure.subplots_adjust(0.08, 0.16, 0.99, 0.9, wspace=0.22)
    left, right = figure.subplots(1, 2)
    w, limits = math.exp(log_w), torch.arange(9)
    r, rho = (x.item() for x in split(torch.tensor([w]), torch.tensor([d]), fresh))
    lows, highs = (x.log().clamp(-3, 3).tolist() for x in band(limits, epsilon, fresh))
    clipped = "clipped if A > 0" if log_w > highs[d] else "clipped if A < 0" if log_w < lows[d] else "not clipped"
    prox = math.log(rho)
    left.axvspan(prox + math.log(1 - epsilon), prox + math.log(1 + epsilon), color=PROX, alpha=0.18, linewidth=0)
    for x, colour, row in ((0.0, BEHAV, 0), (prox, PROX, 1), (log_w, THETA, 2)):
        left.plot([x], [row], "o", color=colour, markersize=10)
        left.axvline(x, color=colour, linewidth=1, linestyle=":")
    for a, b, row, name in ((0.0, prox, 0.5, f"ρ = {rho:.2f}"), (prox, log_w, 1.5, f"r = {r:.2f}")):
        left.annotate("", (b, row), (a, row), arrowprops={"arrowstyle": "->", "linewidth": 1.8})
        left.text(max(a, b) + 0.08, row, name, va="center", backgroundcolor="white")
    left.set(xticks=(-1, 0, 1), xlim=(-1.6, 1.6), ylim=(-0.6, 2.6), xlabel="log(π / behav), nats; shaded: r in 1 ± ε")
    left.set_yticks(range(3), ["behav", "prox", "θ"])
    left.set_title(f"one token, d = {d}, w = {w:.2f}: {clipped}", loc="left", y=1)
    right.fill_between(limits, lows, highs, color=PROX, alpha=0.18, linewidth=0, step="mid")
    right.plot([d], [log_w], "o" if clipped == "not clipped" else "X", color=THETA, markersize=11)
    right.axhline(0, color="#555555", linewidth=1)
    ticks = (0.1, 0.3, 1, 3, 10)
    right.set_yticks(np.log(ticks), ticks)
    right.set(xticks=range(0, 9, 2), xlim=(-0.5, 8.5), ylim=(-3, 3), xlabel="staleness d, training steps", ylabel="w = θ / behav")
    right.set_title(f"shaded: not clipped, ε = {epsilon:g}", loc="left", y=1)
    return figure


@styled
def contraction(log_w: float = 2.0, cap: float = 5.0) -> Figure:
    """r, rho and their product against staleness; rho above the cap leaves the loss."""
    figure = Figure(figsize=(7.4, 3.6))
    figure.subplots_adjust(0.08, 0.15, 0.78, 0.9)
    ax, d = figure.subplots(), torch.arange(1, 33)
    w = torch.full(d.shape, log_w).exp()
    r, rho = split(w, d)
    top = 1.6 * max(w[0].item(), cap, 1.5)
    ax.axhspan(cap, top, color="#CC79A7", alpha=0.2, linewidth=0)
    ax.text(32, 0.93 * top, "ρ above the cap: dropped", ha="right")
    lines = {"w = θ / behav": (w, "--", "#555555"), "ρ = prox / behav": (rho, "s-", BEHAV), "r = θ / prox": (r, "o-", THETA)}
    for name, (values, style, colour) in lines.items():
        ax.plot(d, values, style, color=colour, markersize=4)
        ax.text(33, values[-1].item(), name, color=colour, weight="bold", va="top" if values is rho else "bottom")
    ax.set(xticks=(1, 8, 16, 24, 32), xlim=(0.5, 32.5), ylim=(0, top))
    ax.set(xlabel="staleness d, training steps", ylabel="ratio")
    ax.set_title(f"one token, w = {w[0].item():.2f}: r goes to 1, ρ to w", loc="left", y=1)
    return figure


PICTURES = {"anchors_token": token, "anchors_contraction": contraction}
EXERCISES = {
    "weights": [
        ((-1.0, -0.4, 2), (1.3498588, 1.3498588), "log r is the d-th part of log(theta/behav); what is left of it is log rho"),
        ((-1.0, -0.4, 3), (1.2214028, 1.4918247), "r = w^(1/d) and rho = w^(1 - 1/d), where log w = logp_theta - logp_behav"),
        ((-1.0, -0.4, 1), (1.8221188, 1.0), "at d = 1 the anchor is behav itself"),
    ],
    "clipped": [
        ((1.5, 1, 0.2, 1.0), True, "r = w^(1/d) is compared with 1 + epsilon where A > 0, since raising it further is what the clip forbids"),
        ((1.5, 4, 0.2, 1.0), False, "the band in w is the d-th power of 1 - epsilon and 1 + epsilon: it widens with d"),
        ((1.5, 1, 0.2, -1.0), False, "with A < 0 the loss wants w to fall; being above the band, it may"),
        ((0.5, 1, 0.2, -1.0), True, "with A < 0 a token is clipped below the band"),
        ((0.5, 4, 0.2, -1.0), False, "the lower end of the band is (1 - epsilon)^d"),
    ],
    "largest": [
        ((5.0, 2), 25.0, "solve rho = w^(1 - 1/d) <= cap for w"),
        ((5.0, 4), 8.5498797, "the exponent is 1 / (1 - 1/d) = d / (d - 1)"),
        ((5.0, 1), float("inf"), "at d = 1, rho is 1 whatever w is: nothing is ever dropped"),
    ],
}
