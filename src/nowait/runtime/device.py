"""A device is an executor (where a call runs) and a clock (what its time costs). It hosts named workers, one call at a time, in order."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import nullcontext

from nowait.runtime.clock import VirtualTimeLoop
from nowait.runtime.timeline import Timeline

Cost = Callable[[str, str, tuple, object], float]  # seconds(worker, method, args, result)


class DeviceFailed(RuntimeError):
    """The process behind a device is gone."""


def resolve(name: str | Callable) -> Callable:
    """The function behind `module:function`. Raises ValueError where it cannot be imported."""
    if callable(name):
        return name
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: an empty name
        raise ValueError(f"{name!r} cannot be imported: {error}; write module:function") from error


class _Host:
    """The workers of one device, in whatever process they live."""

    def __init__(self) -> None:
        self.workers: dict[str, object] = {}

    def act(self, action: str, args: tuple):
        """Result of an action, for another process; so is its error, which one without a copy is replaced by."""
        try:
            return getattr(self, action)(*args)
        except Exception as error:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # its constructor asks for more than its message; the pool would take that for a dead process
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            raise

    def place(self, name: str, factory: str | Callable, kwargs: dict) -> None:
        self.workers[name] = resolve(factory)(**kwargs)

    def call(self, name: str, method: str, args: tuple, timed: bool) -> tuple[object, float | None]:
        """Result and, if `timed`, the seconds of processor time that this thread took for it; real seconds where the worker has a GPU."""
        function = getattr(self.workers[name], method)
        if not timed:
            return function(*args), None
        seconds = _stopwatch(self.workers[name])
        start = seconds()
        result = function(*args)
        return result, seconds() - start

    def follow(self, action: str, *args) -> None:
        """An action whose result is that of another rank."""
        getattr(self, action)(*args)

    def address(self) -> str:
        """Where ranks can meet: a port of this machine that is free now."""
        with socket.create_server((self._machine(), 0)) as server:
            return "tcp://{}:{}".format(*server.getsockname())

    def _machine(self) -> str:
        return "127.0.0.1"


def _stopwatch(worker: object) -> Callable[[], float]:
    """A clock for the calls of a worker. A call returns before the GPU has done its work, so that one is waited for."""
    device = getattr(getattr(worker, "model", None), "device", None)
    if getattr(device, "type", "cpu") != "cuda":
        return time.thread_time

    def seconds() -> float:
        sys.modules["torch"].cuda.synchronize(device)
        return time.perf_counter()

    return seconds


class InlineExecutor:
    """Calls run here and now."""

    def __init__(self) -> None:
        self._host = _Host()

    def submit(self, action: str, *args) -> Future:
        future: Future = Future()
        try:
            future.set_result(getattr(self._host, action)(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        self._host.workers.clear()


class ProcessExecutor:
    """Calls run in one process of their own, started fresh (spawn), with `threads` compute threads; of the GPUs it sees those in `gpus`, if given."""

    def __init__(self, threads: int = 1, gpus: Sequence[int] = ()) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_start_process, initargs=(threads, os.getpid(), gpus))

    def submit(self, action: str, *args) -> Future:
        if action == "place":
            module, name = args[1].split(":")[:2] if isinstance(args[1], str) else (args[1].__module__, args[1].__qualname__)
            if module == "__main__":
                raise ValueError(f"{name} is defined in __main__, which a worker process cannot import: put it in a module")
        return self._pool.submit(_in_process, action, args)

    def close(self) -> None:
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


_host = _Host()  # of this worker process


def _in_process(action: str, args: tuple):
    return _host.act(action, args)


def _start_process(threads: int, parent: int, gpus: Sequence[int]) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if gpus:  # read when CUDA starts; where some GPUs are hidden already, indices count the visible ones
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] if visible != [""] else str(gpu) for gpu in gpus)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver decides what happens
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    """End this process when its driver has died without telling it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class WallClock:
    """Real seconds."""

    virtual = timed = False


class MeasuredClock:
    """Virtual time in which each call costs the processor time that it really took; transfer and contention are left out."""

    virtual = timed = True

    def seconds(self, worker: str, method: str, args: tuple, result: object, measured: float) -> float:
        return measured


