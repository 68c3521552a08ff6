"""Evaluation of any checkpoint on the held-out rows of a task: mean reward and pass@k, with a standard error over problems."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from nowait import tasks
from nowait.batch import LENGTH, RUNNING
from nowait.config import TaskConfig
from nowait.tasks.prompts import evaluation_requests
from nowait.training import load_tokenizer
from nowait.workers.sampler import HFSampler
from nowait.workers.scorers import RuleScorer

CHUNK = 32  # tokens per decode round
ANY = 2**31  # tokens: no prompt is too long


def evaluate(
    checkpoint: str,
    task: TaskConfig,
    *,
    prompts: int | None = None,
    samples: int = 1,
    temperature: float = 1.0,
    max_new_tokens: int = 1024,
    slots: int = 128,
    dtype: str = "float32",
    seed: int = 0,
    out: Path | None = None,
) -> dict:
    """`summary` of `samples` responses to each of the first `prompts` held-out rows (None: all of them), and how long they are.

    checkpoint: folder, hub name or asset:<name>; slots: responses written at once; out: JSON lines file for all responses and their rewards.
    Raises ValueError where the task has fewer rows, GraderFailed where more than 5 % of the responses cannot be graded.
    """
    held_out, (encode, decode, _) = tasks.load(task), load_tokenizer(checkpoint)
    requests = evaluation_requests(held_out, encode, prompts or held_out.size("eval"), samples, ANY, max_new_tokens)
    left = total = len(requests) * samples
    capacity = max(len(request.prompt) for request in requests) + max_new_tokens
    cache, device = {"slots": min(slots, total), "capacity": capacity}, "cuda:0" if torch.cuda.is_available() else "cpu"
    sampler = HFSampler(checkpoint, dtype=dtype, device=device, temperature=temperature, seed=seed, stream=1, **cache)
    texts, cut, tokens = [], 0, 0
    scorer = RuleScorer(held_out, lambda ids: texts.append(decode(ids)) or texts[-1], "eval", samples)
    sampler.admit(requests)
    scorer.admit(requests)
    with tqdm(total=total, unit="response") as bar:
        while left:
            segments = sampler.decode(CHUNK)
            scorer.prefill(segments)
            ended = int((segments.finish != RUNNING).sum())
            left, cut, tokens = left - ended, cut + int((segments.finish == LENGTH).sum()), tokens + len(segments.token)
            bar.update(ended)
    rewards = scorer.finish([request.id for request in requests])
    if out:
        rows = np.repeat([request.row for request in requests], samples).tolist()
        lines = zip(rows, texts, sum(rewards, []), strict=True)
        out.write_text("".join(json.dumps(dict(zip(("row", "response", "reward"), line, strict=True))) + "\n" for line in lines))
    settings = {"checkpoint": checkpoint, "task": task.name, "temperature": temperature, "max_new_tokens": max_new_tokens}
    return settings | summary(rewards) | {"cut_off": cut / total, "tokens_mean": tokens / total}


def summary(rewards: list[list[float | None]]) -> dict:
    """Of the rewards of n samples to each problem, None where grading failed: what is reported.

    mean@n and its standard error: mean over a problem's samples first, then mean and error over problems, whose samples are not independent.
    pass@k, where all rewards are 0 or 1: 1 - C(n - c, k) / C(n, k) with c right samples, the unbiased estimate (Chen et al. 2021), for powers of 2.
    A failed grade is left out; so is a problem with fewer than k grades.
    """
    graded = [[reward for reward in several if reward is not None] for several in rewards]
    means = np.array([np.mean(several) for several in graded if several])
    if not len(means):
        raise ValueError("none of the responses could be graded; see the log")
    n = len(rewards[0])
    error = float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None
    found = {"problems": len(means), "samples": n, f"mean@{n}": float(means.mean()), "standard_error": error}
    if {reward for several in graded for reward in several} <= {0.0, 1.0}:
        found["pass@1"] = found[f"mean@{n}"]
        for k in (2**i for i in range(1, n.bit_length())):
            found[f"pass@{k}"] = float(np.mean([pass_at(k, len(several), int(sum(several))) for several in graded if len(several) >= k]))
    return found | {"failed_grades": sum(n - len(several) for several in graded)}


def pass_at(k: int, n: int, right: int) -> float:
    """Probability that at least one of k samples is right, from n samples of which `right` are."""
    return 1 - math.comb(n - right, k) / math.comb(n, k)
