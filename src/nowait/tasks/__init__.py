"""Tasks: prompts and their graders, by name. A task needs neither torch nor transformers."""

from __future__ import annotations

import inspect
from typing import Literal, Protocol

from nowait.config import TaskConfig
from nowait.runtime.device import resolve

Split = Literal["train", "eval"]


class Task(Protocol):
    """Prompts with a grader; everything is a function of (task options, split, row), so a row means the same in every process."""

    def size(self, split: Split) -> int:
        """Number of rows of the split."""

    def prompt(self, split: Split, row: int) -> str | list[dict[str, str]]:
        """Text given to the policy, or messages, which the tokenizer's chat template makes text of."""

    def reward(self, split: Split, row: int, response: str) -> float:
        """Score of a response, decoded without special tokens. An exception means that grading failed, not that the response is wrong."""


GYM = "reasoning_gym:"  # followed by the name of one of its tasks
BUILT_IN = {  # imported when asked for
    "arithmetic": "nowait.tasks.arithmetic:Arithmetic",
    **{name: f"nowait.tasks.data_sets:{name}" for name in ("gsm8k", "dapo_math", "math500", "aime24", "stack_exchange", "opencoder", "dataset")},
}


def load(config: TaskConfig) -> Task:
    """The task `config.name`, a built-in name or `module:function`, called with `config.options` as keyword arguments.

    Raises ValueError for an unknown name, a function that cannot be imported, or options that it does not take.
    """
    name, options = BUILT_IN.get(config.name, config.name), config.options
    if name.startswith(GYM):
        name, options = "nowait.tasks.gym:ReasoningGym", {"task": name.removeprefix(GYM), **options}
    if ":" not in name:
        known = ", ".join([*BUILT_IN, f"{GYM}<task>"])
        raise ValueError(f"unknown task {config.name!r}: built in are {known}; write module:function for your own")
    factory = resolve(name)
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ValueError(f"task {config.name!r}: {error}; its options are {', '.join(signature.parameters)}") from error
    return factory(**options)
