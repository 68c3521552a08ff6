"""The teaching notebooks, executed with solved exercises; their pictures, committed and fast; their exercises, which see wrong answers."""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import resource
import textwrap
import time
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image
from teach_solutions import SOLUTIONS, WRONG

from nowait.teach import common

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks" / "teach").glob("*.ipynb"))
PICTURES = common.pictures()
SECONDS = 40  # of processor time for a notebook, on a slow machine; all six together take about two minutes
each = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def exercises(notebook: nbformat.NotebookNode) -> list[tuple[nbformat.NotebookNode, str]]:
    """Cells tagged `exercise` and the name that each checks."""
    found = [cell for cell in code(notebook) if "exercise" in cell.metadata.get("tags", [])]
    return [(cell, re.search(r'^check\("([\w/]+)", \w+\)$', cell.source, re.MULTILINE).group(1)) for cell in found]


def solve(notebook: nbformat.NotebookNode) -> list[str]:
    """Put the reference solutions in the place of the stubs; returns the names of the exercises."""
    names = []
    for cell, name in exercises(notebook):
        (stub,) = [node for node in ast.parse(cell.source).body if isinstance(node, ast.FunctionDef)]
        assert stub.name == SOLUTIONS[name].__name__
        lines = cell.source.splitlines()
        lines[stub.lineno - 1 : stub.end_lineno] = textwrap.dedent(inspect.getsource(SOLUTIONS[name])).splitlines()
        cell.source = "\n".join(lines)
        names.append(name)
    return names


def printed(notebook: nbformat.NotebookNode) -> str:
    return "".join(output.text for cell in code(notebook) for output in cell.outputs if output.output_type == "stream")


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """What the kernels of executed notebooks inherit."""
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    for name, value in {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "NOWAIT_RUNS": str(tmp_path), "WANDB_MODE": "disabled"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@each
def test_a_notebook_executes_in_seconds_and_every_exercise_is_solved_by_its_reference_solution(notebook, kernel):
    from nbclient import NotebookClient

    solved = nbformat.read(notebook, 4)
    for cell in code(solved):
        cell.source = cell.source.replace('\nscale: str = "cpu"', '\nscale: str = "smoke"')
    names, before = solve(solved), resource.getrusage(resource.RUSAGE_CHILDREN)
    NotebookClient(solved, timeout=120, kernel_name="python3", resources={"metadata": {"path": notebook.parent}}).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert names and [name for name in names if f"{name}: solved\n" not in printed(solved)] == []
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < SECONDS


# Exercises


def test_every_exercise_stands_in_a_notebook_and_has_a_solution_and_a_wrong_answer():
    names = [name for notebook in NOTEBOOKS for _, name in exercises(nbformat.read(notebook, 4))]
    assert sorted(names) == sorted(SOLUTIONS) == sorted(WRONG)


@pytest.mark.parametrize("name", SOLUTIONS)
def test_the_reference_solution_is_right(name, capsys):
    common.check(name, SOLUTIONS[name])
    assert capsys.readouterr().out == f"{name}: solved\n"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_gets_a_hint(name, capsys):
    for answer in WRONG[name]:
        common.check(name, answer)
        assert re.match(rf"{name}: not right yet\. It gave .+ for .+\. Hint: .{{20,}}", capsys.readouterr().out, re.DOTALL)


@each
def test_the_stubs_are_unsolved(notebook, capsys):
    for cell, name in exercises(nbformat.read(notebook, 4)):
        exec(cell.source, {"check": common.check})
        assert capsys.readouterr().out == f"{name}: not solved yet\n"


@pytest.fixture
def halves(monkeypatch):
    from nowait.teach import toy

    monkeypatch.setattr(toy, "EXERCISES", {"half": [((4,), 2.0, "two halves make a whole")]}, raising=False)


def fails(x):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda x: None, "not solved yet"),
        (lambda x: x / 2, "solved"),
        (lambda x: x, "not right yet. It gave 4 for 4. Hint: two halves make a whole"),
        (lambda x: "two", "not right yet. It gave ValueError: could not convert string to float: 'two' for 4. Hint: two halves make a whole"),
        (fails, "not right yet. It gave KeyError: 'x' for 4. Hint: two halves make a whole"),
    ],
)
def test_a_check_says_what_it_found_and_never_stops_the_notebook(halves, answer, said, capsys):
    common.check("toy/half", answer)
    assert capsys.readouterr().out == f"toy/half: {said}\n"


def test_a_cell_that_should_break_and_does_not_is_an_error(capsys):
    with common.broken():
        raise ValueError("as meant")
    assert capsys.readouterr().out == "broken, as it should be: ValueError: as meant\n"
    with pytest.raises(AssertionError, match="nothing broke"), common.broken():
        pass


# Pictures


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_in_under_100_ms(name):
    took, patience = [1.0], time.monotonic() + 10
    while min(took) >= 0.1 and time.monotonic() < patience:  # other work on the machine must not matter
        start = time.process_time()
        common.png(PICTURES[name]())
        took.append(time.process_time() - start)
    assert min(took) < 0.1


@pytest.mark.parametrize("name", PICTURES)
def test_the_committed_picture_is_what_its_function_draws(name):
    remedy = "write it again: python -m nowait.teach.common"
    committed, drawn = (np.asarray(Image.open(file).convert("L"), int) for file in (path(name), io.BytesIO(common.png(PICTURES[name]()))))
    assert committed.shape == drawn.shape and (np.abs(committed - drawn) > 16).mean() < 1e-3, remedy


def path(name: str) -> Path:
    return ROOT / "figures" / "teach" / f"{name}.png"


def test_every_widget_has_its_committed_picture_in_the_cell_before_it_and_every_picture_is_shown():
    image, shown = r"!\[.+?\]\(\.\./\.\./figures/teach/(\w+)\.png\)", []
    for notebook in NOTEBOOKS:
        cells = nbformat.read(notebook, 4).cells
        shown += [name for cell in cells for name in re.findall(image, cell.source)]
        for before, cell in zip(cells, cells[1:], strict=False):
            for draw in re.findall(r"^show\(\s*\w+\.(\w+),", cell.source, re.MULTILINE) if cell.cell_type == "code" else ():
                (name,) = re.findall(image, before.source)
                assert PICTURES[name].__name__ == draw, f"{notebook.stem}: {draw}"
    assert sorted(shown) == sorted(PICTURES) == sorted(file.stem for file in (ROOT / "figures" / "teach").iterdir())


def test_a_slider_draws_the_picture_again():
    (name, draw), *_ = PICTURES.items()
    (argument, parameter), *_ = inspect.signature(draw).parameters.items()
    others = {key: [p.default] for key, p in inspect.signature(draw).parameters.items()}
    box = common.show(draw, **others | {argument: [parameter.default, parameter.default + 1]})
    sliders, image = box.children
    before = image.value
    assert before == common.png(draw())
    sliders.children[0].value = parameter.default + 1
    assert image.value == common.png(draw(**{argument: parameter.default + 1})) != before


def test_without_interaction_a_picture_stands_alone():
    (draw, *_) = PICTURES.values()
    assert common.show(draw, interactive=False)._repr_png_() == common.png(draw())
