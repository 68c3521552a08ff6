"""Workers without tensors: they know how long responses are and what the work costs, so that the real schedules run in simulated time.

A request is one sequence to the schedule (n = 1) whatever its number of samples. For the tokens of a round it gets pieces of up to PIECE of them: the
value of a piece is their number, which is what readers go by. Lengths are a function of (seed, request), so every schedule is given the same work.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from nowait.batch import RUNNING, STOP, Batch, Request, Segments, Weights
from nowait.config import AboveZero, Fraction, NonNegative, Positive
from nowait.runtime.hardware import Group

PIECE = 8  # tokens; fewer pieces than tokens, for speed
PIECES = 32  # of a request and round at most, or they hold more tokens: memory, where rounds are long


@dataclass(frozen=True)
class Lengths:
    """Response tokens, log-normal and cut off: exp(N(log median, sigma²)), of which `difficulty` of the variance belongs to the prompt.

    The median grows linearly by `drift` of itself over the training. `observed` lengths, if given, are drawn from instead.
    """

    median: AboveZero = 1.0
    sigma: NonNegative = 0.0
    cap: Positive = 1
    prompt: Positive = 1  # tokens of every prompt
    difficulty: Fraction = 0.5
    drift: float = 0.0
    observed: tuple[Positive, ...] = ()

    __pydantic_config__ = {"extra": "forbid"}

    def draw(self, rng: np.random.Generator, requests: int, samples: int, horizon: int) -> np.ndarray:
        """int64 [requests, samples]; a request's do not depend on how many are drawn. The drift is complete at request number `horizon`."""
        if self.observed:
            return np.array(self.observed)[(rng.random((requests, samples)) * len(self.observed)).astype(np.int64)]
        z = rng.standard_normal((requests, 1 + samples))
        z = math.sqrt(self.difficulty) * z[:, :1] + math.sqrt(1 - self.difficulty) * z[:, 1:]
        median = self.median * (1 + self.drift * np.minimum(1, np.arange(requests) / horizon)[:, None])
        return np.clip(np.round(median * np.exp(self.sigma * z)), 1, self.cap).astype(np.int64)


@dataclass(frozen=True)
class RewardCurve:
    """Mean reward start + (end - start) (1 - exp(-step / tau)) with noise per request: no model of learning, only food for Δ rules."""

    start: float = 0.0
    end: float = 0.0
    tau: AboveZero = 1.0
    noise: NonNegative = 0.0

    __pydantic_config__ = {"extra": "forbid"}


