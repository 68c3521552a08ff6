"""The papers' published numbers, our targets for them and our deviations, as data. No numbers of our own live here."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

PAPERS = ("a3po", "oppo")
_NOT_VALUES = {"source", "unit", "note", "steps", "bins"}


@dataclass(frozen=True)
class Entry:
    """One published number. `id` is its path in the YAML file, e.g. tables.training_hours.setup1.sync."""

    id: str
    value: float
    source: str  # a key of the file's `sources`
    unit: str


def load(name: str) -> dict:
    """Everything published for "a3po" or "oppo", a fresh copy.

    Of {paper: ...}: "targets", how each published number and shape target is judged, fixed before the runs, and "deviations", what we do differently.
    """
    if name not in (*PAPERS, "targets", "deviations"):
        raise ValueError(f"no published numbers for {name!r}; there are {', '.join(PAPERS)}")
    return copy.deepcopy(_read(name))


def entries(paper: str) -> list[Entry]:
    """One Entry per published number, in file order. List items are named by step (30), bin (30-60), or position."""
    facts = load(paper)
    return [entry for part in ("tables", "figures") for entry in _walk((part,), facts[part], "", "", [])]


@cache
def _read(stem: str) -> dict:
    return yaml.safe_load((resources.files(__name__) / f"{stem}.yaml").read_text(encoding="utf-8"))


def _walk(path: tuple[str, ...], node, source: str, unit: str | dict, axis: list) -> Iterator[Entry]:
    if isinstance(node, dict):
        source, unit, axis = node.get("source", source), node.get("unit", unit), node.get("steps", node.get("bins", axis))
        for key, child in node.items():
            if key not in _NOT_VALUES:
                yield from _walk((*path, str(key)), child, source, unit, axis)
    elif isinstance(node, list):
        for label, child in zip(_labels(path, node, axis), node, strict=True):
            yield from _walk((*path, label), child, source, unit, axis)
    elif isinstance(node, int | float):
        yield Entry(".".join(path), float(node), source, _unit(path, unit))


def _labels(path: tuple[str, ...], items: list, axis: list) -> list[str]:
    if len(axis) == len(items):
        return ["-".join(map(str, at)) if isinstance(at, list) else str(at) for at in axis]
    if len(items) == 2:
        return ["value", "se"] if path[1].startswith("benchmarks") else ["low", "high"]
    return [str(i) for i in range(len(items))]


def _unit(path: tuple[str, ...], unit: str | dict) -> str:
    if isinstance(unit, str):
        return unit
    return next(unit[key] for key in reversed(path) if key in unit)
