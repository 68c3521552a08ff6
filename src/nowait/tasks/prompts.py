"""The stream of training requests: the rows of a task in an order shuffled anew in every epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from nowait.batch import Request
from nowait.tasks import Task

STREAM = 102  # of the random numbers that order rows
LEFT_OUT = "rows whose prompt has more than sampler.max_prompt_tokens tokens are left out of training"


class LongPrompt(ValueError):
    """A prompt has more tokens than sampler.max_prompt_tokens."""


class Prompts:
    """`next(count)` gives requests with running ids; the id alone decides row and randomness, so its state is one number."""

    def __init__(self, task: Task, encode: Callable[..., list[int]], *, seed: int, n: int, max_prompt_tokens: int, max_new_tokens: int) -> None:
        self._task, self._encode, self._seed, self._n = task, encode, seed, n
        self._max_prompt, self._max_new = max_prompt_tokens, max_new_tokens
        self._size = task.size("train")
        self._epoch, self._order = -1, np.empty(0, np.int64)
        self._position = 0

    def next(self, count: int) -> list[Request]:
        ids = range(self._position, self._position + count)
        self._position += count
        return [self._request(i) for i in ids]

    def _request(self, number: int) -> Request:
        """The next row of the epoch's order; one with a too long prompt gives way to that after it, so that the number alone decides."""
        epoch, place = divmod(number, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, np.random.default_rng((self._seed, STREAM, epoch)).permutation(self._size)
        for later in range(self._size):
            row = int(self._order[(place + later) % self._size])
            try:
                return make_request(self._task, self._encode, "train", number, row, self._n, self._max_prompt, self._max_new)
            except LongPrompt as error:
                warnings.warn(LEFT_OUT, stacklevel=2)
                last = error
        raise last

    def get_state(self) -> dict[str, int]:
        return {"position": self._position}

    def set_state(self, state: dict[str, int]) -> None:
        self._position = state["position"]


def make_request(task: Task, encode, split: str, number: int, row: int, n: int, max_prompt_tokens: int, max_new_tokens: int) -> Request:
    """The request for one row of a split; an empty or overlong prompt is an error that names the row."""
    ids = np.array(encode(task.prompt(split, row)), np.int32)
    if not len(ids):
        raise ValueError(f"{split} row {row}: the prompt is empty: fill it in, or leave the row out")
    if len(ids) > max_prompt_tokens:
        raise LongPrompt(
            f"{split} row {row}: the prompt has {len(ids)} tokens, sampler.max_prompt_tokens is {max_prompt_tokens}: raise it or filter the data"
        )
    return Request(number, ids, n, max_new_tokens, row)


def evaluation_requests(task: Task, encode, prompts: int, samples: int, max_prompt_tokens: int, max_new_tokens: int) -> list[Request]:
    """The first `prompts` rows of the split "eval", the same at every evaluation."""
    if (size := task.size("eval")) < prompts:
        raise ValueError(f"evaluation.prompts is {prompts}, the task has {size} held-out rows")
    return [make_request(task, encode, "eval", row, row, samples, max_prompt_tokens, max_new_tokens) for row in range(prompts)]
