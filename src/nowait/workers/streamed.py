"""Frozen models that read responses while they are written: a reward model and the reference policy (OPPO, arXiv 2509.25762, intra-step overlap).

A model that attends backwards only may read a response in pieces: its keys and values are kept between pieces, and across training steps, because its
weights never change. The prompt is read with the first piece. A reward model that cannot do so reads whole responses once they are complete.

Shape legend: R sequences read in one forward pass, T longest new piece, H hidden, V vocabulary, N response tokens.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from nowait.batch import RUNNING, Request, Rollouts, Segments, length_groups, pack_requests, pad, unpack_requests
from nowait.workers.kv_cache import SlotCache, needs_more
from nowait.workers.models import hidden_states, load_model, load_policy, loading, model_folder, on

log = logging.getLogger(__name__)
SCORE = "the reward model's score is not finite; see reward.path, model.dtype"
LOGIT_TOKENS = 512  # tokens whose vocabulary logits exist at once


class Streamed:
    """A causal model that reads pieces of many sequences at once, each at its own length; `slots` sequences of `capacity` tokens at most.

    Values do not depend on how a response was cut into pieces, nor on what else was read with it, up to rounding.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, capacity: int, n: int) -> None:
        self.model, self.n, self.capacity = model.requires_grad_(False), n, capacity
        self._cache = SlotCache(model.config, slots, capacity, model.dtype, model.device)
        self._newest = torch.zeros(slots, model.config.hidden_size, dtype=model.dtype, device=model.device)  # hidden state of the last token read
        self._requests: dict[int, Request] = {}
        self._slot: dict[int, int] = {}  # of every sequence that is held
        self._free = list(range(slots))
        self._prompt, self._read = np.zeros((2, slots), np.int64)  # by slot: tokens of the prompt, and tokens in the cache, prompt included
        self._finish = np.zeros(slots, np.uint8)

    def admit(self, requests: list[Request]) -> None:
        """Reserve slots. Raises ValueError, and admits none of them, where a request is known, too long, or finds no slot."""
        for request in requests:
            if request.id in self._requests:
                raise ValueError(f"request {request.id} was admitted twice")
            if request.n != self.n:
                raise ValueError(f"request {request.id} has {request.n} samples, this worker was built for {self.n}")
            request.check_fits(self.capacity)
        if len(requests) * self.n > len(self._free):
            raise ValueError(f"{len(requests)} requests x {self.n} samples exceed the {len(self._free)} free slots: finish or drop others first")
        for request in requests:
            self._requests[request.id] = request
            for sequence in request.sequences:
                self._slot[sequence] = slot = self._free.pop(0)
                self._prompt[slot], self._read[slot], self._finish[slot] = len(request.prompt), 0, RUNNING

    @torch.inference_mode()
    def prefill(self, segments: Segments) -> int:
        """Read what is new of some sequences; returns how many tokens that was, prompts included."""
        slots, pieces = [], []
        for sequence, finish, (first, end) in zip(segments.sequence, segments.finish, itertools.pairwise(segments.offset), strict=True):
            if (slot := self._slot.get(sequence)) is None:
                raise ValueError(f"sequence {sequence} was not admitted, or its request has finished")
            if self._finish[slot] != RUNNING:
                raise ValueError(f"sequence {sequence} had finished and got more tokens")
            self._finish[slot] = finish
            if end > first:
                prompt = [] if self._read[slot] else [self._requests[sequence // self.n].prompt]
                slots.append(slot)
                pieces.append(np.concatenate([*prompt, segments.token[first:end]]))
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        for group in length_groups(lengths):
            self._feed(np.array(slots)[group], [pieces[i] for i in group], lengths[group])
        return int(lengths.sum())

    def drop(self, ids: list[int]) -> None:
        """Forget requests, complete or not."""
        self._check_held(ids)
        for i in ids:
            for sequence in self._requests.pop(i).sequences:
                self._free.append(self._slot.pop(sequence))

    def get_state(self) -> dict:
        """What is held, with the cached keys and values, in float32."""
        slots = self._slots()
        keys, values = self._cache.read(slots, self._read[slots])
        return {
            "requests": pack_requests(list(self._requests.values())),
            "read": self._read[slots],
            "finish": self._finish[slots],
            "newest": self._newest[on(self.model.device, slots)].float().cpu().numpy(),
            "keys": keys.float().cpu().numpy(),
            "values": values.float().cpu().numpy(),
        }

    def set_state(self, state: dict) -> None:
        """Hold exactly what the worker held that gave the state; values continue bit for bit."""
        self.drop(list(self._requests))
        self.admit(unpack_requests(state["requests"]))
        slots = self._slots()
        self._read[slots], self._finish[slots] = state["read"], state["finish"]
        self._cache.write(slots, state["read"], *(torch.from_numpy(state[name]) for name in ("keys", "values")))
        self._newest[on(self.model.device, slots)] = torch.from_numpy(state["newest"]).to(self._newest)

    def _slots(self) -> np.ndarray:
        """Of all sequences, in the order of their admission."""
        return np.array(list(self._slot.values()), np.int64)

    def _check_held(self, ids: Sequence[int]) -> None:
        if unknown := [i for i in ids if i not in self._requests]:
            raise ValueError(f"requests {', '.join(map(str, unknown))} are not held: admit them first, and finish or drop them once")

    def _complete(self, ids: Sequence[int]) -> np.ndarray:
        """Slots of the sequences of complete requests, in order."""
        self._check_held(ids)
        slots = np.array([self._slot[s] for i in ids for s in self._requests[i].sequences], np.int64)
        running = (self._finish[slots] == RUNNING).reshape(-1, self.n).any(1)
        if running.any():
            raise ValueError(f"requests {', '.join(map(str, np.array(ids)[running]))} are not complete: read them to their end first")
        return slots

    def _feed(self, slots: np.ndarray, tokens: list[np.ndarray], lengths: np.ndarray) -> torch.Tensor:
        """One forward pass over the next tokens of some sequences; returns their hidden states [R, T, H]."""
        device, span = self.model.device, int((self._read[slots] + lengths).max())
        row, start, length = (on(device, column) for column in (slots, self._read[slots], lengths))
        step = torch.arange(int(lengths.max()), device=device)
        positions = start[:, None] + torch.minimum(step, length[:, None] - 1)  # padding sees what the last token sees
        seen = torch.arange(span, device=device) <= positions[..., None]
        mask = torch.where(seen, 0.0, -torch.inf)[:, None].to(self.model.dtype)  # [R, 1, T, span]
        cache = self._cache.at(row, positions.masked_fill(step >= length[:, None], self._cache.spare), span)
        hidden = hidden_states(self.model, on(device, pad(tokens, 0, np.int64)), mask, positions, cache)
        self._newest[row] = hidden[torch.arange(len(slots), device=device), length - 1]
        self._read[slots] += lengths
        return hidden


class StreamedReward(Streamed):
    """Scores by a causal model with one label: its score head at the newest token of a response, EOS included.

    `load_reward` makes one where that is what the model computes.
    """

    @torch.inference_mode()
    def finish(self, ids: list[int]) -> list[list[float]]:
        """n scores per complete request, in the order of ids; forgets them."""
        scores = self.model.score(self._newest[on(self.model.device, self._complete(ids))])
        self.drop(ids)
        return _by_request(scores.float()[:, 0].tolist(), ids, SCORE)


class StreamedReference(Streamed):
    """Per-token log-probs of responses under a frozen policy, at the training temperature; `model` is what `load_policy` takes beside the path."""

    def __init__(self, path: str, *, slots: int, capacity: int, temperature: float, n: int, **model) -> None:
        super().__init__(load_policy(path, **model), slots=slots, capacity=capacity, n=n)
        self.temperature = temperature
        self._logp = np.zeros((slots, capacity), np.float32)  # by position of the token, prompt included

    def finish(self, ids: list[int]) -> list[list[np.ndarray]]:
        """For each complete request, n arrays float32 of the length of the response; forgets the requests."""
        slots = self._complete(ids)
        logp = [self._logp[slot, self._prompt[slot] : self._read[slot]].copy() for slot in slots]
        self.drop(ids)
        return _by_request(logp, ids, "the reference's log-probs are not finite; see algorithm.kl_coef, model.path")

    def get_state(self) -> dict:
        rows = [self._logp[slot, : self._read[slot]] for slot in self._slots()]
        return super().get_state() | {"logp": np.concatenate([np.empty(0, np.float32), *rows])}

    def set_state(self, state: dict) -> None:
        super().set_state(state)
        for slot, row in zip(self._slots(), np.split(state["logp"], np.cumsum(state["read"])), strict=False):
            self._logp[slot, : len(row)] = row

    def _feed(self, slots: np.ndarray, tokens: list[np.ndarray], lengths: np.ndarray) -> torch.Tensor:
        """Also note the log-prob of each response token, which the hidden state one before it predicts."""
        start, before = self._read[slots, None], self._newest[on(self.model.device, slots)]
        hidden = super()._feed(slots, tokens, lengths)
        before = torch.cat([before[:, None], hidden[:, :-1]], 1)
        place = start + np.arange(hidden.shape[1])  # [R, T]
        row, t = np.nonzero((place >= self._prompt[slots, None]) & (place < self._read[slots, None]))
        index, target = (on(hidden.device, row), on(hidden.device, t)), on(hidden.device, pad(tokens, 0, np.int64)[row, t])
        parts = zip(before[index].split(LOGIT_TOKENS), target.split(LOGIT_TOKENS), strict=True)
        self._logp[slots[row], place[row, t]] = torch.cat([self._head(h, y) for h, y in parts]).cpu().numpy()
        return hidden

    def _head(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logp = torch.log_softmax(self.model.get_output_embeddings()(hidden).float().div_(self.temperature), -1)  # [tokens, V]
        return logp.gather(-1, target[:, None])[:, 0]


class WholeReward(Rollouts):
    """Scores by any model with one label, once responses are complete: what cannot be streamed.

    `encode` gives the model's token ids for a prompt and a response (without the policy's EOS) in those of the policy.
    """

    def __init__(self, model: PreTrainedModel, encode: Callable[[np.ndarray, np.ndarray], list[int]], *, padding: int, n: int) -> None:
        super().__init__(n)
        self.model, self._encode, self._padding = model.requires_grad_(False), encode, padding
        self._reads_newest = _scores_newest(model)

    def prefill(self, segments: Segments) -> int:
        """Keep the tokens; the model reads none of them yet."""
        self.add(segments)
        return 0

    @torch.inference_mode()
    def finish(self, ids: list[int]) -> list[list[float]]:
        """n scores per complete request, in the order of ids; forgets them."""
        batch = self.take(ids, 0)
        columns = zip(batch.prompt, batch.prompt_length, batch.token, batch.length, strict=True)
        texts = [np.array(self._encode(prompt[:p], token[:length]), np.int64) for prompt, p, token, length in columns]
        longest, most = max(map(len, texts)), getattr(self.model.config, "max_position_embeddings", None)
        if most is not None and longest > most:
            raise ValueError(f"reward.path: a response makes {longest} tokens, the model reads {most}: lower sampler.max_new_tokens")
        scores = torch.empty(len(texts), 1)
        for rows in length_groups([len(text) for text in texts]):
            scores[rows] = self._score([texts[i] for i in rows]).float().cpu()
        return _by_request(scores[:, 0].tolist(), ids, SCORE)

    def _score(self, texts: list[np.ndarray]) -> torch.Tensor:
        """Scores [R, 1]. A head on one token reads the last one by the length: by the padding token, an EOS that is also padding would be missed."""
        device = self.model.device
        ids, length = on(device, pad(texts, self._padding, np.int64)), on(device, [len(text) for text in texts])
        mask = (torch.arange(ids.shape[1], device=device) < length[:, None]).long()
        if not self._reads_newest:
            return self.model(input_ids=ids, attention_mask=mask).logits
        return self.model.score(hidden_states(self.model, ids, mask)[torch.arange(len(texts), device=device), length - 1])


def load_reward(
    path: str, policy: str, *, slots: int, capacity: int, n: int, dtype: str = "float32", threads: int = 1, device: str = "cpu"
) -> StreamedReward | WholeReward:
    """The reward model `path` for responses of the policy `policy`: streamed where that gives what the model computes, else whole, with a warning.

    Raises ValueError for a model that cannot be loaded, has several labels or no trained head, or lacks the padding token that it needs.
    """
    torch.set_num_threads(threads)
    model = load_model(AutoModelForSequenceClassification, "reward.path", path, dtype).to(device)
    if model.config.num_labels != 1:
        raise ValueError(f"reward.path: {path!r} has {model.config.num_labels} labels; take a model that gives one number (num_labels 1)")
    with loading("reward.path", path):
        own, of_policy = (AutoTokenizer.from_pretrained(model_folder(folder)) for folder in (path, policy))
    vocabulary = own.get_vocab()
    same = all(vocabulary.get(token) == i for token, i in of_policy.get_vocab().items())
    reason = _obstacle(model, capacity) if same else "its vocabulary is not the policy's"
    if reason is None:
        return StreamedReward(model, slots=slots, capacity=capacity, n=n)
    log.warning("reward.path: %r is not read while responses are written, but whole at their end: %s", path, reason)
    padding = own.pad_token_id if model.config.pad_token_id is None else model.config.pad_token_id
    if padding is None:
        raise ValueError(f"reward.path: {path!r} scores padded batches and names no padding token: set pad_token_id in its config.json")

    def encode(prompt: np.ndarray, token: np.ndarray) -> list[int]:
        ids = np.concatenate([prompt, token]).tolist()
        return ids if same else own(of_policy.decode(ids, skip_special_tokens=True))["input_ids"]

    return WholeReward(model, encode, padding=padding, n=n)


@torch.inference_mode()
def _obstacle(model: PreTrainedModel, capacity: int) -> str | None:
    """Why a model with the policy's vocabulary cannot be streamed, or None if it can: tried out on one sequence."""
    if model.config.is_encoder_decoder:
        return "it has an encoder"
    ids = _probe(model)
    changed = torch.cat([ids[:, :6], ids[:, 6:].flip(1)], 1)
    one, two = (model.base_model(input_ids=x).last_hidden_state for x in (ids, changed))
    if not _close(one[:, :6], two[:, :6]):
        return "its attention looks ahead"
    if not _scores_newest(model):
        return "its score is not one linear head at the newest token"
    reason = needs_more(model.config, capacity)
    return f"streaming needs {reason}" if reason else None


@torch.inference_mode()
def _scores_newest(model: PreTrainedModel) -> bool:
    """Whether a model's score is that of the linear layer `score` at the last token: tried out on one sequence."""
    ids, head = _probe(model), getattr(model, "score", None)
    if model.config.is_encoder_decoder or not isinstance(head, torch.nn.Linear):
        return False
    return _close(head(model.base_model(input_ids=ids).last_hidden_state[:, -1]), model(input_ids=ids).logits, 4 * torch.finfo(model.dtype).eps)


def _probe(model: PreTrainedModel) -> torch.Tensor:
    """A sequence without padding tokens, [1, 12]."""
    return on(model.device, [[i for i in range(model.config.vocab_size) if i != model.config.pad_token_id][:12]])


def _close(one: torch.Tensor, two: torch.Tensor, tolerance: float = 0.0) -> bool:
    return bool((one - two).abs().max() <= max(tolerance, 1e-4) * one.abs().max())


def _by_request(values: list, ids: list[int], trouble: str) -> list[list]:
    """The values of all samples, numbers or arrays, as a list for each request; what is not finite raises."""
    n = len(values) // max(1, len(ids))
    for i, value in enumerate(values):
        if not np.isfinite(value).all():
            raise FloatingPointError(f"request {ids[i // n]}: {trouble}")
    return [values[i * n : (i + 1) * n] for i in range(len(ids))]
