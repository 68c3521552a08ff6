"""The command line: what each command hands on, prints and returns; the exact command that repeats a run; reproduction that continues."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import nbformat
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nowait import bench, config, doctor, runs
from nowait import reproduce as reproduction
from nowait.cli import main
from nowait.config import digest, load
from nowait.runs import RunFailed, RunResult

METRICS = [{"step": 0, "eval/reward": 0.25, "eval/se": 0.125}, {"step": 1, "rollout/reward_mean": 0.5}]
METRICS += [{"step": 2, "rollout/reward_mean": 0.5, "eval/reward": 0.75, "eval/se": 0.0625}]


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Runs and figures of this test alone."""
    monkeypatch.setenv("NOWAIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("NOWAIT_FIGURES", str(tmp_path / "figures"))


def record(experiment, seed: int = 1, status: str = "finished", metrics=METRICS, **facts) -> RunResult:
    """A run folder as a training of `experiment` would leave it."""
    folder = runs.folder(experiment, seed)
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"status": status, "started": 1.8e9 + seed, "ended": 1.8e9 + seed + 60} | facts
    (folder / "manifest.json").write_text(json.dumps(runs._manifest(experiment, seed, started=0.0) | facts))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return RunResult(folder)


@pytest.fixture
def trained(monkeypatch) -> list:
    """Arguments of the trainings that were asked for; none takes place."""
    calls: list = []

    def run(experiment, seed, out, *, use_wandb, progress):
        calls.append((experiment, seed, out, use_wandb))
        return record(experiment, seed)

    monkeypatch.setattr(runs, "run", run)
    return calls


def failing(error: BaseException):
    def run(*args, **kwargs):
        raise error

    return run


# Starting and failing


def test_help_needs_none_of_the_heavy_packages():
    code = (
        "import sys; from nowait.cli import main; main(['--help']); print(sorted({'torch', 'pandas', 'matplotlib', 'papermill'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in "reproduce train sample runs bench assets report figures doctor".split())


def test_module_and_command_are_the_same():
    out = subprocess.run([sys.executable, "-m", "nowait", "train", "nowhere"], capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (1, "") and out.stderr.startswith("nowait: nowhere: path: no such file")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "a3po/setup1", "--set", "learner.lrr=1"], "learner.lrr: unknown key"),
        (["train", "a3po/setup1", "--method", "ppo"], "unknown method 'ppo'"),
        (["train", "a3po/setup1", "--method", "loglin"], "did you mean loglinear? choose one of sync, "),
        (["train", "a3po/setup1", "--variant", "trl"], "variants: 'trl' is not one of this file's variants; choose from: areal"),
        (["runs", "show", "x"], "there are none"),
        (["bench", "schedule"], "no bench 'schedule'; choose one of async, overlap, sampler, proximal"),
        (["bench", "sampler", "--clock", "wall"], "bench sampler takes no clock"),
        (["figures"], "no figure data in"),
        (["reproduce", "--paper", "b3po"], "no notebooks"),
    ],
)
def test_a_user_error_is_one_message_and_status_1(argv, message, capsys):
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("nowait: ") and message in err and "Traceback" not in err


def test_debug_keeps_the_traceback_wherever_it_stands():
    for argv in (["--debug", "train", "nowhere"], ["train", "nowhere", "--debug"]):
        with pytest.raises(config.ConfigError):
            main(argv)


def test_a_command_that_does_not_exist_is_a_usage_error(capsys):
    assert main(["trian"]) == 2 and "trian" in capsys.readouterr().err


def test_a_failed_run_says_why_and_an_interrupted_one_how_to_go_on(monkeypatch, capsys):
    monkeypatch.setattr(runs, "run", failing(RunFailed("stopped after step 3: disk full\nrun it again")))
    assert main(["train", "a3po/setup1"]) == 1
    assert "nowait: stopped after step 3: disk full\nrun it again" in capsys.readouterr().err
    monkeypatch.setattr(runs, "run", failing(KeyboardInterrupt()))
    assert main(["train", "a3po/setup1"]) == 130
    assert "interrupted; what was recorded stays" in capsys.readouterr().err


