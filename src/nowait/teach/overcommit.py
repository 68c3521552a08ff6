"""OPPO's overcommitment by example: who is carried over, how old tokens get, what is trained first, and where a rule takes Δ under noise.

The real schedule over simulated workers (`toy.play`): response lengths are log-normal, a decode step takes the same time however many sequences take
part, an update takes time per token.
"""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from nowait import simulate
from nowait.analysis.drawing import styled
from nowait.analysis.studies import FIXED
from nowait.schedules.overcommit import OvercommitController
from nowait.teach.toy import Played, experiment, play
from nowait.workers.simulated import Lengths

HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # colour-blind safe
BATCH, STEPS, SEEDS = 32, 12, 8  # of the histograms
DELTAS = (0, 2, 4, 8, 16)
RIGHT = 100  # tokens: a response of L is right with probability exp(-L / RIGHT), an assumption that gives short ones the better reward
ONWARDS = 4  # counts from here on share a bar


@functools.cache
def course(delta: int, batch: int = BATCH, steps: int = STEPS, chunk: int = 16, seed: int = 0, median: float = 40) -> Played:
    """Training steps with B = `batch` and a fixed Δ; responses of up to 256 tokens, decode rounds of `chunk` tokens, weights in versions 0, 1, ..."""
    e = experiment(
        "oppo/stackexchange_7b",
        "inter",
        schedule={"batch_size": batch, "steps": steps},
        overlap={"delta": delta, "delta_max": delta, "rule": "fixed", "chunk_candidates": []},
        sampler={"slots": batch + delta, "chunk": chunk},
    )
    return play(e, Lengths(median=median, sigma=0.9, cap=256, prompt=8), decode_step=0.01, update_token=0.008 / batch, seed=seed)


def requests(played: Played) -> pd.DataFrame:
    """One row per trained request: its tokens, the step (from 0) that admitted and the one that trained it, how many of its tokens are stale."""
    updates, admitted, rows = played.of("learner", "update"), {}, []
    for call in played.of("sampler", "admit"):
        admitted |= dict.fromkeys((r.id for r in call.args[0]), sum(update.end <= call.start for update in updates))
    for call in updates:
        batch = call.args[0]
        stale = np.where((batch.version >= 0) & (batch.version < batch.step), batch.token, 0).sum(1)  # a piece's value is its number of tokens
        rows += [(i, played.lengths[i], admitted[i], batch.step, n) for i, n in zip(batch.group.tolist(), stale.tolist(), strict=True)]
    return pd.DataFrame(rows, columns=["request", "tokens", "admitted", "trained", "stale"])


@functools.cache
def many(delta: int) -> pd.DataFrame:
    """`requests` of SEEDS courses, with the number of deferrals and the reward that RIGHT gives."""
    frame = pd.concat([requests(course(delta, seed=seed)).assign(seed=seed) for seed in range(SEEDS)], ignore_index=True)
    return frame.assign(deferrals=frame["trained"] - frame["admitted"], reward=np.exp(-frame["tokens"] / RIGHT))


def price(deltas=(0, 4, 8, 16, 32, 64), seeds: int = 3, steps: int = 24) -> pd.DataFrame:
    """The paper's setup with B = 112 on its hardware, simulated: seconds per step and its standard error over seeds, live slots, staleness."""
    rows = []
    for delta in deltas:
        more = [*FIXED, f"overlap.delta={delta}", f"overlap.delta_max={delta}", f"sampler.slots={112 + delta}"]
        setup = simulate.load("oppo/stackexchange_7b", "both", more)
        found = pd.DataFrame([simulate.simulate(*setup, steps, seed).summary(4) for seed in range(seeds)])
        mean, error = found.mean(), found["seconds_per_step"].std() / seeds**0.5
        rows.append((delta, delta / 112, mean["seconds_per_step"], error, mean["occupancy"], mean["mean_staleness"]))
    return pd.DataFrame(rows, columns=["Δ", "Δ / B", "seconds per step", "s.e.", "live slots", "mean d of tokens"]).set_index("Δ").round(3)


