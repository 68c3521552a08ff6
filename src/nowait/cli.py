"""The command `nowait`. Commands import what they need when they run, so that help is quick."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

if TYPE_CHECKING:
    from nowait.runs import RunResult

INTERRUPTED = 130  # exit status of a command that Ctrl-C ended
OPTIONS: dict[str, Any] = {"no_args_is_help": True, "add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}

app = typer.Typer(help="Rerun, tweak and teach A-3PO and OPPO. `nowait COMMAND --help` explains a command; --debug shows tracebacks.", **OPTIONS)
runs_app = typer.Typer(help="List, show and compare runs. RUN: a folder, or the beginning of a run's path, name or hash.", **OPTIONS)
assets_app = typer.Typer(help="Build or verify the shipped checkpoints.", **OPTIONS)
app.add_typer(runs_app, name="runs")
app.add_typer(assets_app, name="assets")

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file, or a shipped config such as a3po/setup1")]
Scale = Annotated[str, typer.Option(help="a scale of the config, or paper")]
NoWandb = Annotated[bool, typer.Option("--no-wandb", help="do not mirror metrics to Weights & Biases")]
Run = Annotated[str, typer.Argument(metavar="RUN")]
Preset = Annotated[str | None, typer.Option("--hardware", help="a preset of paper_configs/hardware; by default the assumed one")]
Setting = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override a setting; repeatable")]


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors end in one message on stderr, with a traceback only under --debug."""
    if sys.platform == "win32":
        print("nowait: Linux and macOS only; on Windows, use it inside WSL", file=sys.stderr)
        return 1
    arguments = sys.argv[1:] if argv is None else argv
    try:
        _start()
        app([a for a in arguments if a != "--debug"], prog_name="nowait")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            print("interrupted; what was recorded stays, and the same command continues it", file=sys.stderr)
        return int(end.code or 0)
    except (ValueError, RuntimeError, OSError) as error:
        if "--debug" in arguments:
            raise
        print(f"nowait: {error}", file=sys.stderr)
        return 1
    return 0


def _start() -> None:
    """Find the modules of a user's own tasks as `python -m` does, say warnings in one line, take a batch system's SIGTERM for Ctrl-C."""
    warnings.formatwarning = lambda message, *where, **line: f"nowait: {message}\n"
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


@app.command()
def reproduce(
    paper: Annotated[str, typer.Option(help="folder under notebooks/, or all")] = "all",
    scale: Scale = "cpu",
    seeds: Annotated[int, typer.Option(min=1, help="seeds per method: 1 to N")] = 1,
    no_wandb: NoWandb = False,
) -> None:
    """Train, execute the notebooks, write figures. Continues where it stopped; smoke writes under runs/ only."""
    from nowait.reproduce import reproduce

    for path in reproduce(paper, scale, seeds, use_wandb=not no_wandb):
        print(path)


