"""What a clone must be: one version everywhere, every import declared and pinned, nothing local, notebooks that papermill can drive."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import nowait

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = [name for several in PROJECT["optional-dependencies"].values() for name in several]
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("*.ipynb")) if (ROOT / "notebooks").is_dir() else []
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "notebooks").glob("*.md"))]
PARAMETERS = {"config or configs", "scale", "seeds", "overrides", "interactive"}
TEACHING = {"interactive"}  # what a notebook of notebooks/teach needs
IMPORTED_AS = {"PyYAML": "yaml", "ipython": "IPython"}
LARGEST = 8_000_000  # bytes of a file


def tracked() -> list[Path]:
    try:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def distribution(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group()


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    changelog = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).group(1)
    assert nowait.__version__ == PROJECT["version"] == citation == changelog


def test_constraints_pin_what_pyproject_requires_and_nothing_local():
    wanted = {distribution(line) for line in [*PROJECT["dependencies"], *EXTRAS]} - {"vllm"}  # for GPUs, with another torch
    assert wanted <= set(pins())
    assert all(re.fullmatch(r"\d+(\.\d+)+(\.post\d+)?", version) for version in pins().values()), "a release, without +cpu or the like"
    assert (pins()["torch"], pins()["transformers"]) == ("2.13.0", "5.19.0")


def test_every_package_that_the_code_imports_is_declared():
    declared = {IMPORTED_AS.get(name, name).replace("-", "_") for name in map(distribution, [*PROJECT["dependencies"], *EXTRAS])}
    nodes = [node for file in (ROOT / "src").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    assert {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"nowait"} <= declared


def test_git_holds_no_products_and_no_large_files():
    product = re.compile(r"(^|/)(\.venv|runs|wandb|build|dist|__pycache__|\.ipynb_checkpoints|\.pytest_cache|\.DS_Store)(/|$)|\.(pyc|pt|pkl|pickle)$")
    names = [file.relative_to(ROOT).as_posix() for file in tracked()]
    assert [name for name in names if product.search(name)] == []
    assert [file.name for file in tracked() if file.stat().st_size > LARGEST] == []


def test_no_file_names_a_place_on_somebody_s_machine():
    place = re.compile(r"(?<![\w.~}])/(work|root|home|Users)/\w")
    found = []
    for file in tracked():
        if file.suffix not in (".png", ".safetensors"):
            found += [f"{file.relative_to(ROOT)}: {match.group()}" for match in place.finditer(file.read_text(encoding="utf-8"))]
    assert found == []


def test_what_the_readme_and_the_pages_promise_exists():
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE)) <= targets
    commands = subprocess.run([sys.executable, "-m", "nowait", "--help"], capture_output=True, text=True, check=True).stdout
    for command in set(re.findall(r"^ *nowait ([a-z]+)", "\n".join([readme, *(page.read_text() for page in PAGES)]), re.MULTILINE)):
        assert re.search(rf"^  {command} ", commands, re.MULTILINE), command
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)\)", readme)
    assert [link for link in links if not link.startswith("figures/") and not (ROOT / link).exists()] == []


@pytest.mark.skipif(not any((ROOT / "figures").glob("*")), reason="no figures are committed yet: make figures-full")
def test_the_figures_that_the_readme_links_are_committed():
    links = re.findall(r"\]\((figures/[^)#]+)\)", (ROOT / "README.md").read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text)
    files = [(page.parent / name if name else page, anchor) for name, anchor in links]
    assert [file for file, _ in files if not file.exists()] == []
    for file, anchor in files:
        heads = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads], f"{file.name}#{anchor}"


def test_the_readme_lists_every_notebook_and_what_it_saves():
    readme = (ROOT / "README.md").read_text()
    for notebook in [path for path in NOTEBOOKS if path.parent.name != "teach"]:
        first = "".join(json.loads(notebook.read_text())["cells"][0]["source"])
        (row,) = [line for line in readme.splitlines() if line.startswith("| ") and f"({notebook.relative_to(ROOT).as_posix()})" in line]
        saved = {f"({name})" for name in re.findall(r"figures/[\w.]+\.(?:png|md)", first)}
        assert saved and all(name in row for name in saved), notebook.name


def test_the_ci_script_is_executable_and_runs_the_readme_s_test_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111 and subprocess.run(["bash", "-n", script]).returncode == 0
    assert script.read_text().rstrip().endswith("make test") and "make test" in (ROOT / "README.md").read_text()


# Notebooks


def faults(notebook: dict, required: set[str] = frozenset(PARAMETERS)) -> list[str]:
    """What would make papermill ignore a parameter or a reader see stale output."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    found = ["outputs are committed" for cell in code if cell["outputs"] or cell["execution_count"] is not None][:1]
    if notebook["metadata"].get("kernelspec", {}).get("name") != "python3":
        found.append("the kernelspec is not python3")
    tagged = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    if len(tagged) != 1:
        return [*found, f"{len(tagged)} cells are tagged parameters"]
    return found + _parameter_faults("".join(tagged[0]["source"]), required)


def _parameter_faults(source: str, required: set[str]) -> list[str]:
    """A value that is computed keeps its default after injection; an unknown parameter passes with a warning."""
    found, names = [], set()
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else getattr(node, "target", None)
        try:
            ast.literal_eval(node.value)
            names.add(target.id)
        except (AttributeError, ValueError):
            found.append(f"not a literal parameter: {ast.unparse(node)}")
    names |= {"config or configs"} if {"config", "configs"} & names else set()
    return found + [f"no parameter {name}" for name in sorted(required - names)]


GOOD = 'config: str = "a3po/setup1"  # which\nscale = "cpu"\nseeds = [1]\noverrides = []\ninteractive = True\nlag = -1'


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, []),
        ({"source": GOOD + "\ntotal = 10 * lag"}, ["not a literal parameter: total = 10 * lag"]),
        ({"source": GOOD + "\nimport os"}, ["not a literal parameter: import os"]),
        ({"source": GOOD + "\na = b = 1"}, ["not a literal parameter: a = b = 1"]),
        ({"source": GOOD.replace("seeds = [1]\n", "").replace("config", "confg")}, ["no parameter config or configs", "no parameter seeds"]),
        ({"metadata": {"tags": ["parameter"]}}, ["0 cells are tagged parameters"]),
        ({"outputs": [{"output_type": "stream"}]}, ["outputs are committed"]),
        ({"execution_count": 3}, ["outputs are committed"]),
    ],
)
def test_the_lint_finds_every_trap(change, fault):
    cell = {"cell_type": "code", "source": GOOD, "metadata": {"tags": ["parameters"]}, "outputs": [], "execution_count": None}
    notebook = {"cells": [{"cell_type": "markdown", "source": "# Title"}, cell | change], "metadata": {"kernelspec": {"name": "python3"}}}
    assert faults(notebook) == fault


def test_the_lint_finds_two_parameter_cells_and_a_kernel_of_one_s_own():
    cell = {"cell_type": "code", "source": GOOD, "metadata": {"tags": ["parameters"]}, "outputs": [], "execution_count": None}
    assert faults({"cells": [cell, cell], "metadata": {}}) == ["the kernelspec is not python3", "2 cells are tagged parameters"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_papermill_can_drive_the_notebook(notebook):
    assert faults(json.loads(notebook.read_text()), TEACHING if notebook.parent.name == "teach" else PARAMETERS) == []
