"""Static key-value storage with one length per row; speculative entries lie past the length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers: [layers, slots, max_len, 2, kv_heads, head_dim].

    Entries at or past `lengths[slot]` are scratch: a pass may write there, and only `advance`
    makes them part of the text.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.max_len = max_len
        self.num_slots = num_slots
        self.width = 2 * num_kv_heads * head_dim
        self.data = torch.zeros(
            num_layers, num_slots, max_len, 2, num_kv_heads, head_dim, device=device, dtype=dtype
        )
        self._rows = self.data.view(num_layers, num_slots * max_len, self.width)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)

    @property
    def bytes_per_token(self) -> int:
        return self.data.shape[0] * self.width * self.data.element_size()

    def flat(self, slots: Tensor, columns: Tensor) -> Tensor:
        """Row numbers [B·T] of columns [B, T] in the slots [B]."""
        return (slots.unsqueeze(1) * self.max_len + columns).flatten()

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store keys_values [B, T, 2, kv_heads, head_dim] at the flat rows [B·T]."""
        self._rows[layer].index_copy_(0, rows, keys_values.reshape(-1, self.width))

    def read(self, layer: int, slots: SlotView, num_columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, S, head_dim] of the first `num_columns` columns."""
        data = self.data[layer]
        if slots.span is not None:
            block = data[slots.span[0] : slots.span[1], :num_columns]
        else:
            block = data[:, :num_columns].index_select(0, slots.index)
        block = block.permute(2, 0, 3, 1, 4)  # [2, B, kv_heads, S, head_dim]
        return block[0], block[1]

    def move(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy columns sources [B, M] to targets [B, M] in every layer (accepted tree nodes)."""
        rows = self._rows[:, self.flat(slots, sources)]
        self._rows[:, self.flat(slots, targets)] = rows


class SlotView:
    """The slots of one pass as an index, and as a span where they are contiguous (no copy)."""

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        self.slots = list(slots)
        self.index = torch.tensor(self.slots, dtype=torch.int64, device=device)
        first = self.slots[0]
        is_span = self.slots == list(range(first, first + len(self.slots)))
        self.span = (first, first + len(self.slots)) if is_span else None

    def __len__(self) -> int:
        return len(self.slots)
