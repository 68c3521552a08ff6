"""Runs: a training with a folder of its own. A finished run is found again by its hash; an interrupted one goes on where it stopped.

Folder: manifest.json, metrics.jsonl, evaluations.jsonl, timeline.jsonl, policy/ (final model), checkpoint/ (while running).
Reading runs needs no torch.
"""

from __future__ import annotations

import ast
import asyncio
import fcntl
import functools
import hashlib
import importlib.util
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
from nowait.tracking import Tracker, cut_unfinished_line, read_metrics

VERSIONED = ("algorithms", "workers", "runtime", "schedules", "tasks", "batch.py", "training.py")  # code that decides a run's results
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
    def status(self) -> str:
        """finished, failed, running, or killed: noted as running and held by no process."""
        noted = self.manifest["status"] if (self.path / "manifest.json").exists() else "empty"
        return "killed" if noted == "running" and not _held(self.path) else noted

    @property
    def finished(self) -> bool:
        return self.status == "finished"

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


def code_digest() -> str:
    """SHA-256 (12 digits) of the modules that decide a run's results; comments and layout do not count."""
    package = Path(__file__).parent
    files = sorted(f for name in VERSIONED for f in ([package / name] if name.endswith(".py") else (package / name).rglob("*.py")))
    return _code_digest(tuple((f.relative_to(package).as_posix(), f, f.stat().st_mtime_ns) for f in files))


@functools.lru_cache(maxsize=4)
def _code_digest(files: tuple[tuple[str, Path, int], ...]) -> str:
    h = hashlib.sha256()
    for name, file, _ in files:
        h.update(f"{name}\0{ast.dump(ast.parse(file.read_bytes()))}".encode())
    return h.hexdigest()[:12]


