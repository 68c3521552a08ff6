"""What ran where and when: spans in seconds since the start of the run, busy fractions, and a trace for Perfetto."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain, takewhile
from pathlib import Path


@dataclass(frozen=True)
class Span:
    """One call of a worker's method on a device; `step` is the training step in progress when it began."""

    device: str
    worker: str
    method: str
    start: float
    end: float
    step: int = 0


class Timeline:
    """Spans in the order in which they ended."""

    def __init__(self, spans: list[Span] | None = None) -> None:
        self.spans = list(spans or [])
        self._running: list[Span] = []
        self.step = 0  # set by the schedule

    @contextmanager
    def call(self, device: str, worker: str, method: str, now: Callable[[], float]) -> Iterator[None]:
        """Records what runs inside as one call, unless it fails. A window that closes meanwhile counts it up to there."""
        span = Span(device, worker, method, now(), math.inf, self.step)
        self._running.append(span)
        try:
            yield
            self.spans.append(replace(span, end=now()))
        finally:
            self._running.remove(span)

    def seconds(self, start: float, end: float) -> dict[tuple[str, str], float]:
        """Seconds per (worker, method) inside the window, summed over devices."""
        total: dict[tuple[str, str], float] = defaultdict(float)
        for span in self._reaching(start):
            inside = min(span.end, end) - max(span.start, start)
            if inside > 0:
                total[span.worker, span.method] += inside
        return dict(total)

    def busy(self, start: float, end: float) -> dict[str, float]:
        """Seconds in which each device ran at least one call inside the window."""
        clipped: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in self._reaching(start):
            if span.start < end:
                clipped[span.device].append((max(span.start, start), min(span.end, end)))
        return {device: _union(sorted(parts)) for device, parts in clipped.items()}

    def _reaching(self, start: float) -> Iterator[Span]:
        """Calls that end after `start`, those still running first."""
        return chain(self._running, takewhile(lambda span: span.end > start, reversed(self.spans)))

    def utilisation(self) -> dict[str, float]:
        """Busy fraction of each device between the first start and the last end."""
        if not self.spans:
            return {}
        start, end = min(s.start for s in self.spans), max(s.end for s in self.spans)
        busy = self.busy(start, end)
        # calls that take no time are no reason to divide by zero
        return {device: busy.get(device, 0.0) / (end - start) if end > start else 0.0 for device in dict.fromkeys(s.device for s in self.spans)}

    def to_trace(self, path: str | Path) -> None:
        """Write the Chrome trace format, which Perfetto and chrome://tracing open."""
        devices = {device: i for i, device in enumerate(sorted({s.device for s in self.spans}))}
        names = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": f"device {d}"}} for d, tid in devices.items()]
        calls = [
            {"name": f"{s.worker}.{s.method}", "ph": "X", "pid": 0, "tid": devices[s.device], "ts": s.start * 1e6,
             "dur": (s.end - s.start) * 1e6, "args": {"step": s.step}}
            for s in self.spans
        ]  # fmt: skip
        Path(path).write_text(json.dumps({"traceEvents": names + calls, "displayTimeUnit": "ms"}))

    def append_to(self, path: str | Path, written: int = 0) -> int:
        """Append the spans after the first `written` ones, one JSON object a line; returns how many are written now."""
        new = self.spans[written:]  # of now: the training goes on in another thread
        with Path(path).open("a") as file:
            file.writelines(json.dumps(asdict(span)) + "\n" for span in new)
        return written + len(new)


def _union(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in intervals:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
