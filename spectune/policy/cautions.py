"""A run's comparisons in, the doubts a reader must know out."""

from __future__ import annotations

from collections.abc import Sequence

from spectune.policy.comparison import ArmSummary, CellComparison
from spectune.policy.decide import POOLED_BASIS, is_clear_loss
from spectune.records import Status

INEFFECTIVE_LENGTH = 1.05
RESIDUAL_LIMIT = 0.10


def run_cautions(
    cells: Sequence[CellComparison],
    categories: Sequence[CellComparison],
    *,
    is_simulated: bool,
    num_missing: int,
    num_points: int,
    notes: Sequence[str],
) -> tuple[str, ...]:
    """One sentence a doubt, the most damaging first."""
    found: list[str] = []
    if is_simulated:
        found.append("simulated run: every number follows from declared costs, nothing was measured")
    if num_missing:
        found.append(f"{num_missing} of {num_points} points are not finished: resume the run")
    found += notes
    for cell in cells:
        for arm in cell.arms:
            found += [f"{arm.config.label} at {cell.cell.label}: {text}" for text in _arm_cautions(arm)]
    found += _losing_categories(cells, categories)
    if any(arm.speedup_basis == POOLED_BASIS for category in categories for arm in category.arms):
        found.append(
            "categories without blocks of their own show the pooled round time over their own acceptance "
            "length: no interval"
        )
    return tuple(dict.fromkeys(found))


def _arm_cautions(arm: ArmSummary) -> list[str]:
    found = list(arm.cautions)
    if arm.status is not Status.OK:
        return [*found, f"{arm.status}: {arm.reason}"]
    length = None if arm.acceptance is None else arm.acceptance.acceptance_length
    if not arm.config.is_off and arm.acceptance is not None and length is None:
        found.append(f"acceptance length unknown: {arm.acceptance.reason}")
    if arm.config.method == "eagle3" and length is not None and length <= INEFFECTIVE_LENGTH:
        found.append(
            f"the draft is ineffective, acceptance length {length:.2f}: does the head fit the target?"
        )
    if arm.speedup is not None and arm.speedup.low is None:
        found.append(f"one block only, so the speedup of {arm.speedup.value:.2f}x has no interval")
    residual = None if arm.prediction is None else arm.prediction.residual_fraction
    if residual is not None and abs(residual) > RESIDUAL_LIMIT:
        found.append(f"measured time per token differs from the predicted one by {residual:+.0%}")
    return found


def _losing_categories(cells: Sequence[CellComparison], categories: Sequence[CellComparison]) -> list[str]:
    """Categories that the configuration chosen over all of them slows down."""
    found = []
    chosen = {cell.cell: cell.decision for cell in cells if cell.decision.verdict == "on"}
    for category in categories:
        decision = chosen.get(category.cell)
        if decision is None:
            continue
        for arm in category.arms:
            if arm.config == decision.chosen and is_clear_loss(arm) and arm.speedup is not None:
                found.append(
                    f"{decision.chosen.label}, chosen at {category.cell.label}, slows {category.scope} down to "
                    f"{arm.speedup.value:.2f}x"
                )
    return found
