"""Loading causal language models, and their forward pass split into backbone and head, so that logits exist only where they are needed."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from nowait import assets
from nowait.batch import Weights

OFFLINE = "Give a folder with a checkpoint; or, for a hub name, run `hf download NAME` once where the hub can be reached and set HF_HUB_OFFLINE=1"


def model_folder(path: str) -> str:
    """Hub name or folder behind a model path: `asset:<name>` ships with the package, `gguf:<file>` is unpacked into a folder."""
    kind, _, rest = path.partition(":")
    if kind == "gguf":
        from nowait.workers.gguf import unpacked

        return str(unpacked(rest))
    return str(assets.path(path)) if kind == "asset" else path


@contextmanager
def loading(key: str, path: str) -> Iterator[None]:
    """A block that loads `path`, the value of the setting `key`: what the libraries say of a failure becomes a ValueError with a remedy."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{key}: cannot load {path!r}: {error}" + ("" if Path(path).is_dir() else f"\n{OFFLINE}")) from error


def optional(module: str, extra: str, purpose: str) -> ModuleType:
    """A module that an extra of this package brings. Raises ValueError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{purpose} needs {module}, which is missing: pip install -e '.[{extra}]' -c constraints.txt") from error


def load_model(kind: type, key: str, path: str, dtype: str) -> PreTrainedModel:
    """A model by one of transformers' Auto classes, dropout off (eval mode); `path` is the value of the setting `key`.

    Raises ValueError when it cannot be loaded, or lacks weights, which would be random.
    """
    logging.disable_progress_bar()
    with loading(key, path):
        model, found = kind.from_pretrained(model_folder(path), dtype=getattr(torch, dtype), output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{key}: {path!r} lacks {len(missing)} trained weights, first {missing[0]}: take a complete checkpoint")
    return model.eval()


def load_policy(path: str, dtype: str = "float32", threads: int = 1, device: str = "cpu") -> PreTrainedModel:
    """A causal LM from a hub name, a folder, `asset:<name>` or `gguf:<file>`.

    Raises ValueError as `load_model`, and for a model that does more to its logits than one linear head, which the chunked log-probs assume.
    """
    torch.set_num_threads(threads)
    model = load_model(AutoModelForCausalLM, "model.path", path, dtype)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        if not torch.equal(model(input_ids=ids).logits, model.get_output_embeddings()(hidden_states(model, ids))):
            raise ValueError(f"model.path: {path!r} transforms its logits after the output layer, which is not supported")
    return model.to(device)


def on(device: torch.device | str, values) -> torch.Tensor:
    """An array or a list as a tensor on a device; on the CPU an array shares its memory."""
    return torch.as_tensor(values).to(device)


def hidden_states(model: PreTrainedModel, input_ids, attention_mask=None, position_ids=None, cache=None) -> torch.Tensor:
    """Last hidden states [B, T, hidden]; attention_mask is None (causal), or [B, 1, T, keys]: boolean, or added to the scores."""
    kwargs = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
    if cache is not None:
        kwargs[_cache_argument(type(model.base_model))] = cache
    return model.base_model(input_ids=input_ids, **kwargs).last_hidden_state


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Make each layer keep its input only and run again in the backward pass. Hugging Face's own way needs training mode, and with it dropout."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"model.gradient_checkpointing: {type(model).__name__} has no layers that support it; set false")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _cache_argument(backbone: type) -> str:
    """transformers 5.24 renamed past_key_values to cache."""
    return "cache" if "cache" in inspect.signature(backbone.forward).parameters else "past_key_values"


def eos_ids(model: PreTrainedModel) -> list[int]:
    """End-of-sequence token ids of a model; at least one."""
    for config in (model.generation_config, model.config):
        if config is not None and config.eos_token_id is not None:
            ids = config.eos_token_id
            return list(ids) if isinstance(ids, list | tuple) else [ids]
    raise ValueError("the model names no eos_token_id in config.json or generation_config.json, so responses could not end")


@torch.no_grad()
def load_weights(model: PreTrainedModel, weights: Weights) -> None:
    """Copy a published snapshot into the model: all weights, or those that training changes, as a mapping of tensors or a safetensors file's path."""
    payload = weights.payload
    parameters = dict(model.named_parameters())  # shared parameters appear once
    for name, tensor in (payload if isinstance(payload, Mapping) else load_file(Path(payload))).items():
        parameters[name].copy_(tensor)
