"""The decisions of a run in, one or two sentences for people out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spectune.policy import decide
from spectune.policy.comparison import CellComparison, Decision
from spectune.records import Cell

MANY_CELLS = 4
"""From here on a sentence names the span of the cells, not each one."""


def verdict_text(
    outcome: str,
    cells: Sequence[CellComparison],
    categories: Sequence[CellComparison],
) -> str:
    """What to do and by how much, the mix named that the numbers are over."""
    decided = [cell for cell in cells if cell.decision.verdict != decide.NO_DATA]
    places = place_names([cell.cell for cell in cells])
    if outcome == decide.NO_DATA or not decided:
        reasons = dict.fromkeys(cell.decision.reason for cell in cells)
        return f"No data to decide on: {'; '.join(reasons) or 'no point was measured'}."
    sentences = (
        f"{_first_sentence(outcome, decided, places)}.",
        _mix_text(categories, places),
        _categories_text(decide.opposed_categories(decided, categories), places),
    )
    return " ".join(sentence for sentence in sentences if sentence)


def place_names(cells: Sequence[Cell]) -> dict[Cell, str]:
    """Cells by batch size and whatever else differs between them: `batch 4, T=0.7`."""
    contexts = {cell.context_tokens for cell in cells}
    temperatures = {cell.temperature for cell in cells}
    return {
        cell: f"batch {cell.batch_size}"
        + (f", context {cell.context_tokens}" if len(contexts) > 1 else "")
        + (f", T={cell.temperature:g}" if len(temperatures) > 1 else "")
        for cell in cells
    }


def _first_sentence(outcome: str, cells: Sequence[CellComparison], places: Mapping[Cell, str]) -> str:
    verdicts = {cell.decision.verdict for cell in cells}
    if outcome == decide.DO_NOT and len(cells) == 1:
        return f"Do not speculate at {places[cells[0].cell]}: {cells[0].decision.reason}"
    lead = {
        decide.SPECULATE: "Speculate",
        decide.DO_NOT: "Do not speculate",
        decide.LOAD: "It depends on the load",
        decide.WORKLOAD: "It depends on the workload",
    }[outcome]
    if outcome == decide.WORKLOAD and len(verdicts) == 1:
        lead += "; over all categories"
    return f"{lead}: {'; '.join(_cell_text(cell, places[cell.cell]) for cell in cells)}"


def _cell_text(cell: CellComparison, place: str) -> str:
    decision = cell.decision
    if decision.verdict == "on" and decision.speedup is not None:
        return f"{decision.chosen.label} at {place} runs at {decide.ratio_text(decision.speedup)}"
    return f"off at {place}, {_loser(decision)}"


def _loser(decision: Decision) -> str:
    if decision.runner_up is None or decision.runner_up_reason is None:
        return decision.reason
    return f"best candidate {decision.runner_up.label} runs at {decision.runner_up_reason}"


def _categories_text(
    opposed: Sequence[tuple[CellComparison, CellComparison]], places: Mapping[Cell, str]
) -> str:
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
        f"At {places[cell]} categories disagree: speculation gains in {', '.join(gains.values())} and loses in "
        f"{', '.join(losses.values())}."
    )


def _mix_text(categories: Sequence[CellComparison], places: Mapping[Cell, str]) -> str:
    """What the numbers are pooled over: requests by category where all cells ran the same, else by cell."""
    counts: dict[Cell, dict[str, int]] = {}
    for category in categories:
        counts.setdefault(category.cell, {})[category.scope] = max(arm.num_requests for arm in category.arms)
    names = sorted({name for row in counts.values() for name in row})
    if len(names) < 2:
        return ""
    first = next(iter(counts.values()))
    if all(row == first for row in counts.values()):
        mix = ", ".join(f"{name} {first[name]}" for name in names)
        return f"Pooled over requests of {mix}."
    totals = {places.get(cell, cell.label): sum(row.values()) for cell, row in counts.items()}
    if len(totals) > MANY_CELLS:
        sizes = f"{min(totals.values())} to {max(totals.values())} in a cell"
    else:
        sizes = ", ".join(f"{total} at {place}" for place, total in totals.items())
    return f"Pooled over {', '.join(names)}; requests: {sizes}."
