"""Sampler on any Hugging Face causal LM: chunked decoding over a slot cache with counter-based randomness.

Shape legend: A active rows (always the first slots), C tokens of a round, V vocabulary.
Row i's history holds prompt and response; the cache of the first `_cached` rows holds all of it but the newest token, which the next decode step
feeds in, and that of the rows behind them is void: they are prefilled, which gives their next token as well.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from nowait.batch import LENGTH, STOP, Batch, Request, Rollouts, Segments, Weights, length_groups, pack_requests, unpack_requests
from nowait.workers.kv_cache import GROUPED, SlotCache
from nowait.workers.models import eos_ids, hidden_states, load_policy, load_weights, on


@dataclass
class Sequence:
    """A sample of a request, and what has been drawn of it."""

    request: Request
    sample: int
    token: list[int]

    @property
    def id(self) -> int:
        return self.request.sequences[self.sample]

    @property
    def ids(self) -> list[int]:
        """Token ids of the prompt and of what has been drawn."""
        return [*self.request.prompt.tolist(), *self.token]


class Queue:
    """What samplers share: sequences run in slots or wait for one. Those that wait and have begun, which a restored state leaves, stand in front."""

    def __init__(self, slots: int, capacity: int) -> None:
        self._slots, self._capacity = slots, capacity
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    def admit(self, requests: list[Request]) -> None:
        for request in requests:
            request.check_fits(self._capacity)
            self._waiting.extend(Sequence(request, sample, []) for sample in range(request.n))

    def drop(self, ids: list[int]) -> None:
        self._waiting = deque(s for s in self._waiting if s.request.id not in ids)

    def get_state(self) -> dict:
        """Sequences in flight and waiting. A restored sampler goes on as this one does after its next `load`, with an empty cache."""
        sequences = [*self._running, *self._waiting]
        return {
            "requests": pack_requests(list({s.request.id: s.request for s in sequences}.values())),
            "sequences": np.array([(s.request.id, s.sample, len(s.token)) for s in sequences], np.int64).reshape(-1, 3),
            "token": np.array([token for s in sequences for token in s.token], np.int32),
        }

    def set_state(self, state: dict) -> None:
        """Continue under the same weights, which `load` has brought."""
        self.drop([s.request.id for s in self._running])
        requests, token = {request.id: request for request in unpack_requests(state["requests"])}, iter(state["token"].tolist())
        self._waiting = deque(Sequence(requests[i], sample, [*itertools.islice(token, made)]) for i, sample, made in state["sequences"].tolist())

    def _round(self, sequences: list[Sequence], finish: np.ndarray, steps: list[tuple], version: int) -> Segments:
        """What `sequences` have drawn in a round, in columns. Each step holds indices of some of them, and the token and its log-prob of each."""
        rows = np.concatenate([np.empty(0, np.int64), *(step[0] for step in steps)])
        order = np.argsort(rows, kind="stable")
        token = np.concatenate([np.empty(0, np.int64), *(step[1] for step in steps)])[order].astype(np.int32)
        logp = np.concatenate([np.empty(0, np.float32), *(step[2] for step in steps)])[order].astype(np.float32)
        if not np.isfinite(logp).all():
            raise FloatingPointError(f"log-probs are not finite under weights of version {version}: look at the learning rate")
        offset = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(sequences)))])
        for s, (start, end) in zip(sequences, itertools.pairwise(offset.tolist()), strict=True):
            s.token += token[start:end].tolist()
        return Segments(np.array([s.id for s in sequences], np.int64), offset, token, logp, finish, version)


class HFSampler(Queue):
    """Samples with temperature from the full softmax; `stream` separates training (0) from evaluation (1)."""

    def __init__(
        self,
        path: str,
        *,
        dtype: str = "float32",
        threads: int = 1,
        device: str = "cpu",
        slots: int,
        capacity: int,
        temperature: float = 1.0,
        seed: int = 0,
        stream: int = 0,
    ) -> None:
        super().__init__(slots, capacity)
        self.model = load_policy(path, dtype, threads, device).requires_grad_(False)
        self.model.set_attn_implementation(GROUPED)
        self.temperature, self.seed, self.stream = temperature, seed, stream
        self.eos = np.array(eos_ids(self.model))
        self._cache = SlotCache(self.model.config, slots, capacity, self.model.dtype, device)
        self._version = self._cached = 0
        self._history = np.zeros((slots, capacity), np.int64)
        self._length, self._limit = np.zeros((2, slots), np.int64)  # of history: now, and at most

    def load(self, weights: Weights) -> int:
        load_weights(self.model, weights)
        self._version, self._cached = weights.version, 0
        return int(self._length[: len(self._running)].sum())

    @torch.inference_mode()
    def decode(self, max_tokens: int) -> Segments:
        self._start_waiting()
        prefilled = self._prefill()
        uniforms = self._uniforms(max_tokens)
        sequences, row = list(self._running), np.arange(len(self._running))  # row[i]: which of them stands in slot i
        finish = np.zeros(len(row), np.uint8)
        steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for t in range(max_tokens):
            if not len(row):
                break
            token, logp = self._step(uniforms[row, t], prefilled if t == 0 else prefilled[:0])
            steps.append((row, token, logp))
            stopped = (token[:, None] == self.eos).any(1)
            ended = stopped | (self._length[: len(row)] >= self._limit[: len(row)])
            if ended.any():
                finish[row[ended]] = np.where(stopped[ended], STOP, LENGTH)
                row = self._release(ended, row)
        return self._round(sequences, finish, steps, self._version)

    def drop(self, ids: list[int]) -> None:
        super().drop(ids)
        gone = np.array([s.request.id in ids for s in self._running], bool)
        self._release(gone, np.arange(len(gone)))

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            s, i = self._waiting.popleft(), len(self._running)
            ids, most = s.ids, len(s.request.prompt) + s.request.max_new_tokens
            self._history[i, : len(ids)] = ids
            self._length[i], self._limit[i] = len(ids), most
            self._running.append(s)

    def _prefill(self) -> torch.Tensor:
        """Fill the cache of rows where it is void; samples that begin with the same prompt read it once.

        Returns the hidden states [rows, H] of their newest tokens.
        """
        rows = np.arange(self._cached, len(self._running))
        self._cached = len(self._running)
        text = np.array([-1 - i if self._running[i].token else self._running[i].request.id for i in rows], np.int64)  # equal where it is the same
        _, first, which = np.unique(text, return_index=True, return_inverse=True)
        read, lengths = rows[first], self._length[rows[first]]
        newest = torch.empty(len(read), self.model.config.hidden_size, dtype=self.model.dtype, device=self.model.device)
        for group in length_groups(lengths):
            newest[group] = self._prefill_rows(read[group], lengths[group])
        source = read[which]
        if (copied := source != rows).any():
            self._cache.copy(source[copied], rows[copied], int(self._length[rows[copied]].max()))
        return newest[which]

    def _prefill_rows(self, rows: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
        width, device = int(lengths.max()), self.model.device
        positions = torch.arange(width, device=device).expand(len(rows), -1)
        padding = positions >= on(device, lengths)[:, None]
        mask = torch.ones(1, 1, 1, 1, device=device)  # a stand-in, so that the model makes none: attention is causal, which hides padding at the end
        cache = self._cache.at(on(device, rows), positions.masked_fill(padding, self._cache.spare), width)
        hidden = hidden_states(self.model, on(device, self._history[rows, :width]), mask, positions, cache)
        return hidden[np.arange(len(rows)), lengths - 1]

    def _step(self, uniform: np.ndarray, prefilled: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """One token for every active row, the last of which are prefilled already: token int64 [A], log-prob float32 [A]."""
        active = len(self._running)
        hidden = torch.cat([self._feed(active - len(prefilled)), prefilled])
        token, logp = pick(self.model.get_output_embeddings()(hidden), self.temperature, on(self.model.device, uniform))
        token = token.cpu().numpy()
        self._history[np.arange(active), self._length[:active]] = token
        self._length[:active] += 1
        return token, logp.cpu().numpy()

    def _feed(self, count: int) -> torch.Tensor:
        """Hidden states [count, H] of the newest tokens of the first `count` rows, which the cache lacks."""
        device = self.model.device
        if not count:
            return torch.empty(0, self.model.config.hidden_size, dtype=self.model.dtype, device=device)
        length = self._length[:count]
        at, span = on(device, length - 1), int(length.max())
        mask = torch.where(torch.arange(span, device=device) <= at[:, None], 0.0, -torch.inf)[:, None, None]  # [count, 1, 1, span], added to scores
        newest = on(device, self._history[np.arange(count), length - 1])[:, None]
        return hidden_states(self.model, newest, mask, at[:, None], self._cache.at(slice(0, count), at[:, None], span))[:, 0]

    def _release(self, ended: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Free the slots of `ended` rows; the last rows move into the gaps. Returns `row` in the new order."""
        row = row.copy()
        for i in np.flatnonzero(ended)[::-1]:
            last = len(self._running) - 1
            moved = self._running.pop()
            if i != last:
                length = self._length[last]
                self._cache.copy(last, i, length)
                self._history[i, :length] = self._history[last, :length]
                self._running[i], row[i], self._length[i], self._limit[i] = moved, row[last], length, self._limit[last]
        self._cached = min(self._cached, len(self._running))
        return row[: len(self._running)]

    def _uniforms(self, count: int) -> np.ndarray:
        request, sample, made = np.array([(s.request.id, s.sample, len(s.token)) for s in self._running], np.int64).reshape(-1, 3, 1).swapaxes(0, 1)
        return uniform(self.seed, self.stream, request, sample, made + np.arange(count))


