"""OPPO's schedule with real models, at scale smoke: a reward model, a reference and PPO's learner with its critic."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
from tiny import EXACT, exact, generate, train

from nowait import runs, tasks
from nowait.batch import Batch, Segments, pad
from nowait.config import Experiment, load
from nowait.runtime.timeline import Timeline
from nowait.tasks.prompts import Prompts
from nowait.training import _learner, _model, load_tokenizer
from nowait.workers.ppo_learner import PPOLearner
from nowait.workers.sampler import HFSampler
from nowait.workers.streamed import StreamedReference, load_reward

ONE_DEVICE = "runtime.placement={a: [sampler, learner, reward, reference]}"
THREE_STEPS = (ONE_DEVICE, "schedule.steps=3", "schedule.eval_every=0", "overlap.chunk_candidates=[]")
NO_DELTA = tuple(f"overlap.{key}=0" for key in ("delta", "delta_min", "delta_max"))


@pytest.fixture
def updates(monkeypatch) -> list[tuple[Batch, dict]]:
    """What the learner was given and what it said, by step."""
    seen, update = [], PPOLearner.update

    def noted(self, batch, logp_prox=None):
        seen.append((batch, update(self, batch, logp_prox)))
        return seen[-1][1]

    monkeypatch.setattr(PPOLearner, "update", noted)
    return seen


@pytest.mark.parametrize(("whole", "streamed"), [("sequential", "intra"), ("inter", "both")])
def test_reading_along_changes_neither_tokens_nor_scores_nor_the_gradient(updates, whole, streamed):
    reads = []
    for method in (whole, streamed):
        timeline = Timeline()
        list(runs.steps(load("oppo/stackexchange_7b", "smoke", ["schedule.steps=1", "schedule.eval_every=0"], method), 1, timeline=timeline))
        reads.append([sum((span.worker, span.method) == (worker, "prefill") for span in timeline.spans) for worker in ("reward", "reference")])
    assert reads[0] == [1, 1] and min(reads[1]) > 3
    (one, plain), (other, stats) = updates
    for column in ("sequence", "prompt", "token", "length", "version", "finish", "logp_behav", "keep"):
        np.testing.assert_array_equal(getattr(other, column), getattr(one, column))
    np.testing.assert_allclose(other.reward, one.reward, atol=EXACT)
    np.testing.assert_allclose(other.logp_ref, one.logp_ref, atol=EXACT)
    assert len(set(one.length)) > 1 and len(set(one.reward)) > 1 and plain["grad_norm"] > 0.01 and plain["kl_coef"] > 0
    assert stats["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


def sequential_ppo(x: Experiment, seed: int, folder: Path) -> list[dict]:
    """The learner's statistics of a PPO training without a schedule: every step generates to the end, reads whole responses, and updates."""
    encode, _, _ = load_tokenizer(x.model.path)
    plan, sampling, model, path = x.schedule, x.sampler, _model(x, "a"), x.reward.path
    limits = {"max_prompt_tokens": sampling.max_prompt_tokens, "max_new_tokens": sampling.max_new_tokens}
    sizes = {"slots": plan.batch_size, "capacity": sum(limits.values()), "n": plan.group_size}
    prompts = Prompts(tasks.load(x.task), encode, seed=seed, n=plan.group_size, **limits)
    sampler = HFSampler(**model, slots=sampling.slots, capacity=sizes["capacity"], temperature=sampling.temperature, seed=seed)
    learner, found = PPOLearner(**model, **_learner(x, seed, None)), []
    reward = load_reward(**model | {"path": path}, policy=x.model.path, **sizes)
    reference = StreamedReference(**model, temperature=sampling.temperature, **sizes)
    for step in range(plan.steps):
        sampler.load(learner.publish())
        requests = prompts.next(plan.batch_size)
        batch = generate(sampler, requests, sampling.chunk, step)
        offset = np.concatenate([[0], np.cumsum(batch.length)])
        whole = Segments(batch.sequence, offset, batch.token[batch.mask], batch.logp_behav[batch.mask], batch.finish, step)
        for reader in (reward, reference):
            reader.admit(requests)
            reader.prefill(whole)
        ids = [request.id for request in requests]
        scores, logp_ref = np.array(reward.finish(ids), np.float32).ravel(), pad(sum(reference.finish(ids), []), 0.0, np.float32)
        batch = dataclasses.replace(batch, reward=scores, keep=np.ones(len(batch), bool), logp_ref=logp_ref)
        found.append(learner.update(batch, learner.logp(batch)))
    learner.save(str(folder))
    return found


def test_without_overcommitment_it_is_sequential_ppo_to_the_bit_and_to_the_second(tmp_path):
    (sequential, weights), (none, same) = (
        train(load("oppo/stackexchange_7b", "smoke", [*THREE_STEPS, *more], method), tmp_path / method, seed=1)
        for method, more in (("sequential", ()), ("inter", NO_DELTA))
    )
    assert same == weights and exact(none) == exact(sequential) and len(none) == 3
    x = load("oppo/stackexchange_7b", "smoke", THREE_STEPS, "sequential")
    assert x.algorithm.anchor == "ppo" and x.runtime.clock == "model"
    stats = sequential_ppo(x, 1, tmp_path / "plain")
    assert hashlib.sha256((tmp_path / "plain" / "model.safetensors").read_bytes()).hexdigest() == weights
    assert stats == [{key: record.metrics[f"train/{key}"] for key in found} for record, found in zip(sequential, stats, strict=True)]
    assert len({tuple(found.values()) for found in stats}) == 3
