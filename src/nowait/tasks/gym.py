"""Tasks of the package reasoning-gym: `reasoning_gym:chain_sum` and a hundred others. Rows are made from their numbers, and graded by the package."""

from __future__ import annotations

import difflib
import functools
import json

from nowait.tasks import Split

ROWS = {"train": 100_000, "eval": 1_000}
ASK = "\nGive the final answer between <answer> and </answer>."


class ReasoningGym:
    """One task of the package; `settings` are its own, such as min_terms. The splits differ in their seeds: a small task repeats itself in both.

    Raises ValueError for a missing package, an unknown task, or settings that it does not take.
    """

    def __init__(self, task: str, *, seed: int = 0, chat: bool = True, **settings) -> None:
        self._made_from, self._chat = (task, seed, json.dumps(settings)), chat
        self.size("train")

    def size(self, split: Split) -> int:
        """Number of rows."""
        return len(_generator(*self._made_from, split))

    def prompt(self, split: Split, row: int) -> str | list[dict[str, str]]:
        """The question, and how to answer it."""
        words = _generator(*self._made_from, split)[row]["question"] + ASK
        return [{"role": "user", "content": words}] if self._chat else words

    def reward(self, split: Split, row: int, response: str) -> float:
        """0 to 1: the package's score of what stands in the last <answer>."""
        from reasoning_gym.utils import extract_answer

        rows = _generator(*self._made_from, split)
        return float(rows.score_answer(extract_answer(response), entry=rows[row]))


@functools.lru_cache(maxsize=8)
def _generator(task: str, seed: int, settings: str, split: Split):
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(f"tasks of reasoning_gym need the package: pip install 'nowait-rl[data]' ({error})") from error
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, 1) or sorted(DATASETS)
        raise ValueError(f"reasoning_gym has no task {task!r}; did you mean {' or '.join(close)}?")
    try:
        return create_dataset(task, size=ROWS[split], seed=2 * seed + (split == "eval"), **json.loads(settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"reasoning_gym:{task}: {error}") from error
