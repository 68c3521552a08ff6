"""A tiny learner with a critic, and what its tests share."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tiny import generate, requests

from nowait.batch import LENGTH, STOP, Batch
from nowait.config import AlgorithmConfig, CriticConfig, LearnerConfig
from nowait.workers.ppo_learner import PPOLearner
from nowait.workers.sampler import HFSampler

ALGORITHM = {"anchor": "behave", "advantage": "gae", "lam": 0.9}
BOTH_CRITICS = pytest.mark.parametrize("shared", [False, True])


def ppo(folder: str, *, critic: dict | None = None, algorithm: dict | None = None, options: dict | None = None, **settings) -> PPOLearner:
    """`settings` are those of the optimiser, `options` those of the worker."""
    return PPOLearner(
        folder,
        LearnerConfig(**{"lr": 1e-3} | settings),
        AlgorithmConfig(**ALGORITHM | (algorithm or {})),
        critic=CriticConfig(**critic or {}),
        **{"temperature": 1.0, "seed": 0} | (options or {}),
    )


def awake(worker: PPOLearner) -> PPOLearner:
    """With a value head that is not 0, so that values differ between tokens and reach the backbone."""
    torch.manual_seed(5)
    torch.nn.init.normal_(worker._value_head.weight, std=0.3)
    return worker


def blank(worker: PPOLearner, value: float = 0.0) -> PPOLearner:
    """Every next token has probability 1/16, every prefix the same value; only the value head's bias has a gradient."""
    with torch.no_grad():
        for parameter in worker._parameters:
            parameter.zero_()
        worker._value_head.bias.fill_(value)
    return worker


def scored_responses(folder: str) -> Batch:
    """Sixteen responses by the learner's first weights, some of them cut off, each with a score and a reference's log-probs."""
    batch = generate(HFSampler(folder, slots=16, capacity=64, seed=1), requests(8))
    assert set(batch.finish) == {STOP, LENGTH} and len(set(batch.length)) > 4
    reference = batch.logp_behav - np.random.default_rng(0).normal(0, 0.3, batch.token.shape).astype(np.float32)
    return dataclasses.replace(batch, reward=(batch.sequence * 7 % 5).astype(np.float32), logp_ref=reference)


def at(batch: Batch, worker: PPOLearner) -> Batch:
    return dataclasses.replace(batch, step=worker.version)


def trained(worker: PPOLearner, batch: Batch, steps: int) -> PPOLearner:
    for _ in range(steps):
        worker.update(at(batch, worker))
    return worker


def gradients(worker: PPOLearner, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Of the policy's parameters and of the critic's own, the whole batch as one minibatch."""
    assert worker.prepare(batch) == 1
    flat = worker.gradient(0)[0].copy()
    policy = sum(p.numel() for p in worker.model.parameters())
    return flat[:policy], flat[policy:]


def parameters(worker: PPOLearner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in worker._parameters])