@styled
def lanes(delta: int = 2, seed: int = 4) -> Figure:
    """Every request of four steps with B = 4 as a bar, coloured by the weights that wrote it; grey: forward passes (light) and updates."""
    played, figure = course(delta, 4, 4, 8, seed, 24), Figure(figsize=(7.6, 4))
    figure.subplots_adjust(0.08, 0.13, 0.99, 0.78)
    ax = figure.subplots()
    for version in range(4):
        rounds = [c for c in played.of("sampler", "decode") if c.result.version == version]
        bars = [(i, c.start, c.start + 0.01 * n) for c in rounds for i, n in zip(c.result.sequence, _made(c.result), strict=True)]
        ax.hlines(*np.array(bars).T, colors=HUES[version], linewidth=7)
    for method, grey in (("logp", "#E2E2E2"), ("update", "#AAAAAA")):
        for call in played.of("learner", method):
            ax.axvspan(call.start, call.end, color=grey, linewidth=0)
    for call in played.of("learner", "update"):
        ax.text(call.end, -1.2, f"trains\n{', '.join(map(str, call.args[0].group))}", ha="right", va="bottom")
    ax.set(xlabel="seconds (virtual)", ylabel="request", ylim=(16 + delta - 0.4, -0.8))
    ax.set_yticks(range(0, 16 + delta, 2))
    ax.set_title(f"B = 4, Δ = {delta}, n = 1 course; colour: version; light grey: forward pass, grey: update", loc="left", pad=38)
    return figure


def _made(segments) -> np.ndarray:
    return np.add.reduceat(segments.token, segments.offset[:-1])


@styled
def deferrals(delta: int = 8) -> Figure:
    """How often requests are carried over, short and long ones apart; and what share of their tokens is stale by then."""
    frame, figure = many(delta), Figure(figsize=(7.6, 3.2))
    figure.subplots_adjust(0.09, 0.18, 0.99, 0.87, wspace=0.25)
    left, right = figure.subplots(1, 2)
    times, short, bottom = frame["deferrals"].clip(upper=ONWARDS).to_numpy(), (frame["tokens"] <= frame["tokens"].median()).to_numpy(), 0.0
    for name, part, colour in (("shorter half", short, HUES[0]), ("longer half", ~short, HUES[1])):
        share = np.bincount(times[part], minlength=ONWARDS + 1) / len(frame)
        left.bar(range(ONWARDS + 1), share, 0.7, bottom, color=colour)
        left.text(ONWARDS + 0.5, 0.6 + 0.12 * (part is short), name, color=colour, ha="right", weight="bold")
        bottom = bottom + share
    left.set(ylim=(0, 1.12), xlabel="times carried over", ylabel="share of trained requests")
    left.set_title(f"B = {BATCH}, Δ = {delta}, n = {len(frame):,} requests", loc="left")
    stale, tokens, count = (np.bincount(times, weights, minlength=ONWARDS + 1) for weights in (frame["stale"], frame["tokens"], None))
    old = stale / tokens.clip(min=1)
    right.bar(range(ONWARDS + 1), old, 0.7, color=HUES[2])
    for k in range(ONWARDS + 1):
        left.text(k, bottom[k] + 0.02, f"{count[k]:,.0f}", ha="center")
        right.text(k, old[k] + 0.02, f"{old[k]:.0%}" if count[k] else "none", ha="center")
    right.set(ylim=(0, 1.12), xlabel="times carried over", ylabel="share of stale tokens")
    right.set_title("of the requests in each bar", loc="left")
    for ax in (left, right):
        ax.set_xticks(range(ONWARDS + 1), ["0", "1", "2", "3", "4 +"])
        ax.set(xlim=(-0.6, ONWARDS + 0.6), yticks=(0, 0.5, 1))
    return figure


