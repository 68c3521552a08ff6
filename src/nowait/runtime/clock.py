"""Virtual time: an asyncio event loop whose clock jumps to the next timer, so that asynchrony repeats exactly.

Nothing outside the loop can make it wait: threads, executors and sockets are refused, since virtual time would run on beside them.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import inspect
import itertools
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace


class Deadlock(RuntimeError):
    """No task can go on and no timer is left."""


class _Timer(asyncio.TimerHandle):
    """Timers of one instant fire in the order of their creation; asyncio's own heap leaves that order open."""

    __slots__ = ("number",)

    def __lt__(self, other: _Timer) -> bool:
        return (self._when, self.number) < (other._when, other.number)


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """`time()` is virtual seconds, from `start` on. Raises `Deadlock` when nothing is ready and no timer is set."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self._now = start
        self._clock_resolution = math.ulp(start)  # a timer is due at its own instant and not before
        self._numbers = itertools.count()
        self._selector = SimpleNamespace(select=self._jump)  # an event loop waits there for input and output; here, waiting moves the clock

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None) -> None:
        """Move to the next timer; called when the loop would wait for `timeout` seconds."""
        if timeout is None:
            raise Deadlock(f"schedule deadlocked at t = {self._now:g}: {self._waiting()}")
        if timeout > 0:
            self._now = self._scheduled[0]._when
            self._clock_resolution = math.ulp(self._now)

    def call_at(self, when, callback, *args, context=None) -> asyncio.TimerHandle:
        self._check_closed()
        if not math.isfinite(when):
            raise ValueError(f"a timer cannot fire at t = {when}")
        timer = _Timer(when, callback, args, self, context)
        timer.number = next(self._numbers)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def call_soon_threadsafe(self, callback, *args, context=None) -> asyncio.Handle:
        if self._thread_id not in (None, threading.get_ident()):
            raise RuntimeError("virtual time does not wait for other threads; use the wall clock")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor, func, *args):
        raise RuntimeError("virtual time does not wait for executors; call the function and let its cost pass, or use the wall clock")

    def _no_socket(self, *args):
        raise RuntimeError("virtual time does not wait for sockets; use the wall clock")

    add_reader = add_writer = sock_connect = sock_accept = sock_recv = sock_sendall = _no_socket

    def _process_events(self, event_list) -> None: ...

    def _write_to_self(self) -> None: ...

    def _waiting(self) -> str:
        tasks = sorted((t for t in asyncio.all_tasks(self) if not t.done()), key=lambda t: t.get_name())
        return "; ".join(f"{t.get_name()} awaits {' > '.join(_places(t.get_coro()))}" for t in tasks) or "no task is left"


def _places(awaitable: object) -> Iterator[str]:
    """Function and line of every frame of a suspended task, the innermost last."""
    while awaitable is not None:
        kind = "cr" if inspect.iscoroutine(awaitable) else "ag" if inspect.isasyncgen(awaitable) else None
        if kind is None:  # one step of an async generator hides the generator; anything else is the end of the chain
            awaitable = next(filter(inspect.isasyncgen, gc.get_referents(awaitable)), None)
            continue
        if frame := getattr(awaitable, f"{kind}_frame"):
            yield f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})"
        awaitable = getattr(awaitable, f"{kind}_await")