def run_hash(experiment: Experiment, seed: int) -> str:
    """12 digits from the resolved config (with executor and clock), the seed, the code, the initial model and the code of a user's own tasks."""
    tasks = {experiment.task.name, *(t.name for t in experiment.evaluation.benchmarks.values())}
    inputs = [_model_digest(experiment.model.path), *(_task_digest(name) for name in sorted(tasks))]
    text = json.dumps([experiment.model_dump(mode="json"), seed, code_digest(), inputs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _model_digest(path: str) -> str:
    """SHA-256 of the weights: from the manifest of a shipped policy, of the files in a folder; empty for a hub name."""
    if path.startswith("asset:"):
        manifest = Path(__file__).parent / "data" / path.removeprefix("asset:") / "manifest.json"
        return json.loads(manifest.read_text())["sha256"] if manifest.exists() else ""
    return " ".join(_file_digest(f, f.stat().st_mtime_ns) for f in sorted(Path(path).glob("*.safetensors"))) if Path(path).is_dir() else ""


def _task_digest(name: str) -> str:
    """SHA-256 of the module behind `module:function`; empty for a built-in task."""
    module = name.partition(":")[0] if ":" in name else ""
    spec = importlib.util.find_spec(module) if module else None
    return _file_digest(Path(spec.origin), Path(spec.origin).stat().st_mtime_ns) if spec and spec.origin else ""


@functools.lru_cache(maxsize=64)
def _file_digest(file: Path, changed: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def folder(experiment: Experiment, seed: int) -> Path:
    return root() / experiment.name / experiment.scale / f"{experiment.method}-seed{seed}-{run_hash(experiment, seed)}"


def find(experiment: Experiment, seed: int) -> RunResult | None:
    """The finished run of this experiment and seed, if there is one."""
    result = RunResult(folder(experiment, seed))
    return result if result.finished else None


def listing() -> list[RunResult]:
    """All runs under the root, oldest first."""
    return sorted((RunResult(p.parent) for p in root().rglob("manifest.json")), key=lambda r: r.manifest["started"])


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
            with _ignored(RuntimeError):  # the loop has just closed
                loop.call_soon_threadsafe(task.cancel)
        while thread.is_alive():  # let a record that waits to be handed over go
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
    before = RunResult(path).manifest if (path / "manifest.json").exists() else {}
    manifest = _manifest(experiment, seed, before.get("started", time.time()))
    _write(path / "manifest.json", manifest)
    tags = [experiment.method, experiment.scale, manifest["commit"]]
    tracker = Tracker(path, config=manifest["config"], name=path.name, group=experiment.name, tags=tags, use_wandb=use_wandb)
    timeline, written, ok = Timeline(), 0, False
    _trim(path / "timeline.jsonl", before=state["step"] if state else 0)
    _trim(path / "evaluations.jsonl")
    try:
        for record in steps(experiment, seed, timeline=timeline, state=state, policy=path / "policy"):
            tracker.log(record.step, record.metrics)
            for name, rewards in record.rewards.items():
                means = [round(float(np.nanmean(row)), 6) if np.isfinite(row).any() else None for row in rewards]
                _append(path / "evaluations.jsonl", json.dumps({"step": record.step, "set": name, "rewards": means}) + "\n")
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
    saved = checkpoint.latest(path / "checkpoint") if (path / "checkpoint").exists() else None
    again = f"continues after step {saved[0]}" if saved else "starts at step 0 again, for want of a checkpoint (schedule.checkpoint_every)"
    advice = f"{done} of {experiment.schedule.steps} steps are recorded in {path} and stay. Run the same command again: it {again}"
    raise RunFailed(f"run {experiment.name} ({experiment.method}) stopped after step {done}: {cause}\n{advice}") from error


def _recorded(path: Path) -> int:
    with _ignored(Exception):
        return int(read_metrics(path / "metrics.jsonl")["step"].max())
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
        "versions": {"python": platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}},
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "threads": experiment.runtime.threads},
        "started": started,
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


def _trim(path: Path, before: int | None = None) -> None:
    """Cut an unfinished last line, and the spans of steps from `before` on, which will be run again."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        cut_unfinished_line(file)
    if before is not None:
        kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] < before]
        path.write_text("".join(kept))


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _held(path: Path) -> bool:
    """Whether a process works in a run folder."""
    try:
        with (path / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


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


def sweep(experiments: list[Experiment], seeds: list[int], *, jobs: int | None = None, use_wandb: bool = True, progress: bool = True) -> None:
    """Train every experiment with every seed that is not finished yet, in `jobs` processes (default: what the cores hold).

    The first failure stops the sweep with that run's error; finished runs stay.
    """
    missing = [(e, seed) for e in experiments for seed in seeds if find(e, seed) is None]
    if missing:
        width = max(len(e.runtime.placement) if e.runtime.executor == "process" else 1 for e, _ in missing)
        _train_all(missing, jobs or max(1, (os.cpu_count() or 1) // width), use_wandb, progress)


def _train_all(missing: list[tuple[Experiment, int]], jobs: int, use_wandb: bool, progress: bool) -> None:
    from tqdm.auto import tqdm

    threads = max(e.runtime.threads for e, _ in missing)
    pool = ProcessPoolExecutor(min(jobs, len(missing)), mp_context=get_context("spawn"), initializer=_set_threads, initargs=(threads,))
    futures = {pool.submit(_run_in_worker, e, seed, use_wandb): (e, seed) for e, seed in missing}
    bar = tqdm(total=sum(e.schedule.steps for e, _ in missing), unit="step", desc=f"{len(missing)} runs", disable=not progress)
    try:
        waiting = set(futures)
        while waiting:
            time.sleep(0.5)
            bar.update(sum(min(_lines(folder(e, s)), e.schedule.steps) for e, s in missing) - bar.n)
            for future in [f for f in waiting if f.done()]:
                waiting.remove(future)
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


def _lines(path: Path) -> int:
    """Training steps recorded so far (an evaluation before the first step is a line as well)."""
    with _ignored(OSError):
        return max(0, (path / "metrics.jsonl").read_bytes().count(b"\n") - 1)
    return 0


def _set_threads(count: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(count)  # read when torch is imported


def _run_in_worker(experiment: Experiment, seed: int, use_wandb: bool) -> None:
    run(experiment, seed, use_wandb=use_wandb)