@app.command()
def train(
    config: Config,
    scale: Annotated[str | None, typer.Option(help="a scale of the config, or paper; by default cpu")] = None,
    method: Annotated[str | None, typer.Option(help="a key of nowait.config.METHODS, such as recompute")] = None,
    variant: Annotated[str | None, typer.Option(help="one of the config's `variants`, such as areal in a3po/setup1")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 1,
    setting: Setting = None,
    no_wandb: NoWandb = False,
    out: Annotated[Path | None, typer.Option(help="folder of the run; by default one under runs/")] = None,
) -> None:
    """Train one run. A finished one is found again, an interrupted one continued."""
    from nowait import description, runs
    from nowait.config import load

    experiment, start = load(config, scale, setting, method, variant), time.time()
    result = runs.run(experiment, seed, out, use_wandb=not no_wandb, progress=True)
    if result.manifest["ended"] < start:
        print("found finished: nothing was trained", file=sys.stderr)
    _print_aligned(description.describe(result))


@app.command()
def sample(
    run: Run,
    prompt: Annotated[str, typer.Option(help="text in the form of the task's prompts; what a user says, where those are messages")],
    samples: Annotated[int, typer.Option(min=1)] = 4,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
) -> None:
    """Let a trained policy answer a prompt, at the temperature of its training."""
    import numpy as np
    from transformers.utils import logging

    from nowait import tasks
    from nowait.batch import LENGTH, Request
    from nowait.config import TaskConfig
    from nowait.training import load_tokenizer
    from nowait.workers.sampler import HFSampler, generate

    logging.disable_progress_bar()
    result = _trained(_find(run))
    config, path = result.manifest["config"], str(result.path / "policy")
    encode, _, tokenizer = load_tokenizer(path)
    example = tasks.load(TaskConfig(**config["task"])).prompt("eval", 0)
    unknown = sorted({character for character in prompt if not tokenizer(character, add_special_tokens=False)["input_ids"]})
    if unknown or not prompt:
        what = f"--prompt has {' '.join(unknown)!r}, which the policy's tokenizer does not know" if unknown else "--prompt is empty"
        raise ValueError(f"{what}; a prompt of this run's task: {example}")
    ids = np.array(encode(prompt if isinstance(example, str) else [{"role": "user", "content": prompt}]), np.int32)
    sampling, longest = config["sampler"], config["sampler"]["max_new_tokens"]
    cache = {"slots": min(samples, sampling["slots"]), "capacity": len(ids) + longest}
    sampler = HFSampler(path, dtype=config["model"]["dtype"], temperature=sampling["temperature"], seed=seed, **cache)
    batch = generate(sampler, [Request(0, ids, samples, longest)])
    for token, length, finish in zip(batch.token, batch.length, batch.finish, strict=True):
        print(tokenizer.decode(token[:length], skip_special_tokens=True) + (f"  [cut at {longest} tokens]" if finish == LENGTH else ""))


@app.command()
def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="a run, a folder, a hub name, or asset:NAME")],
    task: Annotated[str, typer.Option(help="gsm8k, math500, aime24, or any other task")],
    path: Annotated[str | None, typer.Option(help="JSON lines file, folder or hub name in place of the task's own data")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="another option of the task; repeatable")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="the first N held-out rows; by default all")] = None,
    samples: Annotated[int, typer.Option(min=1, help="responses to each")] = 1,
    temperature: Annotated[float, typer.Option(min=0.01)] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest response")] = 1024,
    slots: Annotated[int, typer.Option(min=1, help="responses written at once: what memory allows")] = 128,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON lines file for the responses and their rewards")] = None,
) -> None:
    """Grade responses to held-out rows: pass@k with standard error. Table on stderr, one JSON object as the last line of stdout."""
    from nowait.config import TaskConfig
    from nowait.config_files import parse_overrides
    from nowait.evaluate import evaluate

    options = {"path": path, "eval_path": path} if path else {}
    chosen = TaskConfig(name=task, options=options | dict(parse_overrides(option or [], Path("--option"))))
    sampling = {"samples": samples, "temperature": temperature, "max_new_tokens": max_new_tokens, "slots": slots, "dtype": dtype, "seed": seed}
    result = evaluate(_checkpoint(checkpoint), chosen, prompts=prompts, **sampling, out=out)
    _print_aligned([[name, f"{value:.4g}" if isinstance(value, float) else str(value)] for name, value in result.items()], sys.stderr)
    print(json.dumps(result, allow_nan=False))


def _checkpoint(text: str) -> str:
    """A folder, a shipped asset, or the final policy of a run; what is none of these is a hub name."""
    if text.startswith("asset:") or (Path(text) / "config.json").is_file() or not (Path(text).exists() or _begin_with(text)):
        return text
    return str(_trained(_find(text)).path / "policy")


@runs_app.command("list")
def list_runs() -> None:
    """All runs, oldest first."""
    from nowait import description, runs

    rows = [["run", "status", "steps", "held-out reward", "started", "changed settings"]]
    for result in runs.listing():
        manifest = result.manifest
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest["started"]))
        rows.append([description.name(result), result.status, *description.progress(result), started, description.changes(result)])
    _print_aligned(rows)


@runs_app.command()
def show(run: Run, yaml: Annotated[bool, typer.Option("--yaml", help="print its resolved settings as a config file instead")] = False) -> None:
    """What a run did, and the exact command that repeats it."""
    from nowait import description

    result = _find(run)
    if yaml:
        from nowait.config import to_yaml

        print(to_yaml(description.settings(result)), end="")
    else:
        _print_aligned(description.describe(result))


