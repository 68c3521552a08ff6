"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) by peft, in all linear layers but the output layer.

Adapters are float32 whatever the model's dtype. What leaves the learner is merged, so that nothing else needs to know of them.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from nowait.workers.models import optional

ADAPTER = "default"  # peft's name for the only one


def add(model: PreTrainedModel, rank: int, alpha: int, seed: int) -> None:
    """Put adapters of `rank`, scaled by alpha / rank, into a model, in place; from now on only they are trained. They change nothing at first.

    Raises ValueError where peft is not installed.
    """
    peft = optional("peft", "peft", f"model.lora_rank={rank}")
    plan = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", bias="none", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # data-parallel ranks must begin alike
        peft.inject_adapter_in_model(plan, model)
    for adapter in (p for p in model.parameters() if p.requires_grad):
        adapter.data = adapter.data.float()
    model.eval()


@torch.no_grad()
def merged(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Weights of the adapted layers with their adapters added, under the names of the model without adapters."""
    layers = ((name, layer) for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight"))
    return {f"{name}.weight": (w := layer.get_base_layer().weight).float().add(layer.get_delta_weight(ADAPTER)).to(w.dtype) for name, layer in layers}


def whole(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """All weights of the model without adapters, merged."""
    plain = {name.replace(".base_layer", ""): weight for name, weight in model.state_dict().items() if ".lora_" not in name}
    return plain | merged(model)
