"""What makes two runs the same: settings, seed, code, models, and a user's own parts."""

import ast
import functools
import hashlib
import importlib.util
import json
import subprocess
from pathlib import Path

from nowait.config import Experiment

VERSIONED = ("algorithms", "workers", "runtime", "schedules", "tasks", "batch.py", "training.py")  # code that decides a run's results
SIMULATED = ("schedules", "runtime", "workers/simulated.py", "batch.py", "simulate.py")  # and those of a simulation
ONLY_SIMULATED = ("runtime/hardware.py", "workers/simulated.py")  # which no real run uses


def code_digest(modules: tuple[str, ...] = VERSIONED) -> str:
    """SHA-256 (12 digits) of modules, by default those that decide a run's results; comments and layout do not count."""
    package = Path(__file__).parent
    every = sorted(f for name in modules for f in ([package / name] if name.endswith(".py") else (package / name).rglob("*.py")))
    files = [f for f in every if modules != VERSIONED or f.relative_to(package).as_posix() not in ONLY_SIMULATED]
    return _code_digest(tuple((f.relative_to(package).as_posix(), f, f.stat().st_mtime_ns) for f in files))


@functools.lru_cache(maxsize=4)
def _code_digest(files: tuple[tuple[str, Path, int], ...]) -> str:
    h = hashlib.sha256()
    for name, file, _ in files:
        h.update(f"{name}\0{ast.dump(ast.parse(file.read_bytes()))}".encode())
    return h.hexdigest()[:12]


def run_hash(experiment: Experiment, seed: int) -> str:
    """12 digits from the resolved config (with executor and clock), the seed, the code, the models, and a user's own parts and data files."""
    tasks = (experiment.task, *experiment.evaluation.benchmarks.values())
    options = {v for t in tasks for v in t.options.values() if isinstance(v, str)}
    parts = options | {t.name for t in tasks} | {experiment.algorithm.anchor, experiment.overlap.rule, experiment.reward.path or ""}
    data = [_file_digest(file, file.stat().st_mtime_ns) for file in map(Path, sorted(options)) if file.is_file()]
    models = [path for path in (experiment.model.path, experiment.reward.path, experiment.critic.path) if path]
    inputs = [*map(_model_digest, models), *(_own_digest(name) for name in sorted(parts)), *data]
    settings = experiment.model_dump(mode="json", exclude={"runtime": {"ray_address"}})  # where a cluster is changes nothing that it computes
    text = json.dumps([settings, seed, code_digest(), inputs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _model_digest(path: str) -> str:
    """SHA-256 of the weights: from the manifest of a shipped model, of a GGUF file, of the files in a folder; else empty, as for a hub name."""
    if path.startswith("asset:"):
        manifest = Path(__file__).parent / "data" / path.removeprefix("asset:") / "manifest.json"
        return json.loads(manifest.read_text())["sha256"] if manifest.exists() else ""
    there = Path(path.removeprefix("gguf:"))
    files = sorted(there.glob("*.safetensors")) if there.is_dir() else [there] if there.is_file() else []
    return " ".join(_file_digest(f, f.stat().st_mtime_ns) for f in files)


def _own_digest(name: str) -> str:
    """SHA-256 of the module behind `module:function`; empty for what is built in, and where there is no such file, which using it reports."""
    if ":" not in name:
        return ""
    try:
        file = Path(importlib.util.find_spec(name.partition(":")[0]).origin)
        return _file_digest(file, file.stat().st_mtime_ns)
    except Exception:  # finding a module runs the code of its packages
        return ""


@functools.lru_cache(maxsize=64)
def _file_digest(file: Path, changed: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


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
