"""Frozen linear layers: prepacked and plain agree."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spectune.engine.linear import Linear, can_prepack


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_linear_is_x_times_w_transposed_plus_bias() -> None:
    """A product by hand, over leading dimensions."""
    linear = Linear(torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 0.0]]), torch.tensor([0.5, 0.0, 1.0]))

    product = linear(torch.tensor([[[1.0, 1.0], [2.0, 0.0]]]))

    assert [[[3.5, -1.0, 4.0], [2.5, 0.0, 7.0]]] == product.tolist()


def test_linear_reports_shape_and_bytes() -> None:
    """Bytes are those of the weight, at its own width."""
    linear = Linear(random(6, 4, seed=0, dtype=torch.float16), prepack=False)

    assert (6, 4, 48) == (linear.out_features, linear.in_features, linear.num_bytes)


def test_float32_is_never_prepacked() -> None:
    """fp32 stays with F.linear, so exactness checks run on the plain path."""
    assert not can_prepack(torch.float32)


@pytest.mark.skipif(not can_prepack(torch.bfloat16), reason="this torch has no working oneDNN prepacking")
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("has_bias", [False, True], ids=["bare", "biased"])
def test_prepacked_bf16_agrees_with_plain(num_rows: int, has_bias: bool) -> None:
    """The private operator gives F.linear's product within bf16 rounding, for few and many rows."""
    weight = random(96, 64, seed=1, dtype=torch.bfloat16)
    bias = random(96, seed=2, dtype=torch.bfloat16) if has_bias else None
    x = random(2, num_rows, 64, seed=3, dtype=torch.bfloat16)

    product = Linear(weight, bias, prepack=True)(x)

    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert (2, num_rows, 96) == tuple(product.shape)
    assert torch.allclose(exact, product.double(), atol=0.1, rtol=0.02)
