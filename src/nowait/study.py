"""What the notebooks share: parameters, finished runs and benches, what was compared, and saved figures. Imports no torch.

Trainings and benches run in processes of their own and are kept under the folder of runs; what is finished is only read.
"""

import ast
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Image, Markdown

from nowait import bench, runs, simulate
from nowait.analysis import figures, report, tables
from nowait.config import METHODS, Experiment, digest, load
from nowait.config_files import ConfigError, Problem, find
from nowait.identity import SIMULATED, code_digest
from nowait.reproduce import A3PO_METHODS, EXPERIMENTS, figures_dir
from nowait.runs import RunResult
from nowait.tracking import Tracker

KNOBS = {  # parameter of a notebook: the settings that it overrides
    "steps": ("schedule.steps",),
    "eta": ("schedule.max_staleness",),
    "epsilon": ("algorithm.clip_low", "algorithm.clip_high"),
    "lr": ("learner.lr",),
    "minibatches": ("learner.minibatches",),
    "fresh": ("algorithm.fresh",),
    "chunk": ("sampler.chunk",),
    "kl": ("algorithm.kl_coef",),
    "rule": ("overlap.rule",),
    "delta": ("overlap.delta",),
    "window": ("overlap.window",),
}
SHOWN = """title schedule.steps schedule.batch_size schedule.group_size schedule.max_staleness schedule.order sampler.slots learner.lr
    learner.minibatches learner.epochs algorithm.clip_low algorithm.clip_high algorithm.behav_weight_cap algorithm.fresh
    evaluation.prompts evaluation.samples schedule.eval_every runtime.clock runtime.costs.charge_forward""".split()
OPPO_SHOWN = """title schedule.steps schedule.batch_size schedule.group_size sampler.slots sampler.chunk overlap.rule overlap.delta overlap.delta_max
    overlap.window reward.path critic.shared algorithm.kl_coef algorithm.anchor learner.lr learner.minibatches learner.epochs evaluation.prompts
    evaluation.samples schedule.eval_every runtime.placement.a runtime.placement.b runtime.clock""".split()
Results = dict[str, list[RunResult]]  # one config: method (or the name of a variant) -> one run per seed
Variants = Mapping[str, tuple[str, list[str]]]  # name: method and further overrides


@dataclass(frozen=True)
class Plan:
    """The parameters of a notebook. A knob that is None leaves its setting as in the config."""

    configs: list[str]
    scale: str
    seeds: list[int]
    overrides: list[str]
    interactive: bool  # progress bars
    knobs: dict[str, Any]
    others: dict[str, Any] = field(default_factory=dict)  # what else the notebook's figure depends on, such as which steps it shows

    def experiment(self, config: str, method: str | None, knobs: Iterable[str] = tuple(KNOBS), more: Iterable[str] = ()) -> Experiment:
        """A config with those of `knobs` that are set and do not touch what defines the method, then `more` and the overrides."""
        chosen = {key: self.knobs[name] for name in knobs for key in KNOBS[name] if self.knobs.get(name) is not None and _applies(key, method)}
        return load(config, self.scale, [*(f"{key}={value}" for key, value in chosen.items()), *more, *self.overrides], method)


def read(namespace: dict[str, Any]) -> Plan:
    """The plan of a notebook, from its `globals()`. Raises ConfigError for a parameter that the notebook lacks, of which papermill only warns,
    and for text in the place of a list or a truth value, as papermill's -p passes it.

    Papermill injects a cell that begins with "# Parameters".
    """
    cells = namespace["In"]
    own = ast.parse(next(cell for cell in cells if "overrides:" in cell)).body
    defaults = {node.target.id: ast.literal_eval(node.value) for node in own if isinstance(node, ast.AnnAssign)}
    injected = [name for cell in cells if cell.startswith("# Parameters") for name in re.findall(r"^(\w+) = ", cell, re.MULTILINE)]
    problems = [Problem(name, "is no parameter of this notebook", _meant(name, list(defaults))) for name in injected if name not in defaults]
    texts = [name for name, default in defaults.items() if isinstance(default, list | bool) and type(namespace[name]) is not type(default)]
    problems += [Problem(name, f"got {namespace[name]!r}", f"for papermill, write -y '{name}: {json.dumps(defaults[name])}'") for name in texts]
    problems += [] if texts else _unusable(namespace["configs"], namespace["seeds"])
    if problems:
        raise ConfigError(problems, "parameters")
    shared = ("configs", "scale", "seeds", "overrides", "interactive")
    knobs, others = ({n: namespace[n] for n in defaults if n not in shared and (n in KNOBS) == is_knob} for is_knob in (True, False))
    return Plan(**{name: namespace[name] for name in shared}, knobs=knobs, others=others)


def _unusable(configs: list, seeds: list) -> list[Problem]:
    wrong_seeds = not seeds or not all(type(seed) is int and seed in runs.SEEDS for seed in seeds)
    problems = [Problem("seeds", f"got {seeds!r}", "write one whole number >= 0 or several, as in [1, 2]")] if wrong_seeds else []
    return problems + ([] if configs else [Problem("configs", "got []", "write one config or several, as in [a3po/setup1]")])


