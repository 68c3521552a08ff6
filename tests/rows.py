"""Ten hand-written rows in the columns of each data set, and a response to each that is right."""

from __future__ import annotations

import json
from pathlib import Path


def _gsm8k() -> list[dict]:
    stories = [
        ("Ada packs 6 boxes with 7 pens each. How many pens are that?", "6*7 = <<6*7=42>>42 pens.", "42"),
        ("A hall has 40 rows of 30 seats. How many people can sit?", "40*30 = <<40*30=1200>>1200.", "1,200"),
        ("It was 3 degrees, then 8 colder. How warm is it?", "3-8 = <<3-8=-5>>-5.", "-5"),
        ("Ben halves 5 litres. How much is a half?", "5/2 = <<5/2=2.5>>2.5 litres.", "2.50"),
        ("A ticket is $9. What do 2 cost?", "2*9 = $<<2*9=18>>18.", "$18"),
        ("Cem reads 12 pages a day for a week. How many pages?", "12*7 = <<12*7=84>>84.", "84"),
        ("A tank of 100 litres loses 1 each minute. When is it empty?", "100/1 = <<100/1=100>>100 minutes.", "100"),
        ("Dora has 3 cats and 2 dogs. How many legs?", "5*4 = <<5*4=20>>20.", "20"),
        ("A town grows by 250,000 a year for 6 years. By how many?", "6*250000 = <<6*250000=1500000>>1500000.", "1,500,000"),
        ("Eve gives all of her 7 sweets away. How many are left?", "7-7 = <<7-7=0>>0.", "0"),
    ]
    return [{"question": question, "answer": f"{steps}\n#### {answer}"} for question, steps, answer in stories]


MATH = [
    ("What is half of a third?", r"\frac{1}{6}"),
    (r"Simplify $\sqrt{50}$.", r"5\sqrt{2}"),
    ("Give the midpoint of (0, 0) and (4, -2).", "(2,-1)"),
    ("Which interval holds the numbers from 0 up to but without 3?", "[0,3)"),
    ("How many degrees has a right angle?", r"90^\circ"),
    (r"Multiply out $(x+1)^2$.", "x^2+2x+1"),
    ("Write 3/8 as a decimal.", "0.375"),
    ("What is the square of the imaginary unit, plus i?", "-1+i"),
    (r"Which angle, in radians, has the sine 1 in $[0, \pi]$?", r"\frac{\pi}{2}"),
    (r"Give the inverse of the matrix that doubles a plane.", r"\begin{pmatrix} \frac12 & 0 \\ 0 & \frac12 \end{pmatrix}"),
]
SUMS = {"2+3": "5", "10*10": "100", "7-9": "-2", "6*4": "24", "9*9": "81", "2^10": "1024", "13+8": "21", "5!": "120", "8-8": "0", "3^3": "27"}
WHOLE = list(SUMS.items())
PROGRAMS = [
    ("Double a number.", "twice", "return 2 * x", ["assert twice(2) == 4", "assert twice(-1) == -2"]),
    ("Tell whether a number is even.", "even", "return x % 2 == 0", ["assert even(2)", "assert not even(3)"]),
    ("Reverse a text.", "backwards", "return x[::-1]", ["assert backwards('abc') == 'cba'"]),
    ("Sum the digits of a number.", "digits", "return sum(map(int, str(x)))", ["assert digits(123) == 6"]),
    ("Take the largest of a list.", "largest", "return max(x)", ["assert largest([3, 9, 2]) == 9"]),
    ("Count the vowels of a text.", "vowels", "return sum(c in 'aeiou' for c in x)", ["assert vowels('education') == 5"]),
    ("Drop what a list repeats.", "unique", "return list(dict.fromkeys(x))", ["assert unique([1, 2, 1]) == [1, 2]"]),
    ("Take the square root.", "root", "import math\n    return math.isqrt(x)", ["assert root(81) == 9"]),
    ("Make a text of capitals.", "loud", "return x.upper()", ["assert loud('a') == 'A'"]),
    ("Count the words of a text.", "words", "return len(x.split())", ["assert words('a b c') == 3"]),
]


def _programs() -> list[dict]:
    rows = []
    for number, (instruction, name, body, tests) in enumerate(PROGRAMS):
        code = f"def {name}(x):\n    {body}"
        output = f"Here it is:\n```python\n{code}\n```\nIt does what was asked."
        rows.append({"seq_id": number, "instruction": instruction, "output": output, "code": code, "entry_point": name, "testcase": tests})
    return rows


ROWS: dict[str, list[dict]] = {
    "gsm8k": _gsm8k(),
    "math500": [{"problem": p, "solution": "", "answer": a, "subject": "Algebra", "level": 1, "unique_id": p} for p, a in MATH],
    "aime24": [{"id": i, "problem": f"What is {p}?", "solution": "", "answer": a.zfill(3), "year": "2024"} for i, (p, a) in enumerate(WHOLE)],
    "dapo_math": [
        {"prompt": f"What is {p}?", "solution": a, "data_source": "math_dapo", "reward_model": {"ground_truth": a, "style": "rule"}} for p, a in WHOLE
    ],
    "stack_exchange": [{"qid": i, "question": f"How do I write {p}?", "response_j": a, "response_k": "no"} for i, (p, a) in enumerate(WHOLE)],
    "opencoder": _programs(),
    "dataset": [{"prompt": [{"role": "user", "content": f"{p} = ?"}], "solution": a} for p, a in WHOLE],
}


def right(name: str, row: dict) -> str:
    """A response that earns the full reward."""
    if name == "opencoder":
        return row["output"]
    return row["answer"] if name == "gsm8k" else rf"So it is \boxed{{{row.get('answer', row['solution'])}}}."


def write(folder: Path, name: str, rows: list[dict] | None = None) -> str:
    """A JSON lines file of rows, by default those of the data set."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS[name]))
    return str(file)
