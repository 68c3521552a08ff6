"""What crosses a boundary between workers: numpy columns, numbers and strings, never tensors.

Shape legend: S sequences of a batch (requests x n samples), T longest response, P longest prompt, N tokens of one decode round.
Response-aligned arrays [S, T] hold no prompt; index t is the token it describes; nothing is rolled. Padding has version -1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

PASS_TOKENS = 256  # whose work costs about as much as the overhead of a pass, of small models on a CPU
PREFILL_TOKENS = 16384  # padded tokens per forward pass without gradients
RUNNING, STOP, LENGTH = 0, 1, 2  # finish reasons, set by the sampler and never inferred from padding


@dataclass(frozen=True)
class Request:
    """One prompt with n samples; admitted, finished, scored, trained and deferred whole.

    `id` is a running number that is never reused (it keys the random numbers), `row` the row of the data set.
    """

    id: int
    prompt: np.ndarray  # int32 [P]
    n: int
    max_new_tokens: int
    row: int = 0

    @property
    def sequences(self) -> range:
        """Sequence ids of the samples: request id * n + sample."""
        return range(self.id * self.n, (self.id + 1) * self.n)

    def check_fits(self, capacity: int) -> None:
        """Raise ValueError where prompt and longest response exceed a cache of `capacity` tokens per sequence."""
        if len(self.prompt) + self.max_new_tokens > capacity:
            size = f"{len(self.prompt)} prompt + {self.max_new_tokens} new tokens"
            raise ValueError(f"request {self.id}: {size} exceed the cache of {capacity}")


@dataclass
class Segments:
    """One decode round in columns: sequence i produced token[offset[i]:offset[i+1]] under weights `version`."""

    sequence: np.ndarray  # int64 [n]
    offset: np.ndarray  # int64 [n + 1]
    token: np.ndarray  # int32 [N]
    logp_behav: np.ndarray  # float32 [N]
    finish: np.ndarray  # uint8 [n]
    version: int


@dataclass(frozen=True)
class Weights:
    """A published snapshot; `payload` is opened by workers only (tensors, a safetensors path, an object reference)."""

    version: int
    payload: object = field(repr=False)


@dataclass
class Batch:
    """A training batch of S complete sequences; `step` is the learner's version during this update."""

    step: int
    sequence: np.ndarray  # int64 [S]
    group: np.ndarray  # int64 [S]: request id
    prompt: np.ndarray  # int32 [S, P], right-padded
    prompt_length: np.ndarray  # int32 [S]
    token: np.ndarray  # int32 [S, T]
    length: np.ndarray  # int32 [S]
    logp_behav: np.ndarray  # float32 [S, T]
    version: np.ndarray  # int32 [S, T], -1 on padding
    finish: np.ndarray  # uint8 [S]
    reward: np.ndarray  # float32 [S]
    keep: np.ndarray  # bool [S]: False drops the sequence from the loss (its grader failed)
    logp_ref: np.ndarray | None = None  # float32 [S, T]: the reference model's log-probs, where there is one

    def __len__(self) -> int:
        return len(self.length)

    @property
    def mask(self) -> np.ndarray:
        """bool [S, T]: response tokens that enter the loss."""
        return (np.arange(self.token.shape[1]) < self.length[:, None]) & self.keep[:, None]

    def rows(self, index: np.ndarray) -> Batch:
        """The sequences `index`, with padding trimmed to the longest of them."""
        longest, widest = int(self.length[index].max(initial=1)), int(self.prompt_length[index].max(initial=1))
        cut = {"token": longest, "logp_behav": longest, "version": longest, "logp_ref": longest, "prompt": widest}
        whole = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "step"}
        columns = {name: column[index] for name, column in whole.items() if column is not None}
        return replace(self, **{k: v[:, : cut[k]] if k in cut else v for k, v in columns.items()})


