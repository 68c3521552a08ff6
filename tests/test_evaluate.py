from __future__ import annotations

import json
import math

import pytest
from rows import write
from tiny import experiment

from nowait import runs
from nowait.cli import main
from nowait.config import TaskConfig
from nowait.evaluate import evaluate, pass_at, summary

SHORT = ["--prompts", "6", "--samples", "4", "--max-new-tokens", "40"]


@pytest.fixture
def command(capsys):
    def run(*arguments: str) -> tuple[int, dict, str]:
        code = main(["evaluate", *arguments])
        out, err = capsys.readouterr()
        return code, json.loads(out.splitlines()[-1]) if out else {}, err

    return run


def test_pass_at_k_counts_the_draws_without_a_right_sample():
    assert pass_at(1, 4, 1) == 0.25
    assert pass_at(2, 4, 1) == 0.5  # 3 of the 6 pairs hold the right one
    assert pass_at(2, 4, 3) == 1.0 and pass_at(4, 4, 0) == 0.0


def test_the_standard_error_is_over_problems_and_failed_grades_are_left_out():
    found = summary([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.0, None, 0.0]])
    third = 1 / 3
    assert found["mean@4"] == found["pass@1"] == pytest.approx((1 + 0 + third) / 3)
    mean = 4 / 9
    spread = ((1 - mean) ** 2 + mean**2 + (third - mean) ** 2) / 2
    assert found["standard_error"] == pytest.approx(math.sqrt(spread / 3))
    assert found["pass@2"] == pytest.approx((1 + 0 + 2 / 3) / 3)  # of three samples, 2 of 3 pairs hold the right one
    assert found["pass@4"] == 0.5  # the third problem has three grades only
    assert (found["problems"], found["samples"], found["failed_grades"]) == (3, 4, 1)


def test_rewards_other_than_0_and_1_have_no_pass_at_k():
    assert summary([[0.5], [1.5]]) == {"problems": 2, "samples": 1, "mean@1": 1.0, "standard_error": 0.5, "failed_grades": 0}
    assert summary([[1.0]])["standard_error"] is None
    with pytest.raises(ValueError, match="none of the responses"):
        summary([[None]])


def test_a_shipped_policy_is_evaluated_on_arithmetic(command, tmp_path):
    out = tmp_path / "responses.jsonl"
    code, found, table = command("asset:policy_small", "--task", "arithmetic", "--option", "operand_cap=3", *SHORT, "--out", str(out))
    assert code == 0 and "pass@4" in table and "standard_error" in table
    assert (found["problems"], found["samples"], found["failed_grades"], found["cut_off"]) == (6, 4, 0, 0.0)
    assert 0.3 < found["pass@1"] <= found["pass@2"] <= found["pass@4"] <= 1 and found["mean@4"] == found["pass@1"]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["row"] for line in lines] == [row for row in range(6) for _ in range(4)]
    assert sum(line["reward"] for line in lines) / 24 == pytest.approx(found["pass@1"]) and all("#" in line["response"] for line in lines)


def test_the_same_seed_gives_the_same_responses_and_slots_do_not_matter():
    task = TaskConfig(options={"operand_cap": 4})
    first, again = (evaluate("asset:policy_small", task, prompts=5, samples=2, max_new_tokens=8, slots=slots) for slots in (10, 3))
    assert first == again and first["cut_off"] > 0


def test_a_local_file_takes_the_place_of_the_data(command, tmp_path):
    rows = [{"question": f"{i}+{i}=", "answer": f"#### {2 * i}"} for i in range(3)]
    options = ["--path", write(tmp_path, "sums", rows), "--option", "chat=false", "--option", "prompt_template='{question}'"]
    code, found, _ = command("asset:policy_small", "--task", "gsm8k", *options, "--max-new-tokens", "8")
    assert code == 0 and (found["problems"], found["pass@1"]) == (3, 0.0)  # it answers after one #


def test_a_run_is_evaluated_by_its_name(command, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("NOWAIT_RUNS", str(tmp_path))
    result = runs.run(experiment(tiny, "loglinear", "schedule.steps=1"), 3, use_wandb=False)
    code, found, _ = command(result.path.name[:14], "--task", "tiny:EvenDigits", "--prompts", "4", "--max-new-tokens", "6")
    assert code == 0 and found["checkpoint"] == str(result.path / "policy") and 0 <= found["mean@1"] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["asset:policy_small", "--task", "arithmetik"], "unknown task 'arithmetik'"),
        (["asset:policy_huge", "--task", "arithmetic"], "no asset 'asset:policy_huge'"),
        (["asset:policy_small", "--task", "arithmetic", "--prompts", "20000"], "the task has 10000 held-out rows"),
        (["asset:policy_small", "--task", "arithmetic", "--option", "operand_cup=3"], "its options are operand_mean"),
        (["asset:policy_small", "--task", "gsm8k", "--path", "nowhere.jsonl"], "no such file: nowhere.jsonl"),
        (["asset:policy_small", "--task", "arithmetic", "--dtype", "int8"], "'float32', 'bfloat16'"),
        (["asset:policy_small", "--task", "arithmetic", "--temperature", "0"], "--temperature"),
    ],
)
def test_mistakes_are_named(command, arguments, message):
    code, _, said = command(*arguments)
    assert code in (1, 2) and message in said
