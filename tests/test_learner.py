from __future__ import annotations

import dataclasses
import math
import weakref

import numpy as np
import pytest
import torch
from tiny import EXACT, assert_plain, digest, generate, requests, response, save_model, train_in_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from nowait.batch import Batch
from nowait.config import AlgorithmConfig, LearnerConfig
from nowait.workers.learner import HFLearner
from nowait.workers.models import load_weights
from nowait.workers.sampler import HFSampler


def learner(folder: str, anchor: str = "behave", *, algorithm: dict | None = None, options: dict | None = None, **settings):
    """`settings` are those of the optimiser, `options` those of the worker."""
    algorithm = AlgorithmConfig(anchor=anchor, **algorithm or {})
    return HFLearner(folder, LearnerConfig(**{"lr": 1e-3} | settings), algorithm, **{"temperature": 1.0, "seed": 0} | (options or {}))


def rewarded(batch: Batch, step: int = 0) -> Batch:
    """For training step `step`, with rewards that differ within every group."""
    return dataclasses.replace(batch, step=step, reward=(batch.sequence * 7 % 5).astype(np.float32))


@pytest.fixture(scope="module")
def fresh(tiny) -> Batch:
    """Four requests of four samples, sampled with the learner's first weights."""
    return rewarded(generate(HFSampler(tiny, slots=16, capacity=64, seed=1), requests(4, n=4)))


def trained(worker: HFLearner, batch: Batch, steps: int) -> HFLearner:
    """After more steps on the same responses, which become staler."""
    for _ in range(steps):
        at = dataclasses.replace(batch, step=worker.version)
        worker.update(at, worker.logp(at) if worker.algorithm.anchor in ("recompute", "diagnostic") else None)
    return worker


def parameters(worker: HFLearner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in worker.model.parameters()])


def gradient(worker: HFLearner, batch: Batch) -> np.ndarray:
    """Of the whole batch as one minibatch."""
    assert worker.prepare(batch) == 1
    return worker.gradient(0)[0].copy()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_log_probs_equal_the_samplers_and_those_of_a_plain_forward_pass(tiny, temperature):
    batch = generate(HFSampler(tiny, slots=16, capacity=64, temperature=temperature), requests(4))
    logp = learner(tiny, options={"temperature": temperature}).logp(batch)
    np.testing.assert_allclose(logp, batch.logp_behav, atol=EXACT)
    assert_plain(tiny, batch, logp, temperature)
    assert (logp[~batch.mask] == 0).all()


@pytest.mark.parametrize("settings", [{"logp_chunk_tokens": 1}, {"logp_chunk_tokens": 17}, {"micro_batch_tokens": 1}, {"micro_batch_tokens": 70}])
def test_log_probs_and_gradient_do_not_depend_on_how_the_work_is_cut(tiny, fresh, settings):
    whole, cut = learner(tiny, minibatches=1), learner(tiny, minibatches=1, **settings)
    np.testing.assert_allclose(cut.logp(fresh), whole.logp(fresh), atol=EXACT)
    np.testing.assert_allclose(gradient(cut, fresh), gradient(whole, fresh), atol=1e-6)


