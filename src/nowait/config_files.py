"""Settings files whatever their schema: finding and reading YAML, layering blocks and overrides, reporting problems."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class Problem(NamedTuple):
    """One thing that is wrong with a config."""

    key: str  # dotted, e.g. learner.lr
    what: str
    remedy: str


class ConfigError(ValueError):
    """Settings that cannot be used: the file (None for settings built in code) and a `Problem` for each thing to correct."""

    def __init__(self, problems: Iterable[Problem], file: Path | str | None = None) -> None:
        self.problems, self.file = tuple(problems), file
        super().__init__(self.problems, file)

    def __str__(self) -> str:
        lines = [f"{p.key}: {p.what}; {p.remedy}" for p in self.problems]
        head = f"{self.file or 'config'}: "
        return head + (lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems", *lines]))


class _Exponent(str):
    """A number that YAML 1.1 takes for text: no dot, or no sign in the exponent, as in 1e-4."""


class _FileLoader(yaml.SafeLoader):
    """SafeLoader that marks such numbers and refuses a key that occurs twice (plain YAML keeps the last one silently)."""

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        if twice := {name for name in names if names.count(name) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"key {min(twice)!r} occurs twice in one block", node.start_mark)
        return super().construct_mapping(node, deep)


class _OverrideLoader(_FileLoader):
    """The same for overrides, where 1e-4 can only mean the number."""


_FileLoader.add_implicit_resolver("!exponent", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))
_FileLoader.add_constructor("!exponent", lambda loader, node: _Exponent(node.value))
_OverrideLoader.add_constructor("!exponent", lambda loader, node: float(node.value))


def _folders() -> list[Path]:
    """Folders of configs: `paper_configs` at or above the working directory, above this file (a source checkout), inside the installed package."""
    here = Path(__file__).resolve().parent
    candidates = [parent / "paper_configs" for start in (Path.cwd(), here) for parent in (start, *start.parents)]
    return [folder for folder in dict.fromkeys(candidates) if folder.is_dir()]


def find(path: str | Path) -> Path:
    """The file `path`, or the shipped config with that stem, such as `a3po/setup1`. Raises ConfigError that lists what there is."""
    if Path(path).is_file():
        return Path(path)
    known = {file.relative_to(folder).with_suffix("").as_posix(): file for folder in reversed(_folders()) for file in sorted(folder.rglob("*.yaml"))}
    stem = str(path).removesuffix(".yaml").removeprefix("paper_configs/")
    if stem in known:
        return known[stem]
    close = get_close_matches(stem, known, 1)
    remedy = f"did you mean {close[0]}?" if close else f"give the path of a YAML file, or one of {', '.join(sorted(known)) or '(none found)'}"
    raise ConfigError([Problem("path", "no such file or shipped config", remedy)], path)


def read(file: Path) -> dict[str, Any]:
    """The settings of a YAML file. Raises ConfigError for a file that is no text, bad YAML, a repeated key, or a number that YAML takes for text."""
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), _FileLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("file", f"cannot be read: {error}", "give a YAML file in UTF-8 that you may read")], file) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError([Problem(f"line {mark.line + 1}" if mark else "YAML", _reason(error), "correct the YAML")], file) from None
    if not isinstance(document, dict):
        held = "nothing" if document is None else type(document).__name__
        raise ConfigError([Problem("YAML", f"holds {held}, not settings", "write `key: value` lines")], file)
    if problems := list(_exponents(document, "")):
        raise ConfigError(problems, file)
    return document


def read_whole(file: Path, leaves: Collection[str]) -> dict[str, Any]:
    """`read`, on top of the file or shipped config that its key `base` names. Blocks merge key by key down to `leaves`, which are replaced."""
    document = read(file)
    if "base" not in document:
        return document
    below = read(find(document.pop("base")))
    if "base" in below:
        what = f"builds on a file that itself has the base {below['base']}"
        raise ConfigError([Problem("base", what, "name that one, or repeat its settings")], file)
    layers = Layers(leaves)
    layers.merge(below, "")
    layers.merge(document, "")
    return layers.data


def _reason(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error)


def _exponents(value: Any, key: str) -> Iterator[Problem]:
    if isinstance(value, _Exponent):
        yield Problem(key, f"YAML reads {value} as text", f"write {_dotted(value)}")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in items:
        yield from _exponents(part, f"{key}.{name}".lstrip("."))


def _dotted(number: str) -> str:
    """The same number as YAML 1.1 wants it: 1e4 -> 1.0e+4."""
    mantissa, exponent = number.lower().split("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent if exponent[0] in '+-' else '+' + exponent}"


def parse_overrides(overrides: Iterable[str], file: Path) -> Iterator[tuple[str, Any]]:
    """Keys and values of `["learner.lr=1e-4", ...]`; a value is a YAML scalar, list or block."""
    for text in [overrides] if isinstance(overrides, str) else overrides:
        key, separator, value = str(text).partition("=")
        if not separator or not key.strip():
            raise ConfigError([Problem(f"override {text!r}", "is not a setting", "write key=value, as in learner.lr=1e-4")], file)
        try:
            yield key.strip(), yaml.load(value, _OverrideLoader)
        except yaml.YAMLError as error:
            raise ConfigError([Problem(key.strip(), f"cannot read {value!r}: {_reason(error)}", "quote the value")], file) from None


class Layers:
    """Settings under construction: later layers win, and `origin` remembers which layer set a key."""

    def __init__(self, leaves: Collection[str]) -> None:
        self.leaves = leaves
        self.data: dict[str, Any] = {}
        self.origin: dict[str, str] = {}

    def merge(self, block: Mapping[str, Any], layer: str, into: dict | None = None, prefix: str = "") -> None:
        """Blocks merge key by key down to `leaves`, such as tables whose keys are data (the options of a task): they are replaced whole."""
        into = self.data if into is None else into
        for name, value in block.items():
            if isinstance(value, dict) and isinstance(into.get(name), dict) and name not in self.leaves:
                self.merge(value, layer, into[name], f"{prefix}{name}.")
            else:
                into[name] = copy.deepcopy(value)
                self.origin[f"{prefix}{name}"] = layer

    def set(self, key: str, value: Any, layer: str) -> None:
        """Set one dotted key, which may be an entry of a table; a block merges as above."""
        *sections, name = key.split(".")
        block = self.data
        for section in sections:
            if not isinstance(block.get(section), dict):
                block[section] = {}
            block = block[section]
        self.merge({name: value}, layer, block, key.removesuffix(name))

    def located(self, problem: Problem) -> Problem:
        """The problem, with the layer that set the key when it is not the file's own base."""
        key = problem.key
        while key and key not in self.origin:
            key = key.rpartition(".")[0]
        layer = self.origin.get(key)
        return problem._replace(what=f"{problem.what} (set by {layer})") if layer else problem
