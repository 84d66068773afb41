"""Weights and the key-value cache in the layout that the tiles read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectune.engine.cpu.attention import move_columns
from spectune.engine.cpu.tiles import BLOCK, aligned_zeros, pack, pack_int8

Array = np.ndarray[Any, Any]


def array_of(tensor: Tensor) -> Array:
    """The tensor's memory as numpy; bf16 shows as uint16."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.numpy()


class PackedWeight:
    """One weight [out, in] with its bias; `address` [3] are those of values, bias and scale (0: none)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, quantize: bool = False) -> None:
        self.scale: Tensor | None = None
        if quantize:
            self.packed, self.scale = pack_int8(weight)
            self.num_steps = weight.shape[1]
        else:
            self.packed = pack(weight)
            self.num_steps = self.packed.shape[1]
        self.width = weight.shape[0]
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = torch.zeros(self.packed.shape[0] * BLOCK)
            self.bias[: self.width] = bias.float()
        parts = (self.packed, self.bias, self.scale)
        self.row = [0 if part is None else part.data_ptr() for part in parts]
        self.address = np.array(self.row, dtype=np.int64)
        self.num_bytes = weight.numel() * self.packed.element_size()


class PackedCache:
    """Keys and values of all layers, packed: [layers, 2, slots, key heads, columns · d].

    The same nouns as the plain cache: entries at or past a row's length are scratch.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_slots, self.dim = num_slots, head_dim
        self.max_len = -(-max_len // BLOCK) * BLOCK
        self.padded_dim = -(-head_dim // BLOCK) * BLOCK
        shape = (num_layers, 2, num_slots, num_kv_heads, self.max_len * self.padded_dim)
        self.data = aligned_zeros(shape, dtype)
        self.array = array_of(self.data)

    @property
    def bytes_per_token(self) -> int:
        layers, sides, _, heads, _ = self.data.shape
        return layers * sides * heads * self.padded_dim * self.data.element_size()

    def move(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy columns sources [B, M] to targets [B, M] in every layer (accepted tree nodes)."""
        move_columns(
            self.array,
            slots.numpy(),
            sources.contiguous().numpy(),
            targets.contiguous().numpy(),
            self.padded_dim,
        )
