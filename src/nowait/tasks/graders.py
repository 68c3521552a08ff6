"""Reward functions of the built-in tasks, in the form of TRL's: one reward per completion; the data set's columns come as lists of equal length.

A response that cannot be read is wrong (0.0). An answer of the data set that cannot be read raises ValueError: such a response is counted as failed.
"""

from __future__ import annotations

import re
from decimal import Decimal

from nowait.tasks import sandbox

# a number alone: not a part of a word, a fraction or a power
NUMBER = re.compile(r"(?<![\w^/.,])-?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?(?![/^\d]|[.,]\d)")
BLOCK = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def gsm8k(completions, answer, **columns) -> list[float]:
    """1.0 where the number after the last `####` or in the last `\\boxed{}` is that after the answer's `####`."""
    return [float(final_number(text(completion)) == _gold(solution)) for completion, solution in zip(completions, answer, strict=True)]


def program(completions, testcase, **columns) -> list[float]:
    """1.0 where the last code block of a response passes all of the tests, which are Python statements."""
    return [float(sandbox.run("\n".join([code(text(c)), *tests])).passed) for c, tests in zip(completions, testcase, strict=True)]


def text(completion: str | list[dict[str, str]]) -> str:
    """A response, which is a message where the prompt is a conversation."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def number(words: str) -> Decimal | None:
    """The number in a text such as `$1,200.50.` or `18 eggs`; None where there is none, or more than one."""
    found = NUMBER.findall(re.sub(r"\\!|[\\$]", "", words.replace("{,}", ",").replace("\N{MINUS SIGN}", "-")))
    return Decimal(found[0].replace(",", "")) if len(found) == 1 else None


def final_number(response: str) -> Decimal | None:
    """The number that a response marks as its answer; None where it marks none."""
    if response.rfind("####") > response.rfind(r"\boxed{"):
        return number(response.rpartition("####")[2].strip().partition("\n")[0])
    return number(boxed(response) or "")


def boxed(response: str) -> str | None:
    """What stands in the last `\\boxed{}`; None without one, or where it is cut off."""
    _, mark, rest = response.rpartition(r"\boxed{")
    depth = 1 if mark else len(rest) + 1
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:i]
    return None


def code(response: str) -> str:
    """The last fenced code block of a response, or all of it where it has none."""
    blocks = BLOCK.findall(response)
    return blocks[-1] if blocks else response


def _gold(solution: str) -> Decimal:
    if "####" not in solution or (found := final_number(solution)) is None:
        raise ValueError(f"no number after #### in the answer {solution[-80:]!r}")
    return found
