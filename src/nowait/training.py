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
from nowait.config_rules import check_rows, most_overlapped
from nowait.runtime.costs import LinearCosts
from nowait.runtime.device import Device, InlineExecutor, MeasuredClock, ModelClock, ProcessExecutor, WallClock
from nowait.runtime.group import GroupExecutor
from nowait.runtime.timeline import Timeline
from nowait.schedules.asynchronous import asynchronous
from nowait.schedules.common import Call, Crew, StepRecord
from nowait.schedules.overlapped import overlapped
from nowait.schedules.synchronous import synchronous
from nowait.selfcheck import check_sampler
from nowait.tasks.prompts import Prompts, evaluation_requests
from nowait.workers.scorers import RuleScorer

DEALT = "nowait.workers.dealt:DealtSampler"  # a sampler of several ranks
SAMPLERS = {"transformers": "nowait.workers.sampler:HFSampler", "vllm": "nowait.workers.vllm_sampler:VLLMSampler"}
LEARNERS = {"group": "nowait.workers.learner:HFLearner", "gae": "nowait.workers.ppo_learner:PPOLearner"}  # by algorithm.advantage
SHARDED = {"group": "nowait.workers.sharded:ShardedLearner", "gae": "nowait.workers.sharded:ShardedPPOLearner"}  # of several ranks
REWARD, REFERENCE = "nowait.workers.streamed:load_reward", "nowait.workers.streamed:StreamedReference"
SCHEDULES = {"synchronous": synchronous, "colocated": synchronous, "asynchronous": asynchronous, "overlapped": overlapped}


def make_clock(experiment: Experiment):
    """The clock that the experiment names."""
    if experiment.runtime.clock == "model":
        return ModelClock(LinearCosts(experiment.runtime.costs))
    return WallClock() if experiment.runtime.clock == "wall" else MeasuredClock()


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
    check_gpus(experiment)
    task = tasks.load(experiment.task)
    check_rows(experiment, task.size("train"))  # before a model is loaded, or fetched
    devices = _devices(experiment, clock, timeline)
    schedule = SCHEDULES[experiment.schedule.kind]
    try:
        crew = await _crew(experiment, task, seed, devices, timeline, snapshots)
        if experiment.sampler.engine == "vllm":  # the built-in sampler runs the learner's own code
            learner = partial(devices[crew.devices["learner"][0]].aside, "learner")
            for name in crew.devices["sampler"]:
                await check_sampler(partial(devices[name].aside, "sampler"), learner, crew.prompts, experiment.model.dtype)
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

    def executor(gpus: list[int]):
        if runtime.executor == "ray":
            return ray_executor()(runtime.ray_address, runtime.threads, len(gpus))
        return ProcessExecutor(runtime.threads, gpus) if runtime.executor == "process" else InlineExecutor()

    def group(name: str):
        ranks, gpus = experiment.ranks(name), runtime.gpus.get(name, [])
        share = len(gpus) // ranks
        members = [executor(gpus[rank * share :][:share]) for rank in range(ranks)]
        return GroupExecutor(members, ("sampler", "evaluator", "learner")) if ranks > 1 else members[0]

    devices = {name: Device(name, group(name), clock, timeline) for name in runtime.placement}
    return devices | {"driver": Device("driver", InlineExecutor(), clock, timeline)}  # rules are graded where the schedule runs


def ray_executor() -> type:
    """The executor of the extra `ray`. Raises ValueError where that is not installed."""
    from nowait.workers.models import optional

    optional("ray", "ray", "runtime.executor=ray")
    from nowait.runtime.ray_executor import RayExecutor

    return RayExecutor


