"""Runs: a training with a folder of its own. A finished run is found again by its hash; an interrupted one goes on where it stopped.

Folder: manifest.json, metrics.jsonl, evaluations.jsonl, timeline.jsonl, policy/ (final model), checkpoint/ (while running).
Reading runs needs no torch.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import hashlib
import json
import os
import platform
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import aclosing, contextmanager
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pandas as pd

from nowait import checkpoint
from nowait.config import Experiment
from nowait.runtime.device import event_loop
from nowait.runtime.timeline import Timeline
from nowait.schedules.common import StepRecord
from nowait.tracking import Tracker, read_metrics

VERSIONED = ("algorithms", "workers", "schedules", "tasks")  # code that decides a run's results
PACKAGES = ("torch", "transformers", "numpy")
CHECKPOINTS_KEPT = 2


class RunFailed(RuntimeError):
    """A run stopped; the message names the run, the step, the cause and what to do."""


class RunResult:
    """What a run left behind."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def manifest(self) -> dict:
        return json.loads((self.path / "manifest.json").read_text())

    @property
    def finished(self) -> bool:
        return (self.path / "manifest.json").exists() and self.manifest["status"] == "finished"

    @functools.cached_property
    def metrics(self) -> pd.DataFrame:
        """One row per training step; column `step` counts finished steps (row 0: the evaluation before the first)."""
        return read_metrics(self.path / "metrics.jsonl")

    @functools.cached_property
    def evaluations(self) -> pd.DataFrame:
        """Columns step, set, row (the prompt), reward (mean over its samples)."""
        last: dict[tuple[int, str], list] = {}
        file = self.path / "evaluations.jsonl"  # missing where nothing was evaluated
        for line in file.read_text().splitlines() if file.exists() else []:
            record = json.loads(line)
            last[record["step"], record["set"]] = record["rewards"]
        frames = [pd.DataFrame({"step": s, "set": n, "row": range(len(r)), "reward": r}) for (s, n), r in sorted(last.items())]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["step", "set", "row", "reward"])

    @functools.cached_property
    def timeline(self) -> Timeline:
        return Timeline.load(self.path / "timeline.jsonl")

    def policy(self):
        """The trained model and its tokenizer (needs torch)."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        return AutoModelForCausalLM.from_pretrained(self.path / "policy").eval(), AutoTokenizer.from_pretrained(self.path / "policy")


def root() -> Path:
    """Folder of all runs: $NOWAIT_RUNS, or runs/ beside the nearest pyproject.toml above the working directory, else here."""
    if configured := os.environ.get("NOWAIT_RUNS"):
        return Path(configured)
    here = Path.cwd()
    return next((p / "runs" for p in (here, *here.parents) if (p / "pyproject.toml").exists()), here / "runs")


@functools.cache
def code_digest() -> str:
    """SHA-256 (12 digits) of the modules that decide a run's results."""
    package = Path(__file__).parent
    h = hashlib.sha256()
    for file in sorted(f for folder in VERSIONED for f in (package / folder).rglob("*.py")):
        h.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return h.hexdigest()[:12]


