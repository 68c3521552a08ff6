"""The warm start of the shipped policies: supervised training on demonstrations of the embedded task."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from nowait.assets import EVALUATED, MANIFEST, WEIGHTS, Recipe, character_tokenizer, sha256
from nowait.batch import pad
from nowait.tasks.arithmetic import Arithmetic

POOL = 2048  # demonstrations sorted by length at a time


def warm_start(recipe: Recipe, out: Path) -> dict:
    """Supervised training on demonstrations; writes model, tokenizer and manifest (with held-out exact match) to `out` and returns the manifest."""
    tokenizer, start = character_tokenizer(), time.process_time()
    with reproducible(recipe.seed):
        model = _train(recipe, tokenizer)
        seconds = time.process_time() - start
        results = {k: _evaluate(model, tokenizer, task, recipe.eval_prompts) for k, task in EVALUATED.items()}
    return write(recipe, model, out, seconds, results)


def write(recipe: Recipe, model: PreTrainedModel, out: Path, seconds: float, results: dict) -> dict:
    """Write model, tokenizer and manifest to the folder `out`; returns the manifest."""
    model.save_pretrained(out)
    (out / WEIGHTS).chmod(0o644)  # safetensors files are private to their owner otherwise
    character_tokenizer().save_pretrained(out)  # a used one would save its padding
    manifest = {
        "recipe": {**asdict(recipe), "task": recipe.task.model_dump()},
        "parameters": model.num_parameters(),
        "cpu_seconds": round(seconds, 1),
        "evaluation": results,
        "sha256": sha256(out),
        "versions": {m.__name__: m.__version__ for m in (np, tokenizers, torch, transformers)},
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """One thread and a seeded generator; the caller's threads and generator come back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _train(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
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

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        # Padding stands on the right, where causal attention cannot see it: no attention mask, hence the fast kernel.
        token, target = batch
        return torch.nn.functional.cross_entropy(model(input_ids=token[:, :-1]).logits.flatten(0, 1), target[:, 1:].flatten())

    return fit(model, recipe, _batches(recipe, tokenizer), loss_of)


def fit(model: PreTrainedModel, recipe: Recipe, batches: Iterator, loss_of: Callable) -> PreTrainedModel:
    """Minimise `loss_of(batch)` over the recipe's number of batches, one optimiser step each; returns the model in eval mode."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1.0) * 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
    )
    for batch in (bar := tqdm(islice(batches, recipe.steps), total=recipe.steps, unit="step")):
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        bar.set_postfix(loss=loss.item(), refresh=False)
    return model.eval()


def _batches(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(token, target), both int64 [S, T], of demonstrations of similar length; target is -100 on prompts and padding."""
    rng = np.random.default_rng(recipe.seed)
    for first in range(0, recipe.task.size("train") - POOL, POOL):
        rows = range(first, first + POOL)
        prompts = [recipe.task.prompt("train", row) for row in rows]
        text = [prompt + recipe.task.demonstration("train", row) + tokenizer.eos_token for prompt, row in zip(prompts, rows, strict=True)]
        tokens = [np.array(ids) for ids in tokenizer(text)["input_ids"]]
        groups = list(packed(list(map(len, tokens)), recipe.batch_tokens))
        for i in rng.permutation(len(groups)):
            chosen, prompt = [tokens[j] for j in groups[i]], torch.tensor([len(prompts[j]) for j in groups[i]])
            token, target = (torch.from_numpy(pad(chosen, fill, np.int64)) for fill in (tokenizer.pad_token_id, -100))
            yield token, target.masked_fill(torch.arange(target.shape[1]) < prompt[:, None], -100)


def packed(lengths: list[int], most: int) -> Iterator[list[int]]:
    """Indices by ascending length, in groups of at most `most` padded tokens, one sequence at least."""
    group: list[int] = []
    for i in np.argsort(lengths, kind="stable").tolist():
        if group and (len(group) + 1) * lengths[i] > most:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


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
