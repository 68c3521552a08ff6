from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.results import RunResult
from nowait.runtime.timeline import Span, Timeline


def timeline(*spans: tuple) -> Timeline:
    """(device, method, start, end), in the order of their ends."""
    return Timeline([Span(device, "worker", method, start, end) for device, method, start, end in spans])


# a:  [0 . . . 4)   [6 . 8)          b:      [2 . . . . . . . . 10)
#       [1 . 3)                                        [7 . 9)
GOLDEN = [("a", "decode", 1, 3), ("a", "load", 0, 4), ("a", "decode", 6, 8), ("b", "update", 7, 9), ("b", "logp", 2, 10)]


def test_busy_is_the_union_of_overlapping_calls():
    assert timeline(*GOLDEN).busy(0, 10) == {"a": 6, "b": 8}


def test_seconds_add_up_per_method_even_where_calls_overlap():
    assert timeline(*GOLDEN).seconds(0, 10) == {("worker", "decode"): 4, ("worker", "load"): 4, ("worker", "update"): 2, ("worker", "logp"): 8}


def test_a_window_cuts_the_calls_at_its_edges():
    spans = timeline(*GOLDEN)
    assert spans.busy(2, 7) == {"a": 3, "b": 5}
    assert spans.seconds(2, 7) == {("worker", "decode"): 2, ("worker", "load"): 2, ("worker", "logp"): 5}
    assert spans.busy(4, 6) == {"b": 2}
    assert spans.busy(10, 12) == spans.seconds(10, 12) == {}


def test_a_call_that_still_runs_counts_up_to_the_end_of_the_window():
    spans = timeline(("a", "load", 0, 1))
    with spans.call("a", "sampler", "decode", iter([2, 7]).__next__):
        assert spans.busy(0, 4) == {"a": 3} and spans.seconds(3, 5) == {("sampler", "decode"): 2}
        assert spans.busy(0, 1.5) == {"a": 1}
    assert spans.spans[-1] == Span("a", "sampler", "decode", 2, 7) and spans.busy(0, 10) == {"a": 6}


def test_a_call_that_fails_leaves_no_trace():
    spans = timeline(("a", "load", 0, 1))
    with pytest.raises(ZeroDivisionError), spans.call("a", "sampler", "decode", iter([2]).__next__):
        raise ZeroDivisionError
    assert spans.busy(0, 10) == {"a": 1}


def test_utilisation_is_busy_time_between_the_first_start_and_the_last_end():
    assert timeline(*GOLDEN).utilisation() == {"a": 0.6, "b": 0.8}
    assert timeline(("a", "decode", 5, 6), ("b", "update", 6, 9)).utilisation() == {"a": 0.25, "b": 0.75}


def test_calls_that_take_no_time_use_nothing():
    assert timeline(("a", "decode", 5, 5)).utilisation() == {"a": 0.0}
    assert Timeline().utilisation() == {}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(0, 12)), max_size=12),
    st.lists(st.integers(0, 12), min_size=3, max_size=3, unique=True).map(sorted),
)
def test_busy_and_idle_add_up_to_every_window(calls, window):
    ordered = sorted(((d, "decode", min(x, y), max(x, y)) for d, x, y in calls), key=lambda span: span[3])
    spans, (start, middle, end) = timeline(*ordered), window
    for device in "ab":
        covered = {second for d, _, s, e in ordered if d == device for second in range(s, e)}
        busy = spans.busy(start, end).get(device, 0)
        idle = sum(1 for second in range(start, end) if second not in covered)
        assert busy + idle == end - start
        assert busy == spans.busy(start, middle).get(device, 0) + spans.busy(middle, end).get(device, 0)


def test_a_trace_opens_with_one_track_per_device_in_microseconds(tmp_path):
    spans = timeline(("b", "update", 0.5, 2), ("a", "decode", 1, 2.25))
    spans.to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    calls = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert calls == [(tracks["device b"], "worker.update", 500_000, 1_500_000), (tracks["device a"], "worker.decode", 1_000_000, 1_250_000)]


def test_spans_appended_in_parts_are_read_back_equal(tmp_path):
    spans, file = timeline(*GOLDEN), tmp_path / "timeline.jsonl"
    written = spans.append_to(file)
    spans.spans.append(Span("b", "learner", "update", 10, 11.0625, step=7))
    assert (written, spans.append_to(file, written)) == (5, 6)
    assert RunResult(tmp_path).timeline.spans == spans.spans


class Growing(list):
    """Spans of a training that goes on in another thread: one more has ended when those so far have been taken."""

    def __getitem__(self, part):
        taken = super().__getitem__(part)
        self.append(Span("a", "sampler", "decode", len(self), len(self) + 1))
        return taken


def test_a_span_that_ends_while_others_are_written_is_written_the_next_time(tmp_path):
    spans, file, written = timeline(), tmp_path / "timeline.jsonl", 0
    spans.spans = Growing([Span("a", "sampler", "decode", 0, 1)])
    for _ in range(3):
        written = spans.append_to(file, written)
    assert [span.start for span in RunResult(tmp_path).timeline.spans] == [0, 1, 2]


def test_utilisation_survives_a_constant_shift_of_time():
    shifted = timeline(*[(d, m, s + 1e6, e + 1e6) for d, m, s, e in GOLDEN])
    assert shifted.utilisation() == pytest.approx({"a": 0.6, "b": 0.8})
