"""Workers of several ranks, and workers as Ray actors: the same training as that of one rank in one process."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import closing

import numpy as np
import pytest
from ranks import Rank
from test_device import Worker, gone, on
from tiny import EXACT, digest, exact, generate, requests, save_model
from tiny_ppo import scored_responses

from nowait import checkpoint, cli, runs
from nowait.batch import Weights, join
from nowait.config import AlgorithmConfig, ConfigError, CriticConfig, LearnerConfig, load
from nowait.runtime.device import DeviceFailed, InlineExecutor, ProcessExecutor, WallClock
from nowait.runtime.group import GroupExecutor
from nowait.runtime.timeline import Timeline
from nowait.training import _devices, check_gpus, ray_executor
from nowait.workers.dealt import DealtSampler
from nowait.workers.learner import HFLearner
from nowait.workers.ppo_learner import PPOLearner
from nowait.workers.sampler import HFSampler
from nowait.workers.sharded import ShardedLearner, ShardedPPOLearner

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray")


# A group of executors is one executor


def group(ranks: int = 2, executor=ProcessExecutor) -> GroupExecutor:
    return GroupExecutor([executor() for _ in range(ranks)], ("learner", "sampler"))


def test_a_worker_of_several_ranks_is_called_on_all_and_answers_once():
    ranks = group(3, InlineExecutor)
    ranks.submit("place", "learner", Rank, {}).result()
    names = [host._host.workers["learner"].name for host in ranks._members]
    assert [name.split(" at tcp://127.0.0.1:")[0] for name in names] == ["0 of 3", "1 of 3", "2 of 3"] and len({n[-5:] for n in names}) == 1
    assert ranks.submit("call", "learner", "note", ("a",), False).result()[0][1] == ["a"]
    assert [host._host.workers["learner"].log for host in ranks._members] == [["a"]] * 3
    ranks.close()


def test_the_other_workers_of_a_device_live_on_the_first_member():
    ranks = group(2, InlineExecutor)
    ranks.submit("place", "reward", Worker, {"name": "s"}).result()
    assert ranks.submit("call", "reward", "note", (1,), False).result() == (("s", [1]), None)
    assert [list(host._host.workers) for host in ranks._members] == [["reward"], []]
    ranks.close()


@pytest.mark.parametrize(("method", "error", "message"), [("fail_on", ArithmeticError, "rank 1"), ("die_on", DeviceFailed, "'a' died while running")])
def test_the_error_or_death_of_a_rank_is_that_of_the_device_at_once(method, error, message):
    async def main(device):
        await device.place("learner", "ranks:Rank")
        pids = device._executor._members[1].submit("call", "learner", "pid", (), False).result()
        with pytest.raises(error, match=message):
            await device.run("learner", method, 1)
        return pids[0]

    start = time.monotonic()
    pid = on(WallClock(), main, group)
    assert time.monotonic() - start < 30 and gone(pid)


# Two ranks are one learner


class _Shown:
    """Over a learner: what tests look into."""

    def gradient_of(self, batch) -> np.ndarray:
        """Of the whole batch as one minibatch, by parameter."""
        assert self.prepare(batch, self.logp(batch)) == 1
        self._backward(0)
        return np.concatenate([self._array(p.grad).ravel() for p in self._parameters])


class OneRank(_Shown, HFLearner): ...


class OneRankPPO(_Shown, PPOLearner): ...


class TwoRanks(_Shown, ShardedLearner): ...


class TwoRanksPPO(_Shown, ShardedPPOLearner): ...


KINDS = {  # settings of the learner, of the algorithm, of the critic
    "GRPO": ({}, {"anchor": "loglinear"}, None),
    "adapters": ({"lr": 2e-3}, {"anchor": "linear"}, None),
    "bfloat16 adapters": ({"lr": 1e-2}, {"anchor": "behave"}, None),
    "critic": ({"weight_decay": 0.1}, {"anchor": "ppo", "advantage": "gae", "kl_coef": 0.1, "kl_target": 1.0, "kl_horizon": 100}, {}),
    "shared critic": ({}, {"anchor": "diagnostic", "advantage": "gae", "kl_coef": 0.1}, {"shared": True, "lr": 1e-2}),
}
ALL_KINDS = pytest.mark.parametrize("kind", [kind for kind in KINDS if "bfloat16" not in kind])  # whose rounding depends on the shapes of products


class Ranks:
    """Two processes, in which one worker at a time can be called like a local one."""

    def __init__(self) -> None:
        self._group = group()

    def place(self, factory: str, /, **options) -> Ranks:
        self._group.submit("place", "learner", factory, options).result()
        return self

    def __getattr__(self, method: str):
        return lambda *args: self._group.submit("call", "learner", method, args, False).result()[0]

    def both(self, method: str, *args) -> list:
        """What each rank returns."""
        futures = [member.submit("call", "learner", method, args, False) for member in self._group._members]
        return [future.result()[0] for future in futures]

    def close(self) -> None:
        self._group.close()


@pytest.fixture(scope="module")
def two_processes():
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def batch(tiny):
    return scored_responses(tiny)


@pytest.fixture
def pair(tiny, two_processes):
    """make(kind, settings): the same learner of one rank, here, and of two."""

    def make(kind: str, *, options: dict | None = None, **settings):
        learner, algorithm, critic = KINDS[kind]
        configs = {
            "learner": LearnerConfig(**{"lr": 1e-3, "micro_batch_tokens": 100} | learner | settings),
            "algorithm": AlgorithmConfig(**algorithm),
        }
        configs |= {} if critic is None else {"critic": CriticConfig(**critic)}
        if "adapters" in kind:
            pytest.importorskip("peft")
        adapters = {"lora_rank": 3, "dtype": "bfloat16" if "bfloat16" in kind else "float32"} if "adapters" in kind else {}
        arguments = {"path": tiny, "temperature": 0.9, "seed": 0} | configs | adapters | (options or {})
        ending = "" if critic is None else "PPO"
        return globals()[f"OneRank{ending}"](**arguments), two_processes.place(f"test_scaleout:TwoRanks{ending}", **arguments)

    return make


def step(worker, batch) -> dict[str, float]:
    return worker.update(batch, worker.logp(batch))


def assert_same_weights(one: dict, two: dict, tolerance: float) -> None:
    """Of two states, of which the learners' optimisers hold the same as well, though not to that tolerance."""
    assert one.keys() == two.keys() and one["version"] == two["version"] and one["adam"].keys() == two["adam"].keys()
    for name in one.keys() & {"model", "critic", "value_head"}:
        assert one[name].keys() == two[name].keys()
        for key, array in one[name].items():
            assert two[name][key].dtype == array.dtype == np.float32
            np.testing.assert_allclose(two[name][key], array, rtol=0, atol=tolerance)


