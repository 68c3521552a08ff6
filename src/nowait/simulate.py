"""The papers' hardware in simulated time: the real schedules over workers that cost what the devices' data sheets say.

`assumptions` reads what is assumed about a setup (paper_configs/simulation), `simulate` runs one method, `fit` calibrates on the published baselines.
Needs no torch.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from nowait import config as configs
from nowait import published
from nowait.batch import Segments, Weights
from nowait.config import Experiment, Model, NonNegative, Positive
from nowait.config_files import ConfigError, Layers, Problem, find, parse_overrides, read
from nowait.runs import CHECKPOINTS_KEPT
from nowait.runtime.device import Device, InlineExecutor, ModelClock, event_loop
from nowait.runtime.hardware import OPTIMISER_BYTES, DoesNotFit, Group, Hardware, Shape
from nowait.runtime.timeline import Timeline
from nowait.schedules.common import Call, Crew, max_in_flight
from nowait.training import SCHEDULES
from nowait.workers.simulated import Lengths, RewardCurve, SimulatedLearner, SimulatedPrompts, SimulatedReader, SimulatedSampler, World

METHODS = {"a3po": ("sync", "sync_colocated", "recompute", "loglinear"), "oppo": ("sequential", "intra", "inter", "both")}


class Calibration(Model):
    """Factors on the seconds of each stage; 1 is the data sheet with the assumed efficiencies."""

    generate: NonNegative = 1.0
    forward: NonNegative = 1.0
    update: NonNegative = 1.0
    score: NonNegative = 1.0


class Assumptions(Model):
    """What a simulation assumes beyond the experiment."""

    hardware: str  # a file of paper_configs/hardware
    actor: str  # a key of paper_configs/simulation/models.yaml, as is the next
    reward_model: str | None = None  # None: a rule, which costs nothing
    devices: dict[str, Positive]  # of each device of the placement: how many of the hardware work as one
    lanes: Positive = 1  # models that may work at once on one device
    contention: Annotated[float, Field(ge=1)] = 1.0  # how much longer each takes while several do
    chunk: Positive | None = None  # tokens per simulated decode round, if not the experiment's: fewer rounds, the same work
    tensor_parallel: dict[str, Positive] = {}  # of a device while it samples or scores; 1 where not given
    lengths: Lengths
    rewards: RewardCurve = RewardCurve()
    calibration: Calibration = Calibration()


@dataclass(frozen=True)
class Simulation:
    """Metrics of every training step, and all calls."""

    rows: list[dict[str, Any]]
    timeline: Timeline
    devices: dict[str, int]
    world: World

    def summary(self, skipped: int = 0) -> dict[str, float]:
        """Means per step after the first `skipped` ones; busy_frac weighs every device by how many it stands for."""

        def mean(key: str) -> float:
            return float(np.mean([row.get(key, 0.0) for row in self.rows[skipped:]]))

        names = {"seconds_per_step": "time/step", "generate": "time/generate", "reward": "time/reward", "reference": "time/ref",
                 "forward": "time/prox_forward", "update": "time/train", "transfer": "time/sync", "occupancy": "perf/occupancy",
                 "mean_staleness": "stale/d_mean", "delta": "overlap/delta"}  # fmt: skip
        shares = {f"busy_{name}": mean(f"busy/{name}") / mean("time/step") for name in self.devices}
        total = sum(self.devices.values())
        return {name: mean(key) for name, key in names.items()} | shares | {
            "busy_frac": sum(count * shares[f"busy_{name}"] for name, count in self.devices.items()) / total,
            "device_seconds": total * mean("time/step"),
            "tokens_per_s": mean("train/response_tokens") / mean("time/step"),
        }  # fmt: skip


class _Crew(Crew):
    """Tokens and steps are counted by the simulated samplers: a segment holds fewer pieces than tokens were decoded."""

    simulated: list[SimulatedSampler]

    async def decode(self, sampler: Call, chunk: int) -> Segments:
        segments = await sampler("decode", chunk)
        for worker in self.simulated:
            self.usage.tokens, self.usage.steps = self.usage.tokens + worker.tokens, self.usage.steps + worker.steps
            worker.tokens = worker.steps = 0
        return segments


def methods(config: str) -> tuple[str, ...]:
    """The methods of a setup's paper, its baseline first and its own last. Raises ConfigError for a config of neither paper."""
    if (paper := config.partition("/")[0]) not in METHODS:
        raise ConfigError([Problem("config", "no setup of a paper", f"it begins with {' or '.join(f'{name}/' for name in METHODS)}")], config)
    return METHODS[paper]


