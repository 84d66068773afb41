"""The decisions of a run in, one or two sentences for people out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectune.policy import decide
from spectune.policy.comparison import CellComparison, Decision


def verdict_text(
    outcome: str,
    cells: Sequence[CellComparison],
    categories: Sequence[CellComparison],
    workload: Mapping[str, Any] | None = None,
) -> str:
    """What to do and by how much, the mix named that the numbers are over."""
    decided = [cell for cell in cells if cell.decision.verdict != decide.NO_DATA]
    if outcome == decide.NO_DATA or not decided:
        reasons = dict.fromkeys(cell.decision.reason for cell in cells)
        return f"No data to decide on: {'; '.join(reasons) or 'no point was measured'}."
    first = {
        decide.SPECULATE: _speculate,
        decide.DO_NOT: _do_not,
        decide.LOAD: _depends,
        decide.WORKLOAD: _depends,
    }[outcome](decided)
    second = _categories_text(decide.opposed_categories(decided, categories))
    mix = _mix_text(workload or {})
    return " ".join(part for part in (f"{first}{mix}.", second) if part)


def _speculate(cells: Sequence[CellComparison]) -> str:
    if len(cells) == 1:
        return f"Speculate with {_choice(cells[0])}"
    return f"Speculate: {'; '.join(_choice(cell) for cell in cells)}"


def _do_not(cells: Sequence[CellComparison]) -> str:
    if len(cells) == 1:
        return f"Do not speculate at {cells[0].cell.label}: {cells[0].decision.reason}"
    parts = (f"{cell.cell.label}: {_loser(cell.decision)}" for cell in cells)
    return f"Do not speculate: {'; '.join(parts)}"


def _depends(cells: Sequence[CellComparison]) -> str:
    parts = [
        _choice(cell) if cell.decision.verdict == "on" else f"off at {cell.cell.label}" + _why_off(cell)
        for cell in cells
    ]
    axes = ("batch_size", "context_tokens", "temperature")
    words = ("batch size", "context", "temperature")
    varied = [
        word
        for axis, word in zip(axes, words, strict=True)
        if len({getattr(cell.cell, axis) for cell in cells}) > 1
    ]
    verdicts = {cell.decision.verdict for cell in cells}
    lead = (
        f"It depends on the {' and '.join(varied)}" if varied and len(verdicts) > 1 else "Over all categories"
    )
    return f"{lead}: {'; '.join(parts)}"


def _why_off(cell: CellComparison) -> str:
    loser = _loser(cell.decision)
    return f" ({loser})" if loser else ""


def _loser(decision: Decision) -> str:
    if decision.runner_up is None or decision.runner_up_reason is None:
        return decision.reason
    return f"best candidate {decision.runner_up.label} {decision.runner_up_reason}"


def _choice(cell: CellComparison) -> str:
    decision = cell.decision
    assert decision.speedup is not None, cell.cell.label
    return f"{decision.chosen.label} at {cell.cell.label}, {decide.ratio_text(decision.speedup)}"


def _categories_text(opposed: Sequence[tuple[CellComparison, CellComparison]]) -> str:
    """Which categories gain and which lose, and where."""
    if not opposed:
        return ""
    cell = opposed[0][0].cell
    gains: dict[str, str] = {}
    losses: dict[str, str] = {}
    for gain, loss in opposed:
        if gain.cell == cell:
            if gain.decision.speedup is not None:
                gains[gain.scope] = f"{gain.scope} {decide.ratio_text(gain.decision.speedup)}"
            losses[loss.scope] = f"{loss.scope} ({_loser(loss.decision)})"
    return (
        f"At {cell.label} categories disagree: speculation gains in {', '.join(gains.values())} and loses in "
        f"{', '.join(losses.values())}."
    )


def _mix_text(workload: Mapping[str, Any]) -> str:
    counts: Mapping[str, int] = workload.get("categories") or {}
    if len(counts) < 2:
        return ""
    mix = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f" (pooled over the mix {mix})"
