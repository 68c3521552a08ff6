"""What every setting means, read from the comments of config.py, which are the one place where that is written."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Iterator

import pandas as pd
import yaml

from nowait import config
from nowait.config import FIELDS, Experiment, flat, load

NOT_THE_PAPERS = ("title", "scale", "runtime.")  # settings of ours that have no counterpart there


def settings(experiment: Experiment) -> pd.DataFrame:
    """By key: value, choices (empty where it is a number, a list or free text), and meaning with its unit."""
    comments, values, rows = _comments(), flat(experiment), []
    for key, (model, name) in FIELDS.items():
        rows.append([values[key], " | ".join(_literals(model.model_fields[name].annotation)), comments[model.__name__][name]])
    return pd.DataFrame(rows, index=list(FIELDS), columns=["value", "choices", "meaning"], dtype=object)


def example(name: str = "a3po/setup1") -> str:
    """A config at scale cpu as a complete YAML file, with choices and meaning behind every setting and the paper's value where it is another."""
    own, paper, lines = settings(load(name)), settings(load(name, "paper"))["value"], []
    for key, value, choices, meaning in own.itertuples():
        *parents, field = key.split(".")
        heads = [f"{'  ' * depth}{parent}:" for depth, parent in enumerate(parents)]
        lines += [head for head in heads if head not in lines]
        differs = paper[key] != value and not key.startswith(NOT_THE_PAPERS)
        notes = [choices, meaning.replace("None:", "null:"), f"paper: {_yaml(paper[key])}" if differs else ""]
        lines.append(f"{'  ' * len(parents) + f'{field}: {_yaml(value)}':<30} # {' · '.join(filter(None, notes))}")
    return "\n".join(lines)


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True).removesuffix("...\n").strip()


def _literals(annotation: object) -> Iterator[str]:
    """The words of a choice, of which a function of the user's own may be one; nothing where a list or table holds them."""
    if annotation == config.Own:
        yield "module:function"
    elif typing.get_origin(annotation) is typing.Literal:
        yield from typing.get_args(annotation)
    elif typing.get_origin(annotation) not in (dict, list, tuple):
        for part in typing.get_args(annotation):
            yield from _literals(part)


def _comments() -> dict[str, dict[str, str]]:
    """{class: {field: its comment, behind it or, where the line is full, above it}} of config.py."""
    lines = inspect.getsource(config).splitlines()
    classes = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)]
    return {c.name: {f.target.id: _comment(lines, f) for f in c.body if isinstance(f, ast.AnnAssign)} for c in classes}


def _comment(lines: list[str], field: ast.AnnAssign) -> str:
    behind, above = lines[field.end_lineno - 1].partition("  # ")[2], re.match(r"    # (.*)", lines[field.lineno - 2])
    return behind or (above.group(1) if above else "")
