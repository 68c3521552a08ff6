from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scripted import CopyingExecutor

from nowait.runtime.clock import VirtualTimeLoop
from nowait.runtime.device import Device, DeviceFailed, InlineExecutor, MeasuredClock, ModelClock, ProcessExecutor, WallClock, event_loop, resolve
from nowait.runtime.timeline import Timeline


class Picky(Exception):
    """Cannot be unpickled: its constructor takes two arguments and gives one to its base."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)


class Worker:
    def __init__(self, name: str = "", fail: bool = False) -> None:
        if fail:
            raise KeyError("no such model")
        self.name, self.log, self.inside = name, [], False

    def note(self, what):
        assert not self.inside, "two calls at once"
        self.inside = True
        self.log.append(what)
        self.inside = False
        return self.name, list(self.log)

    def change(self, array: np.ndarray) -> np.ndarray:
        array += 1
        return array

    def fail(self):
        raise ArithmeticError("no such number", 42)

    def fail_badly(self):
        raise Picky(7, "picky")

    def pid(self) -> int:
        return os.getpid()

    def threads(self) -> str:
        return os.environ["OMP_NUM_THREADS"]

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def work(self, seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass


def on(clock, main, executor=CopyingExecutor, names=("a",), timeline=None):
    """Result of main(*devices) on the clock's loop; a worker w stands on each device."""

    async def whole():
        devices = [Device(name, executor(), clock, timeline if timeline is not None else Timeline()) for name in names]
        try:
            for device in devices:
                await device.place("w", "test_device:Worker", name=device.name)
            return await main(*devices)
        finally:
            for device in devices:
                device.close()

    with asyncio.Runner(loop_factory=lambda: event_loop(clock)) as runner:
        return runner.run(whole())


def costs(**seconds):
    return ModelClock(lambda worker, method, args, result: seconds.get(method, 0.0))


def test_calls_run_one_at_a_time_in_the_order_of_their_arrival():
    timeline = Timeline()

    async def main(device):
        results = await asyncio.gather(*(device.run("w", "note", i) for i in range(4)))
        return [log for _, log in results]

    assert on(costs(note=2.0), main, timeline=timeline) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert [(s.start, s.end) for s in timeline.spans] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_devices_work_beside_each_other_and_workers_of_one_device_do_not():
    timeline = Timeline()

    async def main(a, b):
        await a.place("v", Worker)
        await asyncio.gather(a.run("w", "note", 1), a.run("v", "note", 2), b.run("w", "note", 3))
        return asyncio.get_running_loop().time()

    assert on(costs(note=2.0), main, names=("a", "b"), timeline=timeline) == 4.0
    assert [(s.device, s.worker, s.end) for s in timeline.spans] == [("a", "w", 2), ("b", "w", 2), ("a", "v", 4)]


def test_a_cancelled_call_gives_its_turn_to_the_next():
    async def main(device):
        first, second = (asyncio.create_task(device.run("w", "note", i)) for i in range(2))
        await asyncio.sleep(0.5)
        first.cancel()
        await second
        return asyncio.get_running_loop().time()

    assert on(costs(note=2.0), main) == 2.5


def test_a_span_carries_the_training_step_in_which_it_began():
    timeline = Timeline()

    async def main(device):
        timeline.step = 3
        call = asyncio.create_task(device.run("w", "note", 0))
        await asyncio.sleep(1)
        timeline.step = 4
        await call

    on(costs(note=2.0), main, timeline=timeline)
    assert [span.step for span in timeline.spans] == [3]


def test_the_cost_function_sees_worker_method_arguments_and_result():
    seen = []

    async def main(device):
        await device.run("w", "change", np.array([1]))

    on(ModelClock(lambda *call: seen.append(call) or 0.0), main)
    ((worker, method, (argument,), result),) = seen
    assert (worker, method, argument.tolist(), result.tolist()) == ("w", "change", [1], [2])


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_an_impossible_cost_is_refused(cost):
    with pytest.raises(ValueError, match=r"cost of w\.note is (-1\.0|nan|inf) seconds"):
        on(costs(note=cost), lambda device: device.run("w", "note", 1))


def test_the_model_clock_never_reads_the_machines_clock(monkeypatch):
    async def main(device):
        for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
            monkeypatch.setattr(time, name, lambda: pytest.fail("read the machine's clock"))
            monkeypatch.setattr(time, f"{name}_ns", lambda: pytest.fail("read the machine's clock"))
        await asyncio.gather(device.run("w", "note", 1), device.run("w", "note", 2))
        monkeypatch.undo()
        return asyncio.get_running_loop().time()

    assert on(costs(note=1.5), main) == 3.0


def test_the_measured_clock_charges_processor_time_and_not_waiting():
    timeline = Timeline()

    async def main(device):
        await device.run("w", "sleep", 0.2)
        await device.run("w", "work", 0.05)

    on(MeasuredClock(), main, timeline=timeline)
    slept, worked = (span.end - span.start for span in timeline.spans)
    assert slept < 0.05 <= worked < 0.2


def test_pickling_keeps_results_and_protects_the_callers_arrays():
    async def main(device):
        array = np.array([1, 2])
        return (await device.run("w", "change", array)).tolist(), array.tolist(), await device.run("w", "note", "x")

    assert on(costs(), main, InlineExecutor) == ([2, 3], [2, 3], ("a", ["x"]))
    assert on(costs(), main, CopyingExecutor) == ([2, 3], [1, 2], ("a", ["x"]))


def test_inline_calls_on_the_wall_clock_let_other_tasks_have_their_turn():
    order = []

    async def caller(device, name):
        for i in range(3):
            await device.run("w", "note", i)
            order.append(name)

    async def main(a, b):
        await asyncio.gather(caller(a, "a"), caller(b, "b"))

    on(WallClock(), main, names=("a", "b"))
    assert sorted(order[:2]) == sorted(order[2:4]) == ["a", "b"]


