"""Workers as Ray actors, on this machine or on a cluster. Needs the extra `ray`; imported only where it is used.

A payload of published weights stays in Ray's object store: the schedule passes a reference on, and the process that loads it fetches it.
"""

from __future__ import annotations

import os
import socket
import sys
from concurrent.futures import BrokenExecutor, Future
from contextlib import suppress
from dataclasses import replace
from functools import partial

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from nowait.runtime.device import _Host

START = 120.0  # seconds that an actor may wait for a place


class _RayHost(_Host):
    def call(self, name: str, method: str, args: tuple, timed: bool) -> tuple[object, float | None]:
        result, seconds = super().call(name, method, tuple(map(_fetched, args)), timed)
        return (replace(result, payload=_stored(result.payload)) if method == "publish" else result), seconds

    def _machine(self) -> str:
        return ray.util.get_node_ip_address()


def _stored(tensors: dict) -> ray.ObjectRef:
    """A reference to tensors as arrays of bytes, which every process of a machine reads in place; storing tensors takes ten times as long."""
    import torch

    return ray.put({name: (t.cpu().contiguous().view(torch.uint8).numpy(), t.dtype) for name, t in tensors.items()})


def _fetched(argument: object) -> object:
    """The argument; of published weights, the tensors instead of the reference."""
    if not isinstance(reference := getattr(argument, "payload", None), ray.ObjectRef):
        return argument
    import torch

    return replace(argument, payload={name: torch.from_numpy(array).view(dtype) for name, (array, dtype) in ray.get(reference).items()})


class RayExecutor:
    """Calls run in an actor with `threads` CPUs and so many GPUs of its own, anywhere in the cluster at `address`; None: a Ray of this machine alone.

    Raises RuntimeError, naming the remedy, where there is no cluster, or none with room.
    """

    def __init__(self, address: str | None = None, threads: int = 1, gpus: int = 0) -> None:
        self._connected = not ray.is_initialized()  # by this executor, which ends it as well
        if self._connected:
            _connect(address)
        here = {} if address else {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._wanted = {"num_cpus": threads if address else 0, "num_gpus": gpus}  # on one machine, workers share the CPUs by themselves
        environment = {"env_vars": here | {"OMP_NUM_THREADS": str(threads)}}
        self._actor = ray.remote(_RayHost).options(**self._wanted, runtime_env=environment).remote()
        self._placed = False
        self._pending: set[Future] = set()

    def submit(self, action: str, *args) -> Future:
        if not self._placed:
            self._wait_for_place()
        future: Future = Future()
        future.set_running_or_notify_cancel()
        self._pending.add(future)
        self._actor.act.remote(action, args).future().add_done_callback(partial(self._settle, future))
        return future

    def _wait_for_place(self) -> None:
        try:
            ray.get(self._actor.__ray_ready__.remote(), timeout=START)
        except GetTimeoutError as error:
            what = f"no machine of the Ray cluster has had {self._wanted} free for {START:.0f} seconds"
            raise RuntimeError(f"{what}: see `ray status`, then add machines, or change runtime.gpus and the ranks of sampler and learner") from error
        self._placed = True

    def _settle(self, future: Future, done: Future) -> None:
        try:
            self._pending.remove(future)
        except KeyError:  # closed meanwhile
            return
        try:
            future.set_result(done.result())
        except RayTaskError as error:
            error.cause.__cause__ = error  # with the traceback of its process
            future.set_exception(error.cause)
        except RayActorError as error:
            future.set_exception(BrokenExecutor(str(error)))
        except Exception as error:
            future.set_exception(error)

    def close(self) -> None:
        with suppress(KeyError):
            while True:  # Ray would never settle them
                self._pending.pop().set_exception(BrokenExecutor("closed"))
        if ray.is_initialized():
            ray.kill(self._actor)
            if self._connected:
                ray.shutdown()


def _connect(address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {"address": address} if address else {"address": "local", "num_cpus": 1, "include_dashboard": False}
    host, _, port = (address or "").rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host, int(port)), 10).close()  # Ray itself would try for minutes
        ray.init(**options, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError) as error:
        raise RuntimeError(f"runtime.ray_address: no Ray at {address} ({error}): start it with `ray start --head`, or set null") from error
