"""What every schedule shares: the workers it calls, the training loop, evaluation, and the record of a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from nowait.batch import LENGTH, Batch, Request, Rollouts, Segments, Weights
from nowait.config import Experiment
from nowait.runtime.timeline import Timeline

Call = Callable[..., Awaitable[Any]]  # await call(method, *args): one worker on its device
EVALUATION_CHUNK = 8  # tokens per round; freed slots are taken again at the next one
PROXIMAL_FORWARD = {"recompute", "ppo", "diagnostic"}  # anchors that need a forward pass before the update


@dataclass
class Usage:
    """What the samplers did since the last record: generated tokens, decode steps, tokens prefilled again after new weights."""

    tokens: int = 0
    steps: int = 0
    reprefilled: int = 0


@dataclass
class Crew:
    """Workers by role. Several samplers or learners share the work of one (colocated training)."""

    samplers: list[Call]
    learners: list[Call]
    scorer: Call
    prompts: Any  # next(count) -> list[Request], get_state, set_state
    timeline: Timeline
    devices: dict[str, list[str]]  # role -> device names
    reference: Call | None = None
    evaluator: Call | None = None
    evaluations: dict[str, tuple[list[Request], Call]] = field(default_factory=dict)  # set -> requests and their scorer; "eval" is the regular one
    weights: Weights | None = None  # newest published
    slots: int = 1  # of a sampler: sequences that it decodes together
    usage: Usage = field(default_factory=Usage)

    async def decode(self, sampler: Call, chunk: int) -> Segments:
        """A decode round of a training sampler, counted."""
        segments = await sampler("decode", chunk)
        lengths = np.diff(segments.offset)
        self.usage.tokens += int(lengths.sum())
        self.usage.steps += int(lengths.max(initial=0))
        return segments

    async def load(self, sampler: Call) -> None:
        """Bring the newest weights to a training sampler."""
        self.usage.reprefilled += await sampler("load", self.weights)


@dataclass
class StepRecord:
    """One training step, or an evaluation alone at step 0. `step` counts finished training steps."""

    step: int
    metrics: dict[str, Any]
    rewards: dict[str, np.ndarray] = field(default_factory=dict)  # evaluation set -> [prompts, samples]
    state: dict[str, Any] | None = None  # at a checkpoint: everything needed to go on


class Stopwatch:
    """Seconds of training; evaluations and checkpoints stop it."""

    def __init__(self, elapsed: float = 0.0) -> None:
        self.elapsed = elapsed
        self.restart()

    def restart(self) -> None:
        self.since = asyncio.get_running_loop().time()

    def lap(self) -> tuple[float, float]:
        """Start and end of the step that ends now."""
        start, self.since = self.since, asyncio.get_running_loop().time()
        self.elapsed += self.since - start
        return start, self.since


class Schedule:
    """What one kind of training does in a step of `train`, and its state. This base has nothing that goes on beside the steps."""

    def __init__(self, crew: Crew, experiment: Experiment) -> None:
        self.crew, self.experiment, self.plan = crew, experiment, experiment.schedule
        self.rollouts = Rollouts(self.plan.group_size)
        self.parts: dict[str, Any] = {"rollouts": self.rollouts}  # whose state a checkpoint holds
        self.tasks: list[asyncio.Task] = []  # that go on beside the steps
        self.loaded = -1  # version of the first sampler's weights

    def start(self) -> None:
        """Begin what goes on beside the steps."""

    async def step(self, step: int) -> tuple[Batch, dict[str, float], dict[str, Any]]:
        """Train once; returns batch, the learner's statistics and the metrics of this schedule alone."""
        raise NotImplementedError

    async def learn(self, ids: list[int], step: int) -> tuple[Batch, dict[str, float]]:
        """Score complete requests that the scorer has read, and train on them."""
        batch = self.rollouts.take(ids, step)
        grade(batch, await self.crew.scorer("finish", ids))
        return batch, await fit(self.crew, batch, await proximal(self.crew, batch, self.experiment.algorithm.anchor))

    async def barrier(self) -> None:
        """Let all come to rest where evaluation and checkpoint find the newest weights loaded and the sampler's cache void."""

    def release(self) -> None:
        """What the barrier has stopped goes on."""

    async def load_newest(self) -> None:
        if (version := self.crew.weights.version) != self.loaded:
            await self.crew.load(self.crew.samplers[0])
            self.loaded = version

    async def get_state(self) -> dict[str, Any]:
        """After a barrier: everything needed to go on, beside step and time."""
        crew, parts = self.crew, self.parts | {"prompts": self.crew.prompts}
        workers = {"sampler": crew.samplers[0], "scorer": crew.scorer, "learner": crew.learners[0], "reference": crew.reference}
        own = {name: part.get_state() for name, part in parts.items()}
        return own | {name: await call("get_state") for name, call in workers.items() if call}

    def set_state(self, state: dict[str, Any]) -> None:
        """Of this schedule's own parts; workers and prompts have been restored."""
        self.loaded = state["step"]
        for name, part in self.parts.items():
            part.set_state(state[name])


