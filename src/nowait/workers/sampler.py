"""Sampler on any Hugging Face causal LM: chunked decoding over a slot cache with counter-based randomness.

Shape legend: A active rows (always the first slots), C tokens of a round, V vocabulary.
Row i's history holds prompt and response; the cache of the first `_cached` rows holds all of it but the newest token, which the next decode step
feeds in, and that of the rows behind them is void: they are prefilled, which gives their next token as well.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch

from nowait.batch import LENGTH, STOP, Batch, Request, Rollouts, Segments, Weights, length_groups, pack_requests, unpack_requests
from nowait.workers.kv_cache import GROUPED, SlotCache
from nowait.workers.models import eos_ids, hidden_states, load_policy, load_weights, on


class HFSampler:
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
        self.model = load_policy(path, dtype, threads, device).requires_grad_(False)
        self.model.set_attn_implementation(GROUPED)
        self.temperature, self.seed, self.stream = temperature, seed, stream
        self.eos = np.array(eos_ids(self.model))
        self._cache = SlotCache(self.model.config, slots, capacity, self.model.dtype, device)
        self._waiting: deque[tuple[Request, int]] = deque()  # request, sample
        self._active = 0
        self._version = 0
        self._slots, self._capacity = slots, capacity
        self._history = np.zeros((slots, capacity), np.int64)
        self._columns = {k: np.zeros(slots, np.int64) for k in ("sid", "request", "sample", "length", "made", "limit")}
        self._cached = 0

    def admit(self, requests: list[Request]) -> None:
        for request in requests:
            request.check_fits(self._capacity)
            self._waiting.extend((request, sample) for sample in range(request.n))

    def load(self, weights: Weights) -> int:
        load_weights(self.model, weights)
        self._version = weights.version
        self._cached = 0
        return int(self._columns["length"][: self._active].sum())

    @torch.inference_mode()
    def decode(self, max_tokens: int) -> Segments:
        self._start_waiting()
        prefilled = self._prefill()
        count, made = self._active, self._columns["made"]
        uniforms = self._uniforms(max_tokens)
        sids, row = self._columns["sid"][:count].copy(), np.arange(count)  # row[i]: which of sids stands in slot i
        finish = np.zeros(count, np.uint8)
        steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for t in range(max_tokens):
            if not len(row):
                break
            token, logp = self._step(uniforms[row, t], prefilled if t == 0 else prefilled[:0])
            steps.append((row, token, logp))
            made[: self._active] += 1
            stopped = (token[:, None] == self.eos).any(1)
            ended = stopped | (made[: self._active] >= self._columns["limit"][: self._active])
            if ended.any():
                finish[row[ended]] = np.where(stopped[ended], STOP, LENGTH)
                row = self._release(ended, row)
        return self._segments(sids, finish, steps)

    def drop(self, ids: list[int]) -> None:
        gone = set(ids)
        self._waiting = deque(item for item in self._waiting if item[0].id not in gone)
        self._release(np.isin(self._columns["request"][: self._active], list(gone)), np.arange(self._active))

    def get_state(self) -> dict:
        """Sequences in flight and waiting; the cache is not part of it: after `set_state` it is filled again, as after `load`."""
        requests = {request.id: request for request, _ in self._waiting}
        return {
            "version": self._version,
            "history": self._history[: self._active].copy(),
            "columns": {name: column[: self._active].copy() for name, column in self._columns.items()},
            "requests": pack_requests(list(requests.values())),
            "waiting": np.array([(request.id, sample) for request, sample in self._waiting], np.int64).reshape(-1, 2),
        }

    def set_state(self, state: dict) -> None:
        """Continue under the same weights, which `load` has brought."""
        self._version, self._active = state["version"], len(state["history"])
        self._history[: self._active] = state["history"]
        for name, column in state["columns"].items():
            self._columns[name][: self._active] = column
        requests = {request.id: request for request in unpack_requests(state["requests"])}
        self._waiting = deque((requests[request], sample) for request, sample in state["waiting"].tolist())
        self._cached = 0

    def _start_waiting(self) -> None:
        while self._waiting and self._active < self._slots:
            request, sample = self._waiting.popleft()
            i, length = self._active, len(request.prompt)
            self._history[i, :length] = request.prompt
            values = (request.sequences[sample], request.id, sample, length, 0, request.max_new_tokens)
            for column, value in zip(self._columns.values(), values, strict=True):
                column[i] = value
            self._active += 1

    def _prefill(self) -> torch.Tensor:
        """Fill the cache of rows where it is void; samples that begin with the same prompt read it once.

        Returns the hidden states [rows, H] of their newest tokens.
        """
        rows = np.arange(self._cached, self._active)
        self._cached = self._active
        begun = self._columns["made"][rows] > 0
        _, first, which = np.unique(np.where(begun, -1 - rows, self._columns["request"][rows]), return_index=True, return_inverse=True)
        read, lengths = rows[first], self._columns["length"][rows[first]]
        newest = torch.empty(len(read), self.model.config.hidden_size, dtype=self.model.dtype, device=self.model.device)
        for group in length_groups(lengths):
            newest[group] = self._prefill_rows(read[group], lengths[group])
        source = read[which]
        if (copied := source != rows).any():
            self._cache.copy(source[copied], rows[copied], int(self._columns["length"][rows[copied]].max()))
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
        active = self._active
        hidden = torch.cat([self._feed(active - len(prefilled)), prefilled])
        token, logp = pick(self.model.get_output_embeddings()(hidden), self.temperature, on(self.model.device, uniform))
        token = token.cpu().numpy()
        self._history[np.arange(active), self._columns["length"][:active]] = token
        self._columns["length"][:active] += 1
        return token, logp.cpu().numpy()

    def _feed(self, count: int) -> torch.Tensor:
        """Hidden states [count, H] of the newest tokens of the first `count` rows, which the cache lacks."""
        device = self.model.device
        if not count:
            return torch.empty(0, self.model.config.hidden_size, dtype=self.model.dtype, device=device)
        length = self._columns["length"][:count]
        at, span = on(device, length - 1), int(length.max())
        mask = torch.where(torch.arange(span, device=device) <= at[:, None], 0.0, -torch.inf)[:, None, None]  # [count, 1, 1, span], added to scores
        newest = on(device, self._history[np.arange(count), length - 1])[:, None]
        return hidden_states(self.model, newest, mask, at[:, None], self._cache.at(slice(0, count), at[:, None], span))[:, 0]

    def _release(self, ended: np.ndarray, row: np.ndarray) -> np.ndarray:
        """Free the slots of `ended` rows; the last rows move into the gaps. Returns `row` in the new order."""
        row = row.copy()
        for i in np.flatnonzero(ended)[::-1]:
            last = self._active - 1
            if i != last:
                length = int(self._columns["length"][last])
                self._cache.copy(last, i, length)
                self._history[i, :length] = self._history[last, :length]
                row[i] = row[last]
                for column in self._columns.values():
                    column[i] = column[last]
            self._active = last
        self._cached = min(self._cached, self._active)
        return row[: self._active]

    def _uniforms(self, count: int) -> np.ndarray:
        t = self._columns["made"][: self._active, None] + np.arange(count)
        return uniform(self.seed, self.stream, self._columns["request"][: self._active, None], self._columns["sample"][: self._active, None], t)

    def _segments(self, sids: np.ndarray, finish: np.ndarray, steps: list) -> Segments:
        """Columns ordered by row, then time."""
        rows = np.concatenate([np.empty(0, np.int64), *(s[0] for s in steps)])
        order = np.argsort(rows, kind="stable")
        offset = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(sids)))]).astype(np.int64)
        token = np.concatenate([np.empty(0, np.int64), *(s[1] for s in steps)])[order].astype(np.int32)
        logp = np.concatenate([np.empty(0, np.float32), *(s[2] for s in steps)])[order].astype(np.float32)
        if not np.isfinite(logp).all():
            raise FloatingPointError(f"log-probs are not finite under weights of version {self._version}: look at the learning rate")
        return Segments(sids, offset, token, logp, finish, self._version)


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