def generate(sampler: HFSampler, requests: list[Request], chunk: int = 8, step: int = 0) -> Batch:
    """All responses to requests of one n, as the batch of a training step."""
    rollouts, left = Rollouts(requests[0].n), len(requests)
    rollouts.admit(requests)
    sampler.admit(requests)
    while left:
        left -= len(rollouts.add(sampler.decode(chunk)))
    return rollouts.take([r.id for r in requests], step)


def pick(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-CDF sampling: token [A] and its log-prob [A] from logits [A, V] and uniforms [A] in [0, 1).

    The cumulative sum runs in float64, so that a large vocabulary's rounding does not shift probabilities.
    """
    logp = torch.log_softmax(logits.float() / temperature, -1)
    cdf = logp.double().exp().cumsum(-1)
    token = (cdf <= uniform[:, None] * cdf[:, -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)
    return token, logp.gather(-1, token[:, None])[:, 0]


def uniform(seed: int, stream: int, request: np.ndarray, sample: np.ndarray, t: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) from a counter-based hash, so that a token's randomness does not depend on its batch or its chunk."""
    h = np.zeros(np.broadcast_shapes(request.shape, sample.shape, t.shape), np.uint64)
    for part in (seed, stream, request, sample, t):
        h = _mix(h ^ np.asarray(part).astype(np.uint64))
    return (h >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function (Steele, Lea and Flood 2014) after one step of its counter."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
