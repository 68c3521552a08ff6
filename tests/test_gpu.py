"""Sampling of GPU utilisation, with a library in the place of NVML."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest

from nowait.runtime.gpu import GpuSampler


def nvml(readings: dict[int, int], error: Exception | None = None) -> SimpleNamespace:
    """A library with these GPUs, each at a constant utilisation in percent; with an error, one that finds no driver."""

    def init() -> None:
        if error:
            raise error

    return SimpleNamespace(
        nvmlInit=init,
        nvmlDeviceGetCount=lambda: len(readings),
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=readings[handle]),
    )


def taken(sampler: GpuSampler) -> dict[str, float]:
    """The first samples, waited for at most 5 s."""
    for _ in range(500):
        if found := sampler.take():
            return found
        time.sleep(0.01)
    raise AssertionError("nothing was sampled")


def test_utilisation_is_the_mean_over_gpus_and_each_sample_counts_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml({0: 30, 1: 80}))
    sampler = GpuSampler(active=True, period=0.005)
    assert taken(sampler) == {"perf/gpu_utilisation": pytest.approx(0.55)}
    sampler.stop()
    time.sleep(0.05)
    sampler.take()
    time.sleep(0.05)
    assert sampler.take() == {} and not [t for t in threading.enumerate() if t.name == "gpu"]


@pytest.mark.parametrize("library", [None, nvml({}), nvml({0: 50}, RuntimeError("driver not loaded"))])
def test_without_a_gpu_nothing_is_reported(monkeypatch, library):
    monkeypatch.setitem(sys.modules, "pynvml", library)  # None: cannot be imported
    sampler = GpuSampler(active=True, period=0.001)
    time.sleep(0.02)
    assert sampler.take() == {}


def test_runs_in_virtual_time_are_not_sampled(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", nvml({0: 50}))
    sampler = GpuSampler(active=False, period=0.001)
    time.sleep(0.02)
    assert sampler.take() == {}
