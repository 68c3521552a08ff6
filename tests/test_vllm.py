"""The sampler on vLLM, with the real engine. All tests of a model share one engine, which starts once in this process."""

from __future__ import annotations

import importlib.util
import time
from collections import defaultdict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import assert_named_when_not_finite, assert_plain, experiment, generate, plain_logp, requests, response, save_model, train, weights
from transformers import AutoModelForCausalLM

from nowait import runs
from nowait.batch import LENGTH, RUNNING, STOP, Request, Rollouts, Weights
from nowait.config import load
from nowait.runs import RunFailed
from nowait.workers.learner import HFLearner
from nowait.workers.models import model_folder
from nowait.workers.vllm_sampler import VLLMSampler

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed: `make test-vllm` runs these tests", allow_module_level=True)

CLOSE = 1e-4  # nats: what two implementations of a model may differ by in float32
EOS = 15
SIZES = {"max_num_seqs": 16, "max_model_len": 64, "block_size": 32}  # of the engine that samplers of different slots and capacities share
LONG = [Request(100 + i, np.random.default_rng(i).integers(0, 14, 40).astype(np.int32), 2, 24) for i in range(2)]  # prompts that fill a block
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}  # 32 values each, which vLLM's CPU kernels know
SHAPES = {"tied": HEADS, "untied": HEADS | {"tie_word_embeddings": False}, "narrow heads": {}}


