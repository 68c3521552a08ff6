"""Admission and order of asynchronous training: how many requests may start and which are trained next, so that none is trained on too late.

Source of the gate: AReaL's staleness rule (2505.24298), capacity = (eta + version + 1) B - everything ever accepted or running.
The gate alone does not bound staleness, since a request can be overtaken by shorter ones; with the strict order it does.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np


class StalenessGate:
    """Counts requests. `accepted` is every request that ever finished, trained or not; it survives a resume."""

    def __init__(self, batch_size: int, max_staleness: int, max_concurrent: int) -> None:
        if batch_size < 1 or max_staleness < 0 or max_concurrent < 1:
            raise ValueError(f"batch_size and max_concurrent must be >= 1 and max_staleness >= 0: {batch_size}, {max_concurrent}, {max_staleness}")
        self.batch_size, self.max_staleness, self.max_concurrent = batch_size, max_staleness, max_concurrent
        self.running = self.accepted = 0

    def submitted(self, n: int) -> None:
        self.running += n

    def finished(self, n: int) -> None:
        if n > self.running:
            raise ValueError(f"{n} requests finished, {self.running} were running")
        self.running -= n
        self.accepted += n

    def capacity(self, version: int) -> int:
        """Requests that may start under weights `version`, >= 0. A batch always fits: (eta + version + 1) B covers step `version`."""
        allowed = (self.max_staleness + version + 1) * self.batch_size
        return max(0, min(self.max_concurrent - self.running, allowed - self.accepted - self.running))

    def get_state(self) -> dict[str, int]:
        return {"running": self.running, "accepted": self.accepted}

    def set_state(self, state: dict[str, int]) -> None:
        self.running, self.accepted = state["running"], state["accepted"]


def strict_batch(step: int, oldest: dict[int, int], finished: Collection[int], batch_size: int, max_staleness: int) -> list[int] | None:
    """The finished requests to train on at `step`, or None if it has to wait for others: then d <= max_staleness holds at this and every later step.

    `oldest` is the version of the first token of every request not yet trained. A request must be trained by step oldest + max_staleness.
    The earliest of the finished ones are taken, unless the rest, at `batch_size` a step from step + 1 on, could then not all be in time.
    The gate makes waiting worth it: at most (step + 1) batch_size requests ever started under versions <= step - max_staleness.
    """
    if len(finished) < batch_size:
        return None
    chosen = sorted(sorted(finished), key=oldest.__getitem__)[:batch_size]  # stable, so ties go by id
    taken = set(chosen)
    rest = np.sort([version for request, version in oldest.items() if request not in taken])
    in_time = (step + 1 + np.arange(len(rest)) // batch_size <= rest + max_staleness).all()
    return sorted(chosen) if in_time else None
