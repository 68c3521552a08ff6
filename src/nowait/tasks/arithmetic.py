"""The embedded task: chains of additions, small enough for a policy of 0.15 M parameters on one CPU core.

`7+3+9=` asks for the running sums and the answer, `10;19;#19`. Only the answer, the text after the last `#`, is graded.
The number of operands is long-tailed, and with it the length of a response: what both papers' schedules have to cope with.

Demonstrations for the supervised warm start come in two styles, terse `10;19;#19` and restating `7+3=10;10+9=19;#19`, so that length
varies within a prompt and can drift under RL, and with a stated share of wrong sums, so that RL has a better mode to sharpen.
A prompt belongs to one split: a hash of its text decides, 1 in 8 are for evaluation, so that what is evaluated was never trained on.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable
from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from nowait.config import Fraction, Model
from nowait.tasks import Split

SIZES = {"train": 1_000_000, "eval": 10_000}  # rows
STREAMS = {"train": 0, "eval": 1}
HELD_OUT = 8  # one prompt in so many belongs to the split "eval"


class Arithmetic(Model):
    """Options of the task, and the task itself: rows are functions of (seed, split, row), nothing is stored."""

    operand_mean: Annotated[float, Field(gt=2)] = 4.5  # mean number of operands before the cap
    operand_sigma: Annotated[float, Field(ge=0, le=3)] = 1.0  # of the log-normal number: the larger, the longer the tail
    operand_floor: Annotated[int, Field(ge=2, le=64)] = 2  # shorter chains are left out
    operand_cap: Annotated[int, Field(ge=2, le=64)] = 12  # larger numbers of operands become this one
    restate_share: Fraction = 0.4  # demonstrations that restate the operands
    restate_cap: Annotated[int, Field(ge=0)] = 12  # longest chain, in operands, demonstrated in that style: long ones would triple
    corrupted_share: Fraction = 0.15  # demonstrated sums that are too large by 1, 2 or 3
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    def size(self, split: Split) -> int:
        """Number of rows of the split."""
        return SIZES[split]

    @model_validator(mode="after")
    def _floor_below_cap(self) -> Arithmetic:
        if self.operand_floor > self.operand_cap:
            raise ValueError(f"operand_floor ({self.operand_floor}) is above operand_cap ({self.operand_cap}): lower it")
        return self

    def operands(self, split: Split, row: int) -> list[int]:
        """The digits 1 to 9 to be added: 2 + floor(X) of them, at most the cap, with X log-normal of mean `operand_mean` - 1.5.

        Drawn again until there are `operand_floor` of them or more and the prompt belongs to the split.
        """
        for attempt in itertools.count():
            rng = self._rng(split, row, attempt, 0)
            excess = rng.lognormal(np.log(self.operand_mean - 1.5) - self.operand_sigma**2 / 2, self.operand_sigma)
            operands = rng.integers(1, 10, size=min(2 + int(excess), self.operand_cap)).tolist()
            if len(operands) >= self.operand_floor and (zlib.crc32(bytes(operands)) % HELD_OUT == 0) == (split == "eval"):
                return operands

    def prompt(self, split: Split, row: int) -> str:
        """E.g. `7+3+9=`."""
        return "+".join(map(str, self.operands(split, row))) + "="

    def reward(self, split: Split, row: int, response: str) -> float:
        """1.0 if the text after the last `#` is the sum, else 0.0."""
        answer = response.rpartition("#")[1:]
        return float(answer == ("#", str(sum(self.operands(split, row)))))

    def demonstration(self, split: Split, row: int) -> str:
        """A target of the warm start, in one of the two styles.

        A corrupted sum is carried on, and corruptions only add, so that the answer is wrong if and only if a sum is.
        """
        operands, rng = self.operands(split, row), self._rng(split, row, 0, 1)
        restate = rng.random() < self.restate_share and len(operands) <= self.restate_cap
        errors = rng.integers(1, 4, size=len(operands)) * (rng.random(len(operands)) < self.corrupted_share)
        return solution(operands, restate, errors[1:].tolist())

    def _rng(self, split: Split, row: int, attempt: int, purpose: int) -> np.random.Generator:
        if not 0 <= row < SIZES[split]:
            raise IndexError(f"row {row} of split {split!r}: it has rows 0 to {SIZES[split] - 1}")
        return np.random.default_rng([self.seed, STREAMS[split], row, attempt, purpose])


class Asked(Arithmetic):
    """The task for chat models: asked in words, as a message; the last number of the answer is graded."""

    def prompt(self, split: Split, row: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"What is {' + '.join(map(str, self.operands(split, row)))}? Answer with a number."}]

    def reward(self, split: Split, row: int, response: str) -> float:
        """1.0 if the last number of the response is the sum, else 0.0."""
        return float(re.findall(r"\d+", response)[-1:] == [str(sum(self.operands(split, row)))])


def solution(operands: list[int], restate: bool, errors: Iterable[int] = itertools.repeat(0)) -> str:
    """Running sums and answer of a chain, in one of the two styles of the demonstrations; the i-th sum is too large by errors[i]."""
    total, steps = operands[0], []
    for operand, error in zip(operands[1:], errors, strict=False):
        before, total = total, total + operand + error
        steps.append(f"{before}+{operand}={total};" if restate else f"{total};")
    return "".join(steps) + f"#{total}"