def results(plan: Plan, methods: Iterable[str] | Variants = A3PO_METHODS) -> list[Results]:
    """{method or variant: [run per seed]} of every config. What is not finished is trained first, all of it in one sweep."""
    named = methods if isinstance(methods, Mapping) else {method: (method, []) for method in methods}
    planned = [{name: plan.experiment(config, method, more=more) for name, (method, more) in named.items()} for config in plan.configs]
    runs.sweep([e for row in planned for e in row.values()], plan.seeds, progress=plan.interactive)
    return [{name: [RunResult(runs.folder(e, seed)) for seed in plan.seeds] for name, e in row.items()} for row in planned]


def times(plan: Plan, blocks: int, clock: str = "measured", methods: Iterable[str] = bench.METHODS) -> list[dict]:
    """The bench of seconds per step of every config, one dict each: of A-3PO's `methods`, or of OPPO's variants; as short as can be at scale smoke.

    Of the knobs it follows those that change how long a step takes. On the measured clock, which counts processor time, two configs are timed at
    once, each on a core of its own.
    """
    length = {"blocks": 1, "steps": 2} if plan.scale == "smoke" else {"blocks": blocks, "steps": bench.COUNTED_STEPS}
    chosen = [_timed(plan, config, methods) for config in plan.configs]
    with ThreadPoolExecutor(2 if clock == "measured" else 1) as pool:
        return list(pool.map(lambda experiments: measured("step_times", experiments, clock=clock, **length), chosen))


def validation(plan: Plan, config: str, blocks: int) -> tuple[dict[str, Experiment], dict, RunResult]:
    """What the simulator is held against: experiments by method, the bench on the measured clock that timed them, a finished run of the first."""
    one, experiments = replace(plan, configs=[config]), _timed(plan, config)
    first = next(iter(experiments))
    return experiments, times(one, blocks)[0], results(one, [first])[0][first][0]


def _timed(plan: Plan, config: str, methods: Iterable[str] = bench.METHODS) -> dict[str, Experiment]:
    if plan.experiment(config, None, knobs=()).schedule.kind == "overlapped":
        return bench.variants(lambda method, more: plan.experiment(config, method, ("kl",), more))
    return {method: plan.experiment(config, method, ("eta", "minibatches")) for method in methods}


def measured(kind: str, subject: Experiment | dict[str, Experiment], **options: Any) -> dict:
    """What the function `kind` of the benches returns for one or several experiments, measured once and kept; with `provenance`."""
    several = subject if isinstance(subject, dict) else {subject.method: subject}
    hashes = {method: runs.run_hash(e, seed=0) for method, e in several.items()}  # of settings, code and checkpoint
    key = json.dumps([kind, hashes, options, Path(bench.__file__).read_text()], sort_keys=True)
    path = runs.root() / "bench" / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    if not path.is_file():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=runs.end_with, initargs=(os.getpid(),)) as pool:
            result = pool.submit(getattr(bench, kind), subject, **options).result()
        configs = {f"bench/{tables.setup(e.name)}/{method}": digest(e) for method, e in several.items()}
        record = {"seeds": result["seeds"], "code": [runs.code_digest()], "config": configs}
        path.parent.mkdir(parents=True, exist_ok=True)
        runs.write(path, result | {"provenance": record})
    return json.loads(path.read_text())


def settings(plan: Plan, method: str = "loglinear") -> pd.DataFrame:
    """The settings of the paper's own method behind the figures, by the keys that overrides take, and what follows; one column per config."""
    frame = pd.concat([pd.json_normalize(plan.experiment(config, method).model_dump(mode="json")) for config in plan.configs])
    if method != "loglinear":
        return frame[["name", *OPPO_SHOWN]].set_index("name").T
    ends = [((1 + sign * frame[f"algorithm.clip_{end}"]) ** frame["schedule.max_staleness"]).round(3) for end, sign in (("low", -1), ("high", 1))]
    derived = {"sequences per training step": frame["schedule.batch_size"] * frame["schedule.group_size"]}
    derived |= {"optimiser steps per training step": frame["learner.minibatches"] * frame["learner.epochs"]}
    derived |= {"unclipped theta / behav at d = eta": [f"{low:g} to {high:g}" for low, high in zip(*ends, strict=True)]}
    return frame[["name", *SHOWN]].assign(**derived).set_index("name").T


