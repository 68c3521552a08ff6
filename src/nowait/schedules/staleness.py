"""Admission control of asynchronous training: how many requests may start, so that none is trained on too late.

Source: AReaL's staleness rule (2505.24298), capacity = (eta + version + 1) B - everything ever accepted or running.
"""

from __future__ import annotations


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
