"""A key-value cache with a slot per sequence, each at its own length. Handed to a Hugging Face backbone in place of its own cache."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GROUPED = "nowait_grouped"  # name of `grouped_attention` among the attention implementations


def needs_more(config: PretrainedConfig, capacity: int) -> str | None:
    """Why sequences of `capacity` tokens of this model cannot live in a `SlotCache`, or None if they can."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"full attention in every layer; this model has {', '.join(sorted(kinds))}"
    window = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    if window is not None and window < capacity:
        return f"full attention; this model's window of {window} is less than the capacity of {capacity} tokens"
    return None


class SlotCache:
    """Keys and values [slots, kv_heads, capacity + 1, head_dim] per layer.

    Before a forward pass, `at(rows, positions, span)` says where its keys go and how many positions it may see;
    attention reads the first `span` positions of those rows. The last position of each slot takes what is padding.
    """

    def __init__(self, config: PretrainedConfig, slots: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        if reason := needs_more(config, capacity):
            raise ValueError(f"a slot cache needs {reason}")
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.spare = capacity
        shape = (config.num_hidden_layers, slots, heads, capacity + 1, width)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))

    def at(self, rows: torch.Tensor | slice, positions: torch.Tensor, span: int) -> SlotCache:
        """rows [B] or a slice of slots, positions [B, T] of the tokens fed in (self.spare for padding)."""
        self._rows, self._span = rows, span
        (heads, places), device = self.keys.shape[2:4], self.keys.device
        slot = torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows
        self._targets = ((slot[:, None] * heads + torch.arange(heads, device=device))[..., None] * places + positions[:, None]).flatten()
        return self

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, kv_heads, T, head_dim] and return what attention reads, [B, kv_heads, span, head_dim]."""
        return self._store(self.keys[layer], keys), self._store(self.values[layer], values)

    def _store(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        held.view(-1, held.shape[-1]).index_copy_(0, self._targets, new.reshape(-1, held.shape[-1]))
        return held[self._rows, :, : self._span]

    def get_seq_length(self, *_) -> int:
        return 0  # positions and masks are always given

    def read(self, slots: np.ndarray, lengths: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `lengths` keys and values of some slots, one sequence after the other, [tokens, layers, kv_heads, head_dim]."""
        slot, position = self._places(slots, lengths)
        return self.keys[:, slot, :, position], self.values[:, slot, :, position]

    def write(self, slots: np.ndarray, lengths: np.ndarray, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Inverse of `read`, into these slots."""
        slot, position = self._places(slots, lengths)
        self.keys[:, slot, :, position], self.values[:, slot, :, position] = keys.to(self.keys), values.to(self.values)

    def copy(self, source: int | np.ndarray, target: int | np.ndarray, length: int) -> None:
        """Copy the first `length` positions of a slot, or of several, to another one each."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def _places(self, slots: np.ndarray, lengths: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and position of every token held."""
        position = np.concatenate([np.empty(0, np.int64), *map(np.arange, lengths)])
        return tuple(torch.as_tensor(x, device=self.keys.device) for x in (np.repeat(slots, lengths), position))


def grouped_attention(module, query, key, value, attention_mask, scaling, **kwargs) -> tuple[torch.Tensor, None]:
    """Decoding without copying keys and values once per query head: the heads that share a key head become its query positions.

    query [B, heads, 1, head_dim], key and value [B, kv_heads, span, head_dim], additive mask [B, 1, 1, span]. Longer queries are whole prefixes,
    padded at the end: causal, whatever the mask.
    """
    batch, heads, length, width = query.shape
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True, **kwargs)
    if odd := [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]:
        raise ValueError(f"the built-in sampler does not know attention with {', '.join(odd)}")
    query = query.view(batch, key.shape[1], -1, width) * scaling
    scores = torch.matmul(query, key.transpose(-1, -2)).float() + attention_mask
    out = torch.matmul(scores.softmax(-1).to(value.dtype), value)  # [B, kv_heads, heads / kv_heads, head_dim]
    return out.reshape(batch, 1, heads, width), None


AttentionInterface.register(GROUPED, grouped_attention)
