"""What a schedule may ask of a worker. Arguments and results are columns, numbers and strings; no torch here."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from nowait.batch import Batch, Request, Segments, Weights


class Sampler(Protocol):
    """Decodes requests; waiting sequences take the slots of finished ones at the start of a round."""

    def admit(self, requests: list[Request]) -> None:
        """Queue requests; they start as soon as slots are free, in order."""

    def decode(self, max_tokens: int) -> Segments:
        """Advance every active sequence by up to max_tokens."""

    def load(self, weights: Weights) -> int:
        """Use these weights from now on; the sequences in flight are prefilled again. Returns how many tokens that will be."""

    def drop(self, ids: list[int]) -> None:
        """Forget requests, running or waiting."""

    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...


class Scorer(Protocol):
    """Reads responses while they are written (models) or at once (rules)."""

    def admit(self, requests: list[Request]) -> None: ...
    def prefill(self, segments: Segments) -> int | None:
        """Read what is new of some responses. A model returns the number of tokens that it read, prompts included."""

    def finish(self, ids: list[int]) -> list:
        """Values of complete requests in the order of ids: n rewards each, or per-token log-probs for a reference."""

    def drop(self, ids: list[int]) -> None: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...


class Learner(Protocol):
    """Holds the policy being trained."""

    def logp(self, batch: Batch) -> np.ndarray:
        """Log-probs [S, T] of the response tokens under the current weights, no gradient."""

    def values(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """V(prefix before token t) [S, T] and V(whole response) [S] under the current weights; learners with a critic only."""

    def update(self, batch: Batch, logp_prox: np.ndarray | None = None) -> dict[str, float]:
        """One training step on the whole batch; returns statistics."""

    def publish(self) -> Weights:
        """A snapshot of the weights under the number of finished training steps."""

    def save(self, folder: str) -> None:
        """Write the policy as a checkpoint that others can load."""

    def prepare(self, batch: Batch, logp_prox: np.ndarray | None = None) -> int:
        """Data-parallel form of update: prepare, then gradient and apply for each of the returned number of minibatches, then finish."""

    def gradient(self, minibatch: int, rank: int, ranks: int) -> tuple[np.ndarray, dict]:
        """This rank's share of the minibatch's gradient (flat) and statistics; the shares of all ranks add up to the whole."""

    def apply(self, shares: list[tuple[np.ndarray, dict]]) -> None: ...
    def finish(self) -> dict[str, float]: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...