class ModelClock:
    """Virtual time from a cost function; never reads the machine's clock, so runs repeat bit for bit."""

    virtual, timed = True, False

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def seconds(self, worker: str, method: str, args: tuple, result: object, measured: None) -> float:
        seconds = self._cost(worker, method, args, result)
        if not 0 <= seconds < math.inf:
            raise ValueError(f"the cost of {worker}.{method} is {seconds} seconds: the clock's cost function must give a finite number >= 0")
        return seconds


class Device:
    """`await run(...)` calls a placed worker's method; calls queue and run one at a time in the order of their arrival.

    With `lanes`, on a virtual clock only, calls of that many workers may overlap; while several do, each goes on at 1 / `contention` of its speed.
    """

    def __init__(self, name: str, executor: InlineExecutor | ProcessExecutor, clock, timeline: Timeline, lanes: int = 1, contention: float = 1.0):
        if lanes > 1 and not clock.virtual:
            raise ValueError(f"device {name!r}: {lanes} lanes need a virtual clock; in real time, processes share a machine by themselves")
        self.name, self._executor, self._clock, self._timeline = name, executor, clock, timeline
        self._lanes, self._turn, self._contention = lanes, asyncio.Semaphore(lanes), contention
        self._own: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # with lanes, a worker still does one thing at a time
        self._running: set[asyncio.Event] = set()  # one per overlapping call, set when another one comes or goes

    async def place(self, name: str, factory: str | Callable, /, **kwargs) -> None:
        """Build a worker on this device from an importable factory, or `module:function`; its model never travels."""
        await self._result(f"building {name}", "place", name, factory, kwargs)

    async def run(self, name: str, method: str, *args):
        """Result of worker.method(*args). Raises the worker's own error, or `DeviceFailed` if its process died."""
        async with self._own[name] if self._lanes > 1 else nullcontext(), self._turn:
            with self._timeline.call(self.name, name, method, asyncio.get_running_loop().time):
                result, measured = await self._result(f"running {name}.{method}", "call", name, method, args, self._clock.timed)
                if self._clock.virtual:
                    seconds = self._clock.seconds(name, method, args, result, measured)
                    await (asyncio.sleep(seconds) if self._lanes == 1 else self._share(seconds))
            return result

    async def aside(self, name: str, method: str, *args):
        """As `run`, for what is no part of the training: it takes no virtual time and leaves no span."""
        async with self._turn:
            return (await self._result(f"running {name}.{method}", "call", name, method, args, False))[0]

    async def _share(self, seconds: float) -> None:
        """Let time pass that is worth `seconds` of a device of one's own."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._wake()
        self._running.add(changed)
        try:
            while seconds > 0:
                slowdown, start = self._contention if len(self._running) > 1 else 1.0, loop.time()
                timer = loop.call_later(seconds * slowdown, changed.set)
                await changed.wait()
                timer.cancel()
                changed.clear()
                seconds = 0.0 if loop.time() >= timer.when() else seconds - (loop.time() - start) / slowdown
        finally:
            self._running.remove(changed)
            self._wake()

    def _wake(self) -> None:
        for changed in self._running:
            changed.set()

    async def _result(self, doing: str, *action):
        try:
            future = self._executor.submit(*action)
            if self._clock.virtual:
                return future.result()
            return await asyncio.wrap_future(future)  # which also lets other tasks have their turn when an inline call has already run
        except (BrokenExecutor, concurrent.futures.CancelledError) as error:
            raise DeviceFailed(f"the process of device {self.name!r} died while {doing} (killed, or out of memory?)") from error

    def close(self) -> None:
        self._executor.close()


def event_loop(clock, start: float = 0.0) -> asyncio.AbstractEventLoop:
    """The loop that a clock needs; its time begins at `start` seconds."""
    return VirtualTimeLoop(start) if clock.virtual else _WallTimeLoop(start)


class _WallTimeLoop(asyncio.SelectorEventLoop):
    """Real seconds since the run began instead of since the machine did."""

    def __init__(self, start: float) -> None:
        self._offset = start - time.monotonic()
        super().__init__()

    def time(self) -> float:
        return time.monotonic() + self._offset
