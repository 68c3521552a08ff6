"""Synchronous training: sample a batch, train on it, and only then sample the next.

Disaggregated (one sampler and one learner on two devices, of which one always waits) as in the paper's baseline,
or colocated (both devices sample, then both train data-parallel) when the crew has two of each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from nowait.batch import Request, Rollouts
from nowait.config import Experiment
from nowait.schedules.common import Call, Crew, StepRecord, Stopwatch, describe, due, evaluate, learn, together


async def synchronous(crew: Crew, experiment: Experiment, state: dict | None = None) -> AsyncIterator[StepRecord]:
    """One record per training step; `state` is that of a checkpoint's record, whose workers have been restored."""
    plan, start = experiment.schedule, state["step"] if state else 0
    rollouts = Rollouts(plan.group_size)
    crew.weights = await crew.learners[0]("publish")
    if start == 0 and plan.eval_every:
        yield StepRecord(0, *await evaluate(crew, True))
    watch = Stopwatch(state["elapsed"] if state else 0.0)
    for step in range(start, plan.steps):
        crew.timeline.step = step
        requests = crew.prompts.next(plan.batch_size)
        rollouts.admit(requests)
        await crew.scorer("admit", requests)
        count = len(crew.samplers)
        await together(_generate(crew, call, requests[i::count], rollouts, experiment.sampler.chunk) for i, call in enumerate(crew.samplers))
        batch, stats = await learn(crew, rollouts, [r.id for r in requests], step, experiment.algorithm.anchor)
        metrics = describe(crew, batch, stats, watch.lap(), watch.elapsed, rollouts.tokens)
        record = StepRecord(step + 1, metrics)
        if due(plan.eval_every, step + 1, plan.steps):
            more, record.rewards = await evaluate(crew, step + 1 == plan.steps)
            record.metrics |= more
        if due(plan.checkpoint_every, step + 1, plan.steps):
            workers = {"scorer": await crew.scorer("get_state"), "learner": await crew.learners[0]("get_state")}
            record.state = {"step": step + 1, "elapsed": watch.elapsed, "prompts": crew.prompts.get_state(), **workers}
        yield record
        watch.restart()


async def _generate(crew: Crew, sampler: Call, requests: list[Request], rollouts: Rollouts, chunk: int) -> None:
    await crew.load(sampler)
    await sampler("admit", requests)
    left = len(requests)
    while left:
        segments = await crew.decode(sampler, chunk)
        left -= len(rollouts.add(segments))
        await crew.scorer("prefill", segments)
