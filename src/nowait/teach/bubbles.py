"""Where a PPO step loses time, and what reading along takes back (OPPO, arXiv 2509.25762, intra-step overlap)."""

from __future__ import annotations

import functools

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from nowait import tasks
from nowait.analysis.drawing import styled
from nowait.analysis.oppo import WORK
from nowait.batch import Request, Segments
from nowait.config import Experiment
from nowait.tasks.prompts import Prompts
from nowait.teach.toy import Played, experiment, play
from nowait.workers.simulated import Lengths

BATCH, DECODE, CALL = 16, 0.01, 0.02  # requests; seconds per decode step; seconds more per call of sampler or reward model
MEDIAN = 120  # tokens of a response


@functools.lru_cache(maxsize=64)
def step(method: str = "intra", tail: float = 0.8, chunk: int = 64, reading: float = 0.5) -> Played:
    """One PPO step: "sequential", or "intra" with a reward model that reads on device b what device a has written in rounds of `chunk` tokens.

    `tail` is the standard deviation of the logarithm of the lengths, `reading` the milliseconds per token that the reward model reads; 0.2 ms per
    trained token.
    """
    schedule, sampler = {"kind": "overlapped", "steps": 1, "batch_size": BATCH}, {"slots": BATCH, "chunk": chunk}
    e = experiment("oppo/stackexchange_7b", method, schedule=schedule, sampler=sampler, overlap={"chunk_candidates": []})
    lengths = Lengths(median=MEDIAN, sigma=tail, cap=1000, prompt=20)
    return play(e, lengths, decode_step=DECODE, read_token=reading / 1000, update_token=2e-4, call=CALL)


def lost(played: Played) -> dict[str, float]:
    """Seconds of device a: generating while half of the sequences or more are live, generating the tail, waiting for the reward, training."""
    decodes, lengths = played.of("sampler", "decode"), np.sort(played.lengths[:BATCH])
    written, total = decodes[-1].end - decodes[0].start, max(c.end for c in played.calls)
    together = float(written * lengths[BATCH // 2] / lengths[-1])
    trained = sum(c.end - c.start for c in played.calls if c.worker == "learner")
    return {"together": together, "tail": written - together, "waiting": total - written - trained, "training": trained}


@styled
def gantt(tail: float = 0.8, chunk: int = 64, reading: float = 0.5) -> Figure:
    """The same step without and with a reward model that reads along; above, how many sequences are still being written."""
    figure = Figure(figsize=(8.4, 4.8))
    figure.subplots_adjust(0.15, 0.11, 0.98, 0.94, hspace=0.3)
    live, chart = figure.subplots(2, 1, height_ratios=(1, 2))
    played = step("intra", tail, chunk, reading)
    lengths = np.sort(played.lengths[:BATCH])
    tokens = np.arange(lengths[-1] + 1)
    counts, written = (lengths[:, None] > tokens).sum(0), tokens * DECODE + -(-tokens // chunk) * CALL
    seconds = played.of("sampler", "decode")[-1].end + written - written[-1]
    live.fill_between(seconds, counts, step="post", color=WORK["sampler", "decode"][1], alpha=0.35, linewidth=0)
    live.axvspan(seconds[lengths[BATCH // 2]], seconds[-1], color="#E69F00", alpha=0.15, linewidth=0)
    live.set_title(f"sequences being written, of n = {BATCH}; shaded: the tail, fewer than half", loc="left", y=1)
    bars, colours, ends = [], [], {}
    for i, method in enumerate(("sequential", "intra")):
        played = step(method, tail, chunk, reading)
        ends[method] = max(c.end for c in played.calls)
        for c in played.calls:
            if (c.worker, c.method) in WORK and c.end > c.start:
                row = 2.4 * i + (c.worker == "reward")
                bars.append([(c.start, row - 0.4), (c.end, row - 0.4), (c.end, row + 0.4), (c.start, row + 0.4)])
                colours.append(WORK[c.worker, c.method][1])
        chart.text(ends[method] + 0.1, 2.4 * i, f"{ends[method]:.2f} s", va="center")
    chart.add_collection(PolyCollection(bars, facecolors=colours, edgecolors="white", linewidths=0.4))
    chart.set_title(f"devices a and b; white: a bubble; tail {tail:g}, chunk {chunk} tokens, reading {reading:g} ms per token", loc="left", y=1)
    end = 1.12 * max(ends.values())
    for x, key in ((0.02, ("sampler", "decode")), (0.22, ("reward", "prefill")), (0.56, ("learner", "logp")), (0.83, ("learner", "update"))):
        chart.text(end * x, 4.35, WORK[key][0], color=WORK[key][1], weight="bold", va="center")
    ticks = np.arange(0, end, 1 if end < 12 else 2)
    live.set(xlim=(0, end), ylim=(0, BATCH), xticks=ticks, xticklabels=[], yticks=(0, BATCH // 2, BATCH))
    chart.set(xlim=(0, end), ylim=(4.8, -0.6), xticks=ticks, xlabel="virtual seconds, toy machine")
    chart.set_yticks((0, 1, 2.4, 3.4), ("sequential, a", "b", "intra, a", "b"))
    return figure


def write(e: Experiment, chunk: int, count: int = 4, seed: int = 1) -> tuple[list[Request], list[Segments]]:
    """The first `count` requests of an experiment, and what its initial policy answers, in rounds of up to `chunk` tokens."""
    from nowait.training import load_tokenizer
    from nowait.workers.sampler import HFSampler

    plan, encode = e.sampler, load_tokenizer(e.model.path)[0]
    longest = {"max_prompt_tokens": plan.max_prompt_tokens, "max_new_tokens": plan.max_new_tokens}
    requests = Prompts(tasks.load(e.task), encode, seed=seed, n=1, **longest).next(count)
    sampler, rounds = HFSampler(e.model.path, slots=count, capacity=sum(longest.values()), seed=seed), []
    sampler.admit(requests)
    while sum(np.count_nonzero(r.finish) for r in rounds) < count:
        rounds.append(sampler.decode(chunk))
    return requests, rounds


def read(e: Experiment, requests: list[Request], pieces: list[Segments]) -> list[float]:
    """The reward model's score of each response, read piece by piece."""
    from nowait.workers.streamed import load_reward

    capacity = e.sampler.max_prompt_tokens + e.sampler.max_new_tokens
    scorer = load_reward(e.reward.path, e.model.path, slots=len(requests), capacity=capacity, n=1)
    scorer.admit(requests)
    for piece in pieces:
        scorer.prefill(piece)
    return [score for (score,) in scorer.finish([r.id for r in requests])]


PICTURES = {"bubbles_gantt": gantt}
EXERCISES = {
    "idle": [
        (([(0.0, 2.0), (3.0, 4.0)], 5.0), 0.4, "busy for 2 + 1 of 5 seconds; the rest is idle, as a share of the whole"),
        (([], 2.0), 1.0, "a device without a call is idle all the time"),
    ],
    "last_read": [
        (([1.0, 1.0, 1.0], [0.5, 0.5, 0.5]), 3.5, "a piece can be read once it is written and the one before it is read: only the last is left"),
        (([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]), 7.0, "where reading is slower than writing, the reader never waits after the first piece"),
        (([1.0, 3.0], [2.0, 1.0]), 5.0, "each read begins at the later of two moments: its piece is written, the read before it has ended"),
    ],
}
