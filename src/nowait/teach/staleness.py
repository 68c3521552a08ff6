"""Asynchronous training watched while it runs, and what staleness does to the weights of its tokens (A-3PO, arXiv 2512.06547)."""

from __future__ import annotations

import functools
import math

import matplotlib
import numpy as np
import torch
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from nowait.algorithms.losses import decoupled_ppo_loss
from nowait.algorithms.proximal import alpha, interpolate
from nowait.analysis.drawing import curve, styled
from nowait.schedules.staleness import StalenessGate
from nowait.teach.toy import Played, experiment, play
from nowait.workers.simulated import Lengths

BATCH, STEPS, SLOTS = 4, 6, 8


@functools.lru_cache(maxsize=64)
def run(eta: int = 2, tail: float = 0.6, order: str = "strict") -> Played:
    """Six training steps of four requests each; the sampler has eight slots and an update takes a little longer than sampling its batch.

    `tail` is the standard deviation of the logarithm of the lengths, whose median is 56 tokens; 0.01 s per decode step, 1.3 ms per trained token.
    """
    schedule = {"steps": STEPS, "batch_size": BATCH, "max_staleness": eta, "max_concurrent": 2 * SLOTS, "order": order}
    e = experiment("a3po/setup1", "loglinear", schedule=schedule, sampler={"slots": SLOTS, "chunk": 8})
    return play(e, Lengths(median=56, sigma=tail, cap=256, prompt=8, difficulty=1.0), update_token=1.3e-3)


def flow(played: Played, eta: int) -> tuple[np.ndarray, np.ndarray]:
    """Times [n], and [n, 4] at each of them: requests that the gate allows in all, that were let in, that are complete, that are trained on."""
    gate, rows, version, trained = StalenessGate(BATCH, eta, 10**9), [(0.0, (eta + 1) * BATCH, 0, 0, 0)], 0, 0
    events = [(c.start, "admit", len(c.args[0])) for c in played.of("sampler", "admit")]
    events += [(c.start, "load", c.args[0].version) for c in played.of("sampler", "load")]
    events += [(c.end, "decode", int((c.result.finish > 0).sum())) for c in played.of("sampler", "decode")]
    events += [(c.start, "update", BATCH) for c in played.of("learner", "update")]
    for when, what, n in sorted(events, key=lambda event: event[0]):
        version, trained = n if what == "load" else version, trained + n * (what == "update")
        if what in ("admit", "decode"):
            (gate.submitted if what == "admit" else gate.finished)(n)
        let_in = gate.running + gate.accepted
        rows.append((when, let_in + gate.capacity(version), let_in, gate.accepted, trained))
    return np.array(rows)[:, 0], np.array(rows)[:, 1:]


@styled
def watch(eta: int = 2, tail: float = 0.6, seconds: float = 4.0) -> Figure:
    """What has happened after so many seconds: pieces of responses in the colour of the version that sampled them; the gate; the staleness."""
    played, most = run(eta, tail), BATCH * (STEPS + eta + 1)
    end = math.ceil(played.rows[-1]["time/elapsed"])
    figure = Figure(figsize=(6.6, 6.2))
    figure.subplots_adjust(0.1, 0.09, 0.98, 0.95, hspace=0.2)
    top, gate = figure.subplots(2, 1, height_ratios=(3, 2))
    decodes, updates = ([c for c in played.of(*call) if c.start < seconds] for call in (("sampler", "decode"), ("learner", "update")))
    bars = [(c.start, c.end, row, 0.4, c.result.version) for c in decodes for row in c.result.sequence]
    bars += [(c.start, c.end, -3, 1.3, step) for step, c in enumerate(updates)]
    left, right, row, half, version = np.array(bars).T
    right = right.clip(max=seconds)
    corners = np.stack([left, row - half, right, row - half, right, row + half, left, row + half], 1).reshape(-1, 4, 2)
    colours = matplotlib.colormaps["viridis"](version / STEPS)
    top.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.3))
    done = {request: c.end for c in decodes for request in c.result.sequence.tolist()}
    waits = [(request, done[request], c.start) for c in updates for request in c.args[0].group.tolist()]
    top.hlines(*np.array(waits or [(0, 0, 0)]).T, color="#AAAAAA", linewidth=1.5)
    for step, c in enumerate(updates):
        top.text(c.start, -3, f" {step}", va="center", color="white" if step < STEPS / 2 else "black")
    top.axvline(seconds, color="#D55E00", linewidth=1.2)
    top.grid(False)
    top.set(xticklabels=[], yticks=range(0, most, 10), xlim=(0, end), ylim=(most, -4.8), ylabel="request")
    top.set_title(f"η = {eta}, B = {BATCH}, {SLOTS} slots; colour: version, as numbered on top", loc="left", y=1)
    times, counts = flow(played, eta)
    for i, (name, colour) in enumerate({"allowed": "#BBBBBB", "let in": "#0072B2", "complete": "#009E73", "trained": "#D55E00"}.items()):
        gate.step(times[times < seconds], counts[times < seconds, i], where="post", color=colour, linewidth=1.8 if i else 5)
        gate.text(0.98 * end, most * (0.35 - 0.09 * i), name, color=colour, ha="right", weight="bold")
    for ax in (top, gate):
        ax.set_xticks(range(end + 1))
    gate.set(yticks=range(0, most, 10), xlim=(0, end), ylim=(0, most), xlabel="virtual seconds, toy machine", ylabel="requests in all")
    ages = np.concatenate([np.zeros(0, int), *(step - c.args[0].version[c.args[0].mask] for step, c in enumerate(updates))])
    shares = ", ".join(f"{n / len(ages):.0%} d = {d}" for d, n in enumerate(np.bincount(ages)) if n)
    gate.set_title(f"trained pieces: {shares}; n = {len(ages)}", loc="left", y=1)
    return figure


