from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest
import torch
from tiny import experiment, generate, requests

from nowait import runs, tasks
from nowait.runtime.device import Device, InlineExecutor, ModelClock, event_loop
from nowait.runtime.timeline import Timeline
from nowait.selfcheck import check_sampler
from nowait.tasks.prompts import Prompts
from nowait.training import load_tokenizer
from nowait.workers.learner import HFLearner
from nowait.workers.sampler import HFSampler


def check(tiny: str, sampler: HFSampler, limits: str = "float32", prompts: Prompts | None = None) -> float:
    """The self-check of a sampler against the tiny policy's learner at temperature 1."""
    x = experiment(tiny)
    learner = HFLearner(tiny, x.learner, x.algorithm, temperature=1.0, seed=0)

    def call(worker):
        async def call(method, *args):
            return getattr(worker, method)(*args)

        return call

    return asyncio.run(check_sampler(call(sampler), call(learner), prompts or make_prompts(tiny), limits))


def make_prompts(tiny: str) -> Prompts:
    x = experiment(tiny)
    return Prompts(tasks.load(x.task), load_tokenizer(tiny)[0], seed=0, n=4, max_prompt_tokens=8, max_new_tokens=20)


def make_sampler(tiny: str, temperature: float = 1.0) -> HFSampler:
    return HFSampler(tiny, slots=16, capacity=64, seed=1, temperature=temperature)


def test_a_sampler_that_agrees_passes_and_nothing_is_left_behind(tiny):
    worker, prompts = make_sampler(tiny), make_prompts(tiny)
    before = prompts.get_state()
    assert check(tiny, worker, prompts=prompts) < 1e-5
    assert prompts.get_state() == before and [r.id for r in prompts.next(2)] == [0, 1]
    np.testing.assert_array_equal(generate(worker, requests(4)).token, generate(make_sampler(tiny), requests(4)).token)


def test_another_temperature_is_refused_with_numbers_causes_and_a_remedy(tiny):
    with pytest.raises(ValueError) as caught:
        check(tiny, make_sampler(tiny, 0.8), "bfloat16")
    message = str(caught.value)
    assert "differ in the log-probs of " in message and "0.03 on average is allowed for bfloat16" in message
    assert "another temperature" in message and "Set sampler.engine_options={}" in message and "sampler.engine=transformers" in message


@pytest.mark.parametrize("change", [1.01, float("nan")])
def test_other_weights_are_refused(tiny, change):
    worker = make_sampler(tiny)
    with torch.no_grad():
        worker.model.model.layers[0].mlp.down_proj.weight *= change
    with pytest.raises((ValueError, FloatingPointError)):
        check(tiny, worker)


def test_calls_aside_take_no_time_and_leave_no_span():
    timeline = Timeline()
    clock = ModelClock(lambda worker, method, args, result: 5.0)

    async def drive() -> tuple[int, float]:
        device = Device("a", InlineExecutor(), clock, timeline)
        await device.place("worker", list)
        return await device.aside("worker", "__len__"), asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=lambda: event_loop(clock)) as runner:
        assert runner.run(drive()) == (0, 0.0)
    assert not timeline.spans


def test_a_missing_extra_is_an_error_that_says_how_to_install_it(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(RuntimeError, match=r"sampler.engine: vllm cannot be imported .*pip install -e '.\[vllm\]'.*sampler.engine=transformers"):
        list(runs.steps(experiment(tiny, "sync", "sampler.engine=vllm"), 0))
