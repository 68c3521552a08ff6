"""A device that refuses to work with tensors of the CPU, as a GPU does, and computes on the CPU all the same: PyTorch's slot for devices written in
Python, with tensors that only wear its label. Run as a script, it puts every worker there and compares with the same worker on the CPU.

A process of its own, because a device cannot be unregistered.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from test_learner import rewarded
from test_streamed import answers, prompts, rounds, save_reward
from tiny import generate, requests, save_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from nowait.batch import Batch
from nowait.config import AlgorithmConfig, CriticConfig, LearnerConfig
from nowait.workers import streamed
from nowait.workers.learner import HFLearner
from nowait.workers.ppo_learner import PPOLearner
from nowait.workers.sampler import HFSampler

DEVICE = "fakegpu:0"
CROSSING = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class FakeTensor(torch.Tensor):
    """The tensor `inner` under the label of the device."""

    @staticmethod
    def __new__(cls, inner):
        kind = {"dtype": inner.dtype, "strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **kind, device="privateuseone:0")

    def __init__(self, inner):
        self.inner = inner

    def tolist(self):
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._can_decompose() and function not in CROSSING:
            with self:
                result = function.decompose(*args, **kwargs or {})
            if result is not NotImplemented:
                return result
        return run(function, args, kwargs or {})


def bare(x):
    return x.inner if isinstance(x, FakeTensor) else torch.device("cpu") if fake(x) else x


def fake(x) -> bool:
    return isinstance(x, torch.device) and x.type == "fakegpu"


def run(function, args, kwargs):
    """An operation on the tensors behind the labels; mixing tensors of both devices is an error, scalars apart."""
    leaves = tree_leaves((args, kwargs))
    tensors, devices = ([x for x in leaves if isinstance(x, kind)] for kind in (torch.Tensor, torch.device))
    here = [isinstance(x, FakeTensor) for x in tensors]
    if any(here) and function not in CROSSING and any(x.dim() and not on for x, on in zip(tensors, here, strict=True)):
        raise RuntimeError(f"expected all tensors on one device: {function} of {[(str(x.device), tuple(x.shape)) for x in tensors]}")
    if function is torch.ops.aten._fused_sdp_choice.default:
        return SDPBackend.MATH.value
    out = function(*tree_map(bare, args), **tree_map(bare, kwargs))
    if not (fake(devices[0]) if devices else any(here)):
        return args[0] if function is torch.ops.aten.copy_.default else out
    known = {id(bare(x)): x for x in tensors}  # of operations in place
    return tree_map(lambda x: known.get(id(x), FakeTensor(x)) if isinstance(x, torch.Tensor) else x, out)


def tensor(make, values, *, device=None, **options):
    """torch.tensor, which makes its result on the device by itself."""
    there = device is not None and fake(torch.device(device))
    return make(values, **options).to(device) if there else make(values, device=device, **options)


def both(make, use) -> None:
    """`use` of a worker on the CPU and of one on the device gives the same arrays."""
    (here, mine), (there, other) = ((worker := make(place), use(worker)) for place in ("cpu", DEVICE))
    assert {str(p.device) for p in there.model.parameters()} == {DEVICE}
    for a, b in zip(tree_leaves(mine), tree_leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(b, np.float64), np.asarray(a, np.float64), atol=2e-5)


def learn(batch: Batch):
    def use(worker) -> list:
        prox = worker.logp(batch)
        worker.prepare(batch, prox)
        shares = [worker.gradient(0)]
        worker.apply(shares)
        stats = worker.update(batch, prox)
        state = worker.get_state()
        worker.set_state(state)
        weights = {name: tensor.cpu().numpy() for name, tensor in worker.publish().payload.items()}
        return [prox, shares[0][0], {k: v for k, v in stats.items() if v == v}, state, weights]

    return use


def read(worker) -> list:
    """Responses read in pieces, the state taken and given back between them."""
    wanted, states = prompts(4), []
    worker.admit(wanted)
    for piece in rounds(answers(wanted), 7):
        worker.prefill(piece)
        worker.set_state(state := worker.get_state())
        states.append(state)
    return [states, worker.finish([r.id for r in wanted])]


def compare(policy: str, reward: str, batch: Batch) -> None:
    frozen = {"slots": 16, "capacity": 64, "n": 2}
    plain, critic = {"temperature": 0.9, "seed": 0}, {"anchor": "ppo", "advantage": "gae", "kl_coef": 0.1}
    both(
        lambda d: HFSampler(policy, slots=9, capacity=64, seed=1, device=d),
        lambda w: dataclasses.astuple(generate(w, requests(4, n=4, limit=20)))[1:9],
    )
    for options in ({"gradient_checkpointing": True}, {"lora_rank": 4}):
        group = AlgorithmConfig(anchor="recompute")
        both(lambda d: HFLearner(policy, LearnerConfig(minibatches=1), group, **plain, **options, device=d), learn(batch))  # noqa: B023
    for shared in (True, False):
        settings = AlgorithmConfig(**critic), CriticConfig(shared=shared)
        both(
            lambda d: PPOLearner(policy, LearnerConfig(minibatches=1), settings[0], critic=settings[1], **plain, device=d),  # noqa: B023
            lambda w: [w.values(batch), *learn(batch)(w)],
        )
    both(lambda d: streamed.StreamedReference(policy, temperature=0.9, **frozen, device=d), read)
    both(lambda d: streamed.load_reward(reward, policy, **frozen, device=d), read)
    streamed._obstacle = lambda *_: "this test reads whole responses"
    both(lambda d: streamed.load_reward(reward, policy, **frozen, device=d), read)
    try:
        torch.zeros(3, device=DEVICE) + torch.ones(3)
    except RuntimeError as error:
        assert "one device" in str(error)
        print("every worker follows its model's device")


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend("fakegpu")
    torch.fakegpu.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch.__future__.set_swap_module_params_on_conversion(True)  # which keeps tied weights tied
    for worker in (HFSampler, streamed.Streamed, streamed.StreamedReward, streamed.WholeReward):
        for name, method in vars(worker).items():
            if hasattr(method, "__wrapped__"):  # inference mode is not for labelled tensors
                setattr(worker, name, torch.no_grad()(method.__wrapped__))
    for name in ("_obstacle", "_scores_newest"):
        setattr(streamed, name, torch.no_grad()(getattr(streamed, name).__wrapped__))
    folder = Path(sys.argv[1])
    policy, reward = save_model(folder / "policy"), save_reward(folder / "reward")
    batch = rewarded(generate(HFSampler(policy, slots=16, capacity=64, seed=1), requests(4, n=4, limit=20)))
    torch.tensor = partial(tensor, torch.tensor)
    with FakeDevice(), sdpa_kernel(SDPBackend.MATH):
        compare(policy, reward, dataclasses.replace(batch, logp_ref=batch.logp_behav - 0.1))
