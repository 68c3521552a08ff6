"""Everything behind a paper's figures with one call: train the runs, execute the notebooks, write the report.

What is finished is not done again: a run with the same hash, a notebook with the same inputs whose figure data lie as it left them.
"""

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

from nowait import runs
from nowait.config import Experiment, load
from nowait.results import project
from nowait.simulate import METHODS

A3PO_METHODS = ("sync", "recompute", "loglinear", "behave", "linear", "reuse")  # sync_colocated makes the same updates as sync
OPPO_METHODS = METHODS["oppo"]
EXPERIMENTS = {  # folder of notebooks: config: methods
    "a3po": {"a3po/setup1": A3PO_METHODS, "a3po/setup2": A3PO_METHODS},
    "oppo": {f"oppo/{task}": OPPO_METHODS for task in ("stackexchange_7b", "stackexchange_3b", "gsm8k_7b", "opencoder_3b")},
}
CELL_TIMEOUT = 3600  # seconds


def figures_dir() -> Path:
    """Where figures, their CSV files and the report lie: $NOWAIT_FIGURES, or figures/ of the project."""
    return Path(os.environ.get("NOWAIT_FIGURES") or project() / "figures").resolve()


def experiments(paper: str, scale: str) -> list[Experiment]:
    """The trainings that a paper's notebooks share; a folder without an entry in EXPERIMENTS has none."""
    return [load(config, scale, method=method) for config, methods in EXPERIMENTS.get(paper, {}).items() for method in methods]


def notebooks(paper: str = "all") -> dict[str, list[Path]]:
    """Notebooks by folder under notebooks/: of one folder, or of all. Raises ValueError that names the folders there are."""
    root = project() / "notebooks"
    found = {folder.name: sorted(folder.glob("*.ipynb")) for folder in sorted(root.glob("*")) if any(folder.glob("*.ipynb"))}
    if not found:
        raise ValueError(f"no notebooks in {root}: run this inside a source checkout of nowait")
    if paper == "all":
        return found
    if paper not in found:
        raise ValueError(f"no notebooks for paper {paper!r}; choose all or one of {', '.join(found)}")
    return {paper: found[paper]}


def reproduce(paper: str = "all", scale: str = "cpu", seeds: int = 1, *, use_wandb: bool = True) -> list[Path]:
    """Train, execute the notebooks and write report.md; returns the executed notebooks, under runs/notebooks/SCALE/, and the report.

    Runs use seeds 1 to `seeds`. Scale smoke writes its figures under the runs, never to figures/. Raises RunFailed where a run or a
    notebook fails; what was finished until then stays.
    """
    from nowait.analysis.report import report

    selected, numbers, outputs = notebooks(paper), list(range(1, seeds + 1)), []
    root = runs.root().resolve()
    figures = root / "figures-smoke" if scale == "smoke" else figures_dir()
    mirror = {} if use_wandb else {"WANDB_MODE": "disabled"}
    with patch.dict(os.environ, NOWAIT_RUNS=str(root), NOWAIT_FIGURES=str(figures), **mirror):  # for the kernels, which run in the project's folder
        for name, files in selected.items():
            trained = experiments(name, scale)
            runs.sweep(trained, numbers, use_wandb=use_wandb)
            hashes = [runs.run_hash(experiment, seed) for experiment in trained for seed in numbers]
            outputs += [_execute(file, scale, numbers, hashes) for file in files]
        report(figures)
    return [*outputs, figures / "report.md"]


def _execute(notebook: Path, scale: str, seeds: list[int], hashes: list[str]) -> Path:
    """Execute a notebook unless it is up to date; returns the executed copy, beside which a JSON file says what went in and came out."""
    output = runs.root() / "notebooks" / scale / notebook.parent.name / notebook.name
    record, label = output.with_suffix(".json"), f"{notebook.parent.name}/{notebook.name}"
    inputs = hashlib.sha256(json.dumps([notebook.read_text(), scale, seeds, hashes]).encode()).hexdigest()
    if output.is_file() and record.is_file() and _current(json.loads(record.read_text()), inputs):
        print(f"{label} is up to date", file=sys.stderr)
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    start = time.time_ns()
    _papermill(notebook, output, {"scale": scale, "seeds": seeds, "blocks": len(seeds), "interactive": False})
    written = [csv for csv in figures_dir().glob("*.csv") if csv.stat().st_mtime_ns >= start]
    runs.write(record, {"inputs": inputs, "data": {csv.name: _sha256(csv) for csv in written}})
    return output


def _current(record: dict, inputs: str) -> bool:
    files = {figures_dir() / name: digest for name, digest in record["data"].items()}
    return record["inputs"] == inputs and all(csv.is_file() and _sha256(csv) == digest for csv, digest in files.items())


def _papermill(notebook: Path, output: Path, parameters: dict) -> None:
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    known = papermill.inspect_notebook(str(notebook))  # papermill injects unknown ones with no more than a warning
    options = {"kernel_name": "python3", "cwd": str(project()), "execution_timeout": CELL_TIMEOUT}
    print(f"executing {notebook.parent.name}/{notebook.name}", file=sys.stderr)
    try:
        papermill.execute_notebook(str(notebook), str(output), {k: v for k, v in parameters.items() if k in known}, **options)
    except (papermill.PapermillExecutionError, CellTimeoutError, DeadKernelError) as error:
        cause = f": {error} (a kernel dies when it is killed or out of memory)"
        if isinstance(error, papermill.PapermillExecutionError):
            cause = f", In [{error.exec_count}]: {error.ename}: {error.evalue}"
        what = f"notebook {notebook}{cause}\nEverything up to there is in {output}"
        raise runs.RunFailed(f"{what}; run the same command again to continue") from error
    except KeyboardInterrupt:
        logging.getLogger("asyncio").disabled = True  # at exit it would print the traceback of a task that nbclient leaves behind
        raise


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