@ALL_KINDS
def test_gradients_add_up_to_those_of_one_rank(pair, batch, kind):
    one, two = pair(kind, minibatches=1)
    step(one, batch)  # so that the value head, which starts at 0, passes something on
    two.set_state(one.get_state())
    later = dataclasses.replace(batch, step=1)
    expected = one.gradient_of(later)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(two.gradient_of(later), expected, rtol=0, atol=1e-6)


@ALL_KINDS
@pytest.mark.parametrize("minibatches", [2, 16])  # 16: one sequence each, so that the second rank has none
def test_weights_and_statistics_after_three_steps_are_those_of_one_rank(pair, batch, kind, minibatches):
    one, two = pair(kind, minibatches=minibatches, eps=1e-6)  # Adam makes noise in gradients near zero as large as lr otherwise
    for k in range(3):
        expected, found = (step(worker, dataclasses.replace(batch, step=k)) for worker in (one, two))
        assert found.keys() == expected.keys() and found == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
    assert expected["tokens"] == batch.length.sum() and expected["ratio_min"] < 1 < expected["ratio_max"]
    assert_same_weights(one.get_state(), two.get_state(), 1e-4)


@ALL_KINDS
def test_log_probs_and_values_are_those_of_one_rank_also_where_the_second_has_no_sequence(pair, batch, kind):
    one, two = pair(kind)
    step(one, batch)
    two.set_state(one.get_state())
    for part in (batch, batch.rows(np.array([3]))):
        np.testing.assert_allclose(two.logp(part), one.logp(part), atol=EXACT)
        for found, expected in zip(two.values(part), one.values(part), strict=True) if "critic" in kind else ():
            np.testing.assert_allclose(found, expected, atol=EXACT)
            assert np.abs(expected).max() > 1e-3