def run_hash(experiment: Experiment, seed: int) -> str:
    """12 digits from the resolved config (with executor and clock), the seed, the code and the shipped checkpoint it starts from."""
    text = json.dumps([experiment.model_dump(mode="json"), seed, code_digest(), _asset_digest(experiment.model.path)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _asset_digest(model: str) -> str:
    """SHA-256 of a shipped policy's weights, from its manifest; empty for other models."""
    manifest = Path(__file__).parent / "data" / model.removeprefix("asset:") / "manifest.json"
    return json.loads(manifest.read_text())["sha256"] if model.startswith("asset:") and manifest.exists() else ""


def folder(experiment: Experiment, seed: int) -> Path:
    return root() / experiment.name / experiment.scale / f"{experiment.method}-seed{seed}-{run_hash(experiment, seed)}"


def find(experiment: Experiment, seed: int) -> RunResult | None:
    """The finished run of this experiment and seed, if there is one."""
    result = RunResult(folder(experiment, seed))
    return result if result.finished else None


def listing() -> list[RunResult]:
    """All runs under the root, oldest first."""
    return sorted((RunResult(p.parent) for p in root().rglob("manifest.json")), key=lambda r: r.manifest["started"])


def steps(experiment: Experiment, seed: int, *, timeline: Timeline | None = None, state: dict | None = None, policy: Path | None = None) -> Iterator[StepRecord]:
    """Train, as a plain iterator of step records, also where an event loop runs already (notebooks). Closing it stops the training."""
    from nowait.training import make_clock, stream

    clock, timeline = make_clock(experiment), timeline or Timeline()
    records: queue.Queue = queue.Queue(maxsize=1)
    stop = threading.Event()

    async def drive() -> None:
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
        while thread.is_alive():  # let a step that waits to be handed over end
            with _ignored(queue.Empty):
                records.get(timeout=0.1)
        thread.join()


@contextmanager
def _ignored(error: type[BaseException]):
    try:
        yield
    except error:
        pass


def run(experiment: Experiment, seed: int, out: Path | None = None, *, use_wandb: bool = True) -> RunResult:
    """Train to the end and return what was recorded; a finished run of equal hash is returned as it is, an unfinished one continued.

    Raises `RunFailed`; what was recorded until then stays in the folder.
    """
    path = Path(out) if out else folder(experiment, seed)
    with _claimed(path):
        result = RunResult(path)
        if (path / "manifest.json").exists() and result.manifest["hash"] != run_hash(experiment, seed):
            held = f"{result.manifest['method']}, seed {result.manifest['seed']}"
            raise RunFailed(f"{path} holds a run of other settings, seed or code ({held}): choose another folder")
        if result.finished:
            return result
        done = 0
        try:
            saved = checkpoint.latest(path / "checkpoint")
            done = saved[0] if saved else 0
            _train(path, experiment, seed, saved[1] if saved else None, use_wandb)
        except BaseException as error:
            _fail(path, experiment, error, max(done, _recorded(path)))
    return RunResult(path)


def _train(path: Path, experiment: Experiment, seed: int, state: dict | None, use_wandb: bool) -> None:
    manifest = _manifest(experiment, seed)
    _write(path / "manifest.json", manifest)
    tags = [experiment.method, experiment.scale, manifest["commit"]]
    tracker = Tracker(path, config=manifest["config"], name=path.name, group=experiment.name, tags=tags, use_wandb=use_wandb)
    timeline, written, ok = Timeline(), 0, False
    if not state:
        (path / "timeline.jsonl").unlink(missing_ok=True)
    try:
        for record in steps(experiment, seed, timeline=timeline, state=state, policy=path / "policy"):
            tracker.log(record.step, record.metrics)
            for name, rewards in record.rewards.items():
                line = {"step": record.step, "set": name, "rewards": np.nanmean(rewards, axis=1).round(6).tolist()}
                _append(path / "evaluations.jsonl", json.dumps(line) + "\n")
            written = timeline.append_to(path / "timeline.jsonl", written)
            if record.state is not None and record.step < experiment.schedule.steps:
                checkpoint.save(path / "checkpoint", record.step, record.state)
                checkpoint.prune(path / "checkpoint", CHECKPOINTS_KEPT)
        ok = True
    finally:
        tracker.close(failed=not ok)
    _copy_tokenizer(experiment, path / "policy")
    _write(path / "manifest.json", manifest | {"status": "finished", "ended": time.time()})
    shutil.rmtree(path / "checkpoint", ignore_errors=True)


def _copy_tokenizer(experiment: Experiment, target: Path) -> None:
    from nowait.training import load_tokenizer

    load_tokenizer(experiment.model.path)[2].save_pretrained(target)


def _fail(path: Path, experiment: Experiment, error: BaseException, done: int) -> None:
    """Note the failure in the manifest and raise it as one message."""
    cause = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
    with _ignored(OSError):
        _write(path / "manifest.json", RunResult(path).manifest | {"status": "failed", "error": cause, "ended": time.time()})
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    advice = f"{done} of {experiment.schedule.steps} steps are recorded in {path} and stay; run the same command again to continue"
    raise RunFailed(f"run {experiment.name} ({experiment.method}) stopped after step {done}: {cause}\n{advice}") from error


def _recorded(path: Path) -> int:
    with _ignored(Exception):
        return int(read_metrics(path / "metrics.jsonl")["step"].max())
    return 0


def _manifest(experiment: Experiment, seed: int) -> dict:
    return {
        "name": experiment.name,
        "method": experiment.method,
        "scale": experiment.scale,
        "seed": seed,
        "hash": run_hash(experiment, seed),
        "code": code_digest(),
        "commit": commit(),
        "config": experiment.model_dump(mode="json"),
        "versions": {"python": platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}},
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "threads": experiment.runtime.threads},
        "started": time.time(),
        "status": "running",
    }


