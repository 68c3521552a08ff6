"""What ran where and when: spans in seconds since the start of the run, busy fractions, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
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
        self.step = 0  # set by the schedule

    def add(self, device: str, worker: str, method: str, start: float, end: float) -> None:
        self.spans.append(Span(device, worker, method, start, end, self.step))

    def seconds(self, start: float, end: float) -> dict[tuple[str, str], float]:
        """Seconds per (worker, method) inside the window, summed over devices."""
        total: dict[tuple[str, str], float] = defaultdict(float)
        for span in reversed(self.spans):
            if span.end <= start:
                break  # spans are ordered by their end
            inside = min(span.end, end) - max(span.start, start)
            if inside > 0:
                total[span.worker, span.method] += inside
        return dict(total)

    def busy(self, start: float, end: float) -> dict[str, float]:
        """Seconds in which each device ran at least one call inside the window."""
        clipped: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span in reversed(self.spans):
            if span.end <= start:
                break
            if span.start < end:
                clipped[span.device].append((max(span.start, start), min(span.end, end)))
        return {device: _union(sorted(parts)) for device, parts in clipped.items()}

    def utilisation(self) -> dict[str, float]:
        """Busy fraction of each device between the first start and the last end."""
        if not self.spans:
            return {}
        start, end = min(s.start for s in self.spans), max(s.end for s in self.spans)
        # a call that takes no time is no reason to divide by zero
        return {device: seconds / (end - start) if end > start else 0.0 for device, seconds in self.busy(start, end).items()}

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

    def save(self, path: str | Path) -> None:
        Path(path).write_text("".join(json.dumps(asdict(span)) + "\n" for span in self.spans))

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        return cls([Span(**json.loads(line)) for line in Path(path).read_text().splitlines()])


def _union(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in intervals:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