@ALL_KINDS
def test_a_checkpoint_of_one_rank_is_resumed_on_two_and_the_other_way_round(pair, batch, kind, tmp_path):
    one, two = pair(kind, eps=1e-6)
    step(one, batch)
    checkpoint.save(tmp_path, 1, one.get_state())
    two.set_state(checkpoint.latest(tmp_path)[1])
    assert digest(two) == digest(one)
    back = two.get_state()
    for name, value in one.get_state()["adam"]["0"].items():
        np.testing.assert_array_equal(back["adam"]["0"][name], value)
    later = dataclasses.replace(batch, step=1)
    assert step(two, later) == pytest.approx(step(one, later), rel=1e-3, abs=1e-5, nan_ok=True)
    assert_same_weights(one.get_state(), two.get_state(), 1e-4)
    checkpoint.save(tmp_path, 2, two.get_state())
    one.set_state(checkpoint.latest(tmp_path)[1])
    assert digest(one) == digest(two)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_published_and_saved_is_whole(pair, batch, kind, tmp_path):
    one, two = pair(kind, options={"snapshots": str(tmp_path)})
    step(two, batch)
    one.set_state(two.get_state())
    weights, expected = two.publish(), one.publish()
    assert weights.version == expected.version == 1
    assert open(weights.payload, "rb").read() == open(expected.payload, "rb").read()
    two.save(str(tmp_path / "two"))
    one.save(str(tmp_path / "one"))
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file())
    assert len(files) == {"critic": 6, "shared critic": 4}.get(kind, 3)
    for file in files:
        assert (tmp_path / "two" / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file


def test_recomputed_layers_and_an_untied_output_layer_are_gathered_too(two_processes, pair, batch, tmp_path):
    options = {"path": save_model(tmp_path, tie_word_embeddings=False), "gradient_checkpointing": True}
    one, two = pair("shared critic", minibatches=1, options=options)
    np.testing.assert_allclose(two.gradient_of(batch), one.gradient_of(batch), rtol=0, atol=1e-6)


def test_what_is_not_finite_on_one_rank_stops_the_step_and_is_named(pair, batch):
    _, two = pair("GRPO")
    broken = dataclasses.replace(batch, logp_behav=np.where(batch.sequence[:, None] == 3, math.nan, batch.logp_behav))
    with pytest.raises(FloatingPointError, match="step 0: "):
        two.update(broken)  # after which the other rank waits in vain: this test is the last of its processes


# Two ranks are one sampler


class Dealt(DealtSampler):
    def held(self) -> list[int]:
        """The request of each sequence on this rank."""
        return sorted(s.request.id for s in (*self._own._running, *self._own._waiting))


@pytest.fixture
def dealt(tiny, two_processes):
    """make(slots): the same sampler of one rank, here, and of two."""

    def make(slots: int):
        options = {"path": tiny, "capacity": 64, "seed": 5}
        engine = {"factory": "nowait.workers.sampler:HFSampler", "slots": slots}
        return HFSampler(slots=slots, **options), two_processes.place("test_scaleout:Dealt", **engine, **options)

    return make


@pytest.mark.parametrize("slots", [64, 8])  # all at once; 4 on each rank, so that most wait
def test_two_ranks_sample_the_tokens_of_one(dealt, slots):
    one, two = dealt(slots)
    expected, found = generate(one, requests(12)), generate(two, requests(12))
    for name in ("sequence", "token", "length", "finish", "version"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_allclose(found.logp_behav, expected.logp_behav, atol=EXACT)
    assert two.both("held") == [[], []]


def test_a_request_goes_whole_to_the_rank_that_holds_the_fewest_sequences(dealt):
    _, two = dealt(8)
    big, *small = (dataclasses.replace(r, n=n) for r, n in zip(requests(4), (5, 2, 2, 2), strict=True))
    two.admit([big, *small])  # the second rank holds 2 and 4 of 5, then 6
    assert two.both("held") == [[0] * 5, [1, 1, 2, 2, 3, 3]]
    two.drop([1, 2])
    two.admit([dataclasses.replace(big, id=9, n=2)])
    assert two.both("held") == [[0] * 5, [3, 3, 9, 9]]


def test_weights_reach_all_ranks_and_their_state_is_resumed(dealt, tmp_path):
    samplers, wanted = dealt(8), requests(8)
    newer = Weights(1, save_model(tmp_path / "newer", seed=1) + "/model.safetensors")
    rounds: list[list] = [[], []]
    for sampler, log in zip(samplers, rounds, strict=True):
        sampler.admit(wanted)
        log += [sampler.decode(3), sampler.load(newer)]
        state = sampler.get_state()
        sampler.drop([r.id for r in wanted])
        generate(sampler, [dataclasses.replace(r, id=r.id + 100) for r in wanted])  # which leaves no trace
        sampler.load(newer)
        sampler.set_state(state)
        log.append(sampler.decode(30))
    (first, prefilled, rest), (also_first, also_prefilled, also_rest) = rounds
    assert prefilled == also_prefilled > 8 * 3 and also_rest.version == 1
    for found, expected in ((also_first, first), (also_rest, rest)):
        order = np.argsort(expected.sequence)
        np.testing.assert_array_equal(found.sequence, expected.sequence[order])
        np.testing.assert_array_equal(found.finish, expected.finish[order])
    np.testing.assert_array_equal(also_rest.token, join([rest]).token)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "method"), [("a3po/setup1", "recompute"), ("oppo/stackexchange_7b", "both")])