async def _crew(experiment: Experiment, task: tasks.Task, seed: int, devices: dict[str, Device], timeline: Timeline, snapshots: Path | None) -> Crew:
    plan, sampling = experiment.schedule, experiment.sampler
    encode, decode, _ = load_tokenizer(experiment.model.path)
    longest = {"max_prompt_tokens": sampling.max_prompt_tokens, "max_new_tokens": sampling.max_new_tokens}
    capacity, roles = sum(longest.values()), {role: experiment.hosts(role) for role in ("sampler", "learner")}
    place, rule = partial(_place, experiment, devices), partial(_place_rule, devices["driver"], decode)
    factory, engine = _engine(experiment)
    options = engine | {"slots": sampling.slots, "capacity": capacity, "temperature": sampling.temperature, "seed": seed}
    learner = (SHARDED if experiment.learner.ranks > 1 else LEARNERS)[experiment.algorithm.advantage]
    starting = [place("sampler", name, factory, **options) for name in roles["sampler"]]
    starting += [place("learner", name, learner, **_learner(experiment, seed, snapshots)) for name in roles["learner"]]
    workers = await asyncio.gather(*starting)  # processes start side by side
    crew = Crew(
        samplers=workers[: len(roles["sampler"])],
        learners=workers[len(roles["sampler"]) :],
        scorer=await rule("scorer", task, "train", plan.group_size),
        prompts=Prompts(task, encode, seed=seed, n=plan.group_size, **longest),
        timeline=timeline,
        devices=roles | {"scorer": ["driver"]},
        weights=Weights(0, None),
        slots=sampling.slots,
    )
    await _place_frozen(crew, experiment, place, capacity)
    if plan.eval_every:
        await _place_evaluation(crew, experiment, task, encode, place, rule)
    return crew


async def _place(experiment: Experiment, devices: dict[str, Device], role: str, name: str, factory: str, /, **options) -> Call:
    """A worker with a model, on the device `name`."""
    await devices[name].place(role, factory, **_model(experiment, name) | options)
    return partial(devices[name].run, role)


async def _place_rule(driver: Device, decode, name: str, task: tasks.Task, split: str, n: int) -> Call:
    await driver.place(name, RuleScorer, task=task, decode=decode, split=split, n=n)
    return partial(driver.run, name)


def _engine(experiment: Experiment) -> tuple[str, dict]:
    """Factory of the samplers, and what all of them give their engine: sampler and evaluator share one that is large enough for both."""
    sampling, plan, options = experiment.sampler, experiment.evaluation, {}
    factory = SAMPLERS[sampling.engine]
    if sampling.engine == "vllm":
        longest = sampling.max_prompt_tokens + max(sampling.max_new_tokens, plan.max_new_tokens)
        slots = max(sampling.slots, plan.slots) // sampling.ranks
        options["engine"] = sampling.engine_options | {"max_num_seqs": slots, "max_model_len": longest}
    return (DEALT, {"factory": factory} | options) if sampling.ranks > 1 else (factory, options)


def check_gpus(experiment: Experiment) -> None:
    """Raise ValueError where the config names GPUs that no worker would use, or that this machine does not have.

    A cluster is asked for them when workers are placed.
    """
    for device, gpus in experiment.runtime.gpus.items():
        used = experiment.ranks(device) * int(experiment.sampler.engine_options.get("tensor_parallel_size", 1))
        if len(gpus) > used:
            raise ValueError(f"runtime.gpus: device {device} has {len(gpus)} GPUs, of which its workers use {used}: name fewer, or raise their ranks")
    wanted = sorted({gpu for gpus in experiment.runtime.gpus.values() for gpu in gpus})
    if wanted and not experiment.runtime.ray_address:
        import torch

        if (there := torch.cuda.device_count()) <= wanted[-1]:
            remedy = "take --scale cpu, or gpu1 for one card of 24 GB, or set runtime.gpus to what `nowait doctor` finds"
            raise ValueError(f"runtime.gpus: names {', '.join(map(str, wanted))} (from 0 on), and this machine has {there} GPUs; {remedy}")


def _model(experiment: Experiment, device: str) -> dict:
    """What every worker on a device is told about models; a process sees the device's own GPUs only, and counts them from 0."""
    runtime, gpus = experiment.runtime, experiment.runtime.gpus.get(device)
    index = gpus[0] if gpus and runtime.executor == "inline" else 0
    place = f"cuda:{index}" if gpus else "cpu"
    return {"path": experiment.model.path, "dtype": experiment.model.dtype, "threads": runtime.threads, "device": place}