def join(rounds: list[Segments]) -> Segments:
    """Several rounds as one: the tokens of a sequence one after the other, its latest finish reason, the version of the latest round."""
    if len(rounds) == 1 and (np.diff(rounds[0].sequence) > 0).all():  # most are
        return rounds[0]
    sequence = np.concatenate([s.sequence for s in rounds])
    ids, last = np.unique(sequence[::-1], return_index=True)
    lengths = np.concatenate([np.diff(s.offset) for s in rounds])
    owner = np.repeat(np.searchsorted(ids, sequence), lengths)
    order = np.argsort(owner, kind="stable")
    return Segments(
        sequence=ids,
        offset=np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(ids)))]).astype(np.int64),
        token=np.concatenate([s.token for s in rounds])[order],
        logp_behav=np.concatenate([s.logp_behav for s in rounds])[order],
        finish=np.concatenate([s.finish for s in rounds])[::-1][last],
        version=rounds[-1].version,
    )


def length_groups(lengths: np.ndarray | list[int], most: int | None = None) -> Iterator[np.ndarray]:
    """Indices by descending length, in groups of at most `most` padded tokens, or one sequence.

    A group ends where padding would more than double the next sequence, if that of all which follow would cost more than another pass.
    """
    most = PREFILL_TOKENS if most is None else most
    order, lengths = np.argsort(-np.array(lengths, np.int64), kind="stable"), np.array(lengths, np.int64)
    first, count = 0, len(order)
    for end in range(1, count + 1):
        longest, following = lengths[order[first]], lengths[order[end]] if end < count else 0
        apart = 2 * following < longest and (count - end) * (longest - following) > PASS_TOKENS
        if end == count or (end - first + 1) * longest > most or apart:
            yield order[first:end]
            first = end


def pad(rows: list[np.ndarray], fill, dtype) -> np.ndarray:
    """Right-pad 1-D arrays to one [len(rows), longest] array (at least one column)."""
    return _padded(np.concatenate([np.empty(0, dtype), *rows]), np.array([len(row) for row in rows], np.int64), fill, dtype)


def _padded(values: np.ndarray, lengths: np.ndarray, fill, dtype) -> np.ndarray:
    """Rows of these `lengths`, whose values follow one another."""
    out = np.full((len(lengths), lengths.max(initial=1)), fill, dtype)
    out[np.arange(out.shape[1]) < lengths[:, None]] = values
    return out


@dataclass
class _Sequence:
    parts: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)  # of each round: tokens, log-probs, version
    finish: int = RUNNING


def _columns(sequences: list[_Sequence]) -> dict[str, np.ndarray]:
    """What sequences hold, one after the other, and the length of each."""
    parts = [part for s in sequences for part in s.parts]
    lengths = np.array([len(token) for token, _, _ in parts], np.int64)
    return {
        "token": np.concatenate([np.empty(0, np.int32), *(token for token, _, _ in parts)]),
        "logp": np.concatenate([np.empty(0, np.float32), *(logp for _, logp, _ in parts)]),
        "version": np.repeat(np.array([version for _, _, version in parts], np.int32), lengths),
        "length": np.array([sum(len(token) for token, _, _ in s.parts) for s in sequences], np.int64),
        "finish": np.array([s.finish for s in sequences], np.uint8),
    }