def test_a_run_with_two_ranks_trains_like_one_and_leaves_an_ordinary_policy(tmp_path, monkeypatch, capsys, config, method):
    monkeypatch.setenv("NOWAIT_RUNS", str(tmp_path))
    options = ["--scale", "smoke", "--method", method, "--no-wandb", "--set", "sampler.slots=64"]  # so that no request waits for a slot
    two = [part for setting in ("runtime.executor=process", "learner.ranks=2", "sampler.ranks=2") for part in ("--set", setting)]
    for name, ranks in (("one", []), ("two", two)):
        assert cli.main(["train", config, *options, *ranks, "--out", str(tmp_path / name)]) == 0
    one, two = (runs.RunResult(tmp_path / name) for name in ("one", "two"))
    assert two.finished and list(two.metrics) == list(one.metrics) and len(two.metrics) == len(one.metrics)
    first = [result.metrics[result.metrics["step"] == 1].iloc[0] for result in (one, two)]
    assert first[0]["rollout/requests"] == first[1]["rollout/requests"] and first[0]["time/elapsed"] == first[1]["time/elapsed"]
    for name in ("train/grad_norm", "train/policy_loss", "train/entropy", "rollout/reward_mean"):
        assert first[1][name] == pytest.approx(first[0][name], rel=1e-4, abs=1e-6)
    assert cli.main(["sample", str(tmp_path / "two"), "--prompt", "1+2="]) == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["learner.ranks=2"], r"learner.ranks: 2 ranks need a process each .*; set runtime.executor=process or ray, or 1 rank"),
        (["runtime.ray_address=auto"], r"runtime.ray_address: executor inline uses no Ray .*; set runtime.executor=ray, or null"),
        (["learner.ranks=2", "runtime.executor=process", "runtime.gpus={a: [0], b: [1, 2, 3]}"], "learner.ranks: 2 ranks cannot share 3 GPUs evenly"),
        (["sampler.ranks=2", "runtime.executor=process", "runtime.gpus={a: [0], b: [1, 2]}"], "sampler.ranks: 2 ranks cannot share 1 GPUs evenly"),
        (["sampler.ranks=48", "runtime.executor=process"], "schedule.group_size: .* samples of a request exceed a sampler's 2 slots"),
        (["sampler.ranks=5", "runtime.executor=process"], "sampler.slots: 5 ranks cannot share 96 slots evenly .*; choose a multiple of 5"),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_the_remedy(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load("a3po/setup1", "cpu", overrides)


def test_each_rank_must_have_slots_for_its_share_of_the_requests_in_flight():
    ranks = ["learner.ranks=2", "sampler.ranks=2", "runtime.executor=process", "schedule.group_size=3", "overlap.delta_max=5", "overlap.delta=4"]
    load("oppo/stackexchange_7b", "cpu", [*ranks, "sampler.slots=66"])  # 11 requests of 3 samples on each
    with pytest.raises(ConfigError, match="21 requests in flight x 3 samples need 66 slots of 2 ranks, sampler.slots is 64"):
        load("oppo/stackexchange_7b", "cpu", [*ranks, "sampler.slots=64"])


def test_gpus_that_no_worker_would_use_are_refused():
    x = load("a3po/setup1", "paper", method="sync_colocated")
    with pytest.raises(ValueError, match="device a has 4 GPUs, of which its workers use 1: name fewer, or raise their ranks"):
        check_gpus(x)


def test_on_one_device_sampler_and_learner_have_equally_many_ranks():
    with pytest.raises(ConfigError, match="sampler.ranks: got 1, but the learner on the same device has 2 ranks .*; make them equal"):
        load("oppo/stackexchange_7b", "cpu", ["learner.ranks=2", "runtime.executor=process"])


@pytest.mark.parametrize("role", ["sampler", "learner"])
def test_colocated_training_is_data_parallel_already(role):
    with pytest.raises(ConfigError, match=f"{role}.ranks: colocated training has a {role} on each of its two devices .*; set 1"):
        load("a3po/setup1", "smoke", [f"{role}.ranks=2", "runtime.executor=process"], "sync_colocated")


def test_each_rank_sees_its_share_of_the_gpus(monkeypatch):
    seen = []
    monkeypatch.setattr("nowait.training.ProcessExecutor", lambda threads, gpus: seen.append(list(gpus)) or InlineExecutor())
    ranks = ["sampler.ranks=2", "learner.ranks=3", "runtime.executor=process", "runtime.gpus={a: [0, 1, 2, 3], b: [7, 6, 5]}"]
    _devices(load("a3po/setup1", "cpu", ranks), WallClock(), Timeline())
    assert seen == [[0, 1], [2, 3], [7], [6], [5]]


def test_a_run_is_found_again_wherever_its_cluster_is():
    here, there = (load("a3po/setup1", "smoke", ["runtime.executor=ray", f"runtime.ray_address={a}"]) for a in ("null", "10.0.0.1:6379"))
    assert runs.folder(here, 1) == runs.folder(there, 1)


# Ray


@pytest.fixture
def ray_here(monkeypatch, tmp_path_factory):
    """Small, quiet, and without a token in the home folder of whoever tests."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES", str(80 << 20))
    ray = pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # as the paths of its sockets must be
        monkeypatch.setenv("RAY_TMPDIR", short)
        yield ray
    assert not ray.is_initialized()


@needs_ray
@pytest.mark.slow
def test_at_cpu_scale_ray_actors_train_bit_for_bit_like_processes_and_leave_nothing_behind(ray_here):
    short = ["schedule.steps=3", "schedule.eval_every=0", "schedule.checkpoint_every=3", "schedule.max_staleness=1", "learner.ranks=2"]
    seen = []
    for executor in ("process", "ray"):
        x = load("a3po/setup1", "cpu", [*short, f"runtime.executor={executor}"])
        with closing(runs.steps(x, 0)) as records:
            seen.append(list(records))
    processes, actors = seen
    assert exact(actors) == exact(processes) and len(actors) == 3
    for name, weights in processes[-1].state["learner"]["model"].items():
        np.testing.assert_array_equal(actors[-1].state["learner"]["model"][name], weights)


@needs_ray
@pytest.mark.slow
def test_ray_actors_give_results_and_errors_of_their_own_and_one_that_is_killed_is_a_failed_device(ray_here, monkeypatch):
    async def main(device, other):
        assert await device.run("w", "note", 1) == ("gpu0", [1]) and await other.run("w", "threads") == "1"
        with pytest.raises(ArithmeticError) as caught:
            await device.run("w", "fail")
        with pytest.raises(RuntimeError, match="Picky: picky"):
            await device.run("w", "fail_badly")
        pid = await device.run("w", "pid")
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(DeviceFailed, match=r"device 'gpu0' died while running w\.sleep"):
            await device.run("w", "sleep", 60)
        with pytest.raises(DeviceFailed, match=r"device 'gpu0' died while running w\.note"):
            await device.run("w", "note", 1)
        monkeypatch.setattr(sys.modules["nowait.runtime.ray_executor"], "START", 1.0)
        large = ray_executor()(gpus=64)
        with pytest.raises(RuntimeError, match=r"no machine .* has had {'num_cpus': 0, 'num_gpus': 64} free for 1 seconds: see `ray status`"):
            large.submit("place", "w", Worker, {})
        large.close()
        return caught.value.args, await other.run("w", "pid")

    args, pid = on(WallClock(), main, ray_executor(), names=("gpu0", "gpu1"))
    assert args == ("no such number", 42) and gone(pid)


def test_an_address_without_a_cluster_is_named(monkeypatch):
    pytest.importorskip("ray")
    for address in ("127.0.0.1:1", "auto"):
        with pytest.raises(RuntimeError, match=f"runtime.ray_address: no Ray at {address} .*start it with `ray start --head`"):
            ray_executor()(address)


def test_without_ray_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"runtime.executor=ray needs ray, which is missing: pip install -e '.\[ray\]'"):
        list(runs.steps(load("a3po/setup1", "smoke", ["runtime.executor=ray"]), 0))
