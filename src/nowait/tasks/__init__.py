"""Tasks: prompts and their graders, by name. A task needs neither torch nor transformers."""

from __future__ import annotations

import importlib
import inspect
from typing import Literal, Protocol

from nowait.config import TaskConfig

Split = Literal["train", "eval"]


class Task(Protocol):
    """Prompts with a grader; everything is a function of (task options, split, row), so a row means the same in every process."""

    def size(self, split: Split) -> int:
        """Number of rows of the split."""

    def prompt(self, split: Split, row: int) -> str | list[dict[str, str]]:
        """Text given to the policy, or messages {role, content} for its chat template."""

    def reward(self, split: Split, row: int, response: str) -> float:
        """Score of a response, decoded without special tokens. An exception means that grading failed, not that the response is wrong."""


BUILT_IN = {"arithmetic": "nowait.tasks.arithmetic:Arithmetic"}  # imported when asked for


def load(config: TaskConfig) -> Task:
    """The task `config.name`, a built-in name or `module:function`, called with `config.options` as keyword arguments.

    Raises ValueError for an unknown name, a function that cannot be imported, or options that it does not take.
    """
    module, separator, function = BUILT_IN.get(config.name, config.name).partition(":")
    if not separator:
        raise ValueError(
            f"unknown task {config.name!r}: built in are {', '.join(sorted(BUILT_IN))} (scales cpu and smoke); write module:function for your own"
        )
    try:
        factory = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task {config.name!r} cannot be imported: {error}") from error
    signature = inspect.signature(factory)
    try:
        signature.bind(**config.options)
    except TypeError as error:
        raise ValueError(f"task {config.name!r}: {error}; its options are {', '.join(signature.parameters)}") from error
    return factory(**config.options)
