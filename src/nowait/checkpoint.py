"""Checkpoints: nested dicts and lists of arrays, numbers and strings, as one file that numpy reads. No pickle.

step-000020.npz holds the arrays as arr_0, arr_1, ..., and as `state` everything else in JSON, where {"$array": "arr_0"} stands for an array.
The format has checksums.
"""

from __future__ import annotations

import errno
import json
import os
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

UNFINISHED, ARRAY = ".unfinished-checkpoint", "$array"
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free disk space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make the folder writable"),
}


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `state` to folder/step-NNNNNN.npz, whole or not at all whenever the process is killed; one of the same step is replaced.

    `state` nests dicts (string keys) and lists of numpy arrays, int, float, bool, str and None; numpy scalars become Python numbers.
    Raises TypeError naming the key of anything else, RuntimeError naming folder, step, cause and remedy where the disk refuses.
    """
    arrays: list[np.ndarray] = []
    document = json.dumps(_without_arrays(state, "", arrays)).encode()
    unfinished, final = folder / UNFINISHED, folder / f"step-{step:06d}.npz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            np.savez(file, *arrays, state=np.frombuffer(document, np.uint8))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(final)
        _sync(folder)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise cannot_write(f"the checkpoint of step {step}", folder, error) from error
    return final


def latest(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Step and state of the newest checkpoint, None where there is none. Arrays are writable.

    Warns of one that is truncated or otherwise corrupt and takes the one before; raises RuntimeError if none can be read.
    """
    problems = []
    for path in reversed(_checkpoints(folder)):
        try:
            state = _load(path)
        except Exception as error:  # what a damaged file raises is not documented
            problems.append(f"{path} cannot be read ({error})")
            continue
        for problem in problems:
            warnings.warn(f"{problem}; going on from {path.name} instead", stacklevel=2)
        return _step(path), state
    if problems:
        raise RuntimeError(f"{'; '.join(problems)}. Restore one of them from a copy, or delete them all to start from the beginning.")
    return None


def prune(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints, of which there is at least one."""
    for path in _checkpoints(folder)[:-keep]:
        path.unlink()


def cannot_write(what: str, folder: Path, error: OSError) -> RuntimeError:
    """The error that a user sees when the disk refuses: run, step (in `what`), cause, remedy."""
    remedy = REMEDIES.get(error.errno, "check the disk")
    return RuntimeError(f"run {folder}: cannot write {what}: {error}. To go on, {remedy} and resume the run; what was recorded before is kept.")


def _checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints by step."""
    return sorted((path for path in folder.glob("step-*.npz") if re.fullmatch(r"step-\d{6,}", path.stem)), key=_step)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _without_arrays(node: Any, place: str, arrays: list[np.ndarray]) -> Any:
    """`node` with a name in the place of every array, which goes to `arrays`."""
    if isinstance(node, np.generic):
        node = node.item()
    if type(node) is dict:
        if odd := [key for key in node if type(key) is not str or key == ARRAY]:
            raise TypeError(f"checkpoint: {place or '/'} has the key {odd[0]!r}; keys must be strings, as JSON would make them, and not {ARRAY}")
        return {key: _without_arrays(child, f"{place}/{key}", arrays) for key, child in node.items()}
    if type(node) is list:
        return [_without_arrays(child, f"{place}/{i}", arrays) for i, child in enumerate(node)]
    if isinstance(node, np.ndarray) and node.dtype.kind in "biufc":
        arrays.append(np.asarray(node, order="C"))  # a transposed one would come back transposed in memory
        return {ARRAY: f"arr_{len(arrays) - 1}"}
    if node is None or type(node) in (bool, int, float, str):
        return node
    kind = f"an array of {node.dtype}" if isinstance(node, np.ndarray) else f"a {type(node).__name__}"
    raise TypeError(f"checkpoint: {place} is {kind}; make it a number, string, None, dict, list or an array of numbers")


def _load(path: Path) -> dict[str, Any]:
    with np.load(path) as saved:
        return json.loads(saved["state"].tobytes(), object_hook=lambda node: saved[node[ARRAY]] if ARRAY in node else node)


def _sync(folder: Path) -> None:
    """Make the names inside `folder` durable, not only the contents of its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
