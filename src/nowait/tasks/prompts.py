"""The stream of training requests: the rows of a task in an order shuffled anew in every epoch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nowait.batch import Request
from nowait.tasks import Task

STREAM = 102  # of the random numbers that order rows


class Prompts:
    """`next(count)` gives requests with running ids; the id alone decides row and randomness, so its state is one number."""

    def __init__(self, task: Task, encode: Callable[..., list[int]], *, seed: int, n: int, max_prompt_tokens: int, max_new_tokens: int) -> None:
        self._task, self._encode, self._seed, self._n = task, encode, seed, n
        self._max_prompt, self._max_new = max_prompt_tokens, max_new_tokens
        self._size = task.size("train")
        if self._size < 1:
            raise ValueError("the task has no training rows")
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self._position = 0

    def next(self, count: int) -> list[Request]:
        ids = range(self._position, self._position + count)
        self._position += count
        return [make_request(self._task, self._encode, "train", i, self._row(i), self._n, self._max_prompt, self._max_new) for i in ids]

    def _row(self, request: int) -> int:
        epoch, place = divmod(request, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, STREAM, epoch)).permutation(self._size)
        return int(self._order[place])

    def get_state(self) -> dict[str, int]:
        return {"position": self._position}

    def set_state(self, state: dict[str, int]) -> None:
        self._position = state["position"]


def make_request(task: Task, encode, split: str, number: int, row: int, n: int, max_prompt_tokens: int, max_new_tokens: int) -> Request:
    """The request for one row of a split; an empty or overlong prompt is an error that names the row."""
    ids = np.array(encode(task.prompt(split, row)), np.int32)
    if not len(ids):
        raise ValueError(f"{split} row {row}: the prompt is empty")
    if len(ids) > max_prompt_tokens:
        raise ValueError(
            f"{split} row {row}: the prompt has {len(ids)} tokens, sampler.max_prompt_tokens is {max_prompt_tokens}: raise it or filter the data"
        )
    return Request(number, ids, n, max_new_tokens, row)


def evaluation_requests(task: Task, encode, prompts: int, samples: int, max_prompt_tokens: int, max_new_tokens: int) -> list[Request]:
    """The first `prompts` rows of the split "eval", the same at every evaluation."""
    if (size := task.size("eval")) < prompts:
        raise ValueError(f"evaluation.prompts is {prompts}, the task has {size} held-out rows")
    return [make_request(task, encode, "eval", row, row, samples, max_prompt_tokens, max_new_tokens) for row in range(prompts)]