@pytest.mark.parametrize("executor", [CopyingExecutor, ProcessExecutor])
@pytest.mark.parametrize("clock", [costs(), WallClock()], ids=["model", "wall"])
def test_an_error_of_the_worker_surfaces_as_itself_and_the_device_goes_on(executor, clock):
    async def main(device):
        with pytest.raises(ArithmeticError) as caught:
            await device.run("w", "fail")
        with pytest.raises(KeyError, match="no such model"):
            await device.place("v", Worker, fail=True)
        with pytest.raises((Picky, RuntimeError), match="picky"):
            await device.run("w", "fail_badly")
        return caught.value.args, await device.run("w", "note", 1)

    assert on(clock, main, executor) == (("no such number", 42), ("a", [1]))


def test_a_process_gives_the_same_results_times_and_spans_as_a_call_in_place():
    def trace(executor):
        timeline = Timeline()

        async def main(device):
            await asyncio.gather(device.run("w", "note", 1), device.run("w", "note", np.float32(2)))
            return await device.run("w", "note", "end"), (await device.run("w", "change", np.arange(3))).tolist()

        return on(costs(note=1.25, change=0.5), main, executor, timeline=timeline), timeline.spans

    assert trace(CopyingExecutor) == trace(ProcessExecutor)


def test_a_process_of_its_own_with_its_threads_ends_with_its_device():
    async def main(device):
        return await device.run("w", "pid"), await device.run("w", "threads")

    pid, threads = on(WallClock(), main, partial(ProcessExecutor, 3))
    assert pid != os.getpid() and threads == "3" and gone(pid)


@pytest.mark.parametrize("clock", [costs(), WallClock()], ids=["model", "wall"])
def test_a_killed_process_is_reported_with_device_and_call_now_and_later(clock):
    async def main(device):
        pid = await device.run("w", "pid")
        killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(DeviceFailed, match=r"device 'gpu0' died while running w\.sleep"):
            await device.run("w", "sleep", 60)
        with pytest.raises(DeviceFailed, match=r"device 'gpu0' died while running w\.note"):
            await device.run("w", "note", 1)

    start = time.monotonic()
    on(clock, main, ProcessExecutor, names=("gpu0",))
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("form", ["function", "name"])
def test_a_factory_from_main_is_refused_with_the_reason(form):
    def factory():
        return Worker()

    factory.__module__, factory.__qualname__ = "__main__", "my_worker"

    async def main(device):
        await device.place("v", factory if form == "function" else "__main__:my_worker")

    with pytest.raises(ValueError, match="my_worker is defined in __main__, which a worker process cannot import"):
        on(costs(), main, ProcessExecutor)


@pytest.mark.parametrize(
    ("name", "message"), [("numpy.zeros", "module:function"), ("numpy:zeroes", "cannot be imported"), ("nunpy:zeros", "cannot be imported")]
)
def test_a_name_that_cannot_be_resolved_says_so(name, message):
    with pytest.raises(ValueError, match=message):
        resolve(name)


DRIVER = """
import asyncio
from nowait.runtime.device import Device, ProcessExecutor, WallClock
from nowait.runtime.timeline import Timeline

async def main():
    device = Device("a", ProcessExecutor(), WallClock(), Timeline())
    await device.place("w", "test_device:Worker")
    print(await device.run("w", "pid"), flush=True)
    await device.run("w", "sleep", 60)

asyncio.run(main())
"""


def test_a_process_ends_when_its_driver_was_killed():
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert gone(pid)


def gone(pid: int, within: float = 10.0) -> bool:
    """Whether a process ends, or is only left to be reaped, within some seconds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path("/proc/self/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z"):
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.1)
    return False


def test_every_clock_has_its_loop():
    for clock, virtual in [(costs(), True), (MeasuredClock(), True), (WallClock(), False)]:
        loop = event_loop(clock, start=7.0)
        assert isinstance(loop, VirtualTimeLoop) == virtual and (not virtual or loop.time() == 7.0)
        loop.close()


@pytest.mark.parametrize(("lanes", "ends"), [(1, [4.0, 5.0]), (2, [1.5, 4.5])])
def test_calls_that_share_a_device_slow_each_other_down_while_they_overlap(lanes, ends):
    # in two lanes both go at 1 / 1.5 until the short one ends at 1.5; the long one has done 1 of its 4 seconds by then
    timeline, clock = Timeline(), ModelClock(lambda worker, *_: {"long": 4.0, "short": 1.0}[worker])

    async def main():
        device = Device("a", InlineExecutor(), clock, timeline, lanes, contention=1.5)
        for name in ("long", "short"):
            await device.place(name, Worker)
        await asyncio.gather(device.run("long", "note", 1), device.run("short", "note", 1))

    on(clock, main, names=())
    assert [span.end for span in timeline.spans] == ends


def test_one_worker_never_does_two_things_at_once_whatever_the_lanes():
    timeline = Timeline()

    async def main():
        device = Device("a", InlineExecutor(), costs(note=2.0), timeline, lanes=2, contention=1.5)
        await device.place("w", Worker)
        await asyncio.gather(*(device.run("w", "note", i) for i in range(2)))

    on(costs(note=2.0), main, names=())
    assert [(s.start, s.end) for s in timeline.spans] == [(0, 2), (2, 4)]


def test_lanes_are_for_virtual_time():
    with pytest.raises(ValueError, match="2 lanes need a virtual clock"):
        Device("a", InlineExecutor(), WallClock(), Timeline(), lanes=2)
