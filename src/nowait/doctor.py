"""What `nowait doctor` looks at: versions, threads, devices, and what a run, a notebook or the tests would miss."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from nowait import __version__, runs

DISTRIBUTION = "nowait-rl"
INSTALL = "pip install -e '.[dev]' -c constraints.txt"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"  # in a source checkout


class Check(NamedTuple):
    """One line of the examination; `remedy` is None where nothing is missing."""

    name: str
    text: str
    remedy: str | None = None


def checks() -> Iterator[Check]:
    """Examine the installation; reads only."""
    yield Check("nowait", f"{__version__}, commit {runs.commit()}, code {runs.code_digest()}")
    yield Check("python", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    yield from _tried("packages", _packages, INSTALL)
    yield from _extras()
    threads = os.environ.get("OMP_NUM_THREADS", "not set (workers have the threads of their config, everything else takes all CPUs)")
    yield Check("threads", f"{os.cpu_count()} CPUs, OMP_NUM_THREADS {threads}")
    yield from _tried("devices", _devices, INSTALL)
    yield from _tried("assets", _assets, "restore the files of src/nowait/data, or run `nowait assets build`")
    yield from _tried("notebooks", _kernel, INSTALL)
    yield _folder()
    yield Check("wandb", f"WANDB_MODE {os.environ.get('WANDB_MODE', 'not set: online after `wandb login`, else offline')}; --no-wandb: off")


def _tried(name: str, look: Callable[[], tuple[str, str | None]], remedy: str) -> Iterator[Check]:
    """What a look that imports something found, or why it failed."""
    try:
        yield Check(name, *look())
    except (ImportError, ValueError) as error:
        yield Check(name, str(error), remedy)


def _packages() -> tuple[str, str | None]:
    """Installed versions of what the package requires; a difference from constraints.txt is said and is no fault."""
    required = [re.match(r"[\w.-]+", line).group() for line in metadata.requires(DISTRIBUTION) or [] if "extra ==" not in line]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)) if CONSTRAINTS.is_file() else {}
    installed = {name: found.version for name in required for found in [*metadata.distributions(name=name)][:1]}
    missing = [name for name in required if name not in installed]
    other = {name: f" (constraints.txt: {pinned[name]})" for name in installed.keys() & pinned if installed[name].split("+")[0] != pinned[name]}
    text = ", ".join([*(f"{name} {version}{other.get(name, '')}" for name, version in installed.items()), *(f"no {name}" for name in missing)])
    return text, f"install {', '.join(missing)}: {INSTALL}" if missing else None


def _extras() -> Iterator[Check]:
    """What an optional part of the package needs; that some of it is missing is no fault."""
    extras: dict[str, list[str]] = {}
    with suppress(metadata.PackageNotFoundError):  # the packages above say so
        for line in metadata.requires(DISTRIBUTION) or []:
            if found := re.match(r"([\w.-]+).*extra == .([\w-]+)", line):
                extras.setdefault(found[2], []).append(found[1])
    for extra, names in extras.items():
        missing = [name for name in names if not any(metadata.distributions(name=name))]
        how = f"optional; no {', '.join(missing)}: pip install '{DISTRIBUTION}[{extra}]'"
        yield Check(f"extra {extra}", how if missing else "installed")


def _devices() -> tuple[str, None]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join(gpus) or "CPU only, which is what the scales cpu and smoke use", None


def _assets() -> tuple[str, str | None]:
    from nowait import assets

    names = assets.verify()
    missing = sorted(set(assets.RECIPES) - set(names))
    return ", ".join(names) or "none", f"`nowait assets build {' '.join(missing)}`" if missing else None


def _kernel() -> tuple[str, str | None]:
    from jupyter_client.kernelspec import KernelSpecManager

    found = KernelSpecManager().find_kernel_specs()
    remedy = None if "python3" in found else f"{sys.executable} -m ipykernel install --sys-prefix"
    return f"kernel python3 {found.get('python3', 'not found')}", remedy


def _folder() -> Check:
    root = runs.root()
    there = next(folder for folder in (root, *root.resolve().parents) if folder.is_dir())
    text = f"{root}, {shutil.disk_usage(there).free / 1e9:.0f} GB free"
    if root.exists() and not root.is_dir():
        return Check("runs", text, f"{root} is not a folder: set NOWAIT_RUNS to one")
    return Check("runs", text, None if os.access(there, os.W_OK) else f"{there} cannot be written: set NOWAIT_RUNS to another folder")