@runs_app.command()
def diff(a: Run, b: Run) -> None:
    """Settings, code, versions and results in which two runs differ."""
    from nowait import config, description

    left, right = _find(a), _find(b)
    settings = config.diff(description.settings(left), description.settings(right))
    one, other = dict(description.facts(left)), dict(description.facts(right))
    facts = ((key, one.get(key, "-"), other.get(key, "-")) for key in one | other)
    rows = [[key, str(x), str(y)] for key, x, y in [*settings, *facts] if x != y]
    _print_aligned([["", description.name(left), description.name(right)], *rows])


def _trained(result: RunResult) -> RunResult:
    """The run, if it has a final policy."""
    from nowait import description

    if not (result.finished and (result.path / "policy" / "config.json").is_file()):
        raise ValueError(f"{result.path} has no trained policy; finish the run first: {description.repeat(result)}")
    return result


def _begin_with(text: str) -> list[RunResult]:
    """Runs whose path under runs/, name or hash begins with the text."""
    from nowait import description, runs

    return [r for r in runs.listing() if any(name.startswith(text) for name in (description.name(r), r.path.name, r.manifest["hash"]))]


def _find(text: str) -> RunResult:
    """The run in folder `text`, else that whose path under runs/, name or hash begins with it; of several, the one with unchanged settings."""
    from difflib import get_close_matches

    from nowait import description, runs

    if (Path(text) / "manifest.json").is_file():
        return runs.RunResult(Path(text))
    found = _begin_with(text)
    for chosen in (found, [r for r in found if not description.changes(r)]):
        if len(chosen) == 1:
            return chosen[0]
    names = [description.name(r) for r in found or runs.listing()]
    if not names:
        raise ValueError(f"no run {text!r}: there are none in {runs.root()}; `nowait train` makes one")
    near = "\n  ".join(names if found else get_close_matches(text, names, 5, 0.3) or ["see `nowait runs list`"])
    raise ValueError(f"{len(found)} runs begin with {text!r}; give more of the name:\n  {near}" if found else f"no run {text!r}; near it:\n  {near}")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="async, overlap, sampler, proximal or gpu")],
    argument: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="the same as --config")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file or shipped config")] = None,
    scale: Annotated[str | None, typer.Option(help="a scale of the config")] = None,
    clock: Annotated[str | None, typer.Option(help="measured or wall")] = None,
    blocks: Annotated[int | None, typer.Option(min=1, help="interleaved repetitions")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu, of bench gpu")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="tiny shapes, for a test of bench gpu")] = False,
) -> None:
    """Measure on this machine. Progress on stderr, one JSON object as the last line of stdout."""
    import inspect
    from contextlib import redirect_stdout

    from nowait import bench, bench_gpu

    benches = {"async": bench.asynchronous, "overlap": bench.overlap, "sampler": bench.sampler, "proximal": bench.proximal, "gpu": bench_gpu.gpu}
    if name not in benches:
        raise ValueError(f"no bench {name!r}; choose one of {', '.join(benches)}")
    given = {"config": config or argument, "scale": scale, "clock": clock, "blocks": blocks, "device": device, "tiny": tiny or None}
    options = {option: value for option, value in given.items() if value is not None}
    if unused := sorted(set(options) - set(inspect.signature(benches[name]).parameters)):
        raise ValueError(f"bench {name} takes no {', '.join(unused)}")
    with redirect_stdout(sys.stderr):
        result = benches[name](**options)
    print(json.dumps(result, allow_nan=False))


@app.command()
def simulate(
    config: Annotated[str, typer.Argument(help="a shipped setup, such as a3po/setup2")],
    hardware: Preset = None,
    setting: Setting = None,
    steps: Annotated[int, typer.Option(min=12, help="simulated training steps")] = 40,
    trace: Annotated[Path | None, typer.Option(help="folder for a trace of each method, for Perfetto")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="print the calibration that meets the published baselines instead")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object instead of a table")] = False,
) -> None:
    """A setup's methods on the paper's hardware, in simulated seconds. --set takes keys of the config and of paper_configs/simulation."""
    from nowait import simulate

    overrides = _assuming(hardware, setting)
    if fit:
        return print(simulate.fit(config, overrides).model_dump_json())
    found = simulate.compare(config, overrides, steps, trace)
    if as_json:
        return print(json.dumps(found, allow_nan=False))
    names = next(iter(found.values()))
    print("simulated, per training step: seconds of each kind of call; busy: share of the time that a device works; staleness in training steps")
    _print_aligned([("", *found), *((name, *(f"{row[name]:.3g}" for row in found.values())) for name in names)])