def sampler(folder: str, **options) -> VLLMSampler:
    return VLLMSampler(folder, **{"slots": 16, "capacity": 64, "seed": 1, "engine": SIZES} | options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of two models of a shape: `folders(shape)`."""
    made = {}

    def folders(shape: str) -> tuple[str, str]:
        if shape not in made:
            made[shape] = tuple(save_model(tmp_path_factory.mktemp("model"), seed=seed, **SHAPES[shape]) for seed in (0, 1))
        return made[shape]

    return folders


@pytest.fixture(scope="module")
def model(folders) -> str:
    return folders("tied")[0]


@pytest.fixture(scope="module")
def another(folders) -> str:
    return folders("tied")[1]


@pytest.fixture(scope="module")
def sampled(model):
    """Eight requests of two samples, all at once."""
    return generate(sampler(model), requests(8))


def rounds(worker: VLLMSampler, chunk: int):
    """Decode rounds until nothing is in flight."""
    while len((segments := worker.decode(chunk)).sequence):
        yield segments


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("payload", ["tensors", "file"])
def test_log_probs_are_those_of_the_model_before_and_after_a_weight_update(folders, tmp_path, shape, payload):
    (old, new), worker = folders(shape), sampler(folders(shape)[0], temperature=0.7)
    before = generate(worker, requests(8) + LONG)
    assert_plain(old, before, before.logp_behav, 0.7, CLOSE)
    published = weights(new, 1)
    if payload == "file":
        save_file({name: tensor.detach() for name, tensor in published.payload.items()}, tmp_path / "1.safetensors")
        published = Weights(1, str(tmp_path / "1.safetensors"))
    assert worker.load(published) == 0
    after = generate(worker, requests(8) + LONG)
    assert_plain(new, after, after.logp_behav, 0.7, CLOSE)
    assert set(before.version[before.mask]) == {0} and set(after.version[after.mask]) == {1}


def test_an_update_of_some_weights_leaves_the_others_as_they_are(model, tmp_path):
    """As training adapters publishes: of layers with a bias, the weight alone."""
    torch.manual_seed(0)
    old, new = (AutoModelForCausalLM.from_pretrained(model) for _ in range(2))
    with torch.no_grad():
        for name, parameter in old.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    new.load_state_dict(old.state_dict())
    changed = {name: 0.8 * parameter.detach() for name, parameter in old.named_parameters() if name.endswith("proj.weight")}
    new.load_state_dict(changed, strict=False)
    for folder, saved in (("old", old), ("new", new)):
        saved.save_pretrained(tmp_path / folder)
    worker = sampler(str(tmp_path / "old"))
    for version in (1, 2):
        worker.load(Weights(version, dict(changed)))
        batch = generate(worker, requests(8))
        assert_plain(str(tmp_path / "new"), batch, batch.logp_behav, 1.0, CLOSE)


def test_a_sequence_interrupted_by_an_update_goes_on_under_the_new_weights_alone(model, another, sampled):
    worker, wanted, rollouts = sampler(model), requests(8), Rollouts(2)
    rollouts.admit(wanted)
    worker.admit(wanted)
    rollouts.add(worker.decode(5))
    running = sampled.length > 5
    assert worker.load(weights(another, 3)) == (sampled.prompt_length + 5)[running].sum()
    for segments in rounds(worker, 4):
        rollouts.add(segments)
    batch = rollouts.take([r.id for r in wanted], 3)
    old, new = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, another))
    for i in range(len(batch)):
        prompt, token, version = batch.prompt[i, : batch.prompt_length[i]], response(batch, i), response(batch, i, "version")
        assert version.tolist() == ([0] * 5 + [3] * (len(token) - 5) if running[i] else [0] * len(token))
        expected = np.where(version == 0, plain_logp(old, prompt, token, 1.0), plain_logp(new, prompt, token, 1.0))
        np.testing.assert_allclose(response(batch, i, "logp_behav"), expected, atol=CLOSE)
    assert running.sum() > 4


def test_tokens_of_other_weights_than_the_segments_say_are_an_error(model):
    worker = sampler(model)
    worker.admit(requests(1, limit=2))
    worker.decode(1)
    try:
        worker._engine.llm.update_weight_version("9")
        with pytest.raises(RuntimeError, match="under weights of version 0, 9, and not 0"):
            worker.decode(1)
    finally:
        worker._engine.llm.update_weight_version("0")


@pytest.mark.parametrize(("chunk", "slots"), [(1, 16), (3, 16), (100, 16), (7, 3)])
def test_responses_do_not_depend_on_chunk_and_slots(model, sampled, chunk, slots):
    batch = generate(sampler(model, slots=slots), requests(8), chunk)
    for column in ("token", "length", "version", "finish"):
        np.testing.assert_array_equal(getattr(batch, column), getattr(sampled, column))


def test_samples_of_a_request_differ_and_another_seed_or_stream_gives_others(model, sampled):
    batches = [sampled, *(generate(sampler(model, **change), requests(8)) for change in ({"seed": 2}, {"stream": 1}))]
    long = [tuple(response(batch, i)) for batch in batches for i in range(len(batch)) if batch.length[i] > 5]  # short ones may be equal by chance
    assert len(set(long)) == len(long) > 24


def test_tokens_come_in_the_proportions_of_the_full_softmax_at_the_temperature(model):
    prompt = np.array([3, 1, 4], np.int32)
    batch = generate(sampler(model, temperature=1.5), [Request(0, prompt, 1600, 1)])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(input_ids=torch.tensor(prompt[None].astype(np.int64))).logits[0, -1]
    expected = 1600 * torch.softmax(logits / 1.5, -1).numpy()
    found = np.bincount(batch.token[:, 0], minlength=len(expected))
    common = expected > 5
    assert common.sum() > 4 and found[expected < 1e-3].sum() == 0
    assert ((found - expected)[common] ** 2 / expected[common]).sum() < 45  # chi-square with at most 15 degrees of freedom: 1e-4 lies above


def test_a_sequence_s_random_numbers_do_not_begin_again_with_new_weights(tmp_path):
    folder = save_model(tmp_path, **HEADS)
    silent = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        silent.get_input_embeddings().weight.zero_()  # and with it the head: every token is as likely as every other
    silent.save_pretrained(folder)
    worker, first = sampler(folder), {}
    worker.admit([Request(0, np.array([1], np.int32), 64, 2)])
    again = []
    for version in range(1, 9):
        segments = worker.decode(1)
        for sid, token in zip(segments.sequence.tolist(), segments.token.tolist(), strict=True):
            again += [first[sid] == token] if sid in first else []
            first[sid] = token
        worker.load(weights(folder, version))
    assert len(again) > 50 and np.mean(again) < 0.25  # 1 in 16 is to be expected


def test_a_round_gives_every_sequence_its_chunk_and_freed_slots_to_the_next(model):
    worker = sampler(model, slots=3)
    worker.admit(requests(4, limit=6))
    seen, running = [], set()
    for segments in rounds(worker, 2):
        started = [s for s in segments.sequence.tolist() if s not in seen]
        seen += started
        assert len(segments.sequence) == min(3, len(running) + 8 - len(seen) + len(started))
        assert (np.diff(segments.offset)[segments.finish == RUNNING] == 2).all() and np.diff(segments.offset).max() == 2
        running = set(segments.sequence[segments.finish == RUNNING].tolist())
    assert seen == list(range(8)) and not running


def test_eos_is_part_of_the_response_and_every_request_has_its_own_limit(model, sampled):
    wanted = [Request(r.id, r.prompt, r.n, 1 + 3 * r.id) for r in requests(8)]
    batch = generate(sampler(model), wanted)
    for i in range(len(batch)):
        token, limit = response(batch, i), 1 + 3 * (i // 2)
        np.testing.assert_array_equal(token, response(sampled, i)[:limit])
        assert EOS not in token[:-1] and len(token) <= limit
        assert batch.finish[i] == (STOP if token[-1] == EOS else LENGTH)
    assert {STOP, LENGTH} == set(sampled.finish.tolist())


def test_dropped_requests_vanish_and_leave_the_others_alone(model, sampled):
    worker, wanted, rollouts = sampler(model, slots=5), requests(8), Rollouts(2)  # the first sample of request 2 has a slot, the second waits
    rollouts.admit(wanted)
    worker.admit(wanted)
    segments = worker.decode(2)
    rollouts.add(segments)
    assert {2, 3} <= set(segments.sequence[segments.finish == RUNNING].tolist())
    for gone in ([1, 5], [2]):
        worker.drop(gone)
        rollouts.drop(gone)
    for segments in rounds(worker, 3):
        rollouts.add(segments)  # raises on a token of a request that is gone
    batch = rollouts.take([0, 3, 4, 6, 7], 0)
    for i, s in enumerate(batch.sequence.tolist()):
        np.testing.assert_array_equal(response(batch, i), response(sampled, s))


def test_a_restored_sampler_continues_and_its_state_is_a_snapshot(model, another):
    """As at a checkpoint: new weights have just been loaded."""
    original, restored = sampler(model, slots=5), sampler(model, slots=5)
    original.admit(requests(5))
    for _ in range(3):
        original.decode(3)
    published = weights(another, 2)
    original.load(published)
    state = original.get_state()
    expected = list(rounds(original, 3))
    restored.load(published)
    restored.set_state(state)
    for segments, continued in zip(expected, rounds(restored, 3), strict=True):
        assert continued.version == segments.version == 2
        for column in ("sequence", "offset", "token", "finish"):
            np.testing.assert_array_equal(getattr(continued, column), getattr(segments, column))
        np.testing.assert_allclose(continued.logp_behav, segments.logp_behav, atol=CLOSE)
    assert sum(len(s.token) for s in expected) > 20


def test_two_samplers_take_turns_with_one_engine_each_under_its_own_weights(model, another):
    """As training and evaluation do."""
    one, other = sampler(model, slots=4), sampler(model, slots=8, temperature=0.6, stream=1)
    assert one._engine is other._engine
    other.load(weights(another, 5))
    batches = {worker: Rollouts(2) for worker in (one, other)}
    for worker, rollouts in batches.items():
        rollouts.admit(requests(4))
        worker.admit(requests(4))
    for _ in range(8):  # of 3 tokens each, of 24; the first has slots for half of the sequences
        for worker, rollouts in batches.items():
            rollouts.add(worker.decode(3))
    for segments in rounds(one, 3):
        batches[one].add(segments)
    for worker, folder, version, temperature in ((one, model, 0, 1.0), (other, another, 5, 0.6)):
        batch = batches[worker].take([0, 1, 2, 3], 5)
        assert set(batch.version[batch.mask]) == {version}
        assert_plain(folder, batch, batch.logp_behav, temperature, CLOSE)


def test_overlapped_training_neither_loses_nor_doubles_a_token_of_carried_requests(monkeypatch):
    """The real schedule, B = 4 and Δ = 2: what was decoded is, sequence by sequence, what was trained on or is still in flight."""
    decoded, trained, decode, update = defaultdict(list), {}, VLLMSampler.decode, HFLearner.prepare

    def recording_decode(self, max_tokens):
        segments = decode(self, max_tokens)
        for i, sid in enumerate(segments.sequence.tolist() if self.stream == 0 else []):
            span = slice(segments.offset[i], segments.offset[i + 1])
            decoded[sid] += [(int(token), segments.version) for token in segments.token[span]]
        return segments

    def recording_prepare(self, batch, logp_prox=None):
        for i, sid in enumerate(batch.sequence.tolist()):
            assert sid not in trained
            trained[sid] = list(zip(response(batch, i).tolist(), response(batch, i, "version").tolist(), strict=True))
        return update(self, batch, logp_prox)

    monkeypatch.setattr(VLLMSampler, "decode", recording_decode)
    monkeypatch.setattr(HFLearner, "prepare", recording_prepare)
    x = load("oppo/stackexchange_7b", "smoke", ["sampler.engine=vllm", "overlap.rule=fixed", "schedule.steps=6", "schedule.eval_every=0"])
    records = list(runs.steps(x, 1))
    decoded = {sid: tokens for sid, tokens in decoded.items() if sid >= 0}  # below 0: of the self-check
    assert trained == {sid: decoded[sid] for sid in trained} and len(trained) == 6 * 4
    assert records[-1].metrics["overlap/carried"] == len(decoded) - len(trained) > 0
    assert any(len({version for _, version in tokens}) > 1 for tokens in trained.values())  # some were carried over


def test_a_resumed_training_draws_the_tokens_of_an_uninterrupted_one(model, tmp_path):
    x = experiment(model, "loglinear", "sampler.engine=vllm", "schedule.steps=6", "schedule.checkpoint_every=3")
    whole, _ = train(x, tmp_path / "whole")
    (record,) = (r for r in whole if r.step == 3)
    assert len(record.state["sampler"]["token"])
    rest, _ = train(x, tmp_path / "resumed", state=record.state)
    names = ("rollout/requests", "rollout/lengths", "rollout/reward_mean")
    said = [[(r.step, *(r.metrics[name] for name in names)) for r in records] for records in (whole, rest)]
    assert said[1] == said[0][3:]


def test_training_refuses_a_sampler_that_has_other_weights(model):
    x = experiment(model, "sync", "sampler.engine=vllm", "sampler.engine_options={load_format: dummy}")
    with pytest.raises((ValueError, RunFailed), match=r"differ in the log-probs of \d+ sampled tokens by [\d.]+ nats.*0.001.*engine=transformers"):
        list(runs.steps(x, 0))


@pytest.mark.slow
def test_a_smoke_run_ends_in_the_reward_range_of_the_built_in_sampler():
    found = {}
    for engine, overrides in {"transformers": [], "vllm": ["runtime.executor=process", "runtime.clock=wall"]}.items():
        records = list(runs.steps(load("a3po/setup1", "smoke", [f"sampler.engine={engine}", *overrides]), 1))
        found[engine] = records[-1].metrics["eval/reward"], records[-1].metrics["eval/se"]
        gaps = [r.metrics["train/sampler_gap"] for r in records if "train/sampler_gap" in r.metrics]
        assert gaps and max(gaps) < CLOSE
    (built_in, se), (ours, other_se) = found.values()
    assert abs(ours - built_in) < 3 * np.hypot(se, other_se) and ours > 0.4


@pytest.mark.slow
def test_two_engines_sample_beside_the_two_ranks_of_their_learner():
    overrides = ["sampler.engine=vllm", "runtime.executor=process", "sampler.ranks=2", "learner.ranks=2"]
    records = list(runs.steps(load("oppo/stackexchange_7b", "smoke", overrides), 1))
    assert len(records) == 5 and all(np.isfinite(r.metrics["train/grad_norm"]) for r in records[1:])
    assert max(r.metrics["train/sampler_gap"] for r in records[1:]) < CLOSE


def test_weights_of_the_cpu_model_are_updated_within_200_ms():
    worker, taken = VLLMSampler("asset:policy_small", slots=16, capacity=96), []
    tensors = weights(model_folder("asset:policy_small"), 0).payload
    for version in range(1, 7):
        start = time.perf_counter()
        worker.load(Weights(version, dict(tensors)))
        taken.append(time.perf_counter() - start)
    print(f"weight update: {1e3 * np.median(taken):.0f} ms, first {1e3 * taken[0]:.0f} ms")
    assert np.median(taken) < 0.2


def test_weights_that_are_not_finite_raise_and_name_their_version(model, another):
    assert_named_when_not_finite(sampler(model), another)


def test_what_cannot_be_served_is_an_error_that_names_the_setting(model, tmp_path):
    with pytest.raises(ValueError, match=r"request 8: 9 prompt \+ 24 new tokens exceed the cache of 32"):
        sampler(model, capacity=32).admit(requests(9))
    with pytest.raises(ValueError, match="this vllm computes on cpu and runtime.gpus says cuda:0"):
        sampler(model, device="cuda:0")
    with pytest.raises(RuntimeError, match="sampler.engine: vLLM .*no_such_option.*sampler.engine_options"):
        sampler(model, engine=SIZES | {"no_such_option": 1})
    endless = save_model(tmp_path, eos_token_id=None, **HEADS)
    with pytest.raises(ValueError, match="no eos_token_id"):
        sampler(endless)


@pytest.mark.slow
def test_weights_reach_an_engine_that_is_spread_over_processes(model, another, tmp_path):
    """The last test: the engine's two processes stay until this one ends."""
    worker = sampler(model, engine=SIZES | {"tensor_parallel_size": 2})
    save_file({name: p.detach() for name, p in weights(another, 1).payload.items()}, tmp_path / "1.safetensors")
    worker.load(Weights(1, str(tmp_path / "1.safetensors")))
    batch = generate(worker, requests(8))
    assert_plain(another, batch, batch.logp_behav, 1.0, CLOSE)
