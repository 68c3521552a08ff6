"""A worker of several ranks that imports next to nothing, for tests of what joins them."""

from __future__ import annotations

import os
import signal
import time

from test_device import Worker


class Rank(Worker):
    """Knows its place; what it returns only the first rank may."""

    def __init__(self, rank: int, ranks: int, rendezvous: str) -> None:
        super().__init__(f"{rank} of {ranks} at {rendezvous}")
        self.rank = rank

    def who(self) -> str:
        return self.name

    def fail_on(self, rank: int) -> None:
        if self.rank == rank:
            raise ArithmeticError(f"rank {rank}")
        time.sleep(60)  # as in a collective that waits for the failed one

    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        raise RuntimeError("connection closed by peer")