def load(config: str, method: str, overrides: Iterable[str] = ()) -> tuple[Experiment, Assumptions]:
    """A shipped setup at the paper's scale and what is assumed about it; an override's first word says to which of the two it belongs."""
    own = [o for o in overrides if o.split("=")[0].split(".")[0] in Assumptions.model_fields]
    one = ("sampler.ranks=1", "learner.ranks=1")  # what is assumed of the devices takes their place
    experiment = configs.load(config, "paper", [*one, *(o for o in overrides if o not in own)], method)
    return experiment, assumptions(config, own)


def assumptions(config: str, overrides: Iterable[str] = ()) -> Assumptions:
    """Those of a shipped setup, such as oppo/stackexchange_7b, with `key=value` overrides applied. Raises ConfigError."""
    paper, _, setup = config.partition("/")
    file, data = _read(f"simulation/{paper}", setup)
    layers = Layers(())
    layers.merge(data, "file")
    for key, value in parse_overrides(overrides, file):
        layers.set(key, value, "override")
    return _checked(Assumptions, file, layers.data)


def hardware(name: str) -> Hardware:
    """A preset of paper_configs/hardware. Raises ConfigError that names what there is."""
    return _checked(Hardware, *_read(f"hardware/{name}"))


def shape(name: str) -> Shape:
    """A model of paper_configs/simulation/models.yaml. Raises ConfigError that names what there is."""
    return _checked(Shape, *_read("simulation/models", name))


def _read(stem: str, entry: str | None = None) -> tuple[Path, dict[str, Any]]:
    """A shipped file and what it says, of one entry or altogether."""
    data = read(file := find(stem))
    if entry is not None and entry not in data:
        raise ConfigError([Problem(entry, "is not in this file", f"there are {', '.join(data)}")], file)
    return file, data if entry is None else data[entry]


def _checked(kind: type, file: Path, data: dict[str, Any]) -> Any:
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        problems = [Problem(".".join(map(str, e["loc"])), e["msg"].lower(), f"see {file.name}") for e in error.errors()]
        raise ConfigError(problems, file) from None


def simulate(
    experiment: Experiment, assumed: Assumptions, steps: int | None = None, seed: int = 0, group=None, heard: Callable = lambda *call: None
) -> Simulation:
    """Run the experiment's schedule for `steps` training steps (default: all). The same arguments give the same numbers in every process.

    Evaluations and checkpoints are left out. `group(device, model, training=False)` gives a Group in the place of the assumed hardware's; `heard` is
    told of each call as it begins: seconds, worker, method, arguments, result. Raises DoesNotFit where a model does not fit its devices.
    """
    plan = experiment.schedule
    changed = {"steps": steps or plan.steps, "group_size": 1, "eval_every": 0, "checkpoint_every": 0, "max_concurrent": max_in_flight(experiment)}
    sampler = experiment.sampler.model_copy(update={"chunk": assumed.chunk or experiment.sampler.chunk})
    placed = experiment.model_copy(update={"schedule": plan.model_copy(update=changed), "sampler": sampler})
    world, timeline, rows = _world(experiment, assumed, changed["steps"], seed), Timeline(), []

    def cost(*call: Any) -> float:
        heard(seconds := world.take_seconds(), *call)
        return seconds

    clock = ModelClock(cost)

    async def drive() -> None:
        crew = await _crew(experiment, assumed, world, clock, timeline, group or partial(_group, assumed))
        async with aclosing(SCHEDULES[plan.kind](crew, placed, None)) as records:
            async for record in records:
                end = record.metrics["time/elapsed"]
                busy = timeline.busy(end - record.metrics["time/step"], end)  # now, while calls in progress count
                rows.append(record.metrics | {f"busy/{name}": busy.get(name, 0.0) for name in experiment.runtime.placement})

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: event_loop(clock)) as runner:
            runner.run(drive())

    with ThreadPoolExecutor(1) as pool:  # a notebook's own thread has a loop already
        pool.submit(run).result()
    return Simulation(rows, timeline, {name: assumed.devices[name] for name in experiment.runtime.placement}, world)


