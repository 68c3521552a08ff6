"""A sampler of several ranks: each has an engine and slots of its own, and samples its share of the requests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from nowait.batch import Request, Segments, Weights, join
from nowait.runtime.device import resolve


def meet(rank: int, ranks: int, rendezvous: str, device: str) -> None:
    """Join the other ranks, once per process, at an address that torch.distributed understands."""
    if device != "cpu":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks)


class DealtSampler:
    """`ranks` samplers that `factory` builds, with `slots` in all. Every rank is given the same calls; what rank 0 returns is the work of all.

    A request goes whole to the rank that holds the fewest sequences.
    """

    def __init__(self, factory: str | Callable, *, rank: int, ranks: int, rendezvous: str, slots: int, device: str = "cpu", **options) -> None:
        meet(rank, ranks, rendezvous, device)
        self._group = dist.new_group(backend="gloo")
        self._rank, self._held = rank, [0] * ranks  # sequences on every rank
        self._own = resolve(factory)(slots=slots // ranks, device=device, **options)
        self.model = self._own.model

    def admit(self, requests: list[Request]) -> None:
        for request in requests:
            rank = int(np.argmin(self._held))
            self._held[rank] += request.n
            if rank == self._rank:
                self._own.admit([request])

    def load(self, weights: Weights) -> int:
        return sum(self._gather(self._own.load(weights)))

    def decode(self, max_tokens: int) -> Segments:
        segments = self._own.decode(max_tokens)
        rounds, self._held = map(list, zip(*self._gather((segments, len(self._own))), strict=True))
        return join(rounds)

    def drop(self, ids: list[int]) -> None:
        self._own.drop(ids)
        self._held = self._gather(len(self._own))

    def get_state(self) -> dict:
        return {f"rank {rank}": state for rank, state in enumerate(self._gather(self._own.get_state()))}

    def set_state(self, state: dict) -> None:
        self._own.set_state(state[f"rank {self._rank}"])
        self._held = self._gather(len(self._own))

    def _gather(self, own: object) -> list:
        """What every rank has, on all of them."""
        every = [None] * len(self._held)
        dist.all_gather_object(every, own, group=self._group)
        return every
