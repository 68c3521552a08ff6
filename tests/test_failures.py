"""What a user's mistake, a full disk, a signal or a damaged file ends in: one message that says where and what to do, and nothing lost."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import papermill
import pytest
from tiny import EvenDigits, experiment
from transformers import PreTrainedTokenizerBase

from nowait import checkpoint, config, doctor, runs
from nowait import reproduce as reproduction
from nowait.cli import main
from nowait.config import ConfigError
from nowait.config_rules import check_rows
from nowait.runs import RunFailed, RunResult
from nowait.tasks.prompts import evaluation_requests

INTERRUPTED = ("schedule.steps=3", "schedule.checkpoint_every=1", "schedule.eval_every=2")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("NOWAIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def run(x, folder) -> RunResult:
    return runs.run(x, 0, folder, use_wandb=False)


@pytest.fixture
def stopped(tiny, tmp_path, monkeypatch):
    """An experiment and the folder of its run, which has failed after the last step, with checkpoints of steps 1 and 2."""
    x, folder = experiment(tiny, "sync", *INTERRUPTED), tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(PreTrainedTokenizerBase, "save_pretrained", fail(RuntimeError("stopped here")))
        with pytest.raises(RunFailed, match="stopped after step 3: RuntimeError: stopped here .*\n3 of 3 .* it continues after step 2"):
            run(x, folder)
    return x, folder


def fail(error: BaseException):
    def raises(*args, **kwargs):
        raise error

    return raises


# Settings


@pytest.mark.parametrize(("content", "message"), [(b"\xff\xfe\x00n", "cannot be read: 'utf-8' codec"), (b"", "holds nothing, not settings")])
def test_a_file_that_is_no_yaml_is_named(tmp_path, content, message):
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=f"{tmp_path}/x.yaml: .*{message}"):
        config.load(tmp_path / "x.yaml")


@pytest.mark.parametrize("key", ["name", "scale"])
@pytest.mark.parametrize("text", ["", ".", "../x", "/x", "a//b", "a/", "a\0b", "a\nb", "a" * 101])
def test_a_run_cannot_leave_the_folder_of_runs(tmp_path, key, text):
    (tmp_path / "x.yaml").write_text(json.dumps({"name": "x"} | {key: text}))
    with pytest.raises(ConfigError, match=f"{key}: .* cannot name a folder under runs/"):
        config.load(tmp_path / "x.yaml")


def test_names_with_spaces_dots_and_letters_of_any_language_are_folders(tmp_path):
    (tmp_path / "x.yaml").write_text('name: "größe 1.5/~a"')
    assert runs.folder(config.load(tmp_path / "x.yaml"), 1).parent == tmp_path / "runs" / "größe 1.5" / "~a" / "own"


def test_an_empty_scale_is_not_the_default():
    with pytest.raises(ConfigError, match="'' is not one of this file's scales; choose from: paper, cpu, gpu1, smoke"):
        config.load("a3po/setup1", scale="")


def test_the_device_of_the_rules_is_not_free(tiny):
    with pytest.raises(ConfigError, match="runtime.placement: driver is where rules are graded"):
        experiment(tiny, "loglinear", "runtime.placement={driver: [sampler], b: [learner]}")


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "1", True])
def test_a_seed_that_is_none_is_refused_before_anything_is_written(tiny, tmp_path, seed):
    with pytest.raises(ValueError, match=f"seed {seed!r}: choose a whole number"):
        runs.run(experiment(tiny), seed, tmp_path / "run", use_wandb=False)
    assert not (tmp_path / "run").exists()


def test_the_folder_of_runs_may_begin_with_a_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NOWAIT_RUNS", "~/mine")
    assert runs.root() == tmp_path / "mine"


def test_doctor_says_that_the_folder_of_runs_is_a_file(tmp_path):
    (tmp_path / "runs").touch()
    assert doctor._folder().remedy == f"{tmp_path}/runs is not a folder: set NOWAIT_RUNS to one"


# Data


class Hollow(EvenDigits):
    """Row 3 has an empty prompt, or a reward that is no number."""

    def __init__(self, question: str = "", reward: str = "0") -> None:
        super().__init__()
        self.question, self.given = question, float(reward)

    def prompt(self, split: str, row: int) -> str:
        return self.question if row == 3 else super().prompt(split, row)

    def reward(self, split: str, row: int, response: str) -> float:
        return self.given if row == 3 else super().reward(split, row, response)


EVERY_ROW = ("schedule.batch_size=8", "sampler.slots=32", "schedule.steps=5")


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_reward_that_is_no_number_ends_in_one_message_with_step_task_and_row(tiny, tmp_path, value):
    task = f'task={{name: "test_failures:Hollow", options: {{question: "3=", reward: "{value}"}}}}'
    message = rf"run tiny .sync. stopped after step [0-4]: FloatingPointError: the reward function of Hollow returned {value} on train row 3: return"
    with pytest.raises(RunFailed, match=message) as failure:
        run(experiment(tiny, "sync", task, *EVERY_ROW), tmp_path / "run")
    recorded = RunResult(tmp_path / "run").metrics
    assert f"{len(recorded)} of 5 steps are recorded" in str(failure.value)


def test_an_empty_prompt_ends_in_one_message_with_its_row(tiny, tmp_path):
    with pytest.raises(RunFailed, match="stopped after step [0-4]: ValueError: train row 3: the prompt is empty: fill it in, or leave the row out"):
        run(experiment(tiny, "sync", "task={name: 'test_failures:Hollow'}", *EVERY_ROW), tmp_path / "run")
    with pytest.raises(ValueError, match="eval row 3: the prompt is empty"):
        evaluation_requests(Hollow(), lambda text: list(text.encode()), 6, 2, 8, 8)


OVERLAPPED = ("schedule.max_staleness=0", "algorithm.anchor=behave", "runtime.placement={a: [sampler, learner]}", "sampler.slots=400")


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("sync", ["schedule.batch_size=41"], r"schedule.batch_size is 41"),
        ("sequential", [*OVERLAPPED, "schedule.batch_size=41", "overlap.delta_max=8"], r"schedule.batch_size is 41"),
        ("both", [*OVERLAPPED, "schedule.batch_size=36", "overlap.delta_max=5"], r"schedule.batch_size \+ overlap.delta_max is 41"),
    ],
)
def test_more_requests_in_flight_than_rows_are_refused_before_a_model_is_loaded(tiny, method, changes, message):
    x = experiment(tiny, method, *changes, "sampler.slots=400", "model.path=nowhere")
    with pytest.raises(ValueError, match=f"^{message}, but the task has 40 training rows, .*: lower it, or take more rows$"):
        next(runs.steps(x, 0))
    check_rows(x, 41)


# Clipping that is off


@pytest.mark.parametrize(
    ("method", "changes", "warned"),
    [
        ("recompute", ["learner.minibatches=1"], True),  # one step from the anchor
        ("recompute", [], False),  # the second minibatch is off it
        ("recompute", ["learner.minibatches=1", "learner.lr=0.0"], False),  # meant, as in the next one
        ("reuse", [], False),
    ],
)
def test_a_ratio_that_is_always_1_is_warned_of_once(tiny, tmp_path, monkeypatch, method, changes, warned):
    monkeypatch.setattr(runs, "INERT_STEPS", 3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(experiment(tiny, method, "schedule.eval_every=4", *changes), tmp_path / "run")
    found = [str(w.message) for w in seen if "every ratio was 1" in str(w.message)]
    assert found == [f"{tmp_path}/run: for 3 steps every ratio was 1, so nothing can be clipped; see docs/faq.md"] * warned


# Code of the user's own


def test_modules_in_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "module_beside.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert importlib.util.find_spec("module_beside") is None
    assert main(["runs", "list"]) == 0
    assert importlib.util.find_spec("module_beside").origin == str(tmp_path / "module_beside.py")


@pytest.mark.parametrize("name", ["no_such.module:f", "sys:exit", "__main__:f", "broken_package.a:f"])
def test_a_task_that_cannot_be_imported_fails_the_run_and_not_the_search_for_it(tiny, tmp_path, monkeypatch, name):
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    x = experiment(tiny, "sync", f'task.name="{name}"')
    assert runs.find(x, 0) is None
    with pytest.raises(RunFailed, match="run tiny .sync. stopped after step 0"):
        run(x, tmp_path / "run")


@pytest.mark.parametrize(("line", "cause"), [("raise KeyError('question')", "KeyError: 'question'"), ("sys.exit(0)", "SystemExit: 0")])
def test_an_error_in_a_users_code_is_a_failure_that_names_its_line(tiny, tmp_path, monkeypatch, line, cause):
    module = f"import sys\nfrom tiny import EvenDigits\nclass Mine(EvenDigits):\n    def prompt(self, split, row):\n        {line}\n"
    (tmp_path / f"users_{cause[:3]}.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RunFailed, match=re.escape(f"{cause} ({tmp_path}/users_{cause[:3]}.py, line 5)")):
        run(experiment(tiny, "sync", f'task.name="users_{cause[:3]}:Mine"'), tmp_path / "run")
    assert RunResult(tmp_path / "run").status == "failed"


# Disks


@pytest.mark.parametrize("name", ["evaluations.jsonl", "timeline.jsonl"])
def test_a_full_disk_is_named_with_the_file_and_the_next_call_continues(tiny, tmp_path, monkeypatch, name):
    full = fail(OSError(errno.ENOSPC, "No space left on device"))
    x, folder = experiment(tiny, "sync", *INTERRUPTED), tmp_path / "run"
    with monkeypatch.context() as disk:
        disk.setattr(*((runs, "append_line") if name == "evaluations.jsonl" else (runs.Timeline, "append_to")), full)
        with pytest.raises(RunFailed, match=f"cannot write {name}: .*No space left on device. To go on, free disk space"):
            run(x, folder)
    assert run(x, folder).finished


def test_a_disk_that_is_full_for_the_weights_says_where_to_make_room(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        PreTrainedTokenizerBase, "save_pretrained", fail(Exception("Error while serializing: I/O error: No space left on device (os error 28)"))
    )
    with pytest.raises(RunFailed, match=f"Before that, free space under {tmp_path}/run and /"):
        run(experiment(tiny, "sync", "schedule.steps=1"), tmp_path / "run")


def test_a_finished_run_is_found_where_nothing_can_be_written(stopped, monkeypatch):
    x, folder = stopped
    run(x, folder)
    monkeypatch.setattr(runs, "_claimed", fail(PermissionError("read-only")))
    assert run(x, folder).finished


# Damaged files


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_a_run_is_not_resumed_over_a_hole_in_its_records(stopped, name):
    x, folder = stopped
    whole = (folder / name).read_text()
    kept = [line for line in whole.splitlines(keepends=True) if json.loads(line)["step"] < 2]
    (folder / name).write_text("".join(kept))
    with pytest.raises(RunFailed, match=f"{name} lacks step 2, which the checkpoint of step 2 is past. .* delete {folder}/checkpoint"):
        run(x, folder)
    (folder / name).write_text(whole)
    assert run(x, folder).metrics["step"].tolist() == [0, 1, 2, 3]


def test_checkpoints_that_cannot_be_read_are_named_with_run_and_step(stopped):
    x, folder = stopped
    for file in folder.glob("checkpoint/*.npz"):
        file.write_text("{")
    with pytest.raises(RunFailed, match="run tiny .sync. stopped after step 3: .*step-000002.npz cannot be read .*delete them all to start"):
        run(x, folder)


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"hash'])
def test_a_damaged_manifest_is_named_leaves_other_runs_alone_and_may_be_deleted(stopped, tmp_path, capsys, damage):
    x, folder = stopped
    for name in ("runs/a", "runs/b"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text((folder / "manifest.json").read_text())
    (tmp_path / "runs/a/manifest.json").write_text(damage)
    with pytest.warns(UserWarning, match="runs/a/manifest.json is damaged"):
        assert [found.path.name for found in runs.listing()] == ["b"]
    (folder / "manifest.json").write_text(damage)
    with pytest.raises(ValueError, match=f"{folder}/manifest.json is damaged. Restore it; or delete it"):
        run(x, folder)
    (folder / "manifest.json").unlink()
    assert run(x, folder).finished


def test_damaged_metrics_cost_the_list_of_runs_one_cell(stopped, tmp_path, capsys):
    _, folder = stopped
    folder.rename(tmp_path / "runs")
    (tmp_path / "runs" / "metrics.jsonl").write_text("garbage\n")
    with pytest.warns(UserWarning, match="metrics.jsonl, line 1 is not a record"):
        assert main(["runs", "list"]) == 0
    assert "?/3" in capsys.readouterr().out


def test_a_run_of_another_version_is_shown_without_the_command_that_repeats_it(stopped, capsys):
    _, folder = stopped
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["config"]["learner"]["removed_since"] = 1
    (folder / "manifest.json").write_text(json.dumps(manifest | {"commit": "abc1234"}))
    assert main(["runs", "show", str(folder)]) == 0
    assert "this version of nowait has other settings; commit abc1234 reads those of the run" in capsys.readouterr().out
    assert main(["runs", "show", str(folder), "--yaml"]) == 1


def test_a_policy_that_was_never_finished_is_not_sampled(stopped, capsys):
    _, folder = stopped
    assert (folder / "policy" / "config.json").exists()
    assert main(["sample", str(folder), "--prompt", "1="]) == 1
    assert "has no trained policy; finish the run first" in capsys.readouterr().err


def test_records_are_on_the_disk_before_the_checkpoint_that_counts_on_them(tiny, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("records"))
    monkeypatch.setattr(checkpoint, "save", lambda *args: order.append("checkpoint"))
    run(experiment(tiny, "sync", "schedule.steps=2", "schedule.checkpoint_every=1"), tmp_path / "run")
    assert order == ["records", "records", "checkpoint"]  # of metrics and timeline


# Signals


def test_sigterm_is_taken_for_ctrl_c(monkeypatch, capsys):
    def terminated(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(runs, "run", terminated)
    assert main(["train", "a3po/setup1", "--scale", "smoke"]) == 130
    assert "interrupted; what was recorded stays" in capsys.readouterr().err


def test_ctrl_c_leaves_a_run_noted_as_interrupted(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "steps", fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run(experiment(tiny, "sync"), tmp_path / "run")
    assert RunResult(tmp_path / "run").status == "interrupted"


def test_an_interrupted_notebook_leaves_no_traceback_of_its_client(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.getLogger("asyncio"), "disabled", False)
    monkeypatch.setattr(papermill, "inspect_notebook", lambda path: {})
    monkeypatch.setattr(papermill, "execute_notebook", fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        reproduction._papermill(tmp_path / "one.ipynb", tmp_path / "out.ipynb", {})
    assert logging.getLogger("asyncio").disabled


@pytest.mark.slow
def test_the_workers_of_a_sweep_end_when_it_is_killed(tiny, tmp_path):
    x = f"tiny.experiment({tiny!r}, 'loglinear', 'schedule.steps=100000')"
    code = f"import tiny; from nowait import runs; runs.sweep([{x}], [0], use_wandb=False, progress=False)"
    sweep = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        (metrics,) = wait(lambda: list(Path(tmp_path / "runs").rglob("metrics.jsonl")), 60)
        wait(lambda: b"\n" in metrics.read_bytes(), 60)
    finally:
        sweep.kill()
        sweep.wait()
    size = -1
    for _ in range(20):  # a worker that lives on goes on writing
        before, size = size, metrics.stat().st_size
        if before == size:
            break
        time.sleep(1)
    assert before == size and not runs.RunResult(metrics.parent).finished and RunResult(metrics.parent).status == "killed"


def wait(condition, seconds: float):
    """The first true value of a condition."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value
