"""Workers that follow a script instead of a model, so that schedules can be tested exactly.

Lengths are functions of the sequence id, tokens and log-probs of (sequence, position, version): a mix-up shows in the learner's checks.
The learner's "weights" are a hash chain over all that it was given: two runs trained on the same data if and only if the chains are equal.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from nowait.batch import LENGTH, RUNNING, STOP, Batch, Request, Segments, Weights, pack_requests, unpack_requests
from nowait.config import Experiment
from nowait.runtime.clock import VirtualTimeLoop
from nowait.runtime.device import Device, InlineExecutor, ModelClock, ProcessExecutor
from nowait.runtime.timeline import Timeline
from nowait.schedules.asynchronous import asynchronous
from nowait.schedules.common import PROXIMAL_FORWARD, Crew, StepRecord
from nowait.schedules.synchronous import synchronous
from nowait.tasks.prompts import Prompts, evaluation_requests
from nowait.workers.scorers import RuleScorer

LONGEST = 48  # tokens of a response at most


class Scripted(RuntimeError):
    """The failure that a worker was told to have."""


def share(*key) -> float:
    """In [0, 1), the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "big") / 2**48


def response_length(sequence: int, tail: float) -> int:
    """Pareto-like: half of the responses have up to 4 * 2 ** tail tokens; tail 0 makes all of them 4 tokens long."""
    return min(LONGEST, int(4 / (1 - share("length", sequence)) ** tail))


def token_of(sequence: int, position: int, version: int) -> int:
    return (sequence * 7919 + position * 104_729 + version * 1_299_709) % 30_011


def logp_of(sequence: int, position: int, version: int) -> np.float32:
    return np.float32(-(token_of(position, version, sequence) + 1) / 4096)


class ScriptedSampler:
    """`slots` sequences at a time, the others wait. Raises `Scripted` in round `fail_round`."""

    def __init__(self, slots: int, tail: float, fail_round: int | None = None) -> None:
        self.slots, self.tail, self.fail_round = slots, tail, fail_round
        self.waiting: deque[tuple[Request, int]] = deque()
        self.made: dict[int, int] = {}  # sequence in a slot -> tokens so far
        self.limit: dict[int, int] = {}
        self.version = self.rounds = 0

    def admit(self, requests: list[Request]) -> None:
        for request in requests:
            self.waiting.extend((request, sequence) for sequence in request.sequences)

    def load(self, weights: Weights) -> int:
        assert weights.version >= self.version
        self.version = weights.version
        return sum(self.made.values())

    def decode(self, max_tokens: int) -> Segments:
        self.rounds += 1
        if self.rounds == self.fail_round:
            raise Scripted(f"round {self.rounds}")
        while self.waiting and len(self.made) < self.slots:
            request, sequence = self.waiting.popleft()
            self.made[sequence], self.limit[sequence] = 0, request.max_new_tokens
        sequences, offset, token, logp, finish = list(self.made), [0], [], [], []
        assert sequences, "decode of nothing"
        for s in sequences:
            start, end = self.made[s], min(response_length(s, self.tail), self.limit[s])
            stop = min(end, start + max_tokens)
            token += [token_of(s, t, self.version) for t in range(start, stop)]
            logp += [logp_of(s, t, self.version) for t in range(start, stop)]
            finish.append(RUNNING if stop < end else LENGTH if response_length(s, self.tail) > self.limit[s] else STOP)
            offset.append(len(token))
            self.made[s] = stop
            if finish[-1] != RUNNING:
                del self.made[s], self.limit[s]
        columns = zip((sequences, offset, token, logp, finish), (np.int64, np.int64, np.int32, np.float32, np.uint8), strict=True)
        return Segments(*(np.array(column, dtype) for column, dtype in columns), self.version)

    def get_state(self) -> dict:
        requests = {request.id: request for request, _ in self.waiting}
        running = np.array([(s, self.made[s], self.limit[s]) for s in self.made], np.int64).reshape(-1, 3)
        waiting = np.array([(request.id, s) for request, s in self.waiting], np.int64).reshape(-1, 2)
        return {"version": self.version, "running": running, "waiting": waiting, "requests": pack_requests(list(requests.values()))}

    def set_state(self, state: dict) -> None:
        self.version = state["version"]
        self.made = {s: made for s, made, _ in state["running"].tolist()}
        self.limit = {s: limit for s, _, limit in state["running"].tolist()}
        requests = {request.id: request for request in unpack_requests(state["requests"])}
        self.waiting = deque((requests[r], s) for r, s in state["waiting"].tolist())