class Rollouts:
    """Record of the requests in flight (n samples each): joins the rounds' segments and assembles batches."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.requests: dict[int, Request] = {}
        self._sequences: dict[int, _Sequence] = {}
        self.oldest: dict[int, int] = {}  # request -> version of its first token
        self.tokens = 0  # response tokens held: generated and not yet taken for training

    def __len__(self) -> int:
        return len(self.requests)

    def admit(self, requests: list[Request]) -> None:
        for request in requests:
            if request.id in self.requests:
                raise ValueError(f"request {request.id} was admitted twice")
            self.requests[request.id] = request
            self._sequences.update((s, _Sequence()) for s in request.sequences)

    def add(self, segments: Segments) -> list[int]:
        """Append a round; returns the ids of the requests that it completed, in submission order."""
        version, tokens, logps = segments.version, segments.token, segments.logp_behav
        done = []
        bounds = itertools.pairwise(segments.offset.tolist())
        for sid, finish, (first, end) in zip(segments.sequence.tolist(), segments.finish.tolist(), bounds, strict=True):
            sequence = self._sequences[sid]
            if sequence.finish != RUNNING:
                raise ValueError(f"sequence {sid} had finished and got more tokens")
            if end > first:
                self.oldest.setdefault(sid // self.n, version)  # versions only grow
                sequence.parts.append((tokens[first:end], logps[first:end], version))
            if finish != RUNNING:
                sequence.finish = finish
                if self.complete(sid // self.n):
                    done.append(sid // self.n)
        self.tokens += len(tokens)
        return sorted(done)

    def complete(self, request: int) -> bool:
        return all(self._sequences[s].finish != RUNNING for s in self.requests[request].sequences)

    def segments(self, requests: list[int]) -> Segments:
        """All that the sequences of these requests hold, as if one round had brought it."""
        sids = [s for r in requests for s in self.requests[r].sequences]
        held = _columns([self._sequences[s] for s in sids])
        return Segments(
            sequence=np.array(sids, np.int64),
            offset=np.concatenate([[0], np.cumsum(held["length"])]),
            token=held["token"],
            logp_behav=held["logp"],
            finish=held["finish"],
            version=int(held["version"].max()),
        )

    def take(self, requests: list[int], step: int) -> Batch:
        """Remove complete requests and return them as the batch of training step `step`, rewards still to be filled in."""
        if unfinished := [r for r in requests if not self.complete(r)]:
            raise ValueError(f"requests {', '.join(map(str, unfinished))} are not complete and cannot be taken for step {step}")
        owners = [self.requests[r] for r in requests for _ in range(self.n)]
        sids = [s for r in requests for s in self.requests[r].sequences]
        held = self.drop(requests)
        length = held["length"]
        return Batch(
            step=step,
            sequence=np.array(sids, np.int64),
            group=np.array([o.id for o in owners], np.int64),
            prompt=pad([o.prompt for o in owners], 0, np.int32),
            prompt_length=np.array([len(o.prompt) for o in owners], np.int32),
            token=_padded(held["token"], length, 0, np.int32),
            length=length.astype(np.int32),
            logp_behav=_padded(held["logp"], length, 0.0, np.float32),
            version=_padded(held["version"], length, -1, np.int32),
            finish=held["finish"],
            reward=np.zeros(len(sids), np.float32),
            keep=np.ones(len(sids), bool),
        )

    def drop(self, requests: list[int]) -> dict[str, np.ndarray]:
        """Forget requests; what their sequences held."""
        held = _columns([self._sequences.pop(s) for r in requests for s in self.requests.pop(r).sequences])
        self.tokens -= len(held["token"])
        for r in requests:
            self.oldest.pop(r, None)
        return held

    def get_state(self) -> dict:
        held = _columns(list(self._sequences.values()))
        parts = [(sid, len(token), version) for sid, s in self._sequences.items() for token, _, version in s.parts]
        return {
            "requests": pack_requests(list(self.requests.values())),
            "parts": np.array(parts, np.int64).reshape(-1, 3),
            "token": held["token"],
            "logp": held["logp"],
            "finish": held["finish"],
        }

    def set_state(self, state: dict) -> None:
        self.drop(list(self.requests))
        self.admit(unpack_requests(state["requests"]))
        cut = (np.split(state[name], np.cumsum(state["parts"][:, 1])) for name in ("token", "logp"))
        for (sid, _, version), token, logp in zip(state["parts"].tolist(), *cut, strict=False):
            self._sequences[sid].parts.append((token, logp, version))
            self.oldest[sid // self.n] = min(version, self.oldest.get(sid // self.n, version))
        for sequence, finish in zip(self._sequences.values(), state["finish"].tolist(), strict=True):
            sequence.finish = finish
        self.tokens = len(state["token"])


def pack_requests(requests: list[Request]) -> dict:
    """Requests as arrays, for a checkpoint."""
    return {
        "id": np.array([r.id for r in requests], np.int64),
        "prompt": pad([r.prompt for r in requests], 0, np.int32),
        "prompt_length": np.array([len(r.prompt) for r in requests], np.int32),
        "n": np.array([r.n for r in requests], np.int32),
        "max_new_tokens": np.array([r.max_new_tokens for r in requests], np.int32),
        "row": np.array([r.row for r in requests], np.int64),
    }


def unpack_requests(state: dict) -> list[Request]:
    """Inverse of `pack_requests`."""
    columns = zip(*(state[k] for k in ("id", "prompt", "prompt_length", "n", "max_new_tokens", "row")), strict=True)
    return [Request(int(i), np.asarray(p[:length], np.int32), int(n), int(m), int(row)) for i, p, length, n, m, row in columns]
