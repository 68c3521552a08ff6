"""A tiny random policy, and what its tests share. The functions need only a folder, so that other processes can call them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nowait.assets import character_tokenizer
from nowait.batch import Batch, Request, Rollouts, Weights

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


def generate(sampler, wanted: list[Request], chunk: int = 8, step: int = 0) -> Batch:
    """All responses of the requests, as the batch of a training step."""
    rollouts, left = Rollouts(wanted[0].n), len(wanted)
    rollouts.admit(wanted)
    sampler.admit(wanted)
    while left:
        left -= len(rollouts.add(sampler.decode(chunk)))
    return rollouts.take([r.id for r in wanted], step)


def response(batch: Batch, i: int, column: str = "token") -> np.ndarray:
    """A column of sequence i without its padding."""
    return getattr(batch, column)[i, : batch.length[i]]


@torch.no_grad()
def plain_logp(model, prompt: np.ndarray, token: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs of `token` after `prompt` by one ordinary forward pass over the joined sequence."""
    ids = torch.tensor(np.concatenate([prompt, token]), dtype=torch.int64)
    logp = torch.log_softmax(model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1] / temperature, -1)
    return logp.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()


def assert_plain(folder: str, batch: Batch, logp: np.ndarray, temperature: float) -> None:
    """`logp` [S, T] is what the model of a folder gives each response."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for i in range(len(batch)):
        expected = plain_logp(model, batch.prompt[i, : batch.prompt_length[i]], response(batch, i), temperature)
        np.testing.assert_allclose(logp[i, : batch.length[i]], expected, atol=EXACT)
