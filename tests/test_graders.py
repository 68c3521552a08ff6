from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import numpy as np
import pytest

from nowait.batch import STOP, Request, Segments
from nowait.tasks import mathematics
from nowait.tasks.graders import boxed, code, final_number, gsm8k, number, program
from nowait.workers.scorers import RuleScorer


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("18", "18"),
        (" 1,200 ", "1200"),
        ("$18", "18"),
        (r"\$1,234.50.", "1234.50"),
        ("18.", "18"),
        ("-5", "-5"),
        ("-$5", "-5"),
        ("\N{MINUS SIGN}3", "-3"),
        (".5", "0.5"),
        ("70,000 dollars", "70000"),
        (r"20\%", "20"),
        (r"18 \text{ eggs}", "18"),
        ("x = 7", "7"),
        (r"1{,}500", "1500"),
        (r"2,\!500", "2500"),
        ("18.00", "18"),
    ],
)
def test_a_number_is_read_however_it_is_written(words, value):
    assert number(words) == Decimal(value)


@pytest.mark.parametrize("words", ["", "none", "3 or 4", "1/2", r"\frac{14}{3}", r"\frac12", "2^5", "1,2", "5-3", "6 x 3 = 18", "a1b2"])
def test_what_is_no_single_number_is_not_read_as_one(words):
    assert number(words) is None


def test_the_last_mark_of_a_response_counts():
    assert final_number("#### 3 no\n#### 4") == 4
    assert final_number(r"\boxed{3}, I mean #### 4") == 4 and final_number(r"#### 3, I mean \boxed{4}") == 4
    assert final_number("#### 18\nQuestion: 2 + 3 = 5") == 18
    assert final_number("the answer is 18") is None and final_number(r"so \boxed{18") is None


def test_a_box_ends_where_its_braces_close():
    assert boxed(r"\boxed{1} then \boxed{\frac{\sqrt{3}}{2}} and more }") == r"\frac{\sqrt{3}}{2}"
    assert boxed("nothing") is None and boxed(r"\boxed{\frac{1}{2}") is None and boxed(r"\boxed{}") == ""


def test_gsm8k_raises_for_its_own_answers_only():
    assert gsm8k(["#### 18", "eighteen"], ["so\n#### 18"] * 2) == [1.0, 0.0]
    for answer in ("no mark 18", "#### eighteen"):
        with pytest.raises(ValueError, match="no number after ####"):
            gsm8k(["#### 18"], [answer])


@pytest.mark.parametrize(
    ("gold", "response", "same"),
    [
        (r"\frac{1}{2}", r"\boxed{0.5}", True),
        ("0.5", r"\boxed{\tfrac12}", True),
        (r"5\sqrt{2}", r"\boxed{\sqrt{50}}", True),
        ("(1,2)", r"\boxed{(1, 2)}", True),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
        ("204", r"first \boxed{3}, then \boxed{204}", True),
        ("025", r"\boxed{25}", True),
        ("33", "The final answer is $33$.", True),
        ("$33$", "33", True),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", False),
        ("204", r"204, or rather \boxed{3}", False),
        ("(1,2)", r"\boxed{(2,1)}", False),
        ("7", "", False),
        ("7", r"\boxed{", False),
        ("7", r"\boxed{\frac{}{}}", False),
    ],
)
def test_math_answers_are_compared_by_value(gold, response, same):
    assert mathematics.equal(gold, response) is same


def test_answers_are_graded_alike_in_threads():
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: mathematics.equal(rf"\frac{{{i}}}{{7}}", rf"\boxed{{\frac{{{2 * i}}}{{14}}}}"), range(20))) == [True] * 20


def test_a_response_that_would_compute_for_ever_is_wrong_after_a_while(monkeypatch, caplog):
    bomb = r"\boxed{9^{9^{9^{9^{9}}}}}"
    start = time.monotonic()
    assert mathematics.equal("3", bomb) is False and "counts as wrong" in caplog.text
    assert time.monotonic() - start < 4 * mathematics.LIMIT
    assert mathematics.equal(r"\frac{1}{2}", r"\boxed{0.5}") is True  # another process serves on


def test_an_answer_without_content_is_a_failure_of_the_data():
    with pytest.raises(ValueError, match="no answer in"):
        mathematics.equal("", r"\boxed{7}")
    assert mathematics.by_solution([r"\boxed{7}", "8"], ["7", "7"], level=[1, 2]) == [1.0, 0.0]


def test_a_scorer_counts_what_cannot_be_graded_and_goes_on():
    class Broken:
        def reward(self, split: str, row: int, response: str) -> float:
            return gsm8k([response], ["#### 18" if row else "eighteen"])[0]

    scorer = RuleScorer(Broken(), lambda ids: "#### 18", "train", 1)
    scorer.admit([Request(i, np.array([1], np.int32), 1, 4, row=i) for i in range(3)])
    one = np.ones(3)
    scorer.prefill(Segments(np.arange(3), np.arange(4), one.astype(np.int32), one.astype(np.float32), np.full(3, STOP, np.uint8), 0))
    assert scorer.finish([0, 1, 2]) == [[None], [1.0], [1.0]]
    assert (scorer.graded, scorer.failed) == (3, 1)


def test_the_last_block_of_code_is_run():
    assert code("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```\nc") == "y = 2\n"
    assert code("x = 1") == "x = 1" and code("```py\nx = (") == "x = ("


def test_a_program_earns_its_reward_by_all_of_its_tests():
    tests = ["assert twice(2) == 4", "assert twice(3) == 6"]
    right, wrong = "```python\ndef twice(x):\n    return 2 * x\n```", "```python\ndef twice(x):\n    return x ** 2\n```"
    assert program([right, wrong, "I cannot", right.replace("def", "import sys; sys.exit()\ndef")], testcase=[tests] * 4) == [1.0, 0.0, 0.0, 0.0]
    message = [{"role": "assistant", "content": right + "\nDone."}]
    assert program([message], testcase=[tests]) == [1.0]