# Runs


def test_train_hands_on_every_option(trained, tmp_path, capsys):
    argv = ["--scale", "smoke", "--method", "recompute", "--seed", "7", "--set", "learner.lr=1e-5", "--set", "schedule.steps=3"]
    assert main(["train", "a3po/setup2", *argv, "--no-wandb", "--out", str(tmp_path / "here")]) == 0
    expected = load("a3po/setup2", "smoke", ["learner.lr=1e-5", "schedule.steps=3"], "recompute")
    assert trained == [(expected, 7, tmp_path / "here", False)]
    assert "finished, 2/3 steps, 60 s" in capsys.readouterr().out


def test_train_uses_the_default_scale_folder_and_wandb(trained):
    assert main(["train", "a3po/setup1"]) == 0
    assert trained == [(load("a3po/setup1"), 1, None, True)]


def test_a_variant_is_trained_and_its_shown_command_repeats_it(trained, capsys):
    assert main(["train", "a3po/setup1", "--scale", "paper", "--variant", "areal"]) == 0
    expected = load("a3po/setup1", "paper", variant="areal")
    assert trained[0][0] == expected != load("a3po/setup1", "paper")
    command = shlex.split(shown_command(RunResult(runs.folder(expected, 1)), capsys))
    assert main(command[1:]) == 0 and trained[1][0] == expected


def shown_command(result: RunResult, capsys) -> str:
    capsys.readouterr()
    assert main(["runs", "show", str(result.path)]) == 0
    return re.search(r"^repeat +(.*)$", capsys.readouterr().out, re.MULTILINE).group(1)


OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "learner.lr": st.floats(1e-9, 1.0),
        "learner.betas": st.tuples(st.floats(0, 0.9), st.floats(0, 0.9)).map(list),
        "algorithm.behav_weight_cap": st.none() | st.floats(0.5, 9),
        "algorithm.advantage_std": st.booleans(),
        "task.options": st.fixed_dictionaries({"operand_cap": st.integers(5, 20)}, optional={"operand_mean": st.floats(3, 4.5)}),
        "evaluation.benchmarks": st.just({}) | st.just({"long, er": {"name": "arithmetic", "options": {"operand_cap": 20}}}),
        "title": st.text(st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"]), max_size=8),
    },
)


A3PO_METHODS = tuple(name for name, settings_ in config.METHODS.items() if settings_["schedule.kind"] != "overlapped")
CHOICES = ("a3po/setup1", "a3po/setup2"), ("cpu", "smoke"), A3PO_METHODS, range(100)


@given(OVERRIDES, *map(st.sampled_from, CHOICES))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], phases=[Phase.generate])
def test_the_shown_command_repeats_the_run_exactly(trained, capsys, overrides, stem, scale, method, seed):
    experiment = load(stem, scale, [f"{key}={json.dumps(value)}" for key, value in overrides.items()], method)
    command = shlex.split(shown_command(record(experiment, seed), capsys))
    trained.clear()
    assert command[:2] == ["nowait", "train"] and main(command[1:]) == 0
    (repeated, repeated_seed, *_), *_ = trained
    assert (digest(repeated), repeated_seed) == (digest(experiment), seed)


def test_the_shown_command_names_only_what_differs_from_the_file(capsys):
    assert shown_command(record(load("a3po/setup1", method="sync"), 4), capsys) == "nowait train a3po/setup1 --scale cpu --method sync --seed 4"
    changed = load("a3po/setup1", "smoke", ["learner.lr=2e-5", "task.options={operand_cap: 9}"])
    words = ["--set", "learner.lr=2e-05", "--set", 'task.options={"operand_cap": 9}']
    assert shlex.split(shown_command(record(changed), capsys))[-4:] == words


