"""Scorers by rule: they run where the schedule runs and read a response once it is complete."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from nowait.batch import STOP, Rollouts, Segments
from nowait.tasks import Task

log = logging.getLogger(__name__)
FAILURES_ALLOWED, FAILURES_COUNTED_FROM = 0.05, 100  # share of graded responses, and how many make a share


class GraderFailed(RuntimeError):
    """Too many responses could not be graded."""


class RuleScorer(Rollouts):
    """Rewards of a task by its rule. An exception in the rule is counted and gives None, never a wrong-answer reward.

    Raises `GraderFailed` when more than 5 % of the responses failed, and `FloatingPointError` for a reward that is not finite.
    """

    def __init__(self, task: Task, decode: Callable[[list[int]], str], split: str, n: int) -> None:
        super().__init__(n)
        self._task, self._decode, self._split = task, decode, split
        self.graded = self.failed = 0

    def prefill(self, segments: Segments) -> None:
        self.add(segments)

    def finish(self, ids: list[int]) -> list[list[float | None]]:
        """n rewards per request, in the order of ids."""
        rows = [self.requests[i].row for i in ids]
        batch = self.take(ids, 0)
        ends = batch.length - (batch.finish == STOP)  # without the final EOS, and nothing else: a stray special token is part of the answer
        texts = [self._decode(token[:end].tolist()) for token, end in zip(batch.token, ends, strict=True)]
        return [[self._grade(row, text) for text in texts[i * self.n : (i + 1) * self.n]] for i, row in enumerate(rows)]

    def _grade(self, row: int, text: str) -> float | None:
        self.graded += 1
        try:
            reward = float(self._task.reward(self._split, row, text))
        except Exception as error:
            self.failed += 1
            log.warning("grader failed on %s row %d: %s: %s", self._split, row, type(error).__name__, error)
            if self.graded >= FAILURES_COUNTED_FROM and self.failed > FAILURES_ALLOWED * self.graded:
                share = f"{self.failed} of {self.graded} responses"
                raise GraderFailed(
                    f"the reward function failed on {share}, last on {self._split} row {row}: {error!r}. Mend it; see the log"
                ) from error
            return None
        if not np.isfinite(reward):
            what = f"the reward function of {type(self._task).__name__} returned {reward} on {self._split} row {row}"
            raise FloatingPointError(f"{what}: return a finite number, or raise an exception where there is no grade")
        return reward

    def get_state(self) -> dict:
        return super().get_state() | {"graded": self.graded, "failed": self.failed}

    def set_state(self, state: dict) -> None:
        super().set_state(state)
        self.graded, self.failed = state["graded"], state["failed"]