class World:
    """What is true of every request, by id: prompt and response tokens, and how many of its samples go on."""

    def __init__(self, lengths: Lengths, requests: int, samples: int, batch_size: int, steps: int, seed: int, curve: RewardCurve) -> None:
        draws, noise = (np.random.default_rng((seed, stream)) for stream in (0, 1))
        self.prompt, self.response = lengths.prompt, lengths.draw(draws, requests, samples, batch_size * steps)  # [requests, samples]
        step = np.arange(requests) / batch_size
        self.reward = curve.end + (curve.start - curve.end) * np.exp(-step / curve.tau) + curve.noise * noise.standard_normal(requests)
        self.open = np.full(requests, samples)  # samples that are not finished
        self.seconds = 0.0  # that the last call of any worker costs; the clock takes them

    def take_seconds(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def whole(self, ids: np.ndarray) -> np.ndarray:
        """Tokens of prompt and response of every sample of these requests, float64."""
        return (self.prompt + self.response[ids]).ravel().astype(float)


class SimulatedPrompts:
    """Requests in order, without text."""

    def __init__(self) -> None:
        self._next = 0

    def next(self, count: int) -> list[Request]:
        first, self._next = self._next, self._next + count
        return [Request(i, _NOTHING, 1, 1) for i in range(first, self._next)]


_NOTHING = np.zeros(1, np.int32)


class SimulatedSampler:
    """Continuous batching over `slots` sequences; new weights void what is cached, and all of it is prefilled again."""

    def __init__(self, world: World, group: Group, slots: int, slowdown: float = 1.0, transfer: float = 0.0) -> None:
        self.world, self.group, self.slots, self.slowdown, self.transfer = world, group, slots, slowdown, transfer
        self._waiting: deque[tuple[int, int]] = deque()  # request, sample
        self._owner = np.zeros(0, np.int64)  # of the active sequences, like the next two
        self._left, self._context = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.tokens = self.steps = 0  # generated, and decode steps, since they were last read
        self._loaded = 0

    def admit(self, requests: list[Request]) -> None:
        samples = self.world.response.shape[1]
        self._waiting.extend((r.id, sample) for r in requests for sample in range(samples))

    def load(self, weights: Weights) -> int:
        held = self._context.astype(float)
        self.world.seconds += (self.transfer if weights.version else 0.0) + self.slowdown * self.group.forward(held)
        self._loaded = weights.version
        return int(held.sum())

    def decode(self, max_tokens: int) -> Segments:
        self._start_waiting()
        order = np.argsort(self._left)
        steps = int(min(max_tokens, self._left.max(initial=0)))
        t = np.arange(steps)
        ended = np.searchsorted(self._left[order], t, side="right")  # sequences that have no token t
        live = len(order) - ended
        held = np.concatenate([np.cumsum(self._context[order][::-1])[::-1], [0]])[ended] + t * live
        self.world.seconds += self.slowdown * self.group.decode(live, held)
        made = np.minimum(self._left, steps)
        self._left, self._context = self._left - made, self._context + made
        world, done = self.world, self._left == 0
        np.subtract.at(world.open, self._owner[done], 1)
        self.tokens, self.steps = self.tokens + int(made.sum()), self.steps + steps
        starts = np.flatnonzero(np.diff(self._owner, prepend=-1))  # requests start in order, so the sequences of one are neighbours
        ids = self._owner[starts]
        offset, pieces = _pieces(np.add.reduceat(made, starts))
        self._owner, self._left, self._context = self._owner[~done], self._left[~done], self._context[~done]
        finish = np.where(world.open[ids] == 0, STOP, RUNNING).astype(np.uint8)
        return Segments(ids, offset, pieces, np.zeros(len(pieces), np.float32), finish, self._loaded)

    def _start_waiting(self) -> None:
        count = min(len(self._waiting), self.slots - len(self._owner))
        if count <= 0:
            return
        request, sample = np.array([self._waiting.popleft() for _ in range(count)], np.int64).T
        prompts = np.full(np.count_nonzero(sample == 0), float(self.world.prompt))  # the samples of a request share its prompt
        self.world.seconds += self.slowdown * self.group.forward(prompts)
        self._owner = np.concatenate([self._owner, request])
        self._left = np.concatenate([self._left, self.world.response[request, sample]])
        self._context = np.concatenate([self._context, np.full(count, self.world.prompt)])


def _pieces(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets [n + 1] and values, full pieces before the rest, of `tokens` [n] >= 1."""
    size = max(PIECE, math.ceil(tokens.max(initial=0) / PIECES))
    offset = np.concatenate([[0], np.cumsum(-(-tokens // size))])
    pieces = np.full(offset[-1], size, np.int32)
    pieces[offset[1:] - 1] = (tokens - 1) % size + 1
    return offset, pieces


class SimulatedReader:
    """A frozen model (or, without a group, a rule that costs nothing) that reads each prompt once per sample and the tokens that it is given."""

    def __init__(self, world: World, group: Group | None = None, slowdown: float = 1.0, *, log_probs: bool = False) -> None:
        self.world, self.group, self.slowdown, self._log_probs = world, group, slowdown, log_probs
        self._read = np.zeros(len(world.open), np.int64)  # tokens, prompts included
        self._pieces = np.zeros(len(world.open), np.int64)

    def admit(self, requests: list[Request]) -> None: ...

    def prefill(self, segments: Segments) -> int:
        ids, samples, before = segments.sequence, self.world.response.shape[1], self._read[segments.sequence]
        self._pieces[ids] += np.diff(segments.offset)
        new = np.add.reduceat(segments.token, segments.offset[:-1]) + np.where(before, 0, self.world.prompt * samples)
        if self.group:
            self.world.seconds += self.slowdown * self.group.forward(np.repeat(new / samples, samples), np.repeat(before / samples, samples))
        self._read[ids] += new
        return int(new.sum())

    def finish(self, ids: list[int]) -> list[list]:
        if self._log_probs:
            return [[np.zeros(self._pieces[i], np.float32)] for i in ids]
        return [[float(self.world.reward[i])] for i in ids]


class SimulatedLearner:
    """Sharded data-parallel training; `micro_batch_tokens` per device and pass."""

    def __init__(self, world: World, group: Group, *, minibatches: int, epochs: int, micro_batch_tokens: int, recompute: bool,
                 forward: float = 1.0, update: float = 1.0) -> None:  # fmt: skip
        self.world, self.group, self.minibatches, self.epochs, self._recompute = world, group, minibatches, epochs, recompute
        self._micro, self._forward, self._update, self.version = micro_batch_tokens, forward, update, 0

    def logp(self, batch: Batch) -> None:
        lengths = self.world.whole(batch.group)
        self.world.seconds += self._forward * (self.group.forward(lengths) + (self._passes(lengths) - 1) * self.group.hardware.pass_overhead)

    def update(self, batch: Batch, logp_prox: None = None) -> dict[str, float]:
        self.prepare(batch)
        self.world.seconds += self._share(self.world.whole(batch.group))
        return self.finish()

    def publish(self) -> Weights:
        return Weights(self.version, None)

    def prepare(self, batch: Batch, logp_prox: None = None) -> int:
        self._batch = batch
        return self.minibatches

    def gradient(self, minibatch: int, rank: int, ranks: int) -> None:
        self.world.seconds += self._share(self.world.whole(self._batch.group)[rank::ranks]) / self.minibatches

    def apply(self, shares: list) -> None: ...

    def finish(self) -> dict[str, float]:
        self.version = self._batch.step + 1
        return {"response_tokens": float(self.world.response[self._batch.group].sum())}

    def _share(self, lengths: np.ndarray) -> float:
        steps = self.minibatches * self.epochs
        passes = max(steps, self._passes(lengths) * self.epochs)
        return self._update * self.group.update(lengths, steps=steps, passes=passes, epochs=self.epochs, recompute=self._recompute)

    def _passes(self, lengths: np.ndarray) -> int:
        return math.ceil(float(lengths.sum()) / (self._micro * self.group.devices))
