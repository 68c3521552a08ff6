"""The notebooks, executed by papermill as a reader would at scale smoke, and what they share."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pandas as pd
import pytest
from PIL import Image

from nowait import bench, runs, study
from nowait.analysis import tables
from nowait.config import digest, load
from nowait.config_files import ConfigError
from nowait.identity import SIMULATED, code_digest

ROOT = Path(__file__).parents[1]
FIGURES = {  # notebook: what it saves
    "a3po/01_training_time": ["a3po_training_time.md", "a3po_training_time_sampler_bound.md"],
    "a3po/02_proximal_cost": ["a3po_proximal_seconds.png"],
    "a3po/03_training_reward": ["a3po_train_reward_steps.png", "a3po_train_reward_time.png"],
    "a3po/04_evaluation_reward": ["a3po_eval_reward_steps.png", "a3po_eval_reward_time.png", "a3po_final_eval_reward.md"],
    "a3po/05_importance_weights": ["a3po_importance_weight_max.png", "a3po_importance_weight_min.png"],
    "a3po/06_clipped_tokens": ["a3po_clipped_tokens.png"],
    "a3po/07_entropy": ["a3po_entropy.png"],
    "a3po/08_benchmarks": ["a3po_benchmarks.md"],
    "oppo/01_timeline": ["oppo_timeline.png"],
    "oppo/02_motivation": ["oppo_stages.md", "oppo_lengths.png", "oppo_staleness.png"],
    "oppo/03_time_to_reward": ["oppo_time_to_reward.png", "oppo_speedups.md"],
    "oppo/04_reward_per_step": ["oppo_reward_steps.png"],
    "oppo/05_utilisation": ["oppo_utilisation.png"],
    "oppo/06_ablation": ["oppo_ablation.png", "oppo_ablation_table.md"],
    "oppo/07_overcommitment": ["oppo_overcommitment.png", "simulated_overcommitment.png"],
    "oppo/08_chunk_size": ["oppo_chunk_size.png", "simulated_chunk_size.png"],
    "oppo/09_deferrals": ["oppo_deferrals.png", "simulated_deferrals.png"],
    "oppo/10_quality": ["oppo_quality.md"],
    "oppo/11_grpo": ["oppo_grpo.png"],
    "beyond/01_papers": ["simulated_oppo.md", "simulated_speedups.png"],
    "beyond/02_systems": ["simulated_systems.png", "simulated_systems_table.md"],
    "beyond/03_scale": ["simulated_scale.png", *(f"simulated_scale_{name}.png" for name in ("size", "work", "overlap", "hours"))],
    "beyond/04_this_machine": ["simulated_here.png"],
}
TEACHING = [f"teach/{path.stem}" for path in sorted((ROOT / "notebooks" / "teach").glob("*.ipynb"))]  # see test_teach
ALONE = ("a3po/04_evaluation_reward", "oppo/02_motivation", "beyond/02_systems")  # `make smoke` executes all of them, in one go
MEASURED_TOO = {"simulated_here.png"}  # simulated, beside a bench
ASYNCHRONOUS = {"recompute", "loglinear", "behave", "linear", "reuse"}
# one setup with two benchmarks, so that all notebooks share the same few runs
SETS = "{longer: {name: arithmetic, options: {operand_cap: 14}}, longest: {name: arithmetic, options: {operand_cap: 15}}}"
SHORT = ["-y", 'configs: ["a3po/setup1"]', "-y", f'overrides: ["evaluation.benchmarks={SETS}"]']
OPPO_SHORT = ["-y", 'configs: ["oppo/stackexchange_7b"]']
PROBE = 'import sys\nassert "torch" not in sys.modules, "the kernel has loaded torch"'


def source(stem: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", 4)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with runs/ and figures/ of its own for the kernels."""
    folder = tmp_path_factory.mktemp("notebooks")
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("runs", "figures"):
            patch.setenv(f"NOWAIT_{name.upper()}", str(folder / name))
        for name, value in {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}.items():
            patch.setenv(name, value)
        yield folder


def papermill(stem: str, folder: Path, *arguments: str) -> nbformat.NotebookNode:
    """The notebook as papermill's command line executes it at scale smoke, with a cell at the end that looks for torch."""
    from papermill.cli import papermill as command

    notebook, own, output = source(stem), folder / f"{Path(stem).name}.ipynb", folder / f"{Path(stem).name}-executed.ipynb"
    notebook.cells.append(nbformat.v4.new_code_cell(PROBE))
    nbformat.write(notebook, own)
    options = ["--no-progress-bar", "-p", "scale", "smoke", "-y", "seeds: [1]", *arguments]
    command.main([str(own), str(output), *options], standalone_mode=False)
    return nbformat.read(output, 4)


