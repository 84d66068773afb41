"""Static key-value storage with one length per row; speculative entries lie past the length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from spectune.engine.uploads import on_device


class Cache(Protocol):
    """What the rounds know of a cache; its layout is the business of the passes that read it."""

    max_len: int
    num_slots: int

    @property
    def bytes_per_token(self) -> int: ...

    def move(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None: ...


class KVCache:
    """Keys and values of all layers: [layers, 2, slots, kv_heads, max_len, head_dim].

    A head's columns lie together, which is what attention kernels read fastest. Entries at or past
    a row's length are scratch: a pass may write there, and only the owner of the lengths makes them
    part of the text.
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
        self.max_len, self.num_slots = max_len, num_slots
        self.data = torch.zeros(
            num_layers, 2, num_slots, num_kv_heads, max_len, head_dim, device=device, dtype=dtype
        )
        self._rows = self.data.view(num_layers, -1, head_dim)
        # first column of every (key or value, kv head) of slot 0, in the order of `write`
        heads = torch.arange(num_kv_heads, device=device)
        sides = torch.arange(2, device=device).unsqueeze(1) * num_slots
        self._bases = (sides * num_kv_heads + heads) * max_len  # [2, kv_heads]
        self._slot_stride = num_kv_heads * max_len

    @property
    def bytes_per_token(self) -> int:
        layers, sides, _, heads, _, head_dim = self.data.shape
        return layers * sides * heads * head_dim * self.data.element_size()

    def flat(self, slots: Tensor, columns: Tensor) -> Tensor:
        """Row numbers [B·T·2·kv_heads] of columns [B, T] in the slots [B]."""
        starts = slots.unsqueeze(1) * self._slot_stride + columns  # [B, T]
        return (starts.view(*columns.shape, 1, 1) + self._bases).flatten()

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store keys_values [B, T, 2, kv_heads, head_dim] at the flat rows."""
        self._rows[layer].index_copy_(0, rows, keys_values.reshape(len(rows), -1))

    def read(self, layer: int, slots: SlotView, num_columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, S, head_dim] of the first `num_columns` columns."""
        data = self.data[layer, :, :, :, :num_columns]
        if slots.span is not None:
            data = data[:, slots.span[0] : slots.span[1]]
        else:
            data = data.index_select(1, slots.index)
        return data[0], data[1]

    def move(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy columns sources [B, M] to targets [B, M] in every layer (accepted tree nodes)."""
        rows = self._rows[:, self.flat(slots, sources)]
        self._rows[:, self.flat(slots, targets)] = rows


class SlotView:
    """The slots of one pass as an index, and as a span where they are contiguous (no copy)."""

    def __init__(self, slots: Sequence[int], device: torch.device) -> None:
        self.slots = list(slots)
        self.index = on_device(self.slots, device)
        first = self.slots[0]
        is_span = self.slots == list(range(first, first + len(self.slots)))
        self.span = (first, first + len(self.slots)) if is_span else None

    def __len__(self) -> int:
        return len(self.slots)
