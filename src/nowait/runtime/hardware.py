"""Seconds that a language model's work takes on given devices: a roofline of arithmetic and memory traffic, collectives, and fixed overheads.

Williams, Waterman and Patterson 2009 (doi 10.1145/1498765.1498785). All sizes in bytes, rates per second. A group's work is spread evenly over its
devices; what a real engine loses beyond that (imbalance, padding, fragmentation) is in the efficiencies and in the calibration factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

OPTIMISER_BYTES = 16  # per parameter while training: bf16 weight and gradient, float32 master weight and two moments
UPDATE_TRAFFIC = 28  # bytes moved per parameter in one AdamW step: read and write master weight and moments, read the gradient
USABLE = 0.9  # of the memory: the rest is activations and fragmentation


class DoesNotFit(ValueError):
    """A model or a layout that the devices cannot hold; the message says what would fit."""


@dataclass(frozen=True)
class Hardware:
    """One device of a machine. Peaks are the data sheet's (dense bf16), efficiencies the share of them that large kernels reach."""

    name: str
    flops: float
    memory: float  # bytes
    bandwidth: float  # of its memory
    link: float  # to each other device of a node, one direction
    network: float  # to another node, per device, one direction
    node: int  # devices per node
    latency: float  # seconds of one collective
    forward_efficiency: float
    train_efficiency: float
    bandwidth_efficiency: float
    decode_overhead: float  # seconds per decode step, whatever the batch: launches, scheduling, sampling
    pass_overhead: float  # seconds per call of any other kind

    __pydantic_config__ = {"extra": "forbid"}


@dataclass(frozen=True)
class Shape:
    """What a decoder-only transformer costs. `active` parameters take part in a token's forward pass (mixture of experts; default all)."""

    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    active: float = 0.0
    bytes: int = 2  # per weight and cached number

    __pydantic_config__ = {"extra": "forbid"}

    @property
    def used(self) -> float:
        return self.active or self.parameters

    @property
    def cached(self) -> int:
        """Bytes of keys and values per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes

    def flops(self, tokens: float, attended: float) -> float:
        """Of a forward pass over `tokens`, which look at `attended` (query, key) pairs in all."""
        return 2 * self.used * tokens + 4 * self.layers * self.heads * self.head_dim * attended


@dataclass(frozen=True)
class Group:
    """`devices` that run one model: replicas of `tensor_parallel` devices each for inference, fully sharded data parallelism for training.

    Raises DoesNotFit when the layout does not divide the devices or the weights exceed a replica's memory (training: with gradients and optimiser,
    that of all devices).
    """

    hardware: Hardware
    shape: Shape
    devices: int
    tensor_parallel: int = 1
    training: bool = False

    def __post_init__(self) -> None:
        tp, memory = self.tensor_parallel, USABLE * self.hardware.memory
        if self.devices < 1 or tp < 1 or self.devices % tp:
            fit = [n for n in range(1, self.devices + 1) if self.devices % n == 0]
            raise DoesNotFit(f"tensor_parallel {tp} does not divide {self.devices} devices: take one of {', '.join(map(str, fit))}")
        if not self.training and (need := self.shape.parameters * self.shape.bytes) > tp * memory:
            least = 2 ** math.ceil(math.log2(need / memory))
            have = f"{tp} x {self.hardware.memory / 1e9:.0f} GB of a replica on {self.hardware.name}"
            devices = ", on as many devices" if least > self.devices else ""
            raise DoesNotFit(f"weights of {need / 1e9:.0f} GB exceed the {have}: take tensor_parallel {least} or more{devices}")
        if self.training and (need := self.shape.parameters * OPTIMISER_BYTES) > self.devices * memory:
            have = f"{self.devices} x {self.hardware.memory / 1e9:.0f} GB of {self.hardware.name}"
            least = math.ceil(need / memory)
            raise DoesNotFit(f"weights, gradients and optimiser take {need / 1e9:.0f} GB, more than {have}: take {least} devices or more")

    @property
    def replicas(self) -> int:
        return self.devices // self.tensor_parallel

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights of all replicas."""
        free = USABLE * self.hardware.memory * self.tensor_parallel - self.shape.parameters * self.shape.bytes
        return int(self.replicas * free / self.shape.cached)

    def decode(self, live: np.ndarray, context: np.ndarray) -> float:
        """Seconds of consecutive decode steps with `live` [T] rows each, whose caches hold `context` [T] tokens together."""
        h, shape, tp = self.hardware, self.shape, self.tensor_parallel
        rows, held = np.ceil(live / self.replicas), context / self.replicas
        read = shape.parameters * (1 - (1 - shape.used / shape.parameters) ** rows) if shape.active else shape.parameters  # experts hit by some row
        arithmetic = shape.flops(rows, held) / (tp * h.flops * h.forward_efficiency)
        traffic = (shape.bytes * read + shape.cached * held) / (tp * h.bandwidth * h.bandwidth_efficiency)
        return float((np.maximum(arithmetic, traffic) + self._reduce(rows) + h.decode_overhead).sum())

    def forward(self, lengths: np.ndarray, before: np.ndarray | float = 0.0) -> float:
        """Seconds of a forward pass over the next `lengths` tokens of sequences of which `before` are cached already."""
        h, tokens = self.hardware, float(np.sum(lengths))
        if not tokens:
            return 0.0
        attended = float(np.sum(lengths * (before + lengths / 2)))
        arithmetic = self.shape.flops(tokens, attended) / (self.devices * h.flops * h.forward_efficiency)
        traffic = self.shape.bytes * self.shape.parameters / (self.tensor_parallel * h.bandwidth * h.bandwidth_efficiency)
        return max(arithmetic, traffic) + float(self._reduce(tokens / self.replicas)) + h.pass_overhead

    def update(self, lengths: np.ndarray, *, steps: int, passes: int, epochs: int = 1, recompute: bool = False) -> float:
        """Seconds of training on whole sequences: `steps` optimiser steps and `passes` micro-batches in all.

        Backward costs twice the forward, once more with `recompute` (gradient checkpointing). Sharded weights are gathered twice and gradients
        scattered once per micro-batch, beside the arithmetic.
        """
        h, lengths = self.hardware, np.asarray(lengths, float)
        flops = (4 if recompute else 3) * epochs * self.shape.flops(float(lengths.sum()), float((lengths**2 / 2).sum()))
        arithmetic = flops / (self.devices * h.flops * h.train_efficiency)
        moved = 3 * self.shape.bytes * self.shape.parameters * (self.devices - 1) / self.devices
        collective = passes * moved / self._slowest(self.devices)
        optimiser = steps * UPDATE_TRAFFIC * self.shape.parameters / (self.devices * h.bandwidth * h.bandwidth_efficiency)
        return max(arithmetic, collective) + optimiser + passes * h.pass_overhead

    def transfer(self) -> float:
        """Seconds to bring new weights to every replica, each device taking its part."""
        return self.shape.bytes * self.shape.parameters / (self.tensor_parallel * self._slowest(self.devices)) + self.hardware.pass_overhead

    def _reduce(self, rows: np.ndarray | float) -> np.ndarray | float:
        """Two ring all-reduces of the hidden states per layer under tensor parallelism."""
        tp = self.tensor_parallel
        if tp == 1:
            return 0.0
        moved = 2 * (tp - 1) / tp * rows * self.shape.hidden * self.shape.bytes
        return 2 * self.shape.layers * (self.hardware.latency + moved / self._slowest(tp))

    def _slowest(self, devices: int) -> float:
        return self.hardware.link if devices <= self.hardware.node else self.hardware.network