def test_a_run_of_ones_own_file_is_repeated_through_its_settings(tmp_path, capsys):
    (tmp_path / "own.yaml").write_text("name: own/config\nlearner: {lr: 0.25}")
    experiment = load(tmp_path / "own.yaml")
    result = record(experiment, 5)
    assert shown_command(result, capsys) == f"nowait runs show {result.path} --yaml > settings.yaml && nowait train settings.yaml --seed 5"
    assert main(["runs", "show", str(result.path), "--yaml"]) == 0
    (tmp_path / "settings.yaml").write_text(capsys.readouterr().out)
    assert digest(load(tmp_path / "settings.yaml")) == digest(experiment)


def test_show_warns_when_the_code_has_changed_since(capsys):
    main(["runs", "show", str(record(load("a3po/setup1")).path)])
    assert "other numbers" not in capsys.readouterr().out
    main(["runs", "show", str(record(load("a3po/setup1"), code="0123456789ab").path)])
    assert "digest 0123456789ab (here: " in capsys.readouterr().out


def test_a_run_is_found_by_folder_path_name_or_hash_and_never_guessed(capsys):
    a, b = record(load("a3po/setup1")), record(load("a3po/setup1", method="sync"))
    for text in (str(a.path), "a3po/setup1/cpu/log", "loglinear-seed1", a.manifest["hash"][:8]):
        assert main(["runs", "show", text]) == 0
        assert str(a.path) in capsys.readouterr().out
    assert main(["runs", "show", "a3po/setup1"]) == 1
    err = capsys.readouterr().err
    assert "2 runs begin with 'a3po/setup1'" in err and a.path.name in err and b.path.name in err
    assert main(["runs", "show", "recompute"]) == 1
    assert "no run 'recompute'; near it:\n" in (err := capsys.readouterr().err) and "see `nowait runs list`" in err
    changed = record(load("a3po/setup1", overrides=["learner.lr=3e-5"]))
    for text, found in (("loglinear-seed1", a), (changed.path.name, changed)):  # the one with unchanged settings, unless another is meant
        assert main(["runs", "show", text]) == 0
        assert str(found.path) in capsys.readouterr().out


def test_training_a_finished_run_says_that_nothing_was_trained(monkeypatch, capsys):
    for ended, said in ((0.0, True), (4e9, False)):
        monkeypatch.setattr(runs, "run", lambda experiment, seed, *_, ended=ended, **options: record(experiment, seed, ended=ended))
        assert main(["train", "a3po/setup1"]) == 0
        assert ("found finished: nothing was trained" in capsys.readouterr().err) == said