def provenance(path: Path) -> dict:
    if path.suffix == ".png":
        with Image.open(path) as image:
            return json.loads(image.info["provenance"])
    return json.loads(re.search(r"<!-- provenance (.*) -->", path.read_text()).group(1))


@pytest.mark.slow
@pytest.mark.parametrize("stem", ALONE)
def test_a_notebook_runs_alone_saves_its_figures_with_data_and_provenance_and_loads_no_torch(stem, place):
    papermill(stem, place, *(SHORT if stem.startswith("a3po") else OPPO_SHORT))
    for name in FIGURES[stem]:
        path = place / "figures" / name
        record, data = provenance(path), path.with_suffix(".csv").read_bytes()
        simulated = name.startswith("simulated") and name not in MEASURED_TOO
        assert record["data"] == hashlib.sha256(data).hexdigest()
        assert record["code"] == [code_digest(SIMULATED) if simulated else runs.code_digest()] and bool(record["seeds"]) != simulated
        assert all(config.split("/")[-2] in ("setup1", "stackexchange_7b") for config in record["config"])
        assert set(pd.read_csv(path.with_suffix(".csv")).get("scale", ["smoke"])) == {"smoke"}
        assert list((place / "runs" / "figures-wandb" / path.stem).glob("wandb/offline-run-*/*.wandb")), "not mirrored to wandb"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "etaa", "3"], "etaa: is no parameter of this notebook; did you mean eta?"),
        (["-y", "overrides: [learner.lrr=0.1]"], "learner.lrr: unknown key (set by override); did you mean learner.lr?"),
        (["-p", "lr", "fast"], "learner.lr: got 'fast' (set by override); write a number, without quotes"),
    ],
)
def test_a_wrong_parameter_fails_the_notebook_before_anything_is_trained(arguments, message, place, tmp_path):
    with pytest.raises(Exception, match=re.escape(message)) as failure:
        papermill("a3po/07_entropy", tmp_path, *arguments)
    assert failure.value.ename == "ConfigError"


# What a reader sees without a kernel, and what papermill sees


def test_every_notebook_is_tested_here():
    assert sorted(f"{path.parent.name}/{path.stem}" for path in (ROOT / "notebooks").glob("*/*.ipynb")) == sorted([*FIGURES, *TEACHING])


@pytest.mark.parametrize("stem", FIGURES)
def test_the_first_cell_shows_or_links_the_committed_figures(stem):
    first = source(stem).cells[0].source
    for name in FIGURES[stem]:
        assert f"](../../figures/{name})" in first and (name.endswith(".md") or "![" in first)


@pytest.mark.parametrize("stem", [*FIGURES, *TEACHING])
def test_papermill_documents_every_parameter(stem):
    import papermill

    (cell,) = [cell for cell in source(stem).cells if "parameters" in cell.metadata.get("tags", [])]
    found = papermill.inspect_notebook(str(ROOT / "notebooks" / f"{stem}.ipynb"))
    assert set(found) == {node.target.id for node in ast.parse(cell.source).body}
    assert [name for name, parameter in found.items() if not parameter["help"] or parameter["inferred_type_name"] == "None"] == []


@pytest.mark.parametrize("stem", [*FIGURES, *TEACHING])
def test_notebooks_are_thin(stem):
    for cell in source(stem).cells:
        for node in ast.walk(ast.parse(cell.source)) if cell.cell_type == "code" else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.end_lineno - node.lineno < 15, f"{stem}: {node.name} belongs into the package"


# Parameters


def cells(injected: str = "", **values) -> dict:
    """The namespace of a kernel that has run a parameters cell and, after it, papermill's."""
    defaults = {"configs": ["a3po/setup1"], "scale": "cpu", "seeds": [1], "overrides": [], "interactive": True, "eta": None, "lr": None}
    own = "\n".join(f"{name}: {type(value).__name__} = {value!r}  # help" for name, value in defaults.items())
    return {**defaults, **values, "In": ["", own, *([f"# Parameters\n{injected}\n"] if injected else []), "from nowait import study"]}