def seconds_per_step(experiment: Experiment, assumed: Assumptions, steps: int = 40, trace: Path | None = None) -> tuple[float, dict[str, float]]:
    """Seconds of a training step with its share of the evaluations, and the summary of the simulated steps; the first eta + 2 do not count.

    `trace`: a file for all calls, which Perfetto shows.
    """
    simulation = simulate(experiment, assumed, steps)
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        simulation.timeline.to_trace(trace)
    found = simulation.summary(min(steps // 2, experiment.schedule.max_staleness + 2))
    every = experiment.schedule.eval_every
    evaluation = evaluation_seconds(experiment, assumed) / every if every else 0.0
    return found["seconds_per_step"] + evaluation, found | {"evaluation": evaluation}


def evaluation_seconds(experiment: Experiment, assumed: Assumptions) -> float:
    """Seconds to sample the regular evaluation set on the devices and in the slots of the sampler."""
    plan = experiment.evaluation
    world = World(assumed.lengths, plan.prompts, plan.samples, plan.prompts, 1, 0, assumed.rewards)
    devices = _group(assumed, experiment.hosts("sampler")[0], assumed.actor)
    worker = SimulatedSampler(world, devices, experiment.sampler.slots, assumed.calibration.generate)
    worker.admit(SimulatedPrompts().next(plan.prompts))
    while world.open.any():
        worker.decode(256)
    return world.take_seconds()


def fit(config: str, overrides: Iterable[str] = (), rounds: int = 8) -> Calibration:
    """Factors with which the simulation meets the published baselines: seconds per step of sync and recompute and the proximal forward for A-3PO;
    for OPPO one common factor, from the sequential baseline of a task whose steps to the target are known."""
    paper, _, setup = config.partition("/")
    facts, overrides = published.load(paper), list(overrides)
    if paper == "oppo":
        minutes, steps = facts["tables"]["minutes_to_target"][setup]["trl"], max(facts["figures"]["reward_vs_step"][setup])
        experiment, assumed = load(config, "sequential", overrides)
        fitted = Calibration()
        for _ in range(rounds):
            more = 60 * minutes / steps / seconds_per_step(experiment, assumed.model_copy(update={"calibration": fitted}))[0]
            fitted = Calibration(**{name: factor * more for name, factor in fitted.model_dump().items()})
        return fitted
    target, proximal = facts["tables"]["seconds_per_step"][setup], facts["figures"]["proximal_seconds"][setup]["recompute"]
    (sync, assumed), (recompute, _) = (load(config, method, overrides) for method in ("sync", "recompute"))
    _, alone = seconds_per_step(recompute, assumed.model_copy(update={"calibration": Calibration()}))
    generate, update, forward = 1.0, 1.0, proximal.get("mean", proximal.get("typical")) / alone["forward"]
    for _ in range(rounds):
        tried = assumed.model_copy(update={"calibration": Calibration(generate=generate, update=update, forward=forward)})
        (whole, stages), (other, _) = seconds_per_step(sync, tried), seconds_per_step(recompute, tried)
        more = target["recompute"] - other  # what the update has to take longer
        generate *= 1 + (target["sync"] - whole - more) / stages["generate"]
        update *= 1 + more / stages["update"]
    return Calibration(generate=generate, update=update, forward=forward)


def _group(assumed: Assumptions, device: str, model: str, training: bool = False) -> Group:
    tensor_parallel = 1 if training else assumed.tensor_parallel.get(device, 1)
    return Group(hardware(assumed.hardware), shape(model), assumed.devices[device], tensor_parallel, training)


def _world(experiment: Experiment, assumed: Assumptions, steps: int, seed: int) -> World:
    plan = experiment.schedule
    in_flight = max(max_in_flight(experiment), experiment.overlap.delta_max + experiment.overlap.delta)
    requests = plan.batch_size * (steps + plan.max_staleness + 1) + in_flight
    return World(assumed.lengths, requests, plan.group_size, plan.batch_size, steps, seed, assumed.rewards)


async def _crew(experiment: Experiment, assumed: Assumptions, world: World, clock: ModelClock, timeline: Timeline, group: Callable) -> _Crew:
    c, factor, names = experiment.learner, assumed.calibration, [*experiment.runtime.placement, "driver"]
    devices = {name: Device(name, InlineExecutor(), clock, timeline, assumed.lanes, assumed.contention) for name in names}
    roles = {role: experiment.hosts(role) for role in ("sampler", "learner")}

    async def place(role: str, device: str, worker: Any) -> Call:
        await devices[device].place(role, lambda: worker)
        return partial(devices[device].run, role)

    samplers = [
        SimulatedSampler(world, g := group(name, assumed.actor), experiment.sampler.slots, factor.generate, g.transfer()) for name in roles["sampler"]
    ]
    training = {"minibatches": c.minibatches, "epochs": c.epochs, "micro_batch_tokens": c.micro_batch_tokens,
                "recompute": experiment.model.gradient_checkpointing, "forward": factor.forward, "update": factor.update}  # fmt: skip
    learners = [SimulatedLearner(world, group(name, assumed.actor, training=True), **training) for name in roles["learner"]]
    where = experiment.hosts("reward")[0] if assumed.reward_model else "driver"
    reader = SimulatedReader(world, group(where, assumed.reward_model) if assumed.reward_model else None, factor.score)
    crew = _Crew(
        samplers=[await place("sampler", name, worker) for name, worker in zip(roles["sampler"], samplers, strict=True)],
        learners=[await place("learner", name, worker) for name, worker in zip(roles["learner"], learners, strict=True)],
        scorer=await place("reward" if assumed.reward_model else "scorer", where, reader),
        prompts=SimulatedPrompts(),
        timeline=timeline,
        devices=roles | {"scorer": [where]},
        weights=Weights(0, None),
        slots=experiment.sampler.slots,
    )
    if experiment.algorithm.kl_coef:
        (name,) = crew.devices["reference"] = experiment.hosts("reference")
        crew.reference = await place("reference", name, SimulatedReader(world, group(name, assumed.actor), factor.score, log_probs=True))
    crew.simulated = samplers
    return crew


def compare(config: str, overrides: Iterable[str] = (), steps: int = 40, traces: Path | None = None) -> dict[str, dict[str, float]]:
    """The methods of a setup's paper: seconds per step (with evaluations), speed-up over the first one, and the summary of each.

    `traces`: a folder for METHOD.json of each, with all its calls.
    """
    found: dict[str, dict[str, float]] = {}
    for method in methods(config):
        seconds, rest = seconds_per_step(*load(config, method, overrides), steps, traces and traces / f"{method}.json")
        base = next(iter(found.values()))["seconds_per_step"] if found else seconds
        found[method] = rest | {"seconds_per_step": seconds, "speedup": base / seconds}
    return found


def plan(experiment: Experiment, assumed: Assumptions) -> dict[str, float]:
    """What a run of a setup (of `load`) will take: minutes, device-hours, bytes of memory of each device (weights, gradients and
    optimiser; keys and values) and of disk.

    Raises DoesNotFit where the memory does not suffice.
    """
    seconds, _ = seconds_per_step(experiment, assumed)  # which places every model
    total, devices = seconds * experiment.schedule.steps, sum(assumed.devices.values())
    found = {"minutes": total / 60, "device_hours": total * devices / 3600}
    sampler = experiment.sampler
    for name, roles in experiment.runtime.placement.items():
        actor, count = shape(assumed.actor), assumed.devices[name]
        cached = actor.cached * sampler.slots * (sampler.max_prompt_tokens + sampler.max_new_tokens) / count
        need = {"learner": actor.parameters * OPTIMISER_BYTES / count,
                "sampler": actor.parameters * actor.bytes / assumed.tensor_parallel.get(name, 1) + cached,
                "reward": shape(assumed.reward_model).parameters * 2 if assumed.reward_model else 0.0,
                "reference": actor.parameters * actor.bytes if experiment.algorithm.kl_coef else 0.0}  # fmt: skip
        found[f"memory_{name}"] = total_need = sum(need[role] for role in roles)
        if total_need > (have := hardware(assumed.hardware).memory):
            wanted = f"{' and '.join(roles)} take {total_need / 1e9:.0f} GB on each of {name}'s devices, which have {have / 1e9:.0f} GB"
            raise DoesNotFit(f"{wanted}: raise devices or tensor_parallel of {name}, or lower sampler.slots")
    kept = CHECKPOINTS_KEPT if experiment.schedule.checkpoint_every else 0
    found["disk"] = shape(assumed.actor).parameters * (2 + 12 * kept)  # the final policy; float32 weights and two moments per checkpoint
    return found