@functools.cache
def commit() -> str:
    """Commit of the source checkout, with a + where files differ from it; "unknown" outside one."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _write(path: Path, content: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


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


def sweep(experiments: list[Experiment], seeds: list[int], *, jobs: int | None = None, use_wandb: bool = True, progress: bool = True) -> dict[str, list[RunResult]]:
    """Results per method, one per seed, training what is not finished yet in `jobs` processes (default: what the cores hold).

    The first failure stops the sweep with that run's error; finished runs stay.
    """
    wanted = [(e, seed) for e in experiments for seed in seeds]
    missing = [(e, seed) for e, seed in wanted if find(e, seed) is None]
    if missing:
        width = max(len(e.runtime.placement) if e.runtime.executor == "process" else 1 for e, _ in missing)
        _train_all(missing, jobs or max(1, (os.cpu_count() or 1) // width), use_wandb, progress)
    results: dict[str, list[RunResult]] = {}
    for e, seed in wanted:
        results.setdefault(e.method, []).append(RunResult(folder(e, seed)))
    return results


def _train_all(missing: list[tuple[Experiment, int]], jobs: int, use_wandb: bool, progress: bool) -> None:
    from tqdm.auto import tqdm

    os.environ["OMP_NUM_THREADS"] = str(max(e.runtime.threads for e, _ in missing))  # inherited by the workers
    pool = ProcessPoolExecutor(min(jobs, len(missing)), mp_context=get_context("spawn"))
    futures = {pool.submit(_run_in_worker, e, seed, use_wandb): (e, seed) for e, seed in missing}
    bar = tqdm(total=sum(e.schedule.steps for e, _ in missing), unit="step", desc=f"{len(missing)} runs", disable=not progress)
    try:
        waiting = set(futures)
        while waiting:
            time.sleep(0.2)
            bar.update(sum(min(_lines(folder(e, s)), e.schedule.steps) for e, s in missing) - bar.n)
            for future in [f for f in waiting if f.done()]:
                waiting.remove(future)
                experiment, seed = futures[future]
                try:
                    future.result()
                except BrokenProcessPool as error:
                    what = f"the process training {experiment.name} ({experiment.method}, seed {seed}) or one beside it was killed (out of memory?)"
                    raise RunFailed(f"{what}. Finished runs and recorded steps stay; run the same command again to continue") from error
    finally:
        bar.close()
        for process in list((pool._processes or {}).values()):
            if not all(f.done() for f in futures):
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _lines(path: Path) -> int:
    """Training steps recorded so far (an evaluation before the first step is a line as well)."""
    with _ignored(OSError):
        return max(0, (path / "metrics.jsonl").read_bytes().count(b"\n") - 1)
    return 0


def _run_in_worker(experiment: Experiment, seed: int, use_wandb: bool) -> None:
    run(experiment, seed, use_wandb=use_wandb)