@styled
def selection(delta: int = 8) -> Figure:
    """Response length and reward of the batches, step by step, beside those of all requests: the first batches hold the short responses."""
    figure = Figure(figsize=(7.6, 3.2))
    figure.subplots_adjust(0.09, 0.18, 0.99, 0.87, wspace=0.28)
    every = np.concatenate([course(delta, seed=seed).lengths for seed in range(SEEDS)])
    for ax, name, mean in zip(figure.subplots(1, 2), ("tokens", "reward"), (every.mean(), np.exp(-every / RIGHT).mean()), strict=True):
        batches = by_step(delta)[name]
        ax.plot(range(1, STEPS + 1), batches, color=HUES[0], linewidth=0.7, alpha=0.4)
        ax.plot(range(1, STEPS + 1), batches.mean(axis=1), "o-", color=HUES[0], label=f"batches, mean of n = {SEEDS}")
        ax.axhline(mean, color=HUES[5], linestyle="--", label="all requests")
        ax.set(xlabel="training step", ylabel=f"mean {name} of a response", ylim=(0, None), xticks=range(3, STEPS + 1, 3))
        ax.legend(loc="lower right")
    figure.axes[0].set_title(f"B = {BATCH}, Δ = {delta}; thin: single courses", loc="left")
    return figure


@functools.cache
def by_step(delta: int) -> pd.DataFrame:
    """Mean tokens and reward of the batch of every step (rows) of every course (columns)."""
    return many(delta).groupby(["trained", "seed"])[["tokens", "reward"]].mean().unstack()


def plateau(noise: float = 0.1, seed: int = 0) -> np.ndarray:
    """Rewards of 500 steps: from 0 to 1 within 100, then no change, with Gaussian noise of this standard deviation."""
    return np.minimum(np.arange(500) / 100, 1) + noise * np.random.default_rng(seed).normal(size=500)


def follow(rule: str, rewards, window: int = 10) -> np.ndarray:
    """Δ after each of these rewards, from 4 on and within 0 and 16."""
    controller = OvercommitController(4, 0, 16, window, rule)
    return np.array([controller.update(reward) for reward in rewards])


@styled
def rules(rule: str = "slope", noise: float = 0.1, window: int = 10, seed: int = 0) -> Figure:
    """What a rule makes of a reward that rises and then stays."""
    rewards, figure = plateau(noise, seed), Figure(figsize=(7.6, 3.8))
    figure.subplots_adjust(0.08, 0.13, 0.99, 0.92, hspace=0.4)
    delta, (upper, lower) = follow(rule, rewards, window), figure.subplots(2, 1, sharex=True)
    upper.plot(rewards, color=HUES[0], linewidth=1)
    upper.set(ylabel="mean reward")
    upper.set_title(f"noise {noise:g} of the whole rise, n = 1 course", loc="left")
    lower.step(range(500), delta, color=HUES[5])
    lower.set(ylim=(-0.5, 16.5), xlabel="training step", ylabel="Δ, requests")
    last = delta[300:]
    lower.set_title(f"rule {rule}, window {window}; last 200 steps: mean Δ {last.mean():.1f}, Δ = 0 in {100 * (last == 0).mean():.0f} %", loc="left")
    return figure


PICTURES = {"overcommit_lanes": lanes, "overcommit_deferrals": deferrals, "overcommit_selection": selection, "overcommit_rules": rules}
EXERCISES = {
    "next_delta": [
        (([1.0, 5.0, 2.0, 4.0], 3, 9, 16), 11, "the slope is that of the last reward over the one w steps before; a quarter of 9 is 2"),
        (([0.5, 9.0, 9.0, 0.5], 3, 8, 16), 6, "a slope of 0 is not above 0: down"),
        (([7.0, 1.0, 2.0, 3.0], 1, 2, 16), 3, "a quarter of 2 is less than 1: one step then; the window reaches back w steps, whatever came earlier"),
        (([1.0, 2.0], 1, 15, 16), 16, "up by 3 would be over the limit"),
        (([2.0, 1.0], 1, 0, 16), 0, "Δ is never below 0"),
    ],
    "most_deferrals": [
        ((256, 16, 2), 8, "16 rounds complete the request; how many steps is that, at 2 rounds a step?"),
        ((17, 16, 1), 2, "a request that has begun a round needs all of it: round up"),
        ((100, 16, 3), 3, "7 rounds, 3 a step: a step that is begun ends, too, so round up again"),
        ((16, 16, 3), 1, "complete, but not among the first B, it waits for one more update"),
    ],
    "first_batch": [
        (([8, 40, 3, 17, 5, 90], 4), 8.25, "all of them start at once and write equally fast: which are the first B to end?"),
        (([5, 5, 5], 3), 5.0, "with Δ = 0 nothing is selected"),
    ],
}