def plan(**knobs) -> study.Plan:
    return study.Plan(["a3po/setup1"], "cpu", [1], [], False, knobs)


def test_a_plan_is_what_the_parameters_say():
    found = study.read(cells("eta = 2\nseeds = [1, 2]", eta=2, seeds=[1, 2], scratch=5))
    assert found == study.Plan(["a3po/setup1"], "cpu", [1, 2], [], True, {"eta": 2, "lr": None})


@pytest.mark.parametrize(
    ("namespace", "message"),
    [
        (cells("minibatches = 2", minibatches=2), "minibatches: is no parameter of this notebook; it has configs, scale"),
        (cells('seeds = "[1]"', seeds="[1]"), "seeds: got '[1]'; for papermill, write -y 'seeds: [1]'"),
        (cells("seeds = []", seeds=[]), "seeds: got []; write one whole number >= 0 or several, as in [1, 2]"),
        (cells("seeds = [1, -1]", seeds=[1, -1]), "seeds: got [1, -1]; write one whole number"),
        (cells("seeds = ['1']", seeds=["1"]), "seeds: got ['1']; write one whole number"),
        (cells("configs = []", configs=[]), "configs: got []; write one config or several"),
        (cells('interactive = "false"', interactive="false"), "interactive: got 'false'; for papermill, write -y 'interactive: true'"),
    ],
)
def test_what_papermill_injects_by_mistake_is_refused(namespace, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        study.read(namespace)


@pytest.mark.parametrize(
    ("knobs", "touched"),
    [
        ({"eta": 2}, ASYNCHRONOUS),
        ({"minibatches": 3}, {*ASYNCHRONOUS, "sync"} - {"reuse"}),
        ({"fresh": "theta"}, {"loglinear", "linear"}),
        ({"lr": 1e-5, "epsilon": 0.3, "steps": 7}, {*ASYNCHRONOUS, "sync"}),
        ({"lr": None}, set()),
    ],
)
def test_a_knob_reruns_only_the_methods_that_it_concerns(knobs, touched):
    changed = {m for m in study.A3PO_METHODS if digest(plan(**knobs).experiment("a3po/setup1", m)) != digest(plan().experiment("a3po/setup1", m))}
    assert changed == touched


def test_knobs_reach_the_settings_and_overrides_win_over_them():
    found = study.Plan(["a3po/setup1"], "cpu", [1], ["learner.lr=0.5"], False, {"lr": 0.1, "epsilon": 0.3, "steps": 7})
    e = found.experiment("a3po/setup1", "recompute")
    assert (e.learner.lr, e.algorithm.clip_low, e.algorithm.clip_high, e.schedule.steps) == (0.5, 0.3, 0.3, 7)
    assert study.settings(plan(eta=2, epsilon=0.5)).loc["unclipped theta / behav at d = eta", "a3po/setup1"] == "0.25 to 2.25"


# Benches


@pytest.fixture
def calls(monkeypatch, tmp_path) -> list:
    """(clock, blocks, steps, methods) of the benches that were really measured; they are made up, and run in a thread."""
    calls = []

    def step_times(experiments, clock, blocks, steps):
        calls.append((clock, blocks, steps, set(experiments)))
        return {"config": "a3po/setup1", "rows": [], "seeds": [3, 4]}

    monkeypatch.setenv("NOWAIT_RUNS", str(tmp_path))
    monkeypatch.setattr(bench, "step_times", step_times)
    monkeypatch.setattr(study, "ProcessPoolExecutor", lambda workers, **options: ThreadPoolExecutor(workers))
    return calls


def test_a_bench_is_measured_again_only_where_its_time_can_have_changed(calls):
    def again(clock="measured", **knobs) -> bool:
        before = len(calls)
        study.times(plan(**knobs), blocks=3, clock=clock)
        return len(calls) > before

    assert [again(), again(), again(lr=1e-5, epsilon=0.3, steps=7, fresh="theta"), again(eta=None)] == [True, False, False, False]
    assert [again(eta=2), again(eta=2), again(minibatches=2), again(clock="wall"), again(clock="wall")] == [True, False, True, True, False]
    assert calls[0] == ("measured", 3, bench.COUNTED_STEPS, set(bench.METHODS))


def test_a_bench_at_scale_smoke_is_short(calls):
    smoke = study.Plan(["a3po/setup1"], "smoke", [1], [], False, {})
    study.times(smoke, blocks=3)
    study.times(smoke, blocks=3, clock="wall", methods=bench.COMPARED)
    assert calls == [("measured", 1, 2, set(bench.METHODS)), ("wall", 1, 2, set(bench.COMPARED))]


def test_a_bench_remembers_what_it_measured(calls):
    (result,) = study.times(plan(eta=2), blocks=2)
    assert result["provenance"]["seeds"] == [3, 4] and result["provenance"]["code"] == [runs.code_digest()]
    assert result["provenance"]["config"]["bench/setup1/recompute"] == digest(plan(eta=2).experiment("a3po/setup1", "recompute"))


def test_the_bench_reports_medians_of_ratios_inside_a_block(monkeypatch):
    step = {"sync": [4.0, 8.0, 6.0], "sync_colocated": [3.0, 3.0, 3.0], "recompute": [3.0, 3.0, 6.0], "loglinear": [2.0, 2.0, 4.0]}

    order = []

    def block(experiment, clock, steps, seed):
        order.append((seed, clock, experiment.method))
        forward = 0.5 if experiment.method == "recompute" else 0.0
        shared = {"generate": 1.0, "train": 1.5, "forward": forward, "busiest": 1.5 + forward, "hist": [1] * (seed + 1)}
        return {"step": step[experiment.method][seed], **shared} | ({"busiest": 1.0} if clock == "measured" else {})

    monkeypatch.setattr(bench, "_block", block)
    experiments = {method: load("a3po/setup1", method=method) for method in bench.COMPARED}
    found = bench.step_times(experiments)
    assert [found[f"speedup_over_{m}"] for m in ("sync", "sync_colocated", "recompute")] == [2.0, 1.5, 1.5]
    assert (found["forward_s"], found["bound_over_recompute"]) == (0.5, 1 + 1 / 3) and found["counted_steps"] == bench.COUNTED_STEPS
    assert found["overlap_efficiency"] == 0.5 and found["mean_staleness"] == found["rows"][3]["mean_staleness"] and found["seeds"] == [0, 1, 2]
    turns = [[method for seed, _, method in order if seed == i] for i in range(3)]
    assert turns == [[*bench.COMPARED[i:], *bench.COMPARED[:i]] for i in range(3)], "each block begins with another method"
    recompute = found["rows"][2]
    assert recompute["blocks"] == step["recompute"] and (recompute["seconds_per_step"], recompute["forward_s"]) == (3.0, 0.5)
    assert recompute["staleness"] == [3, 2, 1] and recompute["mean_staleness"] == pytest.approx(4 / 6)
    with pytest.raises(ValueError, match="the bench compares sync, .*; add recompute, loglinear"):
        bench.step_times({method: experiments[method] for method in ("sync", "sync_colocated")})
    order.clear()
    wall = bench.step_times(experiments, clock="wall", blocks=1)  # elapsed 2.0, of which 1.0 is work by itself
    assert wall["overlap_efficiency"] == 0.5 and wall["rows"][2]["busiest_s"] == 2.0
    assert order[-1] == (0, "measured", "loglinear") and {clock for _, clock, _ in order[:-1]} == {"wall"}
    with pytest.raises(ValueError, match="no clock 'model'; choose measured or wall"):
        bench.step_times(experiments, clock="model")


@pytest.mark.parametrize("method", ["sync", "sync_colocated"])
def test_a_device_that_samples_and_learns_is_busy_with_both(monkeypatch, method):
    stages = {"generate": 0.5, "train": 0.75, "prox_forward": 0.25, "step": 2.0, "sync": 0.0, "reward": 0.0}

    async def stream(experiment, *args, **options):
        for _ in range(experiment.schedule.steps):
            yield SimpleNamespace(metrics={f"time/{name}": seconds for name, seconds in stages.items()} | {"stale/hist": [1]})

    monkeypatch.setattr("nowait.training.stream", stream)
    block = bench._block(load("a3po/setup1", scale="smoke", method=method), "measured", steps=2, seed=0)
    assert block["busiest"] == {"sync": 1.0, "sync_colocated": 1.5}[method] and block["hist"] == [2]


def test_the_proximal_bench_samples_as_the_training_does(monkeypatch):
    placed = {}

    class Worker:
        def __init__(self, path, **options):
            placed[type(self).__name__] = options
            raise InterruptedError

    monkeypatch.setattr("nowait.workers.sampler.HFSampler", type("Sampler", (Worker,), {}))
    chosen = ["sampler.temperature=0.7", "model.dtype=bfloat16"]
    with pytest.raises(InterruptedError):
        bench.proximal_cost(load("a3po/setup1", scale="smoke", overrides=chosen))
    assert placed["Sampler"].items() >= {"temperature": 0.7, "dtype": "bfloat16"}.items()


@pytest.mark.slow
def test_the_proximal_bench_reports_ratios_within_a_block_and_the_seed_of_each():
    found = bench.proximal_cost(load("a3po/setup1", scale="smoke"), blocks=3)
    assert found["seeds"] == [0, 0, 0] and found["scale"] == "smoke" and len(found["cpu_model"]["ratios"]) == 3
    assert found["cpu_model"]["ratio"] == sorted(found["cpu_model"]["ratios"])[1] > 1 and found["paper_tensors"]["copy_gb_per_s"] > 0


# Tables and figures


def test_staleness_is_counted_over_tokens_of_all_seeds_and_steps():
    hists = [[[2, 2], float("nan")], [[1, 0, 3]]]  # tokens with d = 0, 1, 2 per step; an evaluation alone has none

    def several(*requests):
        """One run per item, which holds the requests of each step."""
        columns = [{"stale/hist": hist, "rollout/requests": trained} for hist, trained in zip(hists, requests, strict=True)]
        return [SimpleNamespace(manifest={"name": "a3po/setup2"}, metrics=pd.DataFrame(each)) for each in columns]

    ours, others = several([[1, 2], float("nan")], [[3]]), several([[1, 2], float("nan")], [[4]])
    rows = [{"method": "sync", "staleness": [9]}]
    found = study.staleness([{"loglinear": ours, "recompute": others}], [{"config": "a3po/setup1", "rows": rows}])
    assert found.loc[("setup2", "loglinear")].to_dict() == {"mean d": 1.0, "same requests": 1.0, "d = 0": 0.375, "d = 1": 0.25, "d = 2": 0.375}
    assert found.loc[("setup2", "recompute"), "same requests"] == 0.5
    assert found.loc[("setup1", "sync"), ["mean d", "d = 0", "d = 1"]].tolist() == [0.0, 1.0, 0.0]
    assert pd.isna(found.loc[("setup1", "sync"), "same requests"])


def timed(clock: str, scale: str) -> pd.DataFrame:
    """Data of the figure of proximal seconds."""
    head = {"setup": ["setup1"], "tensors": ["cpu model"], "method": ["recompute"]}
    return pd.DataFrame({**head, "seconds": [0.1], "simulated": [1.0], "blocks": [1], "clock": clock, "scale": scale})


COMMITTED = {"seeds": [0, 1], "config": {"bench/setup1/loglinear": "abc"}, "parameters": {}}


@pytest.mark.parametrize(("change", "kept", "where"), [
    ({"knobs": {"eta": None}}, None, "figures"),
    ({}, COMMITTED, "figures"),
    ({}, COMMITTED | {"seeds": [0, 1, 2]}, "runs/figures-own"),
    ({}, COMMITTED | {"config": {"bench/setup1/loglinear": "abd"}}, "runs/figures-own"),
    ({"knobs": {"eta": 4}}, None, "runs/figures-own"),
    ({"others": {"shown": [0, 3]}}, COMMITTED | {"parameters": {"shown": [0, 3]}}, "figures"),
    ({"others": {"shown": [0, 3]}}, COMMITTED | {"parameters": {"shown": [40, 43]}}, "runs/figures-own"),
    ({"overrides": ["learner.lr=0.1"]}, None, "runs/figures-own"),
    ({"configs": ["mine.yaml"]}, None, "runs/figures-own"),
    ({"scale": "smoke"}, None, "runs/figures-own"),
    ({"scale": "gpu1"}, None, "runs/figures-own"),
])  # fmt: skip
def test_only_the_reproduction_itself_with_as_many_seeds_is_saved_under_figures(monkeypatch, tmp_path, change, kept, where):
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOWAIT_FIGURES", raising=False)
    monkeypatch.delenv("NOWAIT_RUNS", raising=False)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    frame = timed("wall", "cpu")
    origin = {"provenance": {"seeds": [0, 1], "code": ["c0de"], "config": {"bench/setup1/loglinear": "abc"}}}
    chosen = replace(plan(), **change)
    if kept:
        (tmp_path / "figures").mkdir()
        (tmp_path / "figures" / "provenance.json").write_text(json.dumps({"a3po_proximal_seconds": kept}))
    shown = study.publish(chosen, "a3po_proximal_seconds", frame, benches=[origin])
    assert Path(shown.filename) == tmp_path / where / "a3po_proximal_seconds.png" and shown.data[:4] == b"\x89PNG"
    assert provenance(Path(shown.filename)).items() > origin["provenance"].items()
    assert not list(tmp_path.rglob("figures-wandb"))


def test_provenance_of_a_figure_over_time_names_runs_and_bench(monkeypatch, tmp_path):
    monkeypatch.setenv("NOWAIT_FIGURES", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = SimpleNamespace(manifest={"seed": 7, "code": "new", "config": {"name": "a3po/setup1", "method": "loglinear"}})
    origin = {"provenance": {"seeds": [0], "code": ["old"], "config": {"bench/setup1/loglinear": "abc"}}}
    frame = pd.DataFrame({"setup": ["setup1"], "method": ["sync"], "scale": ["cpu"], "reward": [0.5], "se": [0.1], "seeds": [1], "prompts": [2]})
    text = study.publish(plan(), "a3po_final_eval_reward", frame, [{"loglinear": [run]}], [origin])
    record = provenance(tmp_path / "a3po_final_eval_reward.md")
    assert record["seeds"] == [7] and record["code"] == ["new", "old"] and set(record["config"]) == {"setup1/loglinear", "bench/setup1/loglinear"}
    assert text._repr_markdown_() == tables.markdown(frame, "final_eval_reward")


@pytest.mark.parametrize(("change", "where"), [
    ({}, "figures"),
    ({"scale": "smoke"}, "runs/figures-own"),
    ({"knobs": {"eta": 4}}, "runs/figures-own"),
    ({"overrides": ["lengths.median=99"]}, "runs/figures-own"),
])  # fmt: skip
def test_a_simulated_figure_is_saved_like_a_measured_one_and_names_what_was_assumed(monkeypatch, tmp_path, change, where):
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("FIGURES", "RUNS"):
        monkeypatch.delenv(f"NOWAIT_{name}", raising=False)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    frame = timed("model", "paper")
    plain = study.Plan(["a3po/setup1", "oppo/gsm8k_7b"], "cpu", [1], [], False, {})
    chosen = replace(plain, **change)
    shown = study.publish(chosen, "a3po_proximal_seconds", frame)
    record = provenance(Path(shown.filename))
    assert Path(shown.filename) == tmp_path / where / "a3po_proximal_seconds.png"
    assert record["seeds"] == [] and record["code"] != [runs.code_digest()]
    assert set(record["config"]) == {"simulated/setup1/loglinear", "simulated/gsm8k_7b/both"}
    told = {"knobs", "overrides"} & set(change)
    assert all((record["config"][name] != digest) == bool(told) for name, digest in study.simulated(plain)["config"].items())
    assert study.simulated(replace(chosen, seeds=[2]))["config"].items().isdisjoint(record["config"].items())


def test_verdicts_are_those_of_the_report_and_none_at_scale_smoke():
    frame = pd.DataFrame({"setup": "setup1", "scale": "cpu", "method": ["loglinear"], "difference": [0.02], "difference_se": [0.001]})
    frame = frame.assign(learned="yes", rise=0.2, rise_se=0.01)
    margin, rise = study.verdicts({"a3po_final_eval_reward": frame}).data.split("\n")
    assert margin.startswith("- **fail**, setup1: final eval reward within 0.01 of recompute") and rise.startswith("- **pass**, setup1: ours")
    smoke = study.verdicts({"a3po_final_eval_reward": frame.assign(scale="smoke")})
    assert smoke.data.startswith("- **not judged**") and "numbers mean nothing" in smoke.data


def test_a_run_too_short_to_be_judged_says_why_and_figures_that_are_not_there_say_nothing():
    rows = [("setup1", "cpu", method, 1, step, 0.1) for method in ("sync", "recompute") for step in (1, 2)]
    clipped = pd.DataFrame(rows, columns=["setup", "scale", "method", "seed", "step", "train/clip_frac"])
    text = study.verdicts({"a3po_clipped_tokens": clipped}).data
    assert text.startswith("- **not run**, setup1: clipped tokens") and text.endswith("of the run.") and "\n" not in text, text
