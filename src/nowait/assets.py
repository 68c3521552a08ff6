"""The checkpoints that ship with the package: tiny Qwen2 policies, warm-started on demonstrations of the embedded task.

A build repeats bit for bit on one type of processor (one thread, fixed seeds). Another type may round differently, which is why the weights
ship and the manifest pins their hash.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from nowait.tasks.arithmetic import Arithmetic

DATA = Path(__file__).parent / "data"
MANIFEST, WEIGHTS = "manifest.json", "model.safetensors"
POOL = 2048  # demonstrations sorted by length at a time
EVALUATED = {  # the distributions of A-3PO setup 1, A-3PO setup 2 and OPPO
    "cap12": Arithmetic(operand_mean=4.5, operand_cap=12),
    "cap24": Arithmetic(operand_mean=8.0, operand_cap=24),
    "cap64": Arithmetic(operand_mean=8.0, operand_cap=64),
}


@dataclass(frozen=True)
class Recipe:
    """How a policy is warm-started: AdamW, 100 steps of linear warm-up, then a cosine down to 0."""

    hidden_size: int
    intermediate_size: int
    layers: int
    steps: int
    lr: float
    batch_tokens: int = 2048  # padded tokens per step
    task: Arithmetic = Arithmetic(operand_mean=8.0, operand_cap=64, seed=2**31)  # this seed keeps the rows apart from those of RL
    seed: int = 0
    eval_prompts: int = 1024  # per distribution


RECIPES = {
    "policy_small": Recipe(hidden_size=64, intermediate_size=192, layers=3, steps=5000, lr=3e-3),
    "policy_large": Recipe(hidden_size=96, intermediate_size=288, layers=4, steps=3500, lr=2e-3),
}


def path(name: str) -> Path:
    """Folder of a shipped asset, `name` with or without the prefix `asset:`. Raises FileNotFoundError that names what there is."""
    folder = DATA / name.removeprefix("asset:")
    if not (folder / MANIFEST).is_file():
        there = ", ".join(sorted(m.parent.name for m in DATA.glob(f"*/{MANIFEST}"))) or "none"
        raise FileNotFoundError(f"no asset {name!r}; there are: {there}; `nowait assets build` makes {', '.join(RECIPES)}")
    return folder


def build(name: str, out: Path | None = None, progress: bool = True) -> dict:
    """Train the policy `name` anew and write it to the folder `out` (default: where the package keeps it). Returns its manifest."""
    if name not in RECIPES:
        raise ValueError(f"no recipe for asset {name!r}; there are: {', '.join(RECIPES)}")
    return warm_start(RECIPES[name], out or DATA / name, progress)


def verify(root: Path = DATA) -> list[str]:
    """Names of the assets under `root`, each of whose weights has the SHA-256 of its manifest; ValueError where one has not."""
    names = sorted(m.parent.name for m in root.glob(f"*/{MANIFEST}"))
    for name in names:
        expected, found = json.loads((root / name / MANIFEST).read_text())["sha256"], _sha256(root / name)
        if expected != found:
            raise ValueError(f"asset {name!r}: {WEIGHTS} has SHA-256 {found}, its manifest says {expected}; restore it or run `nowait assets build`")
    return names


def character_tokenizer() -> Qwen2Tokenizer:
    """One token per character of the task, then padding and end of sequence. Encoding adds nothing; characters it does not know are left out.

    AutoTokenizer gives every Qwen2 folder this class, whatever its tokenizer.json says, so it is used from the start: a vocabulary without merges.
    """
    vocabulary = {token: i for i, token in enumerate([*"0123456789+=;#", "<pad>", "<eos>"])}
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": None}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], clean_up_tokenization_spaces=False, model_max_length=1024, **special)


def warm_start(recipe: Recipe, out: Path, progress: bool = True) -> dict:
    """Supervised training on demonstrations; writes model, tokenizer and manifest (with held-out exact match) to `out` and returns the manifest."""
    tokenizer, start = character_tokenizer(), time.process_time()
    with _reproducible(recipe.seed):
        model = _train(recipe, tokenizer, progress)
        seconds = time.process_time() - start
        results = {k: _evaluate(model, tokenizer, task, recipe.eval_prompts) for k, task in EVALUATED.items()}
    model.save_pretrained(out)
    (out / WEIGHTS).chmod(0o644)  # safetensors files are private to their owner otherwise
    character_tokenizer().save_pretrained(out)  # a used one would save its padding
    manifest = {
        "recipe": {**asdict(recipe), "task": recipe.task.model_dump()},
        "parameters": model.num_parameters(),
        "cpu_seconds": round(seconds, 1),
        "evaluation": results,
        "sha256": _sha256(out),
        "versions": {m.__name__: m.__version__ for m in (np, tokenizers, torch, transformers)},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """One thread and a seeded generator; the caller's threads and generator come back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _train(recipe: Recipe, tokenizer: Qwen2Tokenizer, progress: bool) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,  # the usual 0.02 suits wide models: this one then needs several times the steps
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1.0) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    )
    for step, (token, target) in zip(range(1, recipe.steps + 1), _batches(recipe, tokenizer), strict=False):
        # Padding stands on the right, where causal attention cannot see it: no attention mask, hence the fast kernel.
        logits = model(input_ids=token[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if progress and step % max(recipe.steps // 20, 1) == 0:
            print(f"step {step} of {recipe.steps}: loss {loss.item():.3f}, gradient norm {norm.item():.2f}", file=sys.stderr)
    return model.eval()


def _batches(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (token, target), both int64 [S, T], of demonstrations of similar length; target is -100 on prompts and padding."""
    rng = np.random.default_rng(recipe.seed)
    for first in range(0, recipe.task.size("train"), POOL):
        rows = range(first, min(first + POOL, recipe.task.size("train")))
        prompts = [recipe.task.prompt("train", row) for row in rows]
        text = [prompt + recipe.task.demonstration("train", row) + tokenizer.eos_token for prompt, row in zip(prompts, rows, strict=True)]
        tokens = tokenizer(text)["input_ids"]
        pool = sorted(zip(tokens, map(len, prompts), strict=True), key=lambda example: len(example[0]))
        batches, start = [], 0
        for end in range(1, len(pool) + 1):
            if end == len(pool) or (end + 1 - start) * len(pool[end][0]) > recipe.batch_tokens:
                batches.append(_tensors(pool[start:end], tokenizer.pad_token_id))
                start = end
        for i in rng.permutation(len(batches)):
            yield batches[i]


def _tensors(examples: list[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(token) for token, _ in examples)
    token = torch.tensor([t + [pad] * (width - len(t)) for t, _ in examples])
    target = torch.tensor([[-100] * prompt + t[prompt:] + [-100] * (width - len(t)) for t, prompt in examples])
    return token, target


def _evaluate(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, task: Arithmetic, prompts: int) -> dict:
    """Held-out exact match, greedy and sampled at temperature 1, with standard errors over prompts, and the length of sampled responses."""
    result = {"task": task.model_dump(), "prompts": prompts}
    rows = sorted(range(prompts), key=lambda row: len(task.prompt("eval", row)))
    for mode, sample in (("greedy", False), ("sampled", True)):
        rewards, lengths = [], []
        for i in range(0, prompts, 128):
            chunk = rows[i : i + 128]
            response = _generate(model, tokenizer, [task.prompt("eval", row) for row in chunk], sample)
            text = tokenizer.batch_decode(response, skip_special_tokens=True)
            rewards += [task.reward("eval", row, t) for row, t in zip(chunk, text, strict=True)]
            lengths += (response != tokenizer.pad_token_id).sum(1).tolist()
        mean = float(np.mean(rewards))
        result[mode] = {"exact_match": round(mean, 4), "standard_error": round(math.sqrt(mean * (1 - mean) / prompts), 4)}
        result[mode] |= {"length_median": float(np.median(lengths)), "length_max": max(lengths)}
    return result


def _generate(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, prompts: list[str], sample: bool) -> torch.Tensor:
    """Responses int64 [S, T] of at most 256 tokens, right-padded."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    width = inputs["input_ids"].shape[1]
    return model.generate(**inputs, do_sample=sample, top_k=None, max_new_tokens=256)[:, width:]


def _sha256(folder: Path) -> str:
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
