"""From an experiment to a running schedule: builds devices, places workers, and streams the step records."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path

from nowait import tasks
from nowait.batch import Weights
from nowait.config import Experiment
from nowait.config_rules import most_overlapped
from nowait.runtime.costs import LinearCosts
from nowait.runtime.device import Device, InlineExecutor, MeasuredClock, ModelClock, ProcessExecutor, WallClock
from nowait.runtime.timeline import Timeline
from nowait.schedules.asynchronous import asynchronous
from nowait.schedules.common import Crew, StepRecord
from nowait.schedules.overlapped import overlapped
from nowait.schedules.synchronous import synchronous
from nowait.tasks.prompts import Prompts, evaluation_requests
from nowait.workers.scorers import RuleScorer

SAMPLER = "nowait.workers.sampler:HFSampler"
LEARNERS = {"group": "nowait.workers.learner:HFLearner", "gae": "nowait.workers.ppo_learner:PPOLearner"}  # by algorithm.advantage
REWARD, REFERENCE = "nowait.workers.streamed:load_reward", "nowait.workers.streamed:StreamedReference"
SCHEDULES = {"synchronous": synchronous, "colocated": synchronous, "asynchronous": asynchronous, "overlapped": overlapped}


def make_clock(experiment: Experiment):
    """The clock that the experiment names."""
    clocks = {"model": lambda: ModelClock(LinearCosts(experiment.runtime.costs)), "wall": WallClock, "measured": MeasuredClock}
    return clocks[experiment.runtime.clock]()


async def stream(
    experiment: Experiment,
    seed: int,
    clock,
    timeline: Timeline,
    *,
    state: dict | None = None,
    snapshots: Path | None = None,
    policy: Path | None = None,
) -> AsyncIterator[StepRecord]:
    """Step records of a training. `state` (a checkpoint's) continues it; `policy` is the folder that gets the final model.

    A record with a `state` also carries the time of the clock, at which the event loop of a resumed run must begin.
    """
    devices = _devices(experiment, clock, timeline)
    schedule = SCHEDULES[experiment.schedule.kind]
    try:
        crew = await _crew(experiment, seed, devices, timeline, snapshots)
        if state:
            await _restore(crew, state)
        async with aclosing(schedule(crew, experiment, state)) as records:
            async for record in records:
                if record.state is not None:
                    record.state["time"] = asyncio.get_running_loop().time()
                yield record
        if policy:
            await crew.learners[0]("save", str(policy))
    finally:
        for device in devices.values():
            device.close()


def _devices(experiment: Experiment, clock, timeline: Timeline) -> dict[str, Device]:
    runtime = experiment.runtime

    def executor():
        return ProcessExecutor(runtime.threads) if runtime.executor == "process" else InlineExecutor()

    devices = {name: Device(name, executor(), clock, timeline) for name in runtime.placement}
    return devices | {"driver": Device("driver", InlineExecutor(), clock, timeline)}  # rules are graded where the schedule runs


async def _crew(experiment: Experiment, seed: int, devices: dict[str, Device], timeline: Timeline, snapshots: Path | None) -> Crew:
    roles = {
        role: [name for name, hosted in experiment.runtime.placement.items() if role in hosted]
        for role in ("sampler", "learner", "reward", "reference")
    }
    encode, decode, _ = load_tokenizer(experiment.model.path)
    plan, sampling, task = experiment.schedule, experiment.sampler, tasks.load(experiment.task)
    model = {"path": experiment.model.path, "dtype": experiment.model.dtype, "threads": experiment.runtime.threads}
    capacity = sampling.max_prompt_tokens + sampling.max_new_tokens
    for name in roles["sampler"]:
        await devices[name].place("sampler", SAMPLER, **model, slots=sampling.slots, capacity=capacity, temperature=sampling.temperature, seed=seed)
    for name in roles["learner"]:
        await devices[name].place("learner", LEARNERS[experiment.algorithm.advantage], **model, **_learner(experiment, seed, snapshots))
    crew = Crew(
        samplers=[partial(devices[name].run, "sampler") for name in roles["sampler"]],
        learners=[partial(devices[name].run, "learner") for name in roles["learner"]],
        scorer=partial(devices["driver"].run, "scorer"),
        prompts=Prompts(
            task, encode, seed=seed, n=plan.group_size, max_prompt_tokens=sampling.max_prompt_tokens, max_new_tokens=sampling.max_new_tokens
        ),
        timeline=timeline,
        devices={role: roles[role] for role in ("sampler", "learner")} | {"scorer": ["driver"]},
        weights=Weights(0, None),
        slots=sampling.slots,
    )
    if not experiment.reward.path:
        await devices["driver"].place("scorer", RuleScorer, task=task, decode=decode, split="train", n=plan.group_size)
    await _place_frozen(crew, experiment, devices, roles, model, capacity)
    if plan.eval_every:
        await _place_evaluation(crew, experiment, devices[roles["sampler"][0]], devices["driver"], model, encode, decode)
    return crew


def _learner(experiment: Experiment, seed: int, snapshots: Path | None) -> dict:
    """Keyword arguments of the learner beside those of its model."""
    options = {
        "learner": experiment.learner,
        "algorithm": experiment.algorithm,
        "seed": seed,
        "temperature": experiment.sampler.temperature,
        "gradient_checkpointing": experiment.model.gradient_checkpointing,
        "snapshots": str(snapshots) if experiment.runtime.executor == "process" else None,
    }
    return options | ({"critic": experiment.critic} if experiment.algorithm.advantage == "gae" else {})


async def _place_frozen(crew: Crew, experiment: Experiment, devices: dict[str, Device], roles: dict, model: dict, capacity: int) -> None:
    """The models that are not trained: they hold every request in flight."""
    n = experiment.schedule.group_size
    shared = {"slots": most_overlapped(experiment) * n, "capacity": capacity, "n": n}
    if path := experiment.reward.path:
        (device,) = roles["reward"]
        own = ":" in path and not path.startswith("asset:")  # module:function of a scorer of the user's
        await devices[device].place("reward", path if own else REWARD, **model | {"path": path}, policy=experiment.model.path, **shared)
        crew.scorer, crew.devices["scorer"] = partial(devices[device].run, "reward"), [device]
    if experiment.algorithm.kl_coef:
        (device,) = roles["reference"]
        await devices[device].place("reference", REFERENCE, **model, temperature=experiment.sampler.temperature, **shared)
        crew.reference, crew.devices["reference"] = partial(devices[device].run, "reference"), [device]


async def _place_evaluation(crew: Crew, experiment: Experiment, device: Device, driver: Device, model: dict, encode, decode) -> None:
    """A second sampler beside the first, with a random stream of its own and one seed for all runs: methods are compared on equal draws."""
    plan, longest_prompt = experiment.evaluation, experiment.sampler.max_prompt_tokens
    capacity = longest_prompt + plan.max_new_tokens
    await device.place("evaluator", SAMPLER, **model, slots=plan.slots, capacity=capacity, temperature=plan.temperature, seed=0, stream=1)
    crew.evaluator = partial(device.run, "evaluator")
    for name, config in {"eval": experiment.task, **plan.benchmarks}.items():
        held_out, samples = tasks.load(config), plan.samples if name == "eval" else plan.benchmark_samples
        await driver.place(f"{name} scorer", RuleScorer, task=held_out, decode=decode, split="eval", n=samples)
        requests = evaluation_requests(held_out, encode, plan.prompts, samples, longest_prompt, plan.max_new_tokens)
        crew.evaluations[name] = requests, partial(driver.run, f"{name} scorer")


async def _restore(crew: Crew, state: dict) -> None:
    crew.prompts.set_state(state["prompts"])
    for learner in crew.learners:
        await learner("set_state", state["learner"])
    await crew.scorer("set_state", state["scorer"])
    if crew.reference:
        await crew.reference("set_state", state["reference"])
    if "sampler" in state:
        # in this order loading costs nothing: the run that left the state has paid for the prefill
        await crew.samplers[0]("load", await crew.learners[0]("publish"))
        await crew.samplers[0]("set_state", state["sampler"])


def load_tokenizer(path: str):
    """encode(text) -> ids, decode(ids) -> text with every token shown, and the tokenizer itself."""
    from transformers import AutoTokenizer

    from nowait.workers.models import model_folder

    tokenizer = AutoTokenizer.from_pretrained(model_folder(path))

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids)

    return encode, decode, tokenizer