def drift(amount: float, coherent: bool, tokens: int = 1024) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of sampled tokens: under the policy that sampled them [tokens]; d = 0 to 8 steps later, and half a step after that [9, tokens].

    A toy policy: 16 logits per token, to which each step adds Gaussian noise of standard deviation `amount`, always the same noise if `coherent`.
    """
    rng = torch.Generator().manual_seed(0)
    logits, u = torch.randn(tokens, 16, generator=rng), torch.rand(tokens, 1, generator=rng)
    chosen = (logits.softmax(-1).cumsum(-1) < u).sum(-1, keepdim=True).clamp(max=15)
    moves = amount * torch.randn(9, tokens, 16, generator=rng)
    moves = moves[:1].expand(9, -1, -1) if coherent else moves
    later = logits + moves.cumsum(0) - moves
    behav, prox, theta = ((x.gather(-1, chosen.expand(*x.shape[:-1], 1)).squeeze(-1) - x.logsumexp(-1)) for x in (logits, later, later + moves / 2))
    return behav, prox, theta


def effective(weights: torch.Tensor) -> torch.Tensor:
    """Effective sample size as a share of the n weights in the last dimension: (sum w)^2 / (n sum w^2), 1 where all are equal."""
    return weights.sum(-1).square() / (weights.shape[-1] * weights.square().sum(-1))


def compare(amount: float = 0.15, epsilon: float = 0.2, coherent: bool = False) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per anchor, at d = 0 to 8: effective size of rho; share of clipped tokens; effective size of the update, where a clipped token weighs 0."""
    behav, later, theta = drift(amount, coherent)
    behav, mask, d = behav.expand_as(theta), torch.ones_like(theta), torch.arange(9)[:, None]
    advantages = torch.where(torch.arange(theta.shape[1]) % 2 == 0, 1.0, -1.0).expand_as(theta)
    found = {}
    for anchor, prox in {"behave": behav, "recompute": later, "loglinear": interpolate(behav, theta, alpha(d))}.items():
        trained = theta.clone().requires_grad_()
        loss, _ = decoupled_ppo_loss(trained, prox, behav, advantages, mask, clip_low=epsilon, clip_high=epsilon, denominator=1)
        size = torch.autograd.grad(loss, trained)[0].abs()
        found[anchor] = effective((prox - behav).exp()), (size == 0).float().mean(-1), effective(size)
    return found


@styled
def anchors(amount: float = 0.15, epsilon: float = 0.2, coherent: bool = False) -> Figure:
    """What `compare` finds, against staleness."""
    figure = Figure(figsize=(8.8, 3.3))
    figure.subplots_adjust(0.05, 0.16, 0.99, 0.9, wspace=0.1)
    axes = figure.subplots(1, 3)
    for anchor, rows in compare(amount, epsilon, coherent).items():
        for ax, row in zip(axes, rows, strict=True):
            line = curve(ax, range(9), row, anchor)
        axes[0].text(0.2, {"recompute": 0.3, "loglinear": 0.2, "behave": 0.1}[anchor], line.get_label(), color=line.get_color(), weight="bold")
    for ax, title in zip(axes, ("effective size of ρ, share of n", "clipped tokens, share of n", "effective size of the update"), strict=True):
        ax.set(xticks=(0, 4, 8), yticks=(0, 0.5, 1), ylim=(-0.03, 1.03), xlabel="staleness d, training steps")
        ax.set_title(title, loc="left", y=1)
        ax.tick_params(labelleft=ax is axes[0])
    axes[0].text(0.2, 0.0, "n = 1,024 tokens")
    return figure


PICTURES = {"staleness_watch": watch, "staleness_watch_0": functools.partial(watch, eta=0, seconds=9.0), "staleness_anchors": anchors}
EXERCISES = {
    "capacity": [
        ((4, 2, 0, 0, 0), 12, "(eta + version + 1) * batch requests may ever have been let in"),
        ((4, 2, 1, 4, 8), 4, "what was ever let in is what is complete (trained or not) and what is running: subtract both"),
        ((4, 0, 3, 16, 0), 0, "with eta = 0, step 3 may use 16 requests in all, and they are there"),
        ((4, 1, 0, 8, 4), 0, "there is never room for less than nothing"),
    ],
    "ages": [
        ((5, np.array([[3, 3, 5], [4, -1, -1]])), [1, 1, 2], "d = current version - version, for every token that is no padding (-1)"),
        ((1, np.array([[1, -1]])), [1], "padding has version -1, and is no token of staleness 2"),
    ],
    "effective": [
        ((np.array([2.0, 2.0, 2.0, 2.0]),), 1.0, "weights that are all equal lose nothing, whatever their size: divide by the sum of squares"),
        ((np.array([1.0, 0.0, 0.0, 0.0]),), 0.25, "one token with all the weight is worth one of four: divide by n as well"),
        ((np.array([1.0, 3.0]),), 0.8, "(sum of the weights)^2 / (n * sum of their squares)"),
    ],
}
