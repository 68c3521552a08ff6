"""Overlapped training (OPPO, arXiv 2509.25762): frozen models read responses while they are written (intra), and B + Δ requests are in flight, of
which the first B complete ones are trained on and the others carried over with their tokens (inter). Without both it is sequential PPO.

Where the sources are silent: the first B are taken in the order of completion, ties by id, and complete requests beyond them wait for the next step;
what a frozen model has read of a carried request stays valid, the sampler prefills it again under the new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

import numpy as np

from nowait.batch import Batch, Request, Rollouts, Segments, join, pad
from nowait.config import Experiment
from nowait.schedules.chunking import ChunkTuner
from nowait.schedules.common import Call, Crew, Schedule, cancel, fit, grade, proximal, together, train
from nowait.schedules.overcommit import OvercommitController


class _Reader:
    """Feeds one frozen scorer, all of whose calls come from the task `serve`: it reads while others work, and waits for nobody.

    Streaming, everything that waits is read in one call as soon as the scorer is free. Otherwise nothing is read before it is asked for.
    """

    def __init__(self, call: Call, rollouts: Rollouts, streaming: bool) -> None:
        self.call, self.rollouts, self.streaming = call, rollouts, streaming
        self.admitted: list[Request] = []  # which the scorer does not know yet
        self.waiting: list[Segments] = []
        self.question: tuple[list[int], asyncio.Future] | None = None
        self.changed = asyncio.Event()

    def add(self, segments: Segments) -> None:
        if self.streaming:
            self.waiting.append(segments)
            self.changed.set()

    def finish(self, ids: list[int]) -> asyncio.Future:
        """Values of complete requests, for which the others' tokens have to wait from now on. Without ids: done when everything has been read."""
        self.question = ids, asyncio.get_running_loop().create_future()
        self.changed.set()
        return self.question[1]

    async def serve(self) -> None:
        while True:
            while not (self.waiting or self.question):
                self.changed.clear()
                await self.changed.wait()
            question, self.question = self.question, None
            if self.admitted:
                admitted, self.admitted = self.admitted, []
                await self.call("admit", admitted)
            if segments := self._next(question[0] if question else []):
                await self.call("prefill", segments)
            if question:
                ids, answer = question
                answer.set_result(await self.call("finish", ids) if ids else [])

    def _next(self, ids: list[int]) -> Segments | None:
        """What to read now; of what waits, that of the requests `ids` goes first."""
        if not self.streaming:
            return self.rollouts.segments(ids) if ids else None
        if not self.waiting:
            return None
        joined = join(self.waiting)
        first = np.isin(joined.sequence // self.rollouts.n, ids) | (not ids)
        self.waiting = [] if first.all() else [_rows(joined, ~first)]
        return _rows(joined, first) if first.any() else None


def _rows(segments: Segments, chosen: np.ndarray) -> Segments:
    """The sequences where `chosen` [n] is True."""
    lengths = np.diff(segments.offset)
    tokens = np.repeat(chosen, lengths)
    offset = np.concatenate([[0], np.cumsum(lengths[chosen])]).astype(np.int64)
    return Segments(segments.sequence[chosen], offset, segments.token[tokens], segments.logp_behav[tokens], segments.finish[chosen], segments.version)


class _Overlapped(Schedule):
    """Requests that are unfinished after the last step are not trained on; its `overlap/carried` counts them."""

    def __init__(self, crew: Crew, experiment: Experiment) -> None:
        super().__init__(crew, experiment)
        overlap = experiment.overlap
        self.complete: list[int] = []  # not yet trained, in the order of completion
        self.admitted: dict[int, int] = {}  # request not yet trained -> step of its admission
        limits = (overlap.delta, overlap.delta_min, overlap.delta_max, overlap.window, overlap.rule) if overlap.inter else (0, 0, 0, 1, "fixed")
        self.controller = self.parts["controller"] = OvercommitController(*limits)
        self.tuner = ChunkTuner(overlap.chunk_candidates, overlap.chunk_period) if overlap.chunk_candidates else None
        self.parts |= {"tuner": self.tuner} if self.tuner else {}
        scorers = {"scorer": crew.scorer, "reference": crew.reference}
        self.readers = {name: _Reader(call, self.rollouts, overlap.intra) for name, call in scorers.items() if call}

    def start(self) -> None:
        self.tasks = [asyncio.create_task(reader.serve(), name=name) for name, reader in self.readers.items()]

    async def watched(self, work: Coroutine) -> Any:
        """Its result. A reader that fails meanwhile ends it at once and raises the reader's error."""
        task = asyncio.create_task(work, name="step")
        try:
            await asyncio.wait([task, *self.tasks], return_when=asyncio.FIRST_COMPLETED)
            for reader in self.tasks:
                if reader.done():
                    reader.result()
            return task.result()
        finally:
            await cancel([task])

    async def step(self, step: int) -> tuple[Batch, dict[str, float], dict[str, Any]]:
        return await self.watched(self._step(step))

    async def _step(self, step: int) -> tuple[Batch, dict[str, float], dict[str, Any]]:
        size, delta = self.plan.batch_size, self.controller.delta
        self.crew.slots = (size + delta) * self.plan.group_size  # occupancy is a share of what was let in
        chunk = self.tuner.choose(step) if self.tuner else self.experiment.sampler.chunk
        clock = asyncio.get_running_loop().time
        await self.load_newest()
        await self.refill(size + delta, step)
        start = clock()
        rounds = await self.generate(chunk)
        ids, self.complete = sorted(self.complete[:size]), self.complete[size:]
        batch, logp_prox = await self.score(ids, step)
        if self.tuner:
            self.tuner.record(chunk, clock() - start, sum(tokens for _, _, tokens in rounds))
        stats = await fit(self.crew, batch, logp_prox)
        tail = _tail_fraction(rounds, self.crew.slots)
        if batch.keep.any():  # else there is no reward to go by
            self.controller.update(float(batch.reward[batch.keep].mean()), tail)
        metrics = {
            "overlap/delta": delta,
            "overlap/delta_over_b": delta / size,
            "overlap/chunk": chunk,
            "overlap/carried": len(self.rollouts),
            "overlap/deferrals": np.bincount([step - self.admitted.pop(i) for i in ids]).tolist(),
            "overlap/tail_frac": tail,
        }
        return batch, stats, metrics

    async def refill(self, target: int, step: int) -> None:
        """Admit requests until `target` are held; if more are, since Δ has shrunk, they all stay."""
        if room := max(0, target - len(self.rollouts)):
            requests = self.crew.prompts.next(room)
            self.rollouts.admit(requests)
            self.admitted |= {r.id: step for r in requests}
            for reader in self.readers.values():
                reader.admitted += requests
            await self.crew.samplers[0]("admit", requests)

    async def generate(self, chunk: int) -> list[tuple[float, int, int]]:
        """Decode until a batch is complete; returns seconds, sequences and tokens of each round."""
        rounds, clock = [], asyncio.get_running_loop().time
        while len(self.complete) < self.plan.batch_size:
            start = clock()
            segments = await self.crew.decode(self.crew.samplers[0], chunk)
            rounds.append((clock() - start, len(segments.sequence), len(segments.token)))
            done = self.rollouts.add(segments)
            self.complete += done
            for reader in self.readers.values():
                if self.experiment.overlap.unit == "chunk":
                    reader.add(segments)
                elif done:
                    reader.add(self.rollouts.segments(done))
        return rounds

    async def score(self, ids: list[int], step: int) -> tuple[Batch, np.ndarray | None]:
        """The batch of complete requests with rewards and reference, and the log-probs before the update where the anchor needs them.

        That forward pass waits for no score: with intra-step overlap it runs while the frozen models read the end.
        """
        anchor, answers = self.experiment.algorithm.anchor, [reader.finish(ids) for reader in self.readers.values()]
        if self.experiment.overlap.intra:
            batch = self.rollouts.take(ids, step)
            logp_prox, *values = await together([proximal(self.crew, batch, anchor), *answers])
        else:
            values = await together(answers)
            batch = self.rollouts.take(ids, step)
            logp_prox = await proximal(self.crew, batch, anchor)
        grade(batch, values[0])
        if self.crew.reference:
            batch.logp_ref = _reference_logp(batch, values[1])
        return batch, logp_prox

    async def barrier(self) -> None:
        """Load the newest weights, which voids the sampler's cache, and let the frozen models read all that there is."""
        await self.watched(self._barrier())

    async def _barrier(self) -> None:
        await together([self.load_newest(), *(reader.finish([]) for reader in self.readers.values())])

    async def get_state(self) -> dict[str, Any]:
        own = {"complete": list(self.complete), "admitted": [[*item] for item in self.admitted.items()]}
        return await super().get_state() | own

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.complete, self.admitted = list(state["complete"]), dict(state["admitted"])


def _reference_logp(batch: Batch, values: list[list[np.ndarray]]) -> np.ndarray:
    """float32 [S, T] from the log-probs of each request's samples."""
    rows = [row for samples in values for row in samples]
    if [len(row) for row in rows] != batch.length.tolist():
        raise ValueError(f"step {batch.step}: the reference's log-probs do not have the lengths of the responses; see its finish()")
    return pad(rows, 0.0, np.float32)


def _tail_fraction(rounds: list[tuple[float, int, int]], slots: int) -> float:
    """Share of the generation time in which fewer than half of the slots were live."""
    total = sum(seconds for seconds, _, _ in rounds)
    return sum(seconds for seconds, live, _ in rounds if live < slots / 2) / total if total else 0.0


overlapped = partial(train, _Overlapped)
