"""What the command line says about a run, and the command that repeats it."""

import json
import shlex
import warnings
from typing import Any

from nowait.config import ConfigError, Experiment, digest, flat, load
from nowait.identity import code_digest
from nowait.results import RunResult, root


def name(result: RunResult) -> str:
    """Path under the folder of all runs, or the whole path of a run elsewhere."""
    return (result.path.relative_to(root()) if result.path.is_relative_to(root()) else result.path).as_posix()


def settings(result: RunResult) -> Experiment:
    """The settings of a run, which another version of this package may have written."""
    manifest = result.manifest
    try:
        return Experiment.model_validate(manifest["config"])
    except ValueError as error:
        raise ValueError(f"{result.path}: this version of nowait has other settings; commit {manifest['commit']} reads those of the run") from error


def facts(result: RunResult) -> list[tuple[str, Any]]:
    """What can differ between runs beside their settings."""
    manifest, (steps, reward) = result.manifest, progress(result)
    return [
        *((key, manifest[key]) for key in ("seed", "code", "commit", "status")),
        *manifest["versions"].items(),
        ("steps", steps),
        ("held-out reward", reward),
    ]


def progress(result: RunResult) -> tuple[str, str]:
    """Steps done of those wanted, and the last held-out reward with its standard error."""
    steps = result.manifest["config"]["schedule"]["steps"]
    try:
        if not (result.path / "metrics.jsonl").is_file() or (metrics := result.metrics).empty:
            return f"0/{steps}", "-"
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)
        return f"?/{steps}", "-"
    evaluations = metrics.dropna(subset="eval/reward") if "eval/reward" in metrics else metrics.iloc[:0]
    reward = "{eval/reward:.3f} ± {eval/se:.3f}".format(**evaluations.iloc[-1]) if len(evaluations) else "-"
    return f"{metrics['step'].max()}/{steps}", reward


def changes(result: RunResult) -> str:
    """The overrides by which a run differs from its config file at its scale and method; empty where there is no such file any more."""
    try:
        return " ".join(_overrides(settings(result)))
    except ValueError:
        return ""


def describe(result: RunResult) -> list[list[str]]:
    """What a run did, in rows of a label and its text."""
    manifest, (steps, reward) = result.manifest, progress(result)
    seconds = f", {manifest['ended'] - manifest['started']:.0f} s" if "ended" in manifest else ""
    return [
        ["run", str(result.path)],
        ["what", f"{manifest['name']} at scale {manifest['scale']}, method {manifest['method']}, seed {manifest['seed']}"],
        ["title", manifest["config"]["title"]],
        ["status", f"{result.status}, {steps} steps{seconds}", *([manifest["error"]] if "error" in manifest else [])],
        ["held out", f"reward {reward}" + (", by the task's rule" if manifest["config"]["reward"]["path"] else "")],
        ["code", f"commit {manifest['commit']}, digest {manifest['code']}{_changed(manifest)}"],
        ["versions", ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())],
        ["repeat", repeat(result)],
    ]


def _changed(manifest: dict) -> str:
    return "" if manifest["code"] == code_digest() else f" (here: {code_digest()}, so repeating it can give other numbers)"


def repeat(result: RunResult) -> str:
    """The command that trains the run again: its config file with overrides if that gives its exact settings, else its settings as a file."""
    try:
        experiment, seed = settings(result), result.manifest["seed"]
    except ValueError as error:
        return str(error)
    choice = {"scale": experiment.scale, "method": experiment.method}
    try:
        overrides = _overrides(experiment)
        if digest(load(experiment.name, overrides=overrides, **choice)) == digest(experiment):
            options = [word for name, value in {**choice, "seed": str(seed)}.items() for word in (f"--{name}", value)]
            return shlex.join(["nowait", "train", experiment.name, *options, *(word for text in overrides for word in ("--set", text))])
    except ConfigError:
        pass
    return f"nowait runs show {shlex.quote(str(result.path))} --yaml > settings.yaml && nowait train settings.yaml --seed {seed}"


def _overrides(experiment: Experiment) -> list[str]:
    """KEY=VALUE, in YAML, of each setting that its config file has otherwise (tables such as task.options whole). ConfigError without one."""
    file, own = (flat(x) for x in (load(experiment.name, experiment.scale, method=experiment.method), experiment))
    return [f"{key}={json.dumps(own[key], ensure_ascii=False)}" for key in sorted(own) if own[key] != file[key]]
