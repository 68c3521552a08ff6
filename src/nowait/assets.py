"""The checkpoints that ship with the package: tiny Qwen2 policies, warm-started on demonstrations of the embedded task.

A build is deterministic on one machine type (one thread, fixed seeds); other processors differ in the last bits, so the manifest pins a hash.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from nowait.tasks.arithmetic import Arithmetic

DATA = Path(__file__).parent / "data"
CHARACTERS = "0123456789+=;#"
WEIGHTS, MANIFEST = "model.safetensors", "manifest.json"
POOL = 2048  # demonstrations sorted by length at a time
EVALUATED = {"cap12": {"operand_mean": 4.5, "operand_cap": 12}, "cap24": {"operand_mean": 8.0, "operand_cap": 24}, "cap64": {"operand_mean": 8.0, "operand_cap": 64}}


@dataclass(frozen=True)
class Recipe:
    """How a policy is warm-started. `batch_tokens` counts padded tokens; the learning rate warms up, then falls to 5 % along a cosine."""

    hidden_size: int
    layers: int
    intermediate_size: int
    steps: int
    lr: float
    task: Arithmetic = Arithmetic(operand_mean=8.0, operand_cap=64, seed=2**31)  # its seed keeps the rows apart from those of RL
    batch_tokens: int = 2048
    seed: int = 0
    eval_prompts: int = 1024


RECIPES = {
    "policy_small": Recipe(hidden_size=64, layers=3, intermediate_size=192, steps=7000, lr=1e-2),
    "policy_large": Recipe(hidden_size=96, layers=4, intermediate_size=288, steps=5000, lr=5e-3),
}


def path(name: str) -> Path:
    """Folder of a shipped asset; `name` with or without the prefix `asset:`. Raises FileNotFoundError naming what exists."""
    folder = DATA / name.removeprefix("asset:")
    if not (folder / MANIFEST).is_file():
        built = sorted(p.parent.name for p in DATA.glob(f"*/{MANIFEST}"))
        raise FileNotFoundError(f"no asset {name!r} (there are: {', '.join(built) or 'none'}); `nowait assets build` makes {', '.join(RECIPES)}")
    return folder
