from __future__ import annotations

import asyncio
import gc
import math
import re
import threading
import time
from pathlib import Path

import pytest

from nowait.runtime.clock import Deadlock, VirtualTimeLoop


def run(main, start: float = 0.0):
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start)) as runner:
        return runner.run(main)


def now() -> float:
    return asyncio.get_running_loop().time()


async def note(log: list, name: str, *delays: float) -> None:
    for delay in delays:
        await asyncio.sleep(delay)
        log.append((name, now()))


def test_time_jumps_to_the_next_timer_and_tasks_interleave_by_it():
    async def main():
        log = []
        await asyncio.gather(note(log, "a", 1.0, 1.0, 1.0), note(log, "b", 1.5, 1.0))
        return log

    assert run(main()) == [("a", 1.0), ("b", 1.5), ("a", 2.0), ("b", 2.5), ("a", 3.0)]


def test_a_hundred_thousand_virtual_seconds_pass_in_no_time():
    async def main():
        await asyncio.gather(note([], "short", *[10.0] * 10_000), asyncio.sleep(100_000))
        return now()

    start = time.perf_counter()
    assert run(main()) == 100_000
    assert time.perf_counter() - start < 5


def test_waiting_longer_than_a_day_is_one_jump():  # asyncio caps what it waits for at a day
    async def main():
        await asyncio.sleep(10 * 24 * 3600)
        return now()

    assert run(main()) == 864_000


def test_timers_of_one_instant_fire_in_the_order_of_their_creation():
    async def main():
        loop, fired = asyncio.get_running_loop(), []
        timers = [loop.call_at(1.0, fired.append, i) for i in range(200)]
        for timer in timers[1::2]:  # enough cancelled ones make asyncio rebuild its heap
            timer.cancel()
        loop.call_at(0.5, lambda: [loop.call_at(1.0, fired.append, i) for i in range(200, 210)])
        await asyncio.sleep(2)
        return fired

    assert run(main()) == [*range(0, 200, 2), *range(200, 210)]


def test_a_timer_is_due_at_its_instant_and_not_before():
    early, late = 0.1 + 0.2, 0.3  # differ in the last bit
    assert late < early

    async def main():
        log = []
        await asyncio.gather(note(log, "later", early), note(log, "sooner", late))
        return log

    assert run(main()) == [("sooner", late), ("later", early)]


@pytest.mark.parametrize("start", [0.0, 1000.0])
def test_time_is_exactly_that_of_the_timer(start):
    instants = [start + 1e-10, *(start + 0.1 * i for i in range(1, 100))]

    async def main():
        loop, seen = asyncio.get_running_loop(), []
        for instant in instants:
            loop.call_at(instant, lambda: seen.append(now()))
        loop.call_soon(int)  # something else is ready, so that the loop looks for due timers before it waits
        await asyncio.sleep(20)
        return seen

    assert run(main(), start) == instants


def test_a_resumed_clock_goes_on_at_its_start():
    async def main():
        before = now()
        await asyncio.sleep(0.25)
        return before, now()

    assert run(main(), start=1000.125) == (1000.125, 1000.375)


class Gate:
    """Waits like a schedule: an async generator that awaits a method that awaits an event."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def passes(self):
        await self.open.wait()

    async def steps(self):
        yield 1
        await self.passes()


def test_a_deadlock_says_when_and_what_every_task_awaits():
    async def rollout():
        await asyncio.get_running_loop().create_future()

    async def main():
        asyncio.current_task().set_name("training")
        task = asyncio.create_task(rollout(), name="rollout")
        await asyncio.sleep(2.5)
        async for _ in Gate().steps():
            pass
        await task

    with pytest.raises(Deadlock) as caught:
        run(main())
    message = re.sub(r"test_\w+\.<locals>\.| \((test_clock|locks)\.py:\d+\)", "", str(caught.value))
    assert message == "schedule deadlocked at t = 2.5: rollout awaits rollout; training awaits main > Gate.steps > Gate.passes > Event.wait"
    place = re.search(r"Gate\.passes \(test_clock\.py:(\d+)\)", str(caught.value))
    assert Path(__file__).read_text().splitlines()[int(place[1]) - 1].strip() == "await self.open.wait()"


def test_cleaning_up_after_a_deadlock_runs():
    log = []

    async def main():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            log.append(now())

    with pytest.raises(Deadlock):
        run(main())
    assert log == [1.0]


@pytest.mark.parametrize("delay", [math.nan, math.inf])
def test_a_timer_that_could_never_fire_is_refused(delay):
    with pytest.raises(ValueError, match=f"fire at t = {delay}"):
        run(asyncio.sleep(delay))


@pytest.mark.parametrize(
    "submit", [lambda: asyncio.to_thread(time.sleep, 0), lambda: asyncio.get_running_loop().run_in_executor(None, time.sleep, 0)]
)
def test_executors_are_refused(submit):
    async def main():
        await submit()

    with pytest.raises(RuntimeError, match="does not wait for executors"):
        run(main())


def test_calls_from_other_threads_are_refused_where_they_are_made():
    errors = []

    async def main():
        loop = asyncio.get_running_loop()

        def call():
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    run(main())
    assert len(errors) == 1 and "does not wait for other threads" in errors[0]


def test_waiting_for_a_thread_is_a_deadlock_and_no_endless_leap():
    finish = threading.Event()

    async def main():
        future = asyncio.get_running_loop().create_future()
        thread = threading.Thread(target=finish.wait)
        thread.start()
        await future

    try:
        with pytest.raises(Deadlock, match="t = 0: "):
            run(main())
    finally:
        finish.set()


@pytest.mark.parametrize("wait", ["add_reader", "add_writer", "open_connection"])
def test_sockets_are_refused(wait):
    async def main():
        if wait == "open_connection":
            await asyncio.open_connection("127.0.0.1", 9)
        getattr(asyncio.get_running_loop(), wait)(0, print)

    with pytest.raises(RuntimeError, match="does not wait for sockets"):
        run(main())


@pytest.mark.parametrize("kept", [False, True], ids=["dropped while the loop runs", "still held when it ends"])
def test_an_abandoned_async_generator_is_closed_in_virtual_time(kept):
    log, held = [], []

    async def steps():
        try:
            yield 1
        finally:
            await asyncio.sleep(3)
            log.append(now())

    async def main():
        generator = steps()
        held.append(generator if kept else None)
        async for _ in generator:
            break
        del generator
        gc.collect()
        await asyncio.sleep(5)

    run(main())
    assert log == [8.0 if kept else 3.0]


def test_cancelling_a_task_ends_its_wait_at_once():
    async def main():
        task = asyncio.create_task(asyncio.sleep(1e6))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(1)
        return now()

    assert run(main()) == 2.0