def test_list_shows_steps_and_the_last_held_out_reward_oldest_first(capsys):
    record(load("a3po/setup1", overrides=["schedule.steps=9"]), 2, status="failed")
    record(load("a3po/setup1", overrides=["schedule.steps=2"]), 1)
    record(load("a3po/setup1", method="sync"), 3, status="running", metrics=[])
    assert main(["runs", "list"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    cells = [re.split(r"  +", row) for row in rows]
    assert [row[1:4] for row in cells] == [["finished", "2/2", "0.750 ± 0.062"], ["failed", "2/9", "0.750 ± 0.062"], ["killed", "0/100", "-"]]
    assert [re.search(r"seed\d", row[0]).group() for row in cells] == ["seed1", "seed2", "seed3"]


def test_diff_lists_what_differs_and_nothing_else(capsys):
    a = record(load("a3po/setup1"))
    b = record(load("a3po/setup1", overrides=["learner.lr=2e-4"]), 2, metrics=METRICS[:2])
    assert main(["runs", "diff", str(a.path), str(b.path)]) == 0
    rows = [re.split(r"  +", row) for row in capsys.readouterr().out.splitlines()[1:]]
    different = [["learner.lr", "0.0001", "0.0002"], ["seed", "1", "2"], ["steps", "2/100", "1/100"]]
    assert rows == [*different, ["held-out reward", "0.750 ± 0.062", "0.250 ± 0.125"]]
    main(["runs", "diff", str(a.path), str(a.path)])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_diff_shows_packages_that_only_one_of_the_runs_had(capsys):
    a, b = record(load("a3po/setup1"), 1), record(load("a3po/setup1"), 2, versions={"python": "3.9", "vllm": "0.32"})
    here = a.manifest["versions"]
    assert main(["runs", "diff", str(a.path), str(b.path)]) == 0
    rows = [re.split(r"  +", row) for row in capsys.readouterr().out.splitlines()[1:]]
    gone = [[name, version, "-"] for name, version in here.items() if name not in ("python", "vllm")]
    assert rows == [["seed", "1", "2"], ["python", here["python"], "3.9"], *gone, ["vllm", here.get("vllm", "-"), "0.32"]]


@pytest.mark.parametrize(("every", "first"), [(0, []), (1, METRICS[:1])])
def test_the_bar_of_a_sweep_counts_training_steps_with_or_without_an_evaluation_before_them(monkeypatch, every, first):
    x = load("a3po/setup1", overrides=[f"schedule.eval_every={every}", "schedule.steps=2"])
    assert runs._steps_recorded(x, 1) == 0
    for done in (0, 1, 2):
        record(x, metrics=[*first, *METRICS[1 : 1 + done]])
        assert runs._steps_recorded(x, 1) == done


# A trained policy


@pytest.fixture
def policy(folders) -> RunResult:
    """A run whose policy is the shipped one."""
    result = record(load("a3po/setup1"))
    (result.path / "policy").symlink_to(Path(reproduction.__file__).parent / "data" / "policy_small")
    return result


def test_sample_prints_responses_that_repeat_by_seed(policy, capsys):
    def sample(*options) -> list[str]:
        assert main(["sample", str(policy.path), "--prompt", "3+4+5=", *options]) == 0
        return capsys.readouterr().out.splitlines()

    first = sample("--samples", "32")
    assert len(first) == 32 and sum(line.endswith("#12") for line in first) > 16
    assert sample("--samples", "32") == first != sample("--samples", "32", "--seed", "1")


def test_the_policy_of_a_run_is_an_ordinary_model_with_its_tokenizer(policy):
    model, tokenizer = policy.policy()
    ids = tokenizer("3+4+5=", return_tensors="pt", add_special_tokens=False)["input_ids"]
    answer = model.generate(ids, do_sample=False, max_new_tokens=32)[0, ids.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).endswith("#12")


def test_sample_marks_responses_without_an_end(capsys, folders):
    result = record(load("a3po/setup1", overrides=["sampler.max_new_tokens=2"]))
    (result.path / "policy").symlink_to(Path(reproduction.__file__).parent / "data" / "policy_small")
    assert main(["sample", str(result.path), "--prompt", "3+4+5=", "--samples", "1"]) == 0
    assert re.fullmatch(r"\S\S  \[cut at 2 tokens\]\n", capsys.readouterr().out)


@pytest.mark.parametrize(("task", "prompt"), [("arithmetic", "3+4+5="), ("test_cli:Messages", "3+4+5")])
def test_sample_prompts_as_training_does_raw_or_by_the_chat_template(folders, capsys, task, prompt):
    """The template makes `3+4+5=` of the message `3+4+5`, and `3+4+5==` of what the task would have given as text."""
    result = record(load("a3po/setup1", overrides=[f"task={{name: {task}, options: {{}}}}"]))
    copytree(Path(reproduction.__file__).parent / "data" / "policy_small", result.path / "policy")
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    (result.path / "policy" / "chat_template.jinja").write_text(template)
    assert main(["sample", str(result.path), "--prompt", prompt, "--samples", "32"]) == 0
    assert sum(line.startswith("7;12;") or line.endswith("#12") for line in capsys.readouterr().out.splitlines()) > 16


class Messages:
    """A task whose prompts are messages."""

    def prompt(self, split: str, row: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "1+2"}]


@pytest.mark.parametrize(("prompt", "message"), [("3 plus 4=", "--prompt has '  l p s u'"), ("", "--prompt is empty")])
def test_sample_shows_a_prompt_that_the_policy_can_read(policy, capsys, prompt, message):
    assert main(["sample", str(policy.path), "--prompt", prompt]) == 1
    err = capsys.readouterr().err
    assert message in err and re.search(r"a prompt of this run's task: \d(\+\d)+=$", err)


def test_sample_of_an_unfinished_run_says_how_to_finish_it(capsys):
    result = record(load("a3po/setup1"), status="failed")
    assert main(["sample", str(result.path), "--prompt", "1+2="]) == 1
    assert "nowait train a3po/setup1 --scale cpu --method loglinear --seed 1" in capsys.readouterr().err


# Benches, assets, figures, doctor


def test_a_bench_prints_one_json_object_on_stdout_whatever_it_says_itself(monkeypatch, capsys):
    def asynchronous(config="default", scale="cpu", clock="measured", blocks=3):
        print("progress")
        return {"config": config, "scale": scale, "clock": clock, "blocks": blocks}

    monkeypatch.setattr(bench, "asynchronous", asynchronous)
    assert main(["bench", "async", "--clock", "wall", "--blocks", "2", "--scale", "smoke"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"config": "default", "scale": "smoke", "clock": "wall", "blocks": 2} and "progress" in err
    for argv in (["a3po/setup2"], ["--config", "a3po/setup2"]):
        assert main(["bench", "async", *argv]) == 0
        assert json.loads(capsys.readouterr().out)["config"] == "a3po/setup2"


def test_assets_are_listed_and_verified_by_name(capsys):
    assert main(["assets", "verify"]) == 0
    assert "policy_small: ok" in capsys.readouterr().out
    assert main(["assets", "list"]) == 0
    assert re.search(r"^policy_small +149,312 ", capsys.readouterr().out, re.MULTILINE)
    assert main(["assets", "build", "policy_huge"]) == 1
    assert "no recipe for asset 'policy_huge'" in capsys.readouterr().err


def test_report_is_written_beside_the_figures(tmp_path, capsys):
    assert main(["report"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "figures" / "report.md")
    assert "not run" in (tmp_path / "figures" / "report.md").read_text()


def test_doctor_names_a_missing_package_and_the_way_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["numpy>=1", "no-such-package", "ray; extra == 'ray'"])
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"^packages +MISSING +numpy \S+, no no-such-package$", out, re.MULTILINE)
    assert "packages: install no-such-package: pip install -e '.[dev]' -c constraints.txt" in err


def test_doctor_shows_every_extra_and_that_none_of_them_has_to_be_there(monkeypatch):
    needs = ["numpy>=1", "typer; extra == 'one'", "typer>=0; extra == 'two'", 'none-such<3,>=2; extra == "two"', "none.such; extra == 'two'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: needs)
    found = {check.name: check for check in doctor.checks() if check.name.startswith("extra")}
    assert {name: check.text for name, check in found.items()} == {
        "extra one": "installed",
        "extra two": "optional; no none-such, none.such: pip install 'nowait-rl[two]'",
    }
    assert not any(check.remedy for check in found.values())


def test_doctor_is_content_when_nothing_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "checks", lambda: iter([doctor.Check("python", "3.11")]))
    assert main(["doctor"]) == 0 and capsys.readouterr() == ("python  ok  3.11\n", "")


# Reproduction

SOURCE = """import os, pathlib
folder = pathlib.Path(os.environ["NOWAIT_FIGURES"])
folder.mkdir(exist_ok=True)
(folder / "one.csv").write_text(f"{scale},{seeds}")"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project with one notebook; trainings are noted in the list `swept` of the module, and none takes place."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "notebooks" / "a3po").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setenv("NOWAIT_FIGURES", "")
    monkeypatch.setattr(runs, "sweep", lambda *args, **options: None)
    write_notebook(tmp_path, SOURCE)
    return tmp_path


def write_notebook(project: Path, source: str) -> None:
    cells = [nbformat.v4.new_code_cell('scale = "cpu"\nseeds = [7]', metadata={"tags": ["parameters"]}), nbformat.v4.new_code_cell(source)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), project / "notebooks" / "a3po" / "one.ipynb")


@pytest.fixture
def executed(monkeypatch) -> list[dict]:
    """Parameters of the notebooks that were executed; instead of a kernel, a function writes what the notebook would."""
    calls: list[dict] = []

    def papermill(notebook, output, parameters):
        calls.append(parameters)
        output.write_text("executed")
        reproduction.figures_dir().mkdir(exist_ok=True)
        (reproduction.figures_dir() / "one.csv").write_text(str(parameters))

    monkeypatch.setattr(reproduction, "_papermill", papermill)
    return calls


def test_every_method_of_both_setups_is_trained_before_the_notebooks(project, executed, monkeypatch):
    swept = []
    monkeypatch.setattr(runs, "sweep", lambda experiments, seeds, use_wandb: swept.append((experiments, seeds, use_wandb, len(executed))))
    assert main(["reproduce", "--scale", "smoke", "--seeds", "3", "--no-wandb"]) == 0
    ((experiments, *rest),) = swept
    assert rest == [[1, 2, 3], False, 0] and executed == [{"scale": "smoke", "seeds": [1, 2, 3], "blocks": 3, "interactive": False}]
    methods = {"sync", "recompute", "loglinear", "behave", "linear", "reuse"}
    assert {(x.name, x.method, x.scale) for x in experiments} == {(f"a3po/setup{i}", m, "smoke") for i in (1, 2) for m in methods}


def test_what_is_up_to_date_is_not_executed_again(project, executed):
    def executions(seeds: int = 1) -> int:
        before = len(executed)
        reproduction.reproduce("a3po", seeds=seeds)
        return len(executed) - before

    assert [executions(), executions()] == [1, 0]
    assert [executions(seeds=2), executions(seeds=2)] == [1, 0], "other seeds"
    write_notebook(project, SOURCE + "\n")
    assert [executions(seeds=2), executions(seeds=2)] == [1, 0], "another source"
    (project / "figures" / "one.csv").write_text("restored from git")
    assert [executions(seeds=2), executions(seeds=2)] == [1, 0], "other data under figures/"
    (project / "runs" / "notebooks" / "cpu" / "a3po" / "one.ipynb").unlink()
    assert [executions(seeds=2), executions(seeds=2)] == [1, 0], "no executed notebook"


@pytest.mark.usefixtures("executed")
def test_smoke_writes_nothing_under_figures_and_leaves_the_next_call_alone(project):
    assert reproduction.reproduce("a3po", "smoke")[-1] == project / "runs" / "figures-smoke" / "report.md"
    assert not (project / "figures").exists()
    assert reproduction.reproduce("a3po", "cpu")[-1] == project / "figures" / "report.md"
    assert (project / "figures" / "one.csv").exists()


def test_a_notebook_gets_the_parameters_it_declares_and_no_others(project):
    output = reproduction.reproduce("a3po", "smoke", 2)[0]
    assert (project / "runs" / "figures-smoke" / "one.csv").read_text() == "smoke,[1, 2]"
    assert nbformat.read(output, 4).metadata.papermill.parameters == {"scale": "smoke", "seeds": [1, 2]}


def test_a_notebook_that_fails_is_named_with_its_cell_and_is_executed_again(project):
    write_notebook(project, "1 / 0")
    message = r"notebook \S+a3po/one.ipynb, In \[3\]: ZeroDivisionError: division by zero\nEverything up to there is in"
    for _ in range(2):
        with pytest.raises(RunFailed, match=message):
            reproduction.reproduce("a3po", "smoke")


def test_an_unknown_paper_lists_the_folders_of_notebooks(project):
    with pytest.raises(ValueError, match="no notebooks for paper 'b3po'; choose all or one of a3po"):
        reproduction.reproduce("b3po")
