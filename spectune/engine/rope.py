"""Rotary positions: tables of cosine and signed sine, applied to queries and keys together."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spectune.errors import CheckpointError


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """Inverse frequencies [head_dim/2] in float64, with `default`, `linear` or `llama3` scaling.

    Raises CheckpointError for a scaling type outside these three.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = 1.0 / theta**exponents
    kind = "default" if not scaling else str(scaling.get("rope_type", scaling.get("type", "default")))
    if kind == "default":
        return frequencies
    assert scaling is not None
    factor = float(scaling["factor"])
    if kind == "linear":
        return frequencies / factor
    if kind == "llama3":
        return _llama3(frequencies, factor, scaling)
    raise CheckpointError(
        f"rope_scaling type {kind!r} is not supported", hint="supported: default, linear, llama3"
    )


def _llama3(frequencies: Tensor, factor: float, scaling: dict[str, Any]) -> Tensor:
    """Llama-3.1's piecewise scaling: long waves are stretched, short ones kept, a ramp between."""
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    ramp = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - ramp) * frequencies / factor + ramp * frequencies


class Rope:
    """Tables for positions 0 .. max_len-1; grown on demand."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: dict[str, Any] | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.half = head_dim // 2
        self._frequencies = inverse_frequencies(head_dim, theta, scaling)
        self._device, self._dtype = device, dtype
        self._cos = self._sin = torch.empty(0)
        self._tables: tuple[Any, Any] | None = None

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine for positions [B, T], each [B, T, 1, head_dim]."""
        return self._cos[positions].unsqueeze(2), self._sin[positions].unsqueeze(2)

    @property
    def device_tables(self) -> tuple[Tensor, Tensor]:
        """The two tables [max_len, head_dim] that `at` reads, until longer ones replace them."""
        return self._cos, self._sin

    def tables(self) -> tuple[Any, Any]:
        """Cosine and signed sine [max_len, head_dim] as fp32 numpy arrays (values of the pass's dtype)."""
        if self._tables is None:
            self._tables = (self._cos.float().numpy(), self._sin.float().numpy())
        return self._tables

    def reserve(self, max_len: int) -> None:
        """Make the tables long enough for `max_len` positions."""
        if self._cos.shape[0] >= max_len:
            return
        angles = torch.outer(torch.arange(max_len, dtype=torch.float64), self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._tables = None
        self._cos = torch.cat([cos, cos], -1).to(self._device, self._dtype)
        self._sin = torch.cat([-sin, sin], -1).to(self._device, self._dtype)

    def rotate(self, heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """Rotate heads [B, T, n, head_dim] (half-split layout, as in Hugging Face Llama).

        [x1, x2] · cos + [x2, x1] · [-sin, sin].
        """
        return torch.addcmul(heads * cos, heads.roll(self.half, -1), signed_sin)