def staleness(several: Iterable[Results] = (), benches: Iterable[dict] = ()) -> pd.DataFrame:
    """Mean d of the trained tokens, and the share of each d, by setup and method, over all seeds (blocks) and steps.

    Of runs beside those of A-3PO also the share of steps in which both trained on the same requests.
    """
    counts = {(tables.setup(b["config"]), row["method"]): row["staleness"] for b in benches for row in b["rows"]}
    same = {}
    for result, method in ((r, m) for r in several for m in r):
        key, each = (tables.setup(result[method][0].manifest["name"]), method), result[method]
        counts[key] = bench.added(c for run in each for c in run.metrics["stale/hist"].dropna())
        if "loglinear" in result:
            same[key] = _same_requests(each, result["loglinear"])
    tokens = pd.DataFrame({key: pd.Series(c) for key, c in counts.items()}).T.fillna(0)
    shares = tokens.div(tokens.sum(axis=1), axis=0)
    found = shares.add_prefix("d = ")
    found.insert(0, "mean d", shares @ shares.columns)
    if same:
        found.insert(1, "same requests", pd.Series(same))
    return found.round(3)


def _same_requests(each: list[RunResult], others: list[RunResult]) -> float:
    steps = [zip(*(run.metrics["rollout/requests"].dropna() for run in pair), strict=True) for pair in zip(each, others, strict=True)]
    return float(np.mean([ours == theirs for pairs in steps for ours, theirs in pairs]))


def verdicts(frames: dict[str, pd.DataFrame], paper: str = "a3po") -> Markdown:
    """The shape targets that were fixed before the runs, judged by the frames {name of the figure: its data}."""
    judged = [row for row in report.shapes(paper, frames) if row[2] != "not run" or not row[3].startswith("no rows of")]  # of another figure
    return Markdown("\n".join(f"- **{verdict}**, {setup}: {target}. {numbers}." for target, setup, verdict, numbers in judged))


def publish(plan: Plan, name: str, frame: pd.DataFrame, several: Iterable[Results] = (), benches: Iterable[dict] = ()) -> Image | Markdown:
    """Draw the figure or table `name` of nowait.analysis, save it with its CSV and provenance, mirror both to wandb, and return it for display.

    It lands in $NOWAIT_FIGURES, which `nowait reproduce` sets; otherwise in figures/, which holds the reproduction, or under the folder of
    runs where it is something else, see `_own`. Without runs and benches it is simulated.
    """
    origins = [o for o in (tables.provenance(several), *(b["provenance"] for b in benches)) if o["config"]] or [simulated(plan)]
    record = {
        "seeds": next((origin["seeds"] for origin in origins if origin["seeds"]), []),  # of the runs, where there are any
        "code": sorted({code for origin in origins for code in origin["code"]}),
        "config": {name: value for origin in origins for name, value in origin["config"].items()},
        "parameters": plan.others,
    }
    own = "NOWAIT_FIGURES" not in os.environ and _own(plan, figures.records(figures_dir()).get(name, {}), record)
    content = figures.draw(name, frame)
    path = figures.save(content, name, frame, record, runs.root() / "figures-own" if own else figures_dir())
    if os.environ.get("WANDB_MODE") != "disabled":
        _mirror(plan, name, frame, path)
    print(f"{path}, data in {path.with_suffix('.csv').name}; seeds {record['seeds']}, code {', '.join(record['code'])}")
    return Markdown(content) if isinstance(content, str) else Image(filename=path)


def simulated(plan: Plan) -> dict:
    """Provenance of what is simulated at the paper's scale: no run, the simulator's code, and a digest of all that it is told about a config."""
    config = {}
    for name in plan.configs:
        method = simulate.methods(name)[-1]
        experiment, assumed = simulate.load(name, method, plan.overrides)
        files = [find(file).read_text() for file in (f"hardware/{assumed.hardware}", "simulation/models")]
        told = [experiment.model_dump(mode="json"), assumed.model_dump(mode="json"), files, plan.knobs, plan.seeds]
        config[f"simulated/{tables.setup(name)}/{method}"] = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]
    return {"seeds": [], "code": [code_digest(SIMULATED)], "config": config}


def _own(plan: Plan, kept: dict, record: dict) -> bool:
    """Whether a figure must not replace the one in figures/: made with other parameters than those by default, or with fewer seeds."""
    changed = plan.scale != "cpu" or plan.overrides or any(value is not None for value in plan.knobs.values())
    other = not set(plan.configs) <= set().union(*EXPERIMENTS.values())
    differs = any(name in kept and kept[name] != record[name] for name in ("config", "parameters"))
    return bool(changed or other or differs or len(record["seeds"]) < len(kept.get("seeds", [])))


def _mirror(plan: Plan, name: str, frame: pd.DataFrame, path: Path) -> None:
    folder = runs.root() / "figures-wandb" / name
    tracker = Tracker(folder, config=asdict(plan), name=name, group="figures", tags=[plan.scale], use_wandb=True)
    if path.suffix == ".png":
        tracker.log_figure(name, path)
    tracker.log_table(f"{name}_data", frame)
    tracker.close()


def _meant(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}; put any other setting into overrides"


def _applies(key: str, method: str) -> bool:
    """Whether a knob may set a key of this method: not where the method is defined by it, and `fresh` only where something is interpolated."""
    if key == "algorithm.fresh":
        return METHODS[method]["algorithm.anchor"] in ("loglinear", "linear")
    return key not in METHODS[method]
