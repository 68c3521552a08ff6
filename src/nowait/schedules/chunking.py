"""Tokens per decode round, chosen by trial (OPPO, arXiv 2509.25762): long chunks leave little to overlap, short ones cost more calls."""

from __future__ import annotations

import math

TRIALS = 2  # of every candidate per period; interleaved, so that a drift of the response lengths meets all of them


class ChunkTuner:
    """From every `period`-th training step on, the candidates are tried a step each, twice in turn; then the best one serves.

    Best is the least seconds per generated token, summed over its trials: steps differ in length, so their seconds alone would not do.
    The paper tries candidates likewise; it does not say by what it judges them.
    """

    def __init__(self, candidates: list[int], period: int) -> None:
        self.candidates, self.period = list(candidates), period
        self._best = self.candidates[0]
        self._seconds = [0.0] * len(candidates)
        self._tokens = [0] * len(candidates)

    def choose(self, step: int) -> int:
        """The size for training step `step`; steps come in order."""
        place, count = step % self.period, len(self.candidates)
        if place == 0:
            self._seconds, self._tokens = [0.0] * count, [0] * count
        if place < TRIALS * count:
            return self.candidates[place % count]
        if place == TRIALS * count:
            costs = [s / t if t else math.inf for s, t in zip(self._seconds, self._tokens, strict=True)]
            self._best = self.candidates[costs.index(min(costs))]
        return self._best

    def record(self, size: int, seconds: float, tokens: int) -> None:
        """What a step with chunks of `size` took and generated."""
        i = self.candidates.index(size)
        self._seconds[i] += seconds
        self._tokens[i] += tokens

    def get_state(self) -> dict:
        return {"best": self._best, "seconds": list(self._seconds), "tokens": list(self._tokens)}

    def set_state(self, state: dict) -> None:
        self._best, self._seconds, self._tokens = state["best"], list(state["seconds"]), list(state["tokens"])
