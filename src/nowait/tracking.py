"""Metrics of a run: metrics.jsonl, from which every figure is drawn, and a mirror of it in Weights & Biases.

metrics.jsonl is strict JSON, one object per line: {"step": training steps finished, metric: value, ...}. A mean over nothing (NaN) is
null; any other NaN and every infinity is an error. A process killed while it writes leaves a last line without its end, which is cut
when the run goes on.
"""

import contextlib
import json
import math
import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pandas as pd

from nowait.checkpoint import cannot_write

NAMESPACES = ("train", "stale", "rollout", "time", "perf", "overlap", "eval")  # of the metrics, whose names and meanings docs/metrics.md lists


def cut_unfinished_line(file: BinaryIO) -> None:
    """Drop what a killed process left of the last line of a file of JSON lines; a whole record that only lacks its newline gets it."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    complete, newline, rest = file.read(size).rpartition(b"\n")
    if rest and _is_json(rest):
        file.write(b"\n")
    elif rest:
        file.truncate(len(complete + newline))


def append_line(file: BinaryIO, record: dict[str, Any]) -> None:
    """Append a record to an unbuffered file of JSON lines: the whole line or, where the disk refuses, nothing."""
    line, end = json.dumps(record, allow_nan=False).encode() + b"\n", file.seek(0, os.SEEK_END)
    try:
        while line:
            line = line[file.write(line) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


class Tracker:
    """Writes the metrics of the run in `folder`; constructed again in the same folder, it goes on with the same file and wandb run.

    wandb is what WANDB_MODE says, else online if an API key is configured, else offline: `wandb sync` uploads that later, and a resumed
    run is a second one of the same name there. Whatever fails in wandb is warned of once and ends the mirror, never the training. The
    project is WANDB_PROJECT, else "nowait".
    Raises RuntimeError naming run, step, cause and remedy where metrics.jsonl cannot be written.
    """

    def __init__(self, folder: Path, *, config: dict[str, Any], name: str, group: str, tags: list[str], use_wandb: bool) -> None:
        self.folder, self.path, self.step = folder, folder / "metrics.jsonl", 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b", buffering=0)
            cut_unfinished_line(self._file)
        except OSError as error:
            raise cannot_write(self.path.name, folder, error) from error
        self._wandb = self._run = None
        if use_wandb:
            self._mirror(lambda: self._start_wandb(config=config, name=name, group=group, tags=tags))

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append the metrics of `step`: numbers, strings, lists. Raises FloatingPointError on NaN or infinity, see `may_be_nan`."""
        self.step = step
        record = {"step": step} | {key: self._checked(key, value, metrics) for key, value in metrics.items()}
        try:
            append_line(self._file, record)
        except OSError as error:
            raise cannot_write(f"the metrics of step {step} to {self.path.name}", self.folder, error) from error
        if self._run:
            self._mirror(lambda: self._run.log(self._payload(record)))

    def log_figure(self, name: str, png: Path) -> None:
        """Mirror a picture to wandb."""
        if self._run:
            self._mirror(lambda: self._run.log({"train/global_step": self.step, name: self._wandb.Image(str(png))}))

    def log_table(self, name: str, frame: pd.DataFrame) -> None:
        """Mirror a data frame to wandb, as a new table each time: one that was logged before cannot change."""
        if self._run:
            self._mirror(lambda: self._run.log({"train/global_step": self.step, name: self._wandb.Table(dataframe=frame)}))

    def close(self, failed: bool = False) -> None:
        self._file.close()
        if self._run:
            self._mirror(lambda: self._run.finish(exit_code=int(failed)))
            self._run = None

    def _checked(self, key: str, value: Any, metrics: dict[str, Any]) -> Any:
        """The value in Python's own types, None for a legitimate NaN."""
        if isinstance(value, (np.generic, np.ndarray)):
            value = value.tolist()
        bad = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, float) and not math.isfinite(x)]
        if not bad:
            return value
        if isinstance(value, float) and math.isnan(value) and may_be_nan(key, metrics):
            return None
        remedy = "look at train/grad_norm and train/ratio_max of the steps before, which are kept, and try a lower learner.lr"
        raise FloatingPointError(f"run {self.folder}, step {self.step}: {key} is {bad[0]}; {remedy}")

    def _start_wandb(self, **description: Any) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off")
        wandb.setup(settings)
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        place: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", "nowait"), "dir": str(self.folder), "reinit": "create_new"}
        if mode == "online":  # offline runs of one id would overwrite each other when they are uploaded (wandb issue 4624)
            place |= {"id": self._wandb_id(), "resume": "allow"}
        run = wandb.init(mode=mode, settings=settings, **place, **description)
        for namespace in NAMESPACES:
            run.define_metric(f"{namespace}/*", step_metric="train/global_step")
        self._wandb, self._run = wandb, run

    def _wandb_id(self) -> str:
        path = self.folder / "wandb" / "run_id"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(secrets.token_hex(4))
        return path.read_text()

    def _payload(self, record: dict[str, Any]) -> dict[str, Any]:
        """What wandb plots: numbers, and histograms of lists of counts, value i in bin i."""
        payload: dict[str, Any] = {"train/global_step": record["step"]}
        for key, value in record.items():
            if isinstance(value, (int, float)) and key != "step":
                payload[key] = value
            elif key.endswith(("/hist", "/deferrals")) and value:  # wandb has no histogram of nothing
                payload[key] = self._wandb.Histogram(np_histogram=(value, [i - 0.5 for i in range(len(value) + 1)]))
        return payload

    def _mirror(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            warnings.warn(f"wandb failed ({type(error).__name__}: {error}); the run goes on with {self.path} alone", stacklevel=3)


def may_be_nan(key: str, metrics: dict[str, Any]) -> bool:
    """Whether NaN at `key` says that there was nothing to average: a step without tokens, graders that failed, returns without variance."""
    if key.startswith("train/"):
        return metrics.get("train/tokens") == 0 or key == "train/explained_variance"
    return key.startswith(("rollout/reward_", "eval/"))


def read_metrics(path: Path) -> pd.DataFrame:
    """One row per step, sorted; of a step written twice (a resumed run repeats some) the last record. null becomes NaN.

    An unfinished last line is left out; any other line that is not a record raises ValueError with its number.
    """
    records = {r["step"]: {key: math.nan if value is None else value for key, value in r.items()} for r in read_lines(path)}
    return pd.DataFrame([records[step] for step in sorted(records)], columns=None if records else ["step"])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, each of which has a `step`.

    An unfinished last line is left out; any other line that is not such a record raises ValueError with its number.
    """
    records, lines = [], Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not _is_json(line):
            break
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError("a step is a whole number")
            records.append(record)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number} is not a record of a run: {line[:60]!r}. Delete the line, or restore the file") from error
    return records


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
