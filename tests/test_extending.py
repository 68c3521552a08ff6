"""docs/extending.md: its very code and commands."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nowait import tasks
from nowait.batch import STOP, Request, Segments
from nowait.cli import main
from nowait.config import TaskConfig, load
from nowait.config_files import ConfigError
from nowait.identity import run_hash
from nowait.results import listing
from nowait.schedules.overcommit import OvercommitController

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
FILES = {code.split("\n")[0].removeprefix("# "): code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
COMMANDS = re.findall(r"^nowait .*", PAGE, re.MULTILINE)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the files of the page, and runs/ of its own."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOWAIT_RUNS", str(tmp_path / "runs"))
    importlib.invalidate_caches()
    return tmp_path


def test_every_example_is_short_and_run_by_one_command():
    assert sorted(FILES) == ["myanchor.py", "myrule.py", "myscorer.py", "mytask.py"]
    assert max(code.count("\n") for code in FILES.values()) < 40
    assert sorted(name for command in COMMANDS for name in FILES if f"={name.removesuffix('.py')}:" in command) == sorted(FILES)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: shlex.split(command)[-1])
def test_the_commands_train(command, place):
    assert main(shlex.split(command)[1:]) == 0
    (result,) = listing()
    assert result.status == "finished" and result.metrics["step"].max() == 4


def test_the_anchor_halves_its_weight_with_every_step_of_staleness(place):
    from myanchor import halving

    behav, theta, d = torch.zeros(5), torch.full((5,), -8.0), torch.tensor([0, 1, 2, 3, 4])
    assert halving(behav, theta, d).tolist() == [0.0, 0.0, -4.0, -6.0, -7.0]  # alpha 1, 1, 1/2, 1/4, 1/8


def test_the_rule_moves_on_what_is_clear_and_holds_otherwise(place):
    def last(rewards) -> int:
        controller = OvercommitController(5, 0, 9, len(rewards) - 1, "myrule:dead_band")
        return [controller.update(r) for r in rewards][-1]

    assert [last(rewards) for rewards in ([0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1])] == [6, 4, 5, 5]


def test_a_rule_of_one_s_own_is_not_asked_before_the_window_is_full_and_cannot_leave_the_limits(place):
    (place / "myrule.py").write_text("def up(rewards, delta, tail_fraction):\n    return len(rewards) + int(10 * tail_fraction)\n")
    controller = OvercommitController(1, 0, 9, 2, "myrule:up")
    assert [controller.update(0.0, 0.1) for _ in range(5)] == [1, 1, 5, 9, 9]  # 3 rewards and a tail of 0.1: 4 more


def test_the_task_s_text_is_what_the_shipped_policies_know(place):
    task = tasks.load(TaskConfig(name="mytask:Halves", options={}))
    prompts = {split: {task.prompt(split, row) for row in range(task.size(split))} for split in ("train", "eval")}
    assert not prompts["train"] & prompts["eval"] and set("".join(prompts["train"])) <= set("0123456789+=")
    left, right = task.prompt("train", 3)[:-1].split("+")
    assert task.reward("train", 3, f"1;#{max(left, right)}") == 1.0 and task.reward("train", 3, f"#{min(left, right)}") == 0.0


def test_the_scorer_adds_up_pieces_and_goes_on_from_its_state(place):
    from myscorer import Brief

    def piece(*lengths: int) -> Segments:
        offset = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.zeros(offset[-1], np.int32)
        return Segments(np.arange(len(lengths)), offset, tokens, tokens.astype(np.float32), np.full(len(lengths), STOP, np.uint8), 0)

    scorer, other = Brief(policy="", n=2), Brief(policy="", n=2)
    scorer.admit([Request(i, np.zeros(1, np.int32), 2, 9) for i in range(2)])
    assert scorer.prefill(piece(1, 2, 3, 4)) == 10
    other.set_state(scorer.get_state())
    other.prefill(piece(0, 10, 0, 0))
    assert other.finish([1, 0]) == [[0.97, 0.96], [0.99, 0.88]] and scorer.finish([0]) == [[0.99, 0.98]]


@pytest.mark.parametrize(
    ("name", "setting"), [("myanchor.py", "algorithm.anchor=myanchor:halving"), ("myrule.py", "overlap.rule=myrule:dead_band"),
                          ("myscorer.py", "reward.path=myscorer:Brief"), ("mytask.py", "task.name=mytask:Halves")]
)  # fmt: skip
def test_changing_the_file_makes_another_run(name, setting, place):
    more = ["task.options={}"] if name == "mytask.py" else []
    experiment = load("oppo/stackexchange_7b", "smoke", [setting, *more])
    before = run_hash(experiment, 1)
    (place / name).write_text(FILES[name] + "# changed\n")
    assert run_hash(experiment, 1) != before


@pytest.mark.parametrize("setting", ["algorithm.anchor=halving", "overlap.rule=dead band"])
def test_a_name_that_is_neither_built_in_nor_one_s_own_is_refused_with_both_remedies(setting):
    with pytest.raises(ConfigError, match="input should be '.* or write module:function for your own"):
        load("oppo/stackexchange_7b", "smoke", [setting])