class ScriptedLearner:
    """Checks every batch against the script and chains its hash. `max_staleness` None: any staleness is accepted."""

    def __init__(
        self, batch_size: int, group_size: int, max_staleness: int | None, tail: float, forward: bool, minibatches: int, fail_step: int | None
    ):
        self.batch_size, self.group_size, self.max_staleness, self.forward, self.tail = batch_size, group_size, max_staleness, forward, tail
        self.minibatches, self.fail_step = minibatches, fail_step
        self.version, self.chain, self.seen = 0, "", np.empty(0, np.int64)
        self.prepared: Batch | None = None

    def logp(self, batch: Batch) -> np.ndarray:
        return batch.logp_behav + np.float32(self.version)

    def update(self, batch: Batch, logp_prox: np.ndarray | None = None) -> dict:
        self.check(batch)
        assert (logp_prox is not None) == self.forward
        if self.forward:
            np.testing.assert_array_equal(logp_prox, self.logp(batch))
        if self.version == self.fail_step:
            raise Scripted(f"step {self.version}")
        digest = hashlib.sha256(self.chain.encode())
        for name in batch.__dataclass_fields__:
            digest.update(np.ascontiguousarray(getattr(batch, name)).tobytes())
        self.chain, self.version = digest.hexdigest(), self.version + 1
        self.seen = np.concatenate([self.seen, batch.sequence])
        oldest = batch.version[batch.version >= 0].min()
        return {"chain": self.chain, "oldest": int(batch.step - oldest), "trained": int(batch.length.sum()), "dropped": int((~batch.keep).sum())}

    def check(self, batch: Batch) -> None:
        assert batch.step == self.version
        assert len(batch) == self.batch_size * self.group_size
        groups = np.unique(batch.group)
        assert len(groups) == self.batch_size, "a request is trained on whole"
        np.testing.assert_array_equal(batch.sequence, (groups[:, None] * self.group_size + np.arange(self.group_size)).ravel())
        np.testing.assert_array_equal(batch.group, batch.sequence // self.group_size)
        assert not np.isin(batch.sequence, self.seen).any(), "a sequence is trained on once"
        for i, s in enumerate(batch.sequence.tolist()):
            length, version = int(batch.length[i]), batch.version[i]
            assert length == min(response_length(s, self.tail), LONGEST - 1)
            assert batch.finish[i] == (LENGTH if response_length(s, self.tail) == LONGEST else STOP)
            assert (np.diff(version[:length]) >= 0).all() and version[length - 1] <= self.version and (version[length:] == -1).all()
            assert self.max_staleness is None or version[0] >= self.version - self.max_staleness
            assert batch.token[i, :length].tolist() == [token_of(s, t, int(version[t])) for t in range(length)]
            assert batch.logp_behav[i, :length].tolist() == [logp_of(s, t, int(version[t])) for t in range(length)]

    def publish(self) -> Weights:
        return Weights(self.version, self.chain)

    def prepare(self, batch: Batch, logp_prox: np.ndarray | None = None) -> int:
        self.prepared, self.shares = (batch, logp_prox), []
        return self.minibatches

    def gradient(self, minibatch: int, rank: int, ranks: int) -> tuple[np.ndarray, dict]:
        return np.array([self.version, minibatch, rank, ranks]), {}

    def apply(self, shares: list[tuple[np.ndarray, dict]]) -> None:
        self.shares.append([share.tolist() for share, _ in shares])

    def finish(self) -> dict:
        assert self.shares == [[[self.version, m, rank, 2] for rank in range(2)] for m in range(self.minibatches)]
        return self.update(*self.prepared)

    def get_state(self) -> dict:
        return {"version": self.version, "chain": self.chain, "seen": self.seen}

    def set_state(self, state: dict) -> None:
        self.version, self.chain, self.seen = state["version"], state["chain"], state["seen"]


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


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def experiment(kind: str = "asynchronous", **settings) -> Experiment:
    """Settings by field name, whatever their section; small ones by default."""
    defaults = {
        "sampler": {"slots": 6, "chunk": 4, "max_new_tokens": LONGEST - 1},
        "schedule": {"kind": kind, "steps": 12, "batch_size": 3, "group_size": 2, "max_staleness": 2 if kind == "asynchronous" else 0},
        "algorithm": {"anchor": "loglinear" if kind == "asynchronous" else "behave"},
    }
    fields = {name: Experiment.model_fields[name].annotation.model_fields for name in defaults}
    sections = {name: section | {k: settings.pop(k) for k in fields[name] if k in settings} for name, section in defaults.items()}
    assert not settings, f"no such settings: {settings}"
    both = ["sampler", "learner"]
    placement = {"a": both, "b": both} if kind == "colocated" else {"a": ["sampler"], "b": ["learner"]}
    return Experiment(name="scripted", runtime={"placement": placement}, evaluation={"samples": 2}, **sections)


# seconds per call, from and to; what is not listed takes no time
BOUNDS = {
    "sampler_decode": (0.05, 0.15),
    "sampler_load": (0.0, 0.05),
    "scorer_prefill": (0.0, 0.05),
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
    clock, executor = ModelClock(costs or RandomCosts()), ProcessExecutor if process else partial(InlineExecutor, True)
    devices = {name: Device(name, executor(), clock, trained.timeline) for name in x.runtime.placement}
    devices["driver"] = Device("driver", InlineExecutor(True), clock, trained.timeline)
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(state["time"] if state else 0.0)) as runner:
        runner.run(_train(trained, x, devices, state, stop_after, catch, options))
    return trained


async def _train(
    trained: Trained, x: Experiment, devices: dict[str, Device], state: dict | None, stop_after: int | None, catch, options: dict
) -> None:
    crew = await assemble(x, devices, trained, **options)
    if state:
        await restore(crew, state)
    schedule = asynchronous if x.schedule.kind == "asynchronous" else synchronous
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
    x: Experiment, devices: dict[str, Device], trained: Trained, *, tail=1.0, rows=1000, broken=None, prompts=5, fail_round=None, fail_step=None
) -> Crew:
    """A crew of scripted workers on `devices`; what its samplers hand over is counted in `trained`.

    The task has `rows` rows, `prompts` held-out ones; the (first) sampler fails in round `fail_round`, the learner at `fail_step`.
    """
    plan, roles = x.schedule, {role: [name for name, hosted in x.runtime.placement.items() if role in hosted] for role in ("sampler", "learner")}
    bound = None if plan.order == "completion" else plan.max_staleness
    checks = {"max_staleness": bound, "forward": x.algorithm.anchor in PROXIMAL_FORWARD, "tail": tail, "minibatches": x.learner.minibatches}
    for i, name in enumerate(roles["sampler"]):
        await devices[name].place("sampler", "scripted:ScriptedSampler", slots=x.sampler.slots, tail=tail, fail_round=None if i else fail_round)
    for name in roles["learner"]:
        sizes = {"batch_size": plan.batch_size, "group_size": plan.group_size}
        await devices[name].place("learner", "scripted:ScriptedLearner", **sizes, **checks, fail_step=fail_step)
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
        devices=roles | {"scorer": ["driver"]},
        evaluator=partial(actor.run, "evaluator"),
        evaluations={"eval": (held_out, partial(driver.run, "eval scorer"))},
    )
    return crew


async def restore(crew: Crew, state: dict) -> None:
    """Put a checkpoint's state into a new crew, without its taking any time."""
    crew.prompts.set_state(state["prompts"])
    for learner in crew.learners:
        await learner("set_state", state["learner"])
    await crew.scorer("set_state", state["scorer"])
    if "sampler" in state:
        await crew.samplers[0]("set_state", state["sampler"])
