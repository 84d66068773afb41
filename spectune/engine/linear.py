"""Matrix products with frozen weights: prepacked by oneDNN where that is faster, plain elsewhere.

The prepacking operators are private to torch, so they are probed once with real numbers; whatever
is missing or wrong falls back to `F.linear`, which stays the reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Matmul = Callable[[Tensor], Tensor]


@functools.cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's prepacked linear exists here and agrees with `F.linear` for this dtype."""
    if dtype is not torch.bfloat16:
        return False
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(64, 32, generator=generator).to(dtype)
        rows = torch.randn(3, 32, generator=generator).to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
        product = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
        return torch.allclose(product.float(), F.linear(rows, weight).float(), atol=0.05, rtol=0.02)
    except (AttributeError, RuntimeError):
        return False


class Linear:
    """y = x Wᵀ + b with frozen W [out, in]; x is [..., in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, prepack: bool | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.num_bytes = weight.numel() * weight.element_size()
        wants = can_prepack(weight.dtype) if prepack is None else prepack
        self._packed: Tensor | None = None
        self._weight: Tensor | None = weight
        if wants and weight.device.type == "cpu":
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
            self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return product
        assert self._weight is not None
        return F.linear(x, self._weight, self.bias)
