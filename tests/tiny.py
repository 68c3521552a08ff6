"""A tiny random policy, and what its tests share. The functions need only a folder, so that other processes can call them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nowait import runs
from nowait.assets import character_tokenizer
from nowait.batch import Batch, Request, Weights
from nowait.config import Experiment, load
from nowait.schedules.common import StepRecord
from nowait.workers.sampler import generate  # noqa: F401, tests of any sampler use it

EXACT = 2e-5  # nats: what the rounding of one model in two shapes may differ by


def save_model(folder: Path, *, seed: int = 0, kind: str = "qwen2", **settings) -> str:
    """A random model whose distributions are far from flat, with the arithmetic tokenizer; returns its folder."""
    tokenizer = character_tokenizer()
    defaults = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **defaults | settings)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def weights(folder: str, version: int) -> Weights:
    """The model of a folder, as a learner would publish it."""
    return Weights(version, dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()))


def requests(count: int, *, n: int = 2, limit: int = 24, first: int = 0) -> list[Request]:
    """Prompts of 1 to 9 tokens; request `first + i` is the same in every call."""
    made = []
    for number in range(first, first + count):
        random = np.random.default_rng(number)
        made.append(Request(number, random.integers(0, 14, 1 + number % 9).astype(np.int32), n, limit))
    return made


def assert_named_when_not_finite(worker, folder: str) -> None:
    """A sampler that gets a NaN among the weights of a folder's model says which version it was."""
    broken = weights(folder, 4)
    with torch.no_grad():
        broken.payload["model.norm.weight"][0] = torch.nan
    worker.load(broken)
    worker.admit(requests(2))
    with pytest.raises(FloatingPointError, match="version 4"):
        worker.decode(2)


def digest(learner) -> str:
    """SHA-256 of a learner's trained weights, to compare them bit for bit."""
    modules = [weights for weights in learner.get_state().values() if isinstance(weights, dict)]  # and then the optimiser's moments
    return hashlib.sha256(b"".join(array.tobytes() for weights in modules[:-1] for array in weights.values())).hexdigest()


def train_in_ranks(ranks: list, batch: Batch) -> tuple[int, list[dict]]:
    """One data-parallel training step: the number of its minibatches, and the statistics of every rank."""
    (count,) = {worker.prepare(batch) for worker in ranks}
    for m in range(count):
        shares = [worker.gradient(m, rank, len(ranks)) for rank, worker in enumerate(ranks)]
        for worker in ranks:
            worker.apply(shares)
    return count, [worker.finish() for worker in ranks]


def response(batch: Batch, i: int, column: str = "token") -> np.ndarray:
    """A column of sequence i without its padding."""
    return getattr(batch, column)[i, : batch.length[i]]


@torch.no_grad()
def plain_logp(model, prompt: np.ndarray, token: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs of `token` after `prompt` by one ordinary forward pass over the joined sequence."""
    ids = torch.tensor(np.concatenate([prompt, token]), dtype=torch.int64)
    logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / temperature, -1)
    return logp.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()


def assert_plain(folder: str, batch: Batch, logp: np.ndarray, temperature: float, atol: float = EXACT) -> None:
    """`logp` [S, T] is what the model of a folder gives each response."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for i in range(len(batch)):
        expected = plain_logp(model, batch.prompt[i, : batch.prompt_length[i]], response(batch, i), temperature)
        np.testing.assert_allclose(logp[i, : batch.length[i]], expected, atol=atol)


class EvenDigits:
    """Rewards the share of even digits in a response, which an untrained policy can raise. The grader fails on every `broken`-th row."""

    def __init__(self, broken: int = 0) -> None:
        self.broken = broken

    def size(self, split: str) -> int:
        return 40

    def prompt(self, split: str, row: int) -> str:
        return f"{row}="

    def reward(self, split: str, row: int, response: str) -> float:
        if self.broken and row % self.broken == 0:
            raise LookupError(f"no answer to row {row}")
        return sum(character in "02468" for character in response) / max(1, len(response))


EXPERIMENT = """
name: tiny
task: {{name: "tiny:EvenDigits"}}
model: {{path: "{folder}"}}
sampler: {{slots: 8, chunk: 4, max_prompt_tokens: 8, max_new_tokens: 20}}
learner: {{lr: 1.0e-2, minibatches: 2}}
schedule: {{steps: 6, batch_size: 2, group_size: 4, max_staleness: 3}}
evaluation: {{prompts: 6, samples: 2, max_new_tokens: 20}}
"""


def experiment(folder: str, method: str = "loglinear", *overrides: str) -> Experiment:
    """A training of seconds, by default inline and on the model clock."""
    file = Path(folder) / "tiny.yaml"
    file.write_text(EXPERIMENT.format(folder=folder))
    return load(file, method=method, overrides=overrides)


def train(x: Experiment, folder: Path, *, seed: int = 0, state: dict | None = None) -> tuple[list[StepRecord], str]:
    """All records of a training and the SHA-256 of the final weights."""
    records = list(runs.steps(x, seed, state=state, policy=folder))
    return records, hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def exact(records: list[StepRecord], leave_out: tuple[str, ...] = ()) -> list[str]:
    """What records say, one text each, equal only if every bit is."""
    kept = [{k: v for k, v in r.metrics.items() if not k.startswith(leave_out)} for r in records]
    return [json.dumps([r.step, m, {k: v.tolist() for k, v in r.rewards.items()}]) for r, m in zip(records, kept, strict=True)]


def fingerprint(x: Experiment, folder: str) -> str:
    """SHA-256 of all that a training leaves behind; for comparison between processes."""
    records, weights = train(x, Path(folder))
    return hashlib.sha256("".join([*exact(records), weights]).encode()).hexdigest()
