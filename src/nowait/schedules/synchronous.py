"""Synchronous training: sample a batch, train on it, and only then sample the next.

Disaggregated (one sampler and one learner on two devices, of which one always waits) as in the paper's baseline,
or colocated (both devices sample, then both train data-parallel) when the crew has two of each.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nowait.batch import Batch, Request
from nowait.schedules.common import Call, Schedule, generate, together, train


class _Synchronous(Schedule):
    async def step(self, step: int) -> tuple[Batch, dict[str, float], dict[str, Any]]:
        crew = self.crew
        requests = crew.prompts.next(self.plan.batch_size)
        self.rollouts.admit(requests)
        await crew.scorer("admit", requests)
        await together(self.sample(sampler, requests[i :: len(crew.samplers)]) for i, sampler in enumerate(crew.samplers))
        batch, stats = await self.learn([r.id for r in requests], step)
        return batch, stats, {}

    async def sample(self, sampler: Call, requests: list[Request]) -> None:
        await self.crew.load(sampler)
        await generate(sampler, partial(self.crew.decode, sampler, self.experiment.sampler.chunk), self.crew.scorer, requests, self.rollouts)


synchronous = partial(train, _Synchronous)
