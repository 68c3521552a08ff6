"""Loading causal language models, and their forward pass split into backbone and head, so that logits exist only where they are needed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from nowait import assets
from nowait.batch import Weights


def model_folder(path: str) -> str:
    """Hub name or folder behind a model path."""
    return str(assets.path(path)) if path.startswith("asset:") else path


def load_policy(path: str, dtype: str = "float32", threads: int = 1) -> PreTrainedModel:
    """A causal LM from a hub name, a folder or `asset:<name>`, dropout off (eval mode).

    Raises ValueError when the model cannot be loaded, or does more to its logits than one linear head, which the chunked log-probs assume.
    """
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(model_folder(path), dtype=getattr(torch, dtype)).eval()
    except OSError as error:
        raise ValueError(f"model.path: cannot load {path!r}: {error}") from error
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        if not torch.equal(model(input_ids=ids).logits, model.get_output_embeddings()(hidden_states(model, ids))):
            raise ValueError(f"model.path: {path!r} transforms its logits after the output layer, which is not supported")
    return model


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
    """Copy a published snapshot into the model; the payload is a mapping of tensors or the path of a safetensors file."""
    payload = weights.payload
    tensors = payload if isinstance(payload, Mapping) else load_file(Path(payload))
    for name, parameter in model.named_parameters():  # shared parameters appear once
        parameter.copy_(tensors[name])
