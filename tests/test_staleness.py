from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.schedules.staleness import StalenessGate, strict_batch


def gate(batch_size=4, max_staleness=2, max_concurrent=100, running=0, accepted=0) -> StalenessGate:
    out = StalenessGate(batch_size, max_staleness, max_concurrent)
    out.set_state({"running": running, "accepted": accepted})
    return out


@pytest.mark.parametrize(
    ("settings", "version", "room"),
    [
        ({}, 0, 12),  # (2 + 0 + 1) * 4
        ({}, 3, 24),  # (2 + 3 + 1) * 4
        ({"running": 5, "accepted": 6}, 0, 1),  # 12 - 11
        ({"running": 0, "accepted": 12}, 0, 0),
        ({"running": 0, "accepted": 12}, 1, 4),
        ({"max_concurrent": 3, "running": 2}, 0, 1),  # 3 - 2
        ({"max_concurrent": 3, "running": 3}, 9, 0),
        ({"max_staleness": 0}, 0, 4),
        ({"max_staleness": 0, "accepted": 4}, 0, 0),
        ({"max_staleness": 0, "accepted": 4}, 1, 4),
        ({"max_staleness": 0, "accepted": 20}, 0, 0),  # never negative
    ],
)
def test_capacity(settings, version, room):
    assert gate(**settings).capacity(version) == room


def test_a_finished_request_makes_room_for_concurrency_but_not_for_staleness():
    g = gate(max_concurrent=6)
    g.submitted(6)
    assert g.capacity(0) == 0
    g.finished(2)
    assert g.capacity(0) == 2 and g.get_state() == {"running": 4, "accepted": 2}
    g.submitted(2)
    g.finished(6)
    assert g.capacity(0) == 4  # 12 - 8
    g.submitted(4)
    g.finished(4)
    assert g.capacity(0) == 0 and g.capacity(1) == 4


@pytest.mark.parametrize("arguments", [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_impossible_gates_are_refused(arguments):
    with pytest.raises(ValueError, match="must be >="):
        StalenessGate(*arguments)


def test_more_finished_than_running_is_an_error():
    with pytest.raises(ValueError, match="3 requests finished, 2 were running"):
        gate(running=2).finished(3)


@pytest.mark.parametrize(
    ("oldest", "finished", "batch"),
    [  # step 3, batches of 2, eta 2: first tokens of version 1 are due now, of version 2 at step 4, of version 3 at step 5
        ({0: 1, 1: 1, 2: 2}, [2, 1, 0], [0, 1]),  # the earliest, in submission order
        ({0: 1, 1: 2, 2: 2}, [1, 2], None),  # 0 is due and runs
        ({0: 2, 1: 2, 2: 2}, [2, 1], [1, 2]),  # 0 runs and can still be in time
        ({0: 2, 1: 2, 2: 2, 3: 2}, [3, 2], [2, 3]),  # 0 and 1 just fit into step 4
        ({0: 2, 1: 2, 2: 2, 3: 3, 4: 3}, [4, 3], None),  # 0, 1 and 2 would not: one of them has to be among the two
        ({0: 2, 1: 2, 2: 2, 3: 3, 4: 3}, [4, 3, 2], [2, 3]),
        ({0: 3, 1: 3, 2: 3}, [2], None),  # too few
        ({5: 1, 3: 2, 4: 3}, [3, 4, 5], [3, 5]),  # by version first
    ],
)
def test_strict_order_waits_for_what_could_not_be_in_time_later(oldest, finished, batch):
    assert strict_batch(3, oldest, finished, 2, 2) == batch


class Training:
    """Gate and strict order with nothing around them; checks every batch."""

    def __init__(self, batch_size: int, max_staleness: int, max_concurrent: int) -> None:
        self.settings = batch_size, max_staleness, max_concurrent
        self.gate = StalenessGate(*self.settings)
        self.step = self.loaded = self.admitted = 0
        self.queued, self.running, self.finished, self.trained = [], [], [], []
        self.oldest: dict[int, int] = {}

    def admit(self) -> None:
        room = self.gate.capacity(self.loaded)
        self.gate.submitted(room)
        self.queued += range(self.admitted, self.admitted + room)
        self.admitted += room

    def start(self, count: int) -> None:
        started = [self.queued.pop(0) for _ in range(count)]
        self.running += started
        self.oldest |= dict.fromkeys(started, self.loaded)

    def finish(self, requests: list[int]) -> None:
        self.gate.finished(len(requests))
        self.running = [r for r in self.running if r not in requests]
        self.finished += requests

    def train(self) -> bool:
        size, eta, _ = self.settings
        if (batch := strict_batch(self.step, self.oldest, self.finished, size, eta)) is None:
            return False
        assert len(batch) == size and batch == sorted(set(batch)) and set(batch) <= set(self.finished)
        assert all(0 <= self.step - self.oldest.pop(r) <= eta for r in batch)
        self.finished = [r for r in self.finished if r not in batch]
        self.trained += batch
        self.step += 1
        return True

    def restore(self) -> None:
        state, self.gate = self.gate.get_state(), StalenessGate(*self.settings)
        self.gate.set_state(state)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_staleness_stays_bounded_whatever_happens_in_whichever_order(data):
    """Random finishing, loading, training and restarts, with requests in flight at any time."""
    run = Training(*(data.draw(st.integers(low, high)) for low, high in ((1, 4), (0, 4), (1, 12))))
    for _ in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["admit", "start", "start", "finish", "finish", "train", "train", "load", "restore"]))
        if action == "start" and run.queued:
            run.start(data.draw(st.integers(1, len(run.queued))))
        elif action == "finish" and run.running:
            run.finish(data.draw(st.lists(st.sampled_from(run.running), unique=True, min_size=1)))
        elif action == "load":
            run.loaded = data.draw(st.integers(run.loaded, run.step))
        elif action in ("admit", "train", "restore"):
            getattr(run, action)()
    for _ in range(12):  # never stuck: once all that the newest weights admit has finished, there is a batch
        run.loaded = run.step
        run.admit()
        while run.queued or run.running:
            run.start(len(run.queued))
            run.finish(list(run.running))
            run.admit()
        assert run.train()
    assert len(run.trained) == len(set(run.trained)) == run.step * run.settings[0]


def test_without_staleness_exactly_one_batch_is_admitted_per_version():
    g, step = StalenessGate(3, 0, 100), 0
    for version in range(4):
        assert g.capacity(version) == 3
        g.submitted(3)
        assert g.capacity(version) == 0
        ids = range(3 * version, 3 * version + 3)
        oldest = dict.fromkeys(ids, version)
        g.finished(2)
        assert strict_batch(step, oldest, ids[:2], 3, 0) is None
        g.finished(1)
        assert strict_batch(step, oldest, ids, 3, 0) == list(ids)
        step += 1


@pytest.mark.parametrize("version", [0, 3])
def test_a_restored_gate_admits_no_more_than_the_one_that_was_saved(version):
    g = gate(batch_size=2, max_staleness=1, max_concurrent=5, running=2, accepted=2 * version + 1)
    restored = StalenessGate(2, 1, 5)
    restored.set_state(g.get_state())
    assert restored.capacity(version) == g.capacity(version) == 1  # (1 + version + 1) * 2 - (2 * version + 3)
    assert StalenessGate(2, 1, 5).capacity(version) > 1  # what a resume that forgot its counts would admit
