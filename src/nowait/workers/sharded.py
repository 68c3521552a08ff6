"""A learner of several ranks: weights, gradients and optimiser state are sharded over them (FSDP2), and so is the work on every batch.

Zhao et al. 2023 (arXiv 2304.11277). Each rank is given the same calls with the same arguments, and each must make the same number of passes, since
every one of them gathers weights; a rank that has run out of sequences repeats one that counts nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from nowait.algorithms.losses import merge_stats
from nowait.batch import Batch
from nowait.workers.dealt import meet
from nowait.workers.learner import HFLearner
from nowait.workers.ppo_learner import PPOLearner


class _All(torch.nn.ModuleDict):
    """All trained modules. What is no layer of theirs (embeddings, heads) is gathered while the function runs that is called through this."""

    def forward(self, function: Callable, *args):
        return function(*args)


class _Sharded:
    """Over a learner: `rank` of `ranks`, which meet at `rendezvous`, an address that torch.distributed understands.

    Rank 0 returns what a learner of one rank would, up to rounding, states and published weights included; the others return parts of no use.
    """

    def __init__(self, *args, rank: int, ranks: int, rendezvous: str, device: str = "cpu", snapshots: str | None = None, **options) -> None:
        self._rank, self._ranks = rank, ranks
        meet(rank, ranks, rendezvous, device)
        super().__init__(*args, device=device, snapshots=None if rank else snapshots, **options)
        mesh = init_device_mesh(self.model.device.type, (ranks,))
        self._all = _All(self._trained)
        shard = partial(fully_shard, mesh=mesh, reshard_after_forward=True)
        for module in list(self._all.modules()):
            if isinstance(module, GradientCheckpointingLayer):
                shard(module)
        shard(self._all)
        for module in self._all.modules():
            if isinstance(module, FSDPModule):  # gradients are sums: the loss has one denominator for all ranks
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        rates = [group["full_lr"] for group in self._optimizer.param_groups]
        self._train(self._trained, dict(zip(self._trained, rates, strict=True)))

    def _passes(self, batch: Batch, rows: np.ndarray) -> list[tuple[np.ndarray, bool]]:
        """Micro-batches of this rank's share, and whether they count. Sequences are dealt by length, so that ranks do not wait for each other."""
        dealt = rows[np.argsort(-(batch.prompt_length + batch.length)[rows], kind="stable")]
        shares = [self._micro_batches(batch, dealt[rank :: self._ranks]) for rank in range(self._ranks)]
        missing = max(map(len, shares)) - len(shares[self._rank])
        return [(part, True) for part in shares[self._rank]] + missing * [(dealt[-1:], False)]

    def _read(self, batch: Batch, read: Callable[[Batch], Sequence[torch.Tensor]]) -> list[np.ndarray]:
        found = super()._read(batch, partial(self._all, read))
        for whole in found:
            dist.all_reduce(torch.from_numpy(whole))
        return found

    def _loss(self, *args) -> tuple[torch.Tensor, dict]:
        return self._all(super()._loss, *args)

    def _backward(self, minibatch: int) -> dict:
        """Leave the gradient in the parameters, summed over ranks; returns the statistics of all of them."""
        own = super()._backward(minibatch)
        values = torch.stack([value.double() for value in own.values()])
        every = [torch.empty_like(values) for _ in range(self._ranks)]
        dist.all_gather(every, values)
        return merge_stats(dict(zip(own, values, strict=True)) for values in every)

    def save(self, folder: str) -> None:
        with tempfile.TemporaryDirectory() as aside:
            super().save(aside if self._rank else folder)

    def _tensors(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        tied = getattr(module, "all_tied_weights_keys", ())  # would be gathered twice
        return {name: self._whole(weight) for name, weight in super()._tensors(module).items() if name not in tied}

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the CPU of rank 0; the others take part in gathering a tensor and keep nothing but numbers."""
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.new_empty(0) if self._rank and whole.ndim else whole.cpu()

    def _placed(self, array: np.ndarray, parameter: torch.Tensor) -> torch.Tensor:
        whole = super()._placed(array, parameter)
        if not whole.ndim:  # Adam's count of steps
            return whole
        return distribute_tensor(whole.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None)


class ShardedLearner(_Sharded, HFLearner):
    """HFLearner of several ranks."""


class ShardedPPOLearner(_Sharded, PPOLearner):
    """PPOLearner of several ranks."""
