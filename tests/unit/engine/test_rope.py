"""Rotary positions against complex numbers and worked frequencies."""

from __future__ import annotations

import cmath
import math
from typing import Any

import pytest
import torch

from spectune.engine.rope import Rope, inverse_frequencies
from spectune.errors import CheckpointError
from tests.support.toys import CPU

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make_rope(head_dim: int, theta: float = 10000.0, scaling: dict[str, Any] | None = None) -> Rope:
    return Rope(head_dim, theta, scaling, device=CPU, dtype=torch.float64)


def test_frequencies_are_powers_of_the_base() -> None:
    """Base 10000 over a head of 8 gives 1, 1/10, 1/100, 1/1000."""
    assert [1, 0.1, 0.01, 0.001] == pytest.approx(inverse_frequencies(8, 10000.0, None).tolist())


def test_linear_scaling_divides_every_frequency() -> None:
    """Positions are squeezed by the factor."""
    scaled = inverse_frequencies(8, 10000.0, {"rope_type": "linear", "factor": 4.0})

    assert [0.25, 0.025, 0.0025, 0.00025] == pytest.approx(scaled.tolist())


def test_llama3_scaling_keeps_short_and_stretches_long_waves() -> None:
    """Waves below 8192/4 tokens stay, above 8192/1 are divided by 8, a linear ramp lies between."""
    scaled = inverse_frequencies(128, 500000.0, LLAMA3).tolist()

    for index, value in enumerate(scaled):
        frequency = 500000.0 ** (-2 * index / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 2048:
            expected = frequency
        elif wavelength > 8192:
            expected = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert expected == pytest.approx(value)


def test_unknown_scaling_is_refused_by_name() -> None:
    """A type that is not supported never silently becomes the default."""
    with pytest.raises(CheckpointError, match="yarn"):
        inverse_frequencies(8, 10000.0, {"rope_type": "yarn", "factor": 2.0})


def test_rotate_is_a_complex_rotation_of_halves() -> None:
    """Element i and element i + d/2 form one complex number, turned by position times frequency."""
    rope = make_rope(8)
    rope.reserve(50)
    heads = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.tensor([[5, 41]])

    rotated = rope.rotate(heads, *rope.at(positions))

    for t, position in enumerate((5, 41)):
        for head in range(3):
            vector = heads[0, t, head].tolist()
            for i in range(4):
                turned = complex(vector[i], vector[i + 4]) * cmath.exp(1j * position * 10.0**-i)
                got = complex(rotated[0, t, head, i].item(), rotated[0, t, head, i + 4].item())
                assert abs(turned - got) < 1e-12


def test_rotated_products_depend_on_distance_only() -> None:
    """The product of a query and a key is the same at positions (3, 9) and (103, 109)."""
    rope = make_rope(16)
    rope.reserve(128)
    pair = torch.randn(1, 2, 1, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def product(first: int, second: int) -> float:
        rotated = rope.rotate(pair, *rope.at(torch.tensor([[first, second]])))
        return float(rotated[0, 0, 0] @ rotated[0, 1, 0])

    assert product(3, 9) == pytest.approx(product(103, 109), abs=1e-12)


def test_reserve_longer_leaves_earlier_positions_as_they_are() -> None:
    """Tables grow; what they said before stays."""
    rope = make_rope(8)
    rope.reserve(4)
    before = rope.at(torch.arange(4).unsqueeze(0))
    rope.reserve(100)
    after = rope.at(torch.arange(4).unsqueeze(0))

    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
