from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nowait.config import TaskConfig
from nowait.tasks import load
from nowait.tasks.arithmetic import Arithmetic, Asked

rows = st.integers(0, 9_999)
WIDE = Arithmetic(operand_mean=8.0, operand_cap=64)


def chain(text: str) -> list[str]:
    """Steps and answer of a response."""
    steps, _, answer = text.rpartition("#")
    return [*steps.split(";")[:-1], answer]


def test_row_is_fixed_by_seed_split_and_row():
    assert [WIDE.prompt("eval", row) for row in range(3)] == ["4+1+6+4+7+3=", "4+5+5+8+9=", "4+7+5+4+2+6+2+6="]
    assert WIDE.prompt("train", 0) != WIDE.prompt("eval", 0) != Arithmetic(operand_mean=8.0, operand_cap=64, seed=1).prompt("eval", 0)


def test_demonstration_options_leave_the_prompts_alone():
    other = Arithmetic(operand_mean=8.0, operand_cap=64, restate_share=1.0, corrupted_share=0.0)
    assert [other.prompt("train", row) for row in range(50)] == [WIDE.prompt("train", row) for row in range(50)]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("{0}", 0.0),  # no answer mark
        ("#{0}", 1.0),
        ("1;2;#{0}", 1.0),  # only the answer counts
        ("#{0};#1", 0.0),  # the last answer counts
        ("#0{0}", 0.0),
        ("#{0};", 0.0),
        ("#", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_text_after_the_last_mark_is_graded(response, reward):
    total = sum(int(digit) for digit in re.findall(r"\d", WIDE.prompt("eval", 7)))
    assert WIDE.reward("eval", 7, response.format(total)) == reward


@given(rows)
@settings(max_examples=50, deadline=None)
def test_clean_demonstration_states_every_running_sum_and_is_rewarded(row):
    terse = Arithmetic(operand_mean=8.0, operand_cap=64, corrupted_share=0.0, restate_share=0.0)
    operands = [int(digit) for digit in re.findall(r"\d", terse.prompt("train", row))]
    sums = [str(total) for total in np.cumsum(operands)[1:]]
    assert chain(terse.demonstration("train", row)) == [*sums, sums[-1]]
    assert terse.reward("train", row, terse.demonstration("train", row)) == 1.0


@given(rows)
@settings(max_examples=50, deadline=None)
def test_restating_style_has_the_sums_of_the_terse_one(row):
    options = {"operand_mean": 8.0, "operand_cap": 12, "restate_cap": 12}
    terse = chain(Arithmetic(**options, restate_share=0.0).demonstration("train", row))
    restating = chain(Arithmetic(**options, restate_share=1.0).demonstration("train", row))
    assert [step.rpartition("=")[2] for step in restating] == terse
    before = [int(step.partition("+")[0]) for step in restating[:-1]]
    assert before[1:] == [int(total) for total in terse[:-2]]  # each step starts from the sum before it, right or wrong


@given(rows)
@settings(max_examples=100, deadline=None)
def test_answer_is_wrong_if_and_only_if_a_sum_is(row):
    task = Arithmetic(operand_mean=8.0, operand_cap=64, restate_share=0.0)
    operands = [int(digit) for digit in re.findall(r"\d", task.prompt("train", row))]
    shown = [operands[0], *map(int, chain(task.demonstration("train", row))[:-1])]
    errors = [after - before - operand for before, after, operand in zip(shown[:-1], shown[1:], operands[1:], strict=True)]
    assert set(errors) <= {0, 1, 2, 3}
    assert task.reward("train", row, task.demonstration("train", row)) == float(not any(errors))


def test_shares_of_styles_and_of_wrong_sums_are_as_stated():
    task = Arithmetic(operand_mean=4.5, operand_cap=12, restate_share=0.3, corrupted_share=0.2)
    shown = [task.demonstration("train", row) for row in range(3000)]
    pairs = [row for row in range(3000) if task.prompt("train", row).count("+") == 1]  # two operands: one sum
    assert np.mean(["=" in text for text in shown]) == pytest.approx(0.3, abs=0.03)
    assert np.mean([task.reward("train", row, shown[row]) for row in pairs]) == pytest.approx(0.8, abs=0.05)


def test_only_short_chains_restate_their_operands():
    task = Arithmetic(operand_mean=8.0, operand_cap=64, restate_share=1.0, restate_cap=12)
    for row in range(500):
        assert ("=" in task.demonstration("train", row)) == (task.prompt("train", row).count("+") + 1 <= 12)


def test_response_lengths_have_a_long_tail_that_200_tokens_nearly_hold():
    lengths = np.array([len(WIDE.demonstration("train", row)) + 1 for row in range(5000)])
    assert lengths.max() >= 10 * np.median(lengths)
    assert lengths.max() <= 256
    assert np.mean(lengths > 200) < 0.01
    assert max(len(WIDE.prompt("train", row)) for row in range(5000)) == 128


def test_operand_mean_is_the_mean_where_the_cap_does_not_bind():
    task = Arithmetic(operand_mean=5.0, operand_cap=64)
    assert np.mean([task.prompt("train", row).count("+") + 1 for row in range(10_000)]) == pytest.approx(5.0, abs=0.15)


def test_rows_outside_the_split_are_refused():
    for row in (-1, WIDE.size("eval")):
        with pytest.raises(IndexError, match="rows 0 to 9999"):
            WIDE.prompt("eval", row)


def test_load_names_what_exists():
    with pytest.raises(ValueError, match="unknown task 'arithmetics': built in are arithmetic, gsm8k"):
        load(TaskConfig(name="arithmetics"))
    with pytest.raises(ValueError, match="operand_meen.*its options are operand_mean, operand_sigma, operand_floor, operand_cap"):
        load(TaskConfig(options={"operand_meen": 3.0}))
    with pytest.raises(ValueError, match="operand_cap"):
        load(TaskConfig(options={"operand_cap": 65}))
    with pytest.raises(ValueError, match="cannot be imported: .*no_such_module"):
        load(TaskConfig(name="no_such_module:task"))


def test_load_calls_a_function_of_the_user_with_the_options():
    assert load(TaskConfig(name="fractions:Fraction", options={"numerator": 1, "denominator": 4})) == 0.25
    assert load(TaskConfig(options={"operand_mean": 8.0, "operand_cap": 64})) == WIDE


def test_tasks_need_no_torch():
    code = "import sys, nowait.tasks as t; t.load(t.TaskConfig()).prompt('train', 0); print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


def test_no_prompt_is_in_both_splits_and_both_have_the_same_lengths():
    task = Arithmetic(operand_mean=4.5, operand_cap=12)
    train, evaluated = ([task.operands(split, row) for row in range(4000)] for split in ("train", "eval"))
    assert not set(map(tuple, train)) & set(map(tuple, evaluated))
    lengths = [np.mean([len(operands) for operands in rows]) for rows in (train, evaluated)]
    assert abs(lengths[0] - lengths[1]) < 0.2


@given(row=st.integers(0, 200))
@settings(max_examples=20, deadline=None)
def test_a_floor_leaves_out_shorter_chains(row):
    assert 25 <= len(Arithmetic(operand_mean=12.0, operand_floor=25, operand_cap=32).operands("eval", row)) <= 32


def test_a_floor_above_the_cap_is_refused():
    with pytest.raises(ValueError, match=r"operand_floor \(13\) is above operand_cap \(12\)"):
        Arithmetic(operand_floor=13)


@pytest.mark.parametrize(("response", "reward"), [("3 + 4 equals 7.", 1.0), ("It is 7, not 8", 0.0), ("17", 0.0), ("seven", 0.0), ("7", 1.0)])
def test_a_chat_model_is_asked_in_words_and_the_last_number_of_its_answer_counts(response, reward):
    task = Asked(operand_cap=2)
    row = next(row for row in range(1000) if task.operands("train", row) == [3, 4])
    assert task.prompt("train", row) == [{"role": "user", "content": "What is 3 + 4? Answer with a number."}]
    assert task.reward("train", row, response) == reward
