"""A key-value cache with a slot per sequence, each at its own length. Handed to a Hugging Face backbone in place of its own cache."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig


class SlotCache:
    """Keys and values [slots, kv_heads, capacity, head_dim] per layer.

    Before a forward pass, `at(rows, positions, span)` says where its keys go and how many positions it may see;
    attention reads the first `span` positions of those rows. The last position of each slot takes what is padding.
    """

    def __init__(self, config: PretrainedConfig, slots: int, capacity: int, dtype: torch.dtype) -> None:
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"}:
            raise ValueError(f"the built-in sampler needs full attention in every layer; this model has {', '.join(sorted(kinds))}")
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.spare = capacity
        shape = (config.num_hidden_layers, slots, heads, capacity + 1, width)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def at(self, rows: torch.Tensor | slice, positions: torch.Tensor, span: int) -> SlotCache:
        """rows [B] or a slice of slots, positions [B, T] of the tokens fed in (self.spare for padding)."""
        self._rows, self._positions, self._span = rows, positions, span
        index = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        self._index = index[:, None]
        return self

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_, **__) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, kv_heads, T, head_dim] and return what attention reads, [B, kv_heads, span, head_dim]."""
        self.keys[layer][self._index, :, self._positions] = keys.transpose(1, 2)
        self.values[layer][self._index, :, self._positions] = values.transpose(1, 2)
        return self.keys[layer][self._rows, :, : self._span], self.values[layer][self._rows, :, : self._span]

    def get_seq_length(self, *_) -> int:
        return 0  # positions and masks are always given

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one sequence's first `length` positions to another slot."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]