async def train(kind: type[Schedule], crew: Crew, experiment: Experiment, state: dict[str, Any] | None = None) -> AsyncIterator[StepRecord]:
    """One record per training step; `state` is that of a checkpoint's record, whose workers have been restored."""
    plan, start = experiment.schedule, state["step"] if state else 0
    crew.weights = await crew.learners[0]("publish")
    schedule = kind(crew, experiment)
    if state:
        schedule.set_state(state)
    elif plan.eval_every:
        yield StepRecord(0, *await evaluate(crew, True))
    schedule.start()
    watch = Stopwatch(state["elapsed"] if state else 0.0)
    try:
        for step in range(start, plan.steps):
            crew.timeline.step = step
            batch, stats, metrics = await schedule.step(step)
            evaluation, checkpoint = (due(every, step + 1, plan.steps) for every in (plan.eval_every, plan.checkpoint_every))
            if evaluation or checkpoint:
                await schedule.barrier()  # inside the step's time, since it is work of the training
            window, buffered = watch.lap(), schedule.rollouts.tokens
            record = StepRecord(step + 1, describe(crew, batch, stats, window, watch.elapsed, buffered) | metrics)
            if evaluation:
                more, record.rewards = await evaluate(crew, step + 1 == plan.steps)
                record.metrics |= more
            if checkpoint:
                record.state = await schedule.get_state() | {"step": step + 1, "elapsed": watch.elapsed}
            if evaluation or checkpoint:
                schedule.release()
                watch.restart()
            yield record
    finally:
        await cancel(schedule.tasks)


def due(every: int, step: int, steps: int) -> bool:
    """Whether something that happens every `every` steps (0: never) happens after `step` finished ones; the last step always counts."""
    return every > 0 and (step % every == 0 or step == steps)


def grade(batch: Batch, values: list[list[float | None]]) -> None:
    """Fill in the rewards of each request's samples; a request whose grader failed (None) keeps its place and leaves the loss."""
    rewards = [reward for samples in values for reward in samples]
    batch.keep = np.array([r is not None for r in rewards])
    batch.reward = np.array([0.0 if r is None else r for r in rewards], np.float32)
    for group in np.unique(batch.group[~batch.keep]):
        batch.keep[batch.group == group] = False


async def proximal(crew: Crew, batch: Batch, anchor: str) -> np.ndarray | None:
    """Log-probs [S, T] before the update, where the anchor needs this forward pass."""
    return await crew.learners[0]("logp", batch) if anchor in PROXIMAL_FORWARD else None


async def fit(crew: Crew, batch: Batch, logp_prox: np.ndarray | None) -> dict[str, float]:
    """Update and publish; returns the update's statistics."""
    stats = await _update(crew.learners, batch, logp_prox)
    crew.weights = await crew.learners[0]("publish")
    return stats


async def _update(learners: list[Call], batch: Batch, logp_prox: np.ndarray | None) -> dict[str, float]:
    if len(learners) == 1:
        return await learners[0]("update", batch, logp_prox)
    minibatches = (await together(learner("prepare", batch, logp_prox) for learner in learners))[0]
    for m in range(minibatches):
        shares = await together(learner("gradient", m, rank, len(learners)) for rank, learner in enumerate(learners))
        await together(learner("apply", shares) for learner in learners)
    return (await together(learner("finish") for learner in learners))[0]