def _learner(experiment: Experiment, seed: int, snapshots: Path | None) -> dict:
    """Keyword arguments of the learner beside those of its model."""
    options = {
        "learner": experiment.learner,
        "algorithm": experiment.algorithm,
        "seed": seed,
        "temperature": experiment.sampler.temperature,
        **experiment.model.model_dump(include={"gradient_checkpointing", "lora_rank", "lora_alpha"}),
        "snapshots": str(snapshots) if experiment.runtime.executor == "process" else None,
    }
    return options | ({"critic": experiment.critic} if experiment.algorithm.advantage == "gae" else {})


async def _place_frozen(crew: Crew, experiment: Experiment, place: Call, capacity: int) -> None:
    """The models that are not trained: they hold every request in flight."""
    n = experiment.schedule.group_size
    shared = {"slots": most_overlapped(experiment) * n, "capacity": capacity, "n": n}
    if path := experiment.reward.path:
        own = ":" in path and not path.startswith(("asset:", "gguf:"))  # module:function of a scorer of the user's
        (name,) = crew.devices["scorer"] = experiment.hosts("reward")
        crew.scorer = await place("reward", name, path if own else REWARD, path=path, policy=experiment.model.path, **shared)
    if experiment.algorithm.kl_coef:
        (name,) = crew.devices["reference"] = experiment.hosts("reference")
        crew.reference = await place("reference", name, REFERENCE, temperature=experiment.sampler.temperature, **shared)


async def _place_evaluation(crew: Crew, experiment: Experiment, task: tasks.Task, encode, place: Call, rule: Call) -> None:
    """A second sampler beside the first, with a random stream of its own and one seed for all runs: methods are compared on equal draws."""
    plan, longest_prompt = experiment.evaluation, experiment.sampler.max_prompt_tokens
    factory, engine = _engine(experiment)
    sizes = {"slots": plan.slots, "capacity": longest_prompt + plan.max_new_tokens, "temperature": plan.temperature}
    crew.evaluator = await place("evaluator", crew.devices["sampler"][0], factory, **engine, **sizes, seed=0, stream=1)
    for name, held_out in {"eval": task, **{name: tasks.load(config) for name, config in plan.benchmarks.items()}}.items():
        prompts, samples = plan.prompts, plan.samples
        if name != "eval":
            prompts, samples = min(plan.prompts, held_out.size("eval")), plan.benchmark_samples
        requests = evaluation_requests(held_out, encode, prompts, samples, longest_prompt, plan.max_new_tokens)
        crew.evaluations[name] = requests, await rule(f"{name} scorer", held_out, "eval", samples)


async def _restore(crew: Crew, state: dict) -> None:
    crew.prompts.set_state(state["prompts"])
    for learner in crew.learners:
        await learner("set_state", state["learner"])
    await crew.scorer("set_state", state["scorer"])
    if crew.reference:
        await crew.reference("set_state", state["reference"])
    # in this order loading costs nothing: the run that left the state has paid for the prefill
    await crew.samplers[0]("load", await crew.learners[0]("publish"))
    await crew.samplers[0]("set_state", state["sampler"])


def load_tokenizer(path: str):
    """encode(prompt) -> ids, decode(ids) -> text with every token shown, and the tokenizer itself.

    A prompt is a text, or a list of messages {role, content}, which the chat template renders up to where the assistant's answer begins.
    """
    from transformers import AutoTokenizer

    from nowait.workers.models import loading, model_folder

    with loading("model.path", path):
        tokenizer = AutoTokenizer.from_pretrained(model_folder(path))

    def encode(prompt: str | list[dict]) -> list[int]:
        if isinstance(prompt, str):
            return tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if not tokenizer.chat_template:
            raise ValueError(f"model.path: the tokenizer of {path!r} has no chat template, which the task's messages need; take a chat model")
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)

    return encode, tokenizer.decode, tokenizer
