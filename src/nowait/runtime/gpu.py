"""Utilisation of NVIDIA GPUs as the driver counts it, sampled while a run goes on; nothing where there is no GPU or no nvidia-ml-py."""

from __future__ import annotations

import statistics
import threading
from contextlib import suppress

PERIOD = 0.5  # seconds; the driver's counter covers a sixth of a second to one second


class GpuSampler:
    """A thread that reads NVML's share of time in which a kernel was running: a decode step of one row counts as much as one of a hundred."""

    def __init__(self, active: bool, period: float = PERIOD) -> None:
        self._samples: list[float] = []
        self._stopped = threading.Event()
        if active:
            threading.Thread(target=self._sample, args=(period,), name="gpu", daemon=True).start()

    def take(self) -> dict[str, float]:
        """Mean over all GPUs since the last call, as a metric; empty without samples."""
        taken, self._samples = self._samples, []
        return {"perf/gpu_utilisation": statistics.fmean(taken)} if taken else {}

    def stop(self) -> None:
        self._stopped.set()

    def _sample(self, period: float) -> None:
        with suppress(Exception):  # of its own for each: no library, no driver, no GPU, or one that has no such counter
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            while handles and not self._stopped.wait(period):
                self._samples.append(statistics.fmean(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in handles) / 100)
