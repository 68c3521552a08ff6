"""What runs left behind: finding and reading their folders. Needs no torch."""

import fcntl
import functools
import json
import os
import warnings
from contextlib import suppress
from pathlib import Path

import pandas as pd

from nowait.config import Experiment
from nowait.identity import run_hash
from nowait.runtime.timeline import Span, Timeline
from nowait.tracking import read_lines, read_metrics

NOTED = {"name", "method", "scale", "seed", "hash", "config", "started", "status"}  # in every manifest


class RunResult:
    """What a run left behind."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @property
    def manifest(self) -> dict:
        """What manifest.json says. Raises ValueError where it is damaged."""
        file = self.path / "manifest.json"
        with suppress(ValueError):
            content = json.loads(file.read_text())
            if isinstance(content, dict) and content.keys() >= NOTED:
                return content
        raise ValueError(f"{file} is damaged. Restore it; or delete it, and the run of this folder goes on from its last checkpoint or begins again")

    @property
    def status(self) -> str:
        """finished, failed, interrupted, running, or killed: noted as running and held by no process."""
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
        file, keys = self.path / "evaluations.jsonl", ["step", "set"]  # missing where nothing was evaluated
        records = pd.DataFrame(read_lines(file) if file.exists() else [], columns=[*keys, "rewards"])
        rows = records.drop_duplicates(keys, keep="last").sort_values(keys).explode("rewards", ignore_index=True)
        return rows[keys].assign(row=rows.groupby(keys).cumcount(), reward=rows["rewards"].astype(float))

    @functools.cached_property
    def timeline(self) -> Timeline:
        return Timeline([Span(**record) for record in read_lines(self.path / "timeline.jsonl")])

    def policy(self):
        """The trained model and its tokenizer (needs torch)."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        return AutoModelForCausalLM.from_pretrained(self.path / "policy").eval(), AutoTokenizer.from_pretrained(self.path / "policy")


def project() -> Path:
    """The nearest folder with a pyproject.toml at or above the working directory, else that directory."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").is_file()), here)


def root() -> Path:
    """Folder of all runs: $NOWAIT_RUNS, or runs/ of the project."""
    configured = os.environ.get("NOWAIT_RUNS")
    return Path(configured).expanduser() if configured else project() / "runs"


def folder(experiment: Experiment, seed: int) -> Path:
    return root() / experiment.name / experiment.scale / f"{experiment.method}-seed{seed}-{run_hash(experiment, seed)}"


def find(experiment: Experiment, seed: int) -> RunResult | None:
    """The finished run of this experiment and seed, if there is one."""
    result = RunResult(folder(experiment, seed))
    return result if result.finished else None


def listing() -> list[RunResult]:
    """All runs under the root, oldest first. Warns of a damaged one and leaves it out."""
    found = []
    for file in root().rglob("manifest.json"):
        try:
            found.append((RunResult(file.parent).manifest["started"], file.parent))
        except (ValueError, OSError) as error:
            warnings.warn(str(error), stacklevel=2)
    return [RunResult(path) for _, path in sorted(found)]


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
