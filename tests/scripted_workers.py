"""Workers that follow a script instead of a model, so that schedules can be tested exactly.

Lengths are functions of the sequence id, tokens and log-probs of (sequence, position, version): a mix-up shows in the learner's checks.
What frozen models return depends on every token read and on their order, which the learner checks as well.
The learner's "weights" are a hash chain over all that it was given: two runs trained on the same data if and only if the chains are equal.
"""

from __future__ import annotations

import hashlib
from collections import deque

import numpy as np

from nowait.batch import LENGTH, RUNNING, STOP, Batch, Request, Segments, Weights, pack_requests, unpack_requests

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


def reward_of(prompt: list[int], response: list[int]) -> float:
    return share("reward", prompt, response)


def logp_ref_of(response: list[int]) -> np.ndarray:
    """float32 [T]: each depends on its token and all before it."""
    return -((np.cumsum(np.array(response, np.int64)) % 4096 + 1) / 4096).astype(np.float32)


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
        self,
        batch_size: int,
        group_size: int,
        max_staleness: int | None,
        tail: float,
        forward: bool,
        minibatches: int,
        frozen: tuple[str, ...],
        fail_step: int | None,
    ):
        self.batch_size, self.group_size, self.max_staleness, self.forward, self.tail = batch_size, group_size, max_staleness, forward, tail
        self.minibatches, self.frozen, self.fail_step = minibatches, frozen, fail_step
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
            if (column := getattr(batch, name)) is not None:
                digest.update(np.ascontiguousarray(column).tobytes())
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

            self.check_frozen(batch, i, batch.token[i, :length].tolist())

    def check_frozen(self, batch: Batch, i: int, response: list[int]) -> None:
        """What the models that are not trained say of a sequence, of which they must have read every token once and in order."""
        if "reward" in self.frozen:
            prompt = batch.prompt[i, : batch.prompt_length[i]].tolist()
            assert batch.keep[i] and batch.reward[i] == np.float32(reward_of(prompt, response))
        assert (batch.logp_ref is not None) == ("reference" in self.frozen)
        if batch.logp_ref is not None:
            assert batch.logp_ref.shape == batch.token.shape and batch.logp_ref.dtype == np.float32
            np.testing.assert_array_equal(batch.logp_ref[i, : len(response)], logp_ref_of(response))

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


class ScriptedReader:
    """Reads responses in pieces. Raises `Scripted` in prefill call `fail_call`."""

    def __init__(self, n: int, fail_call: int | None = None) -> None:
        self.n, self.fail_call = n, fail_call
        self.prompts: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, int] = {}
        self.last, self.calls = -1, 0

    def admit(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.id > self.last, "a request is admitted once, in order"
            self.last = request.id
            self.prompts[request.id] = request.prompt.tolist()
            self.tokens |= {s: [] for s in request.sequences}

    def prefill(self, segments: Segments) -> int:
        self.calls += 1
        if self.calls == self.fail_call:
            raise Scripted(f"prefill {self.calls}")
        assert len(segments.sequence) and len(set(segments.sequence.tolist())) == len(segments.sequence), "one call reads a sequence once"
        read = 0
        for i, s in enumerate(segments.sequence.tolist()):
            assert s in self.tokens and s not in self.finished
            piece = segments.token[segments.offset[i] : segments.offset[i + 1]].tolist()
            read += len(piece) + (0 if self.tokens[s] else len(self.prompts[s // self.n]))
            self.tokens[s] += piece
            if segments.finish[i] != RUNNING:
                self.finished[s] = int(segments.finish[i])
        return read

    def take(self, ids: list[int]) -> list[list[tuple[list[int], list[int]]]]:
        """Prompt and response of each request's samples, which are forgotten."""
        sequences = [[r * self.n + j for j in range(self.n)] for r in ids]
        assert all(s in self.finished for samples in sequences for s in samples), "finish of a request that was not read to its end"
        for s in sum(sequences, []):
            del self.finished[s]
        return [[(self.prompts[r], self.tokens.pop(s)) for s in samples] for r, samples in zip(ids, sequences, strict=True)]

    def get_state(self) -> dict:
        held = {str(s): list(tokens) for s, tokens in self.tokens.items()}
        prompts = {str(r): prompt for r, prompt in self.prompts.items() if any(r * self.n + j in self.tokens for j in range(self.n))}
        return {"last": self.last, "tokens": held, "finished": {str(s): f for s, f in self.finished.items()}, "prompts": prompts}

    def set_state(self, state: dict) -> None:
        self.last = state["last"]
        self.prompts, self.tokens, self.finished = ({int(k): v for k, v in state[name].items()} for name in ("prompts", "tokens", "finished"))


class ScriptedReward(ScriptedReader):
    def finish(self, ids: list[int]) -> list[list[float]]:
        return [[reward_of(*texts) for texts in samples] for samples in self.take(ids)]


class ScriptedReference(ScriptedReader):
    def finish(self, ids: list[int]) -> list[list[np.ndarray]]:
        return [[logp_ref_of(response) for _, response in samples] for samples in self.take(ids)]
