"""Several executors as one: workers of several ranks, each of which is one worker to the schedule."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_EXCEPTION, BrokenExecutor, Future, ThreadPoolExecutor, wait

GRACE = 2.0  # seconds in which a dead rank explains the errors of those that it has left


class GroupExecutor:
    """A worker of `spread` has a rank on every member, all others live on the first one.

    A call of such a worker goes to all ranks; its result is the first rank's, its error the first of any rank.
    """

    def __init__(self, members: list, spread: Collection[str]) -> None:
        self._members, self._spread = members, spread
        self._waiter = ThreadPoolExecutor(1)

    def submit(self, action: str, name: str, *args) -> Future:
        first, *others = self._members
        if name not in self._spread:
            return first.submit(action, name, *args)
        ranks = [args] * len(self._members)
        if action == "place":
            factory, kwargs = args
            shared = {"ranks": len(self._members), "rendezvous": first.submit("address").result()}
            ranks = [(factory, kwargs | shared | {"rank": rank}) for rank in range(len(self._members))]
        futures = [first.submit(action, name, *ranks[0])]
        futures += [member.submit("follow", action, name, *own) for member, own in zip(others, ranks[1:], strict=True)]
        return self._waiter.submit(_first_of, futures)

    def close(self) -> None:
        for member in self._members:
            member.close()
        self._waiter.shutdown()


def _first_of(futures: list[Future]):
    """Result of the first; an error of any as soon as there is one, the death of a rank before what it does to the others."""
    done, left = wait(futures, return_when=FIRST_EXCEPTION)
    if errors := [future.exception() for future in done if future.exception()]:
        errors += [future.exception() for future in wait(left, GRACE).done if future.exception()]
        raise next((error for error in errors if isinstance(error, BrokenExecutor)), errors[0])
    return futures[0].result()
