"""What two runs tell beyond their rows."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.gate.compare import Row, quantization_notes
from spectune.records import Cell, SpecConfig

CELL = Cell(batch_size=1, context_tokens=0, temperature=0.0)


def row(a: float, b: float, metric: str = "acceptance length", scope: str = "all") -> Row:
    return Row(
        config=SpecConfig.chain("eagle3", 3), cell=CELL, scope=scope, metric=metric, a=a, b=b, ratio=None,
        p_value=None, detectable=None, basis="test",
    )  # fmt: skip


def mark(**settings: Any) -> dict[str, Any]:
    return {"dtype": "bfloat16", "settings": settings}


@pytest.mark.parametrize(
    ("after", "is_told"), [(1.00, True), (1.39, True), (1.41, False)], ids=["all of it", "31%", "29%"]
)
def test_quantised_pair_that_lost_its_acceptance_is_named(after: float, *, is_told: bool) -> None:
    """2.0 falls below 1.4 where the head became fp8: more than 30% is named with the change."""
    notes = quantization_notes(
        mark(draft_quantization="none"), mark(draft_quantization="fp8"), [row(2.0, after)]
    )

    assert is_told == bool(notes)
    if is_told:
        assert f"acceptance length 2.00 -> {after:.2f} while draft_quantization none -> fp8" in notes[0]


def test_loss_without_another_number_format_has_another_cause() -> None:
    """Nothing is blamed on quantisation that did not change, nor read from rows of time or of a category."""
    same, other = mark(draft_quantization="none"), mark(draft_quantization="fp8")

    assert quantization_notes(same, same, [row(2.0, 1.0)]) == []
    assert (
        quantization_notes(same, other, [row(2.0, 1.0, "time per token"), row(2.0, 1.0, scope="chat")]) == []
    )