async def together(calls: Iterable[Awaitable]) -> list:
    """Results of concurrent calls in their order; when one fails, the others are cancelled and joined before its error is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def cancel(tasks: list[asyncio.Future]) -> None:
    """End tasks, if they have not ended, and wait until they have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def evaluate(crew: Crew, every_set: bool) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Sample the set "eval" (or every set) with the newest weights: metrics, and the rewards [prompts, samples] of each set."""
    await crew.evaluator("load", crew.weights)
    metrics, rewards = {}, {}
    for name, (requests, scorer) in crew.evaluations.items():
        if every_set or name == "eval":
            more, rewards[name] = await _evaluate_set(crew.evaluator, requests, scorer)
            prefix = "eval" if name == "eval" else f"eval/{name}"
            metrics |= {f"{prefix}/{k}": v for k, v in more.items()}
    return metrics, rewards


async def _evaluate_set(evaluator: Call, requests: list[Request], scorer: Call) -> tuple[dict[str, float], np.ndarray]:
    rollouts = Rollouts(requests[0].n)
    rollouts.admit(requests)
    await scorer("admit", requests)
    await generate(evaluator, partial(evaluator, "decode", EVALUATION_CHUNK), scorer, requests, rollouts)
    ids = [r.id for r in requests]
    rewards = np.array(await scorer("finish", ids), np.float64)  # None, a failed grader, becomes NaN
    graded = np.isfinite(rewards).any(1)  # a prompt without a single grade is left out
    if not graded.any():
        raise ValueError(f"none of the {rewards.size} responses of an evaluation set could be graded; see the log")
    per_prompt = np.nanmean(rewards[graded], axis=1)
    error = float(per_prompt.std(ddof=1) / np.sqrt(len(per_prompt))) if len(per_prompt) > 1 else 0.0
    metrics = {"reward": float(per_prompt.mean()), "se": error, "len_mean": float(rollouts.take(ids, 0).length.mean())}
    return metrics, rewards.astype(np.float32)


async def generate(sampler: Call, decode: Callable[[], Awaitable[Segments]], scorer: Call, requests: list[Request], rollouts: Rollouts) -> None:
    """Sample requests to their end, in rounds of `decode`; the scorer, which has admitted them, reads each round."""
    await sampler("admit", requests)
    left = len(requests)
    while left:
        segments = await decode()
        left -= len(rollouts.add(segments))
        await scorer("prefill", segments)


def staleness_of(batch: Batch) -> np.ndarray:
    """int [tokens in the loss]: training steps between sampling and this update."""
    versions = batch.version[batch.mask]
    if versions.size and (versions.min() < 0 or versions.max() > batch.step):
        raise ValueError(f"step {batch.step}: token versions {versions.min()} to {versions.max()}, which must lie in [0, {batch.step}]")
    return batch.step - versions


def describe(crew: Crew, batch: Batch, stats: dict[str, float], window: tuple[float, float], elapsed: float, buffered: int) -> dict[str, Any]:
    """Metrics of a finished step; `window` is its start and end, `buffered` the tokens generated and not yet trained."""
    d, usage = staleness_of(batch), crew.usage
    crew.usage = Usage()
    mixed = (np.where(batch.version < 0, batch.version[:, :1], batch.version) != batch.version[:, :1]).any(1)
    rewards = batch.reward[batch.keep]
    return {
        **{f"train/{k}": v for k, v in stats.items()},
        "train/global_step": batch.step + 1,
        "stale/d_mean": float(d.mean()) if d.size else 0.0,
        "stale/d_max": int(d.max(initial=0)),
        "stale/mixed_frac": float(mixed.mean()),
        "stale/hist": np.bincount(d).tolist(),
        "rollout/reward_mean": float(rewards.mean()) if rewards.size else float("nan"),
        "rollout/reward_std": float(rewards.std()) if rewards.size else float("nan"),
        "rollout/len_mean": float(batch.length.mean()),
        "rollout/len_max": int(batch.length.max()),
        "rollout/truncated_frac": float((batch.finish == LENGTH).mean()),
        "rollout/grader_failed_frac": float(1 - batch.keep.mean()),
        "rollout/buffered_tokens": buffered,
        "rollout/reprefill_tokens": usage.reprefilled,
        "rollout/requests": sorted(set(batch.group.tolist())),
        "rollout/lengths": batch.length.tolist(),
        "time/elapsed": elapsed,
        **_times(crew, *window),
        "perf/occupancy": usage.tokens / (usage.steps * crew.slots) if usage.steps else 0.0,
    }


def _times(crew: Crew, start: float, end: float) -> dict[str, float]:
    """Seconds per stage (per device where several share a role) and busy fractions of a window."""
    seconds, busy, total = crew.timeline.seconds(start, end), crew.timeline.busy(start, end), end - start

    def spent(worker: str, *methods: str) -> float:
        return sum(seconds.get((worker, method), 0.0) for method in methods) / len(crew.devices.get(worker, [worker]))

    def busy_fraction(names: list[str]) -> float:
        return sum(busy.get(name, 0.0) for name in names) / (len(names) * total) if total else 0.0

    everywhere = dict.fromkeys(name for names in crew.devices.values() for name in names if name != "driver")
    return {
        "time/step": total,
        "time/generate": spent("sampler", "decode"),
        "time/prox_forward": spent("learner", "logp"),
        "time/train": spent("learner", "update", "prepare", "gradient", "apply", "finish"),
        "time/sync": spent("learner", "publish") + spent("sampler", "load"),
        "time/reward": spent("scorer", "prefill", "finish") + spent("reward", "prefill", "finish"),  # a rule or a model
        **({"time/ref": spent("reference", "prefill", "finish")} if crew.reference else {}),
        "time/idle_gen": total * (1 - busy_fraction(crew.devices["sampler"])),
        "time/idle_train": total * (1 - busy_fraction(crew.devices["learner"])),
        "perf/busy_frac": busy_fraction(list(everywhere)),
    }


def max_in_flight(experiment: Experiment) -> int:
    """Requests in flight at most: what was configured, or twice what the slots hold, so that a freed slot is taken at once."""
    return experiment.schedule.max_concurrent or max(1, 2 * experiment.sampler.slots // experiment.schedule.group_size)
