"""Trainings with scripted workers (tests/scripted_workers.py) under the model clock."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from scripted_workers import LONGEST, ScriptedSampler, share
from scripted_workers import Scripted as Scripted

from nowait.batch import RUNNING, Segments
from nowait.config import Experiment
from nowait.runtime.clock import VirtualTimeLoop
from nowait.runtime.device import Device, InlineExecutor, ModelClock, ProcessExecutor
from nowait.runtime.timeline import Timeline
from nowait.schedules.asynchronous import asynchronous
from nowait.schedules.common import PROXIMAL_FORWARD, Crew, StepRecord
from nowait.schedules.overlapped import overlapped
from nowait.schedules.synchronous import synchronous
from nowait.tasks.prompts import Prompts, evaluation_requests
from nowait.workers.scorers import RuleScorer


class DigitTask:
    """Rewards are functions of row and response; on rows that `broken` divides, the grader fails for about half of the responses."""

    def __init__(self, rows: int = 1000, broken: int | None = None) -> None:
        self.rows, self.broken = rows, broken

    def size(self, split: str) -> int:
        return self.rows

    def prompt(self, split: str, row: int) -> str:
        return f"{split} {row}"

    def reward(self, split: str, row: int, response: str) -> float:
        if self.broken and row % self.broken == 0 and share(response) < 0.5:
            raise ValueError("no grade")
        return share(split, row, response)


class CopyingExecutor(InlineExecutor):
    """Copies arguments and results, as the boundary of a process would."""

    def submit(self, action: str, *args) -> Future:
        done, copied = super().submit(action, *pickle.loads(pickle.dumps(args))), Future()
        if error := done.exception():
            copied.set_exception(error)
        else:
            copied.set_result(pickle.loads(pickle.dumps(done.result())))
        return copied


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def experiment(kind: str = "asynchronous", **settings) -> Experiment:
    """Settings by field name, whatever their section; small ones by default."""
    defaults = {
        "sampler": {"slots": 10 if kind == "overlapped" else 6, "chunk": 4, "max_new_tokens": LONGEST - 1},
        "reward": {"path": "scripted"} if kind == "overlapped" else {},
        "overlap": {"rule": "fixed", "delta": 2, "delta_max": 2},
        "schedule": {"kind": kind, "steps": 12, "batch_size": 3, "group_size": 2, "max_staleness": 2 if kind == "asynchronous" else 0},
        "algorithm": {"asynchronous": {"anchor": "loglinear"}, "overlapped": {"anchor": "ppo", "kl_coef": 0.1}}.get(kind, {"anchor": "behave"}),
    }
    fields = {name: Experiment.model_fields[name].annotation.model_fields for name in defaults}
    sections = {name: section | {k: settings.pop(k) for k in fields[name] if k in settings} for name, section in defaults.items()}
    assert not settings, f"no such settings: {settings}"
    both = ["sampler", "learner"]
    placements = {"colocated": {"a": both, "b": both}, "overlapped": {"a": both, "b": ["reward", "reference"]}}
    placement = placements.get(kind, {"a": ["sampler"], "b": ["learner"]})
    return Experiment(name="scripted", runtime={"placement": placement}, evaluation={"samples": 2}, **sections)


# seconds per call, from and to; what is not listed takes no time
BOUNDS = {
    "sampler_decode": (0.05, 0.15),
    "sampler_load": (0.0, 0.05),
    "scorer_prefill": (0.0, 0.05),
    "reward_prefill": (0.0, 0.1),
    "reference_prefill": (0.0, 0.1),
    "learner_update": (0.1, 0.6),
    "learner_logp": (0.05, 0.2),
    "learner_gradient": (0.05, 0.1),
    "evaluator_decode": (1.0, 2.0),
}


class RandomCosts:
    """Costs between bounds per (worker, method), as random as `seed` and the content of the call, so that a resumed run meets the same ones.

    `grain` seconds divides every cost; a power of two makes all sums exact.
    """

    def __init__(self, seed: int = 0, grain: float = 0.0, **bounds: tuple[float, float]) -> None:
        self.seed, self.grain, self.bounds = seed, grain, BOUNDS | bounds

    def __call__(self, worker: str, method: str, args: tuple, result: object) -> float:
        low, high = self.bounds.get(f"{worker}_{method}", (0.0, 0.0))
        content = result if isinstance(result, Segments) else args[0] if args else None
        if isinstance(content, Segments):
            key = content.version, content.sequence.tolist(), len(content.token)
        else:
            key = getattr(content, "step", getattr(content, "version", None))  # of a batch, of weights
        seconds = low + (high - low) * share(self.seed, worker, method, key)
        return round(seconds / self.grain) * self.grain if self.grain else seconds


@dataclass
class Trained:
    """What a run left behind."""

    records: list[StepRecord] = field(default_factory=list)
    tokens: int = 0  # that have reached the schedule
    read: dict[str, int] = field(default_factory=dict)  # by frozen models, prompts included
    generated: list[int] = field(default_factory=list)  # the same at each record
    completed: list[list[int]] = field(default_factory=list)  # sequences in the order of their ends, by round
    states: list[bytes] = field(default_factory=list)  # of the checkpoints, as they were when their records came
    timeline: Timeline = field(default_factory=Timeline)
    ended: float = 0.0  # virtual seconds
    error: Exception | None = None
    leftover: list[str] = field(default_factory=list)  # tasks that outlived the schedule

    @property
    def steps(self) -> list[dict]:
        """Metrics of the training steps, without those of evaluations."""
        return [{k: v for k, v in r.metrics.items() if not k.startswith("eval/")} for r in self.records if r.step]

    def column(self, name: str) -> list:
        return [metrics[name] for metrics in self.steps]

    @property
    def chain(self) -> str:
        """Hash over everything that was trained on, in order."""
        return self.column("train/chain")[-1]


def train(x: Experiment, costs=None, *, state: dict | None = None, stop_after: int | None = None, catch=(), process=False, **options) -> Trained:
    """Run the schedule of an experiment under the model clock, resumed from a checkpoint's `state`, left after record `stop_after`.

    Errors of the types `catch` are kept in the result; `options` go to `assemble`.
    """
    trained = Trained()
    clock, executor = ModelClock(costs or RandomCosts()), ProcessExecutor if process else CopyingExecutor
    devices = {name: Device(name, executor(), clock, trained.timeline) for name in x.runtime.placement}
    devices["driver"] = Device("driver", CopyingExecutor(), clock, trained.timeline)
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(state["time"] if state else 0.0)) as runner:
        runner.run(_train(trained, x, devices, state, stop_after, catch, options))
    return trained


async def _train(
    trained: Trained, x: Experiment, devices: dict[str, Device], state: dict | None, stop_after: int | None, catch, options: dict
) -> None:
    crew = await assemble(x, devices, trained, **options)
    if state:
        await restore(crew, state)
    schedule = {"asynchronous": asynchronous, "overlapped": overlapped}.get(x.schedule.kind, synchronous)
    try:
        async with aclosing(schedule(crew, x, state)) as records:
            async for record in records:
                if record.state:
                    record.state["time"] = asyncio.get_running_loop().time()
                    trained.states.append(pickle.dumps(record.state))
                trained.records.append(record)
                trained.generated.append(trained.tokens)
                if record.step == stop_after:
                    break
    except catch as error:
        trained.error = error
    finally:
        trained.ended = asyncio.get_running_loop().time()
        trained.leftover = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for device in devices.values():
            device.close()


async def assemble(
    x: Experiment,
    devices: dict[str, Device],
    trained: Trained,
    *,
    tail=1.0,
    rows=1000,
    broken=None,
    prompts=5,
    fail_round=None,
    fail_step=None,
    fail_read=None,
) -> Crew:
    """A crew of scripted workers on `devices`; what its samplers hand over is counted in `trained`.

    The task has `rows` rows, `prompts` held-out ones; the (first) sampler fails in round `fail_round`, the learner at `fail_step`,
    each frozen model of `fail_read` in that prefill call.
    """
    plan, frozen = x.schedule, [*(["reward"] if x.reward.path else []), *(["reference"] if x.algorithm.kl_coef else [])]
    roles = {role: [name for name, hosted in x.runtime.placement.items() if role in hosted] for role in ("sampler", "learner", *frozen)}
    bound = None if plan.order == "completion" or plan.kind == "overlapped" else plan.max_staleness
    checks = {"max_staleness": bound, "forward": x.algorithm.anchor in PROXIMAL_FORWARD, "tail": tail, "minibatches": x.learner.minibatches}
    checks["frozen"] = tuple(frozen)
    for i, name in enumerate(roles["sampler"]):
        await devices[name].place(
            "sampler", "scripted_workers:ScriptedSampler", slots=x.sampler.slots, tail=tail, fail_round=None if i else fail_round
        )
    for name in roles["learner"]:
        sizes = {"batch_size": plan.batch_size, "group_size": plan.group_size}
        await devices[name].place("learner", "scripted_workers:ScriptedLearner", **sizes, **checks, fail_step=fail_step)
    task, driver = DigitTask(rows, broken), devices["driver"]
    await driver.place("scorer", RuleScorer, task=task, decode=decode, split="train", n=plan.group_size)
    await driver.place("eval scorer", RuleScorer, task=task, decode=decode, split="eval", n=x.evaluation.samples)
    held_out = evaluation_requests(task, encode, prompts, x.evaluation.samples, 32, LONGEST - 1)
    actor = devices[roles["sampler"][0]]
    await actor.place("evaluator", ScriptedSampler, slots=4, tail=tail)

    async def counted(device: Device, method: str, *args):
        result = await device.run("sampler", method, *args)
        if method == "decode":
            trained.tokens += len(result.token)
            trained.completed.append(result.sequence[result.finish != RUNNING].tolist())
        return result

    crew = Crew(
        samplers=[partial(counted, devices[name]) for name in roles["sampler"]],
        learners=[partial(devices[name].run, "learner") for name in roles["learner"]],
        scorer=partial(driver.run, "scorer"),
        prompts=Prompts(task, encode, seed=1, n=plan.group_size, max_prompt_tokens=32, max_new_tokens=LONGEST - 1),
        timeline=trained.timeline,
        devices={role: roles[role] for role in ("sampler", "learner")} | {"scorer": ["driver"]},
        evaluator=partial(actor.run, "evaluator"),
        evaluations={"eval": (held_out, partial(driver.run, "eval scorer"))},
    )
    for role in frozen:
        device, arguments = devices[roles[role][0]], {"n": plan.group_size, "fail_call": (fail_read or {}).get(role)}
        await device.place(role, f"scripted_workers:Scripted{role.capitalize()}", **arguments)
        place = "scorer" if role == "reward" else role
        setattr(crew, place, partial(_reading, trained, device, role))
        crew.devices[place] = [device.name]
    return crew


async def _reading(trained: Trained, device: Device, role: str, method: str, *args):
    result = await device.run(role, method, *args)
    if method == "prefill":
        trained.read[role] = trained.read.get(role, 0) + result
    return result


async def restore(crew: Crew, state: dict) -> None:
    """Put a checkpoint's state into a new crew, without its taking any time."""
    crew.prompts.set_state(state["prompts"])
    for learner in crew.learners:
        await learner("set_state", state["learner"])
    await crew.scorer("set_state", state["scorer"])
    if crew.reference:
        await crew.reference("set_state", state["reference"])
    if "sampler" in state:
        await crew.samplers[0]("set_state", state["sampler"])
