"""The checkpoints that ship with the package: tiny Qwen2 policies and a reward model, for the embedded task.

A build repeats bit for bit on one type of processor (one thread, fixed seeds). Another type may round differently, which is why the weights
ship and the manifest pins their hash. Looking for a checkpoint and verifying it need no torch.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from nowait.tasks.arithmetic import Arithmetic

DATA = Path(__file__).parent / "data"
MANIFEST, WEIGHTS = "manifest.json", "model.safetensors"
WIDEST = Arithmetic(operand_mean=8.0, operand_cap=64, seed=2**31)  # this seed keeps the rows apart from those of RL
EVALUATED = {  # the distributions of A-3PO setup 1 and OPPO, and one between them
    "cap12": Arithmetic(operand_mean=4.5, operand_cap=12),
    "cap24": Arithmetic(operand_mean=8.0, operand_cap=24),
    "cap64": Arithmetic(operand_mean=8.0, operand_cap=64),
}


@dataclass(frozen=True)
class Recipe:
    """How a policy is warm-started, or a reward model trained: AdamW, 100 steps of linear warm-up, then a cosine down to 0."""

    hidden_size: int
    intermediate_size: int
    layers: int
    steps: int
    lr: float
    batch_tokens: int = 2048  # padded tokens per step
    task: Arithmetic = WIDEST
    seed: int = 0
    eval_prompts: int = 1024  # per distribution of a policy


@dataclass(frozen=True)
class RewardRecipe(Recipe):
    """How a reward model is trained on preferences. It grows out of the policy `start` (see preferences.py)."""

    start: str = "policy_large"
    samples_of: str = "policy_small"  # whose own responses are ranked beside written ones
    eval_prompts: int = 2048


RECIPES: dict[str, Recipe] = {
    "policy_small": Recipe(hidden_size=64, intermediate_size=192, layers=3, steps=5000, lr=3e-3),
    "policy_large": Recipe(hidden_size=96, intermediate_size=288, layers=4, steps=3500, lr=2e-3),
    "reward_small": RewardRecipe(hidden_size=128, intermediate_size=512, layers=6, steps=800, lr=1e-3),
}


def path(name: str) -> Path:
    """Folder of a shipped asset, `name` with or without the prefix `asset:`. Raises FileNotFoundError that names what there is."""
    folder = DATA / name.removeprefix("asset:")
    if not (folder / MANIFEST).is_file():
        there = ", ".join(sorted(m.parent.name for m in DATA.glob(f"*/{MANIFEST}"))) or "none"
        raise FileNotFoundError(f"no asset {name!r}; there are: {there}; `nowait assets build` makes {', '.join(RECIPES)}")
    return folder


def build(name: str) -> dict:
    """Train the asset `name` anew and replace it in the package. Returns its manifest."""
    if name not in RECIPES:
        raise ValueError(f"no recipe for asset {name!r}; there are: {', '.join(RECIPES)}")
    if isinstance(recipe := RECIPES[name], RewardRecipe):
        from nowait.preferences import train_reward as train
    else:
        from nowait.warm_start import warm_start as train
    return train(recipe, DATA / name)


def verify(root: Path = DATA) -> list[str]:
    """Names of the assets under `root`, each of whose weights has the SHA-256 of its manifest; ValueError where one has not."""
    names = sorted(m.parent.name for m in root.glob(f"*/{MANIFEST}"))
    for name in names:
        expected, found = json.loads((root / name / MANIFEST).read_text())["sha256"], sha256(root / name)
        if expected != found:
            raise ValueError(f"asset {name!r}: {WEIGHTS} has SHA-256 {found}, its manifest says {expected}; restore it or run `nowait assets build`")
    return names


def sha256(folder: Path) -> str:
    """Digest of the weights in a checkpoint's folder."""
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def character_tokenizer():
    """One token per character of the task, then padding and end of sequence. Encoding adds nothing; characters it does not know are left out.

    AutoTokenizer gives every Qwen2 folder this class, whatever its tokenizer.json says, so it is used from the start: a vocabulary without merges.
    """
    from transformers import Qwen2Tokenizer

    vocabulary = {token: i for i, token in enumerate([*"0123456789+=;#", "<pad>", "<eos>"])}
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": None}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], clean_up_tokenization_spaces=False, model_max_length=1024, **special)
