"""Checkpoints: nested dicts and lists of arrays, numbers and strings, as safetensors and JSON. No pickle.

step-000020/arrays.safetensors holds every array under its JSON pointer (RFC 6901), e.g. /learner/model/lm_head.weight;
step-000020/state.json everything else, null where an array stood, and a SHA-256 of both.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

ARRAYS, STATE, UNFINISHED = "arrays.safetensors", "state.json", ".unfinished-checkpoint"
DTYPES = "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8".split()  # numpy's among those of safetensors
UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError)
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free disk space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make the folder writable"),
}


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `state` to folder/step-NNNNNN, whole or not at all whenever the process is killed; one of the same step is deleted first.

    `state` nests dicts (string keys) and lists of numpy arrays, int, float, bool, str and None; numpy scalars become Python numbers.
    Raises TypeError naming the key of anything else, RuntimeError naming folder, step, cause and remedy where the disk refuses.
    """
    arrays: dict[str, np.ndarray] = {}
    tree = _split(state, "", arrays)
    packed = safetensors.numpy.save(arrays)
    document = json.dumps({"sha256": _digest(packed, tree), "state": tree})
    unfinished, final = folder / UNFINISHED, folder / f"step-{step:06d}"
    try:
        _remove(unfinished)
        unfinished.mkdir(parents=True)
        for name, data in ((ARRAYS, packed), (STATE, document.encode())):
            with open(unfinished / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        _sync(unfinished)
        _remove(final)
        unfinished.rename(final)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
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
        except UNREADABLE as error:
            problems.append(f"{path} cannot be read ({error})")
            continue
        for problem in problems:
            warnings.warn(f"{problem}; going on from {path.name} instead", stacklevel=2)
        return int(path.name.removeprefix("step-")), state
    if problems:
        raise RuntimeError(f"{'; '.join(problems)}. Restore one of them from a copy, or delete them all to start from the beginning.")
    return None


def prune(folder: Path, keep: int = 2) -> None:
    """Delete all but the `keep` newest checkpoints."""
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint stays")
    for path in _checkpoints(folder)[:-keep]:
        _remove(path)


def cannot_write(what: str, folder: Path, error: OSError) -> RuntimeError:
    """The error that a user sees when the disk refuses: run, step (in `what`), cause, remedy."""
    remedy = REMEDIES.get(error.errno, "check the disk")
    return RuntimeError(f"run {folder}: cannot write {what}: {error}. To go on, {remedy} and resume the run; what was recorded before is kept.")


def _checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints by step."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _split(node: Any, pointer: str, arrays: dict[str, np.ndarray]) -> Any:
    """`node` without its arrays, which go to `arrays` under their pointers."""
    if isinstance(node, np.generic):
        node = node.item()
    if type(node) is dict:
        if odd := [key for key in node if type(key) is not str]:
            raise TypeError(f"checkpoint: {pointer or '/'} has the key {odd[0]!r}; keys must be strings, as JSON would make them")
        return {key: _split(child, _below(pointer, key), arrays) for key, child in node.items()}
    if type(node) is list:
        return [_split(child, _below(pointer, i), arrays) for i, child in enumerate(node)]
    if isinstance(node, np.ndarray) and node.dtype.str[1:] in DTYPES:
        arrays[pointer] = np.asarray(node, order="C")  # safetensors reads raw memory, whatever the strides
        return None
    if node is None or type(node) in (bool, int, float, str):
        return node
    kind = f"an array of {node.dtype}" if isinstance(node, np.ndarray) else f"a {type(node).__name__}"
    raise TypeError(f"checkpoint: {pointer} is {kind}; make it a number, string, None, dict, list or an array of numbers")


def _join(node: Any, pointer: str, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(node, dict):
        return {key: _join(child, _below(pointer, key), arrays) for key, child in node.items()}
    if isinstance(node, list):
        return [_join(child, _below(pointer, i), arrays) for i, child in enumerate(node)]
    return arrays.get(pointer) if node is None else node


def _below(pointer: str, key: str | int) -> str:
    return f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}"


def _load(path: Path) -> dict[str, Any]:
    document, packed = json.loads((path / STATE).read_bytes()), (path / ARRAYS).read_bytes()
    if _digest(packed, document["state"]) != document["sha256"]:
        raise ValueError(f"{ARRAYS} or {STATE} is not what was written")
    return _join(document["state"], "", safetensors.numpy.load(packed))


def _digest(packed: bytes, tree: Any) -> str:
    digest = hashlib.sha256(packed)
    digest.update(json.dumps(tree).encode())
    return digest.hexdigest()


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def _sync(folder: Path) -> None:
    """Make the names inside `folder` durable, not only the contents of its files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