@app.command()
def plan(
    config: Annotated[str, typer.Argument(help="a shipped setup, such as a3po/setup2")],
    method: Annotated[str | None, typer.Option(help="by default the paper's own")] = None,
    hardware: Preset = None,
    setting: Setting = None,
) -> None:
    """What a run at the paper's scale will take, before anything starts: minutes, device-hours, memory and disk, as simulated."""
    from nowait import simulate

    experiment, assumed = simulate.load(config, method or simulate.methods(config)[-1], _assuming(hardware, setting))
    devices = ", ".join(f"{name} = {count} ({', '.join(experiment.runtime.placement[name])})" for name, count in assumed.devices.items())
    print(f"{config}, method {experiment.method}, {experiment.schedule.steps} steps on {assumed.hardware}: {devices}; memory of each device")
    for name, value in simulate.plan(experiment, assumed).items():
        print(f"{name}: {value / 1e9:.3g} GB" if name.startswith(("memory", "disk")) else f"{name}: {value:.4g}")


def _assuming(hardware: str | None, setting: list[str] | None) -> list[str]:
    return [*([f"hardware={hardware}"] if hardware else []), *(setting or [])]


@app.command()
def report() -> None:
    """Write report.md from the figures' CSV files."""
    from nowait.analysis.report import report
    from nowait.reproduce import figures_dir

    report(figures_dir())
    print(figures_dir() / "report.md")


@app.command()
def figures() -> None:
    """Redraw all figures from their CSV files."""
    from nowait.analysis.figures import redraw_all
    from nowait.reproduce import figures_dir

    if not (drawn := redraw_all(figures_dir())):
        raise ValueError(f"no figure data in {figures_dir()}; `nowait reproduce` makes them")
    for path in drawn:
        print(path)


@assets_app.command()
def build(names: Annotated[list[str] | None, typer.Argument(help="by default all")] = None) -> None:
    """Train shipped checkpoints anew, with fixed seeds, and replace them (minutes each)."""
    from nowait import assets

    for name in names or assets.RECIPES:
        print(f"{name}: {assets.build(name)['sha256']}")


@assets_app.command()
def verify() -> None:
    """Compare the weights with the hashes in their manifests."""
    from nowait import assets

    for name in assets.verify():
        print(f"{name}: ok")


@assets_app.command("list")
def list_assets() -> None:
    """Checkpoints, their size, and how they do on what was held out: exact match of sampled responses, or accuracy on pairs by kind."""
    from nowait import assets

    rows = [["asset", "parameters", "held out"]]
    for file in sorted(assets.DATA.glob(f"*/{assets.MANIFEST}")):
        manifest = json.loads(file.read_text())
        scores = {name: result.get("sampled", result) for name, result in manifest["evaluation"].items()}
        texts = [f"{name} {s.get('exact_match', s.get('accuracy')):.3f} ± {s['standard_error']:.3f}" for name, s in scores.items()]
        rows.append([file.parent.name, f"{manifest['parameters']:,}", ", ".join(texts)])
    _print_aligned(rows)


@app.command()
def doctor() -> None:
    """Print versions, devices, what is missing. Says how to get it; exit status 1 if something is missing."""
    from nowait.doctor import checks

    found = list(checks())
    _print_aligned([[check.name, "ok" if check.remedy is None else "MISSING", check.text] for check in found])
    missing = [check for check in found if check.remedy is not None]
    for check in missing:
        print(f"{check.name}: {check.remedy}", file=sys.stderr)
    raise typer.Exit(1 if missing else 0)


def _print_aligned(rows: Iterable[Iterable[str]], file: TextIO | None = None) -> None:
    """Columns as wide as their widest cell; the last one as it comes."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*(row[:-1] for row in table), fillvalue="")]
    for row in table:
        print("  ".join([*map(str.ljust, row[:-1], widths), row[-1]]).rstrip(), file=file)