class LiveBytes(TorchDispatchMode):
    """Peak of the memory that tensors hold which were made in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def freed(self, size: int) -> None:
        self.live -= size


def test_vocabulary_logits_never_exist_for_more_than_a_chunk_of_tokens(tmp_path):
    vocabulary, tokens, chunk = 5_000, 4096, 128
    folder = save_model(tmp_path, vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    random = np.random.default_rng(0)
    rows, length = 32, tokens // 32
    batch = Batch(
        step=0,
        sequence=np.arange(rows),
        group=np.arange(rows) // 4,
        prompt=np.ones((rows, 1), np.int32),
        prompt_length=np.ones(rows, np.int32),
        token=random.integers(0, vocabulary, (rows, length)).astype(np.int32),
        length=np.full(rows, length, np.int32),
        logp_behav=np.full((rows, length), -9.0, np.float32),
        version=np.zeros((rows, length), np.int32),
        finish=np.ones(rows, np.uint8),
        reward=random.random(rows).astype(np.float32),
        keep=np.ones(rows, bool),
    )
    worker = learner(folder, minibatches=1, logp_chunk_tokens=chunk)
    worker.prepare(batch)
    with LiveBytes() as memory:
        worker.gradient(0)
    logits = tokens * vocabulary * 4
    assert chunk * vocabulary * 4 < memory.peak < logits / 4


def test_gradient_checkpointing_recomputes_layers_and_gives_the_same_gradient_without_dropout(tiny, fresh, tmp_path):
    folder, runs = save_model(tmp_path, attention_dropout=0.5), []
    worker = learner(folder, minibatches=1, options={"gradient_checkpointing": True})
    worker.model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: runs.append(1))
    np.testing.assert_allclose(gradient(worker, fresh), gradient(learner(tiny, minibatches=1), fresh), atol=1e-6)
    passes = len(list(worker._micro_batches(fresh, np.arange(len(fresh)))))
    assert len(runs) == 2 * passes  # forward, and again in the backward pass


def test_dropout_in_the_config_has_no_effect(tiny, fresh, tmp_path):
    worker = learner(save_model(tmp_path, attention_dropout=0.5))
    np.testing.assert_array_equal(worker.logp(fresh), learner(tiny).logp(fresh))
    assert digest(trained(worker, fresh, 2)) == digest(trained(learner(tiny), fresh, 2))


def test_gradient_is_that_of_the_responses_log_probs_including_eos_and_no_prompt(tiny, fresh):
    """At ratio 1 the gradient is -A grad log pi / N, here with A = 1/2 and -1/2, by an ordinary forward and backward pass."""
    pair = np.flatnonzero(fresh.finish[:4] == 1)[:2]
    batch = dataclasses.replace(fresh.rows(pair), reward=np.array([1, 0], np.float32))
    worker = learner(tiny, minibatches=1, algorithm={"advantage_std": False, "advantage_whiten": False})
    model, loss = AutoModelForCausalLM.from_pretrained(tiny), []
    for i, advantage in enumerate((0.5, -0.5)):
        prompt, token = batch.prompt[i, : batch.prompt_length[i]], response(batch, i)
        ids = torch.tensor(np.concatenate([prompt, token]), dtype=torch.int64)
        logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)[range(len(ids) - 1), ids[1:]]
        loss.append(-advantage * logp[len(prompt) - 1 :] / batch.length.sum())
    found = gradient(worker, batch)
    for terms, same in ((loss, True), ([part[:-1] for part in loss], False)):  # with and without EOS
        expected = torch.autograd.grad(torch.cat(terms).sum(), model.parameters(), retain_graph=True)
        assert np.allclose(found, torch.cat([g.flatten() for g in expected]), atol=1e-5) is same


def test_micro_batches_of_one_sequence_train_like_one_of_all(tiny, fresh):
    whole, cut = (trained(learner(tiny, micro_batch_tokens=size, eps=1e-4), fresh, 1) for size in (10_000, 1))
    torch.testing.assert_close(parameters(cut), parameters(whole), atol=1e-6, rtol=0)


@pytest.mark.parametrize("minibatches", [2, 16])  # 16: every rank but the first has nothing to do
def test_two_ranks_train_like_one(tiny, fresh, minibatches):
    options = {"minibatches": minibatches, "epochs": 2, "eps": 1e-6}  # Adam makes noise in gradients near zero as large as lr otherwise
    one, ranks = learner(tiny, **options), [learner(tiny, **options) for _ in range(2)]
    expected = one.update(fresh)
    count, stats = train_in_ranks(ranks, fresh)
    assert count == 2 * minibatches
    assert digest(ranks[0]) == digest(ranks[1]) and stats[0] == stats[1]
    torch.testing.assert_close(parameters(ranks[0]), parameters(one), atol=1e-6, rtol=0)
    assert stats[0] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert stats[0]["tokens"] == 2 * fresh.length.sum()


@pytest.mark.parametrize("anchor", ["recompute", "behave", "loglinear", "linear", "reuse"])
def test_without_a_learning_rate_five_steps_change_nothing_and_the_ratio_stays_1(tiny, fresh, anchor):
    worker = learner(tiny, anchor, lr=0.0, minibatches=1 if anchor == "reuse" else 3, weight_decay=0.1)
    before = digest(worker)
    for _ in range(5):
        batch = dataclasses.replace(fresh, step=worker.version)
        stats = worker.update(batch, worker.logp(batch) if anchor == "recompute" else None)
        assert stats["ratio_min"] == pytest.approx(1, abs=EXACT) and stats["ratio_max"] == pytest.approx(1, abs=EXACT)
        assert stats["behave_weight_min"] == pytest.approx(1, abs=EXACT) and stats["behave_weight_max"] == pytest.approx(1, abs=EXACT)
        assert stats["clip_frac"] == 0 and stats["approx_kl"] < 1e-9 and stats["grad_norm"] > 0
    assert digest(worker) == before and worker.version == 5


def test_reuse_has_ratio_exactly_1_and_clips_nothing_on_stale_tokens(tiny, fresh):
    worker = trained(learner(tiny, minibatches=1, lr=0.01), fresh, 3)
    moved = worker.get_state()
    worker = learner(tiny, "reuse", minibatches=1, lr=0.01)
    worker.set_state(moved)
    stats = worker.update(dataclasses.replace(fresh, step=3))
    assert stats["ratio_min"] == stats["ratio_max"] == 1 and stats["clipped_tokens"] == 0
    assert stats["behave_weight_max"] > 1.2


def test_recompute_clips_after_the_first_of_several_minibatches_only(tiny, fresh):
    """With the current policy as its own anchor, clipping would be off."""
    many, single = (trained(learner(tiny, "recompute", minibatches=m, lr=0.03), fresh, 1) for m in (4, 1))
    for worker, clips in ((many, True), (single, False)):
        batch = dataclasses.replace(fresh, step=1)
        assert (worker.update(batch, worker.logp(batch))["clip_frac"] > 0) is clips


def test_tokens_of_staleness_1_train_loglinear_and_behave_alike_bit_for_bit_and_older_ones_do_not(tiny, fresh):
    loglinear, behave = (learner(tiny, anchor) for anchor in ("loglinear", "behave"))
    for steps, same in ((1, True), (1, True), (1, False)):  # d = 0, 1, 2
        assert (digest(trained(loglinear, fresh, steps)) == digest(trained(behave, fresh, steps))) is same


def test_diagnostic_logs_how_far_each_approximation_is_from_the_recomputed_anchor(tiny, fresh):
    worker = learner(tiny, "diagnostic", minibatches=1, lr=0.01)
    exact = dataclasses.replace(fresh, logp_behav=worker.logp(fresh))
    stats = worker.update(exact, worker.logp(exact))
    errors = [stats[f"prox_abs_error/{name}"] for name in ("behave", "loglinear", "linear")]
    assert errors == pytest.approx([0, 0, 0], abs=1e-6) and stats["prox_abs_error/behave"] == 0
    stale = dataclasses.replace(exact, step=2)
    worker.update(dataclasses.replace(exact, step=1), worker.logp(exact))
    stats = worker.update(stale, worker.logp(stale))
    behave, loglinear, linear, reuse = (stats[f"prox_abs_error/{name}"] for name in ("behave", "loglinear", "linear", "reuse"))
    assert behave > 0.01 and loglinear == pytest.approx(behave / 2, rel=1e-3)  # d = 2: half way
    assert 0 < linear < behave and reuse == pytest.approx(0, abs=1e-6)  # one minibatch: theta is the anchor


def test_the_gap_between_sampler_and_learner_is_that_of_fresh_tokens_before_the_first_optimiser_step(tiny, fresh):
    worker = learner(tiny, "behave", minibatches=4, lr=0.03)
    shifted = dataclasses.replace(fresh, logp_behav=worker.logp(fresh) - 0.25)
    seen = learner(tiny, "behave", minibatches=1).update(shifted)["sampler_gap"]
    assert seen == pytest.approx(0.25, abs=1e-6)
    first = dataclasses.replace(shifted, logp_behav=np.where(shifted.version == 0, shifted.logp_behav, 9))
    assert worker.update(first)["sampler_gap"] == pytest.approx(0.25, abs=1e-6)  # of the first of four minibatches
    assert "sampler_gap" not in worker.update(dataclasses.replace(shifted, step=1))  # stale: the policy may have moved


def test_padding_has_no_influence_whatever_stands_there(tiny):
    fresh = rewarded(generate(HFSampler(tiny, slots=18, capacity=64, seed=1), requests(9, limit=3)))  # prompts of very different lengths
    rows, width = fresh.token.shape
    wide = {"token": 9999, "logp_behav": math.nan, "version": -1, "prompt": 9999}
    padded = {}
    for name, garbage in wide.items():
        column, length = getattr(fresh, name), fresh.prompt_length if name == "prompt" else fresh.length
        column = np.concatenate([column, np.zeros((rows, 3), column.dtype)], 1)
        padded[name] = np.where(np.arange(column.shape[1]) < length[:, None], column, np.array(garbage, column.dtype))
    padded = dataclasses.replace(fresh, **padded)
    np.testing.assert_array_equal(learner(tiny).logp(padded)[:, :width], learner(tiny).logp(fresh))
    assert digest(trained(learner(tiny), padded, 2)) == digest(trained(learner(tiny), fresh, 2))


def test_sequences_without_a_grade_have_no_influence(tiny, fresh):
    kept = fresh.group != 2
    reward, logp = (np.where(kept if x.ndim == 1 else kept[:, None], x, np.nan) for x in (fresh.reward, fresh.logp_behav))
    dropped = dataclasses.replace(fresh, keep=kept)
    broken = dataclasses.replace(dropped, reward=reward, logp_behav=logp)
    workers = [learner(tiny, minibatches=2) for _ in range(2)]
    stats = [worker.update(batch) for worker, batch in zip(workers, (dropped, broken), strict=True)]
    assert stats[0] == stats[1] and digest(workers[0]) == digest(workers[1])
    assert stats[0]["tokens"] == fresh.length[kept].sum()
    without = gradient(learner(tiny, minibatches=1), fresh.rows(np.flatnonzero(kept)))
    np.testing.assert_allclose(gradient(learner(tiny, minibatches=1), broken), without, atol=1e-6)


def test_a_batch_without_any_grade_changes_nothing(tiny, fresh):
    worker = learner(tiny)
    before = digest(worker)
    stats = worker.update(dataclasses.replace(fresh, keep=np.zeros(len(fresh), bool)))
    assert digest(worker) == before and stats["tokens"] == stats["grad_norm"] == 0 and worker.version == 1


def test_learning_rate_warms_up_linearly_from_0(tiny, fresh):
    worker = learner(tiny, lr=0.008, warmup_steps=4)
    rates = [worker.update(dataclasses.replace(fresh, step=step))["lr"] for step in range(6)]
    assert rates == pytest.approx([0, 0.002, 0.004, 0.006, 0.008, 0.008])


@pytest.mark.parametrize(("limit", "clipped"), [(0.5, True), (1e3, False)])
def test_gradient_is_clipped_to_its_norm(tiny, fresh, limit, clipped):
    worker = learner(tiny, minibatches=1, grad_clip=limit)
    norm = worker.update(fresh)["grad_norm"]
    applied = torch.cat([p.grad.flatten() for p in worker.model.parameters()]).norm().item()
    assert norm > 0.5 and applied == pytest.approx(limit if clipped else norm, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reward": [math.nan, 1, 0, 1]}, FloatingPointError, "step 0: reward is nan"),
        ({"logp_behav": math.nan}, FloatingPointError, "step 0: logp_behav is nan"),
        ({"logp_behav": -math.inf}, FloatingPointError, "step 0: logp_behav is -inf"),
        ({"step": 3}, ValueError, "batch is for step 3, the learner has finished 0"),
        ({"version": 1}, ValueError, r"token versions \[1\] .* the learner's version"),
    ],
)
def test_a_batch_that_cannot_be_right_raises_and_leaves_the_weights_alone(tiny, fresh, change, error, message):
    batch = fresh.rows(np.arange(4))
    for name, value in change.items():
        old = getattr(batch, name)
        batch = dataclasses.replace(batch, **{name: value if name == "step" else np.broadcast_to(np.array(value, old.dtype), old.shape)})
    worker = learner(tiny)
    before = digest(worker)
    with pytest.raises(error, match=message):
        worker.update(batch)
    assert digest(worker) == before


def test_a_published_snapshot_stays_as_it_was(tiny, fresh, tmp_path):
    for options in ({}, {"snapshots": str(tmp_path)}):
        worker, copies = learner(tiny, options=options), [HFSampler(tiny, slots=1, capacity=2) for _ in range(3)]
        digests, published = [], []
        for _ in range(3):
            digests.append(digest(worker))
            published.append(worker.publish())
            trained(worker, fresh, 1)
        assert [w.version for w in published] == [0, 1, 2] and len(set(digests)) == 3
        for copy, snapshot, expected in zip(copies, published, digests, strict=True):
            load_weights(copy.model, snapshot)
            holder = learner(tiny)
            holder.model.load_state_dict(copy.model.state_dict())
            assert digest(holder) == expected


def test_old_snapshot_files_are_deleted(tiny, fresh, tmp_path):
    worker = learner(tiny, minibatches=1, options={"snapshots": str(tmp_path)})
    for _ in range(7):
        worker.publish()
        trained(worker, fresh, 1)
    assert sorted(int(file.stem) for file in tmp_path.rglob("*.safetensors")) == [3, 4, 5, 6]


def test_a_restored_learner_continues_bit_for_bit_and_its_state_is_a_snapshot(tiny, fresh):
    original = trained(learner(tiny, weight_decay=0.1, warmup_steps=5), fresh, 3)
    state = original.get_state()
    trained(original, fresh, 2)
    restored = learner(tiny, weight_decay=0.1, warmup_steps=5)
    restored.set_state(state)
    assert digest(restored) != digest(original)
    trained(restored, fresh, 2)
    assert digest(restored) == digest(original) and restored.version == 5
    reset = learner(tiny, weight_decay=0.1, warmup_steps=5)
    reset.set_state(state | {"adam": {}})
    assert digest(trained(reset, fresh, 2)) != digest(original)  # the moments are part of it


def test_the_order_of_sequences_depends_on_seed_and_step_alone(tiny, fresh):
    def first(seed: int, step: int) -> np.ndarray:
        worker = learner(tiny, lr=0.0, minibatches=4, options={"seed": seed})
        worker.version = step
        worker.prepare(dataclasses.replace(fresh, step=step))
        return worker.gradient(0)[0]

    worker = trained(learner(tiny, lr=0.0, minibatches=4), fresh, 2)
    worker.prepare(dataclasses.replace(fresh, step=2))
    np.testing.assert_array_equal(worker.gradient(0)[0], first(0, 2))
    assert not np.allclose(first(0, 1), first(0, 2)) and not np.allclose(first(1, 2), first(0, 2))


def test_every_epoch_covers_every_sequence_once(tiny, fresh):
    worker = learner(tiny, minibatches=3, epochs=2)
    worker.prepare(fresh)
    parts = [worker.gradient(m) for m in range(6)]
    for epoch in (parts[:3], parts[3:]):
        assert sum(int(stats["tokens_sum"]) for _, stats in epoch) == fresh.length.sum()
    weighted = [sum(gradient * float(stats["tokens_sum"]) for gradient, stats in epoch) for epoch in (parts[:3], parts[3:])]
    np.testing.assert_allclose(*weighted, atol=1e-4)


def test_a_bfloat16_policy_trains_and_its_state_returns(tiny, fresh):
    def make() -> HFLearner:
        return learner(tiny, minibatches=1, lr=0.01, options={"dtype": "bfloat16"})

    worker = make()
    batch = dataclasses.replace(fresh, logp_behav=worker.logp(fresh))
    trained(worker, batch, 2)
    assert digest(worker) != digest(make())
    restored = make()
    restored.set_state(worker.get_state())
    assert digest(trained(restored, batch, 1)) == digest(trained(worker, batch, 1))


def test_a_policy_without_preference_has_the_entropy_of_its_vocabulary(tiny, fresh):
    worker = learner(tiny)
    with torch.no_grad():
        for parameter in worker.model.parameters():
            parameter.zero_()
    np.testing.assert_allclose(worker.logp(fresh)[fresh.mask], -math.log(16), rtol=1e-6)
    assert worker.update(dataclasses.replace(fresh, logp_behav=worker.logp(fresh)))["entropy"] == pytest.approx(math.log(16))


def test_the_saved_policy_is_the_trained_one(tiny, fresh, tmp_path):
    worker = trained(learner(tiny), fresh, 2)
    worker.save(str(tmp_path))
    assert_plain(str(tmp_path), fresh, worker.logp(fresh), 1.0)
