"""No prompt is asked twice in a cell unless the user wants it: a repeated prompt finds warm caches."""

from __future__ import annotations

from dataclasses import replace

from spectune.errors import UsageError
from spectune.records import Cell
from spectune.tune.plan import SweepPlan


def without_repeats(plan: SweepPlan) -> SweepPlan:
    """The plan with fewer requests, and without the cells that the prompts cannot fill even so.

    A cell needs at least min_blocks batches; what is left out joins `pruned` with the numbers.
    UsageError where no cell is left.
    """
    available = len(plan.workload.prompts)
    starts = 1 if plan.has_boots else plan.repeats  # a start is repeated on the same prompts
    per_repeat = available // starts
    kept = [cell for cell in plan.cells if plan.min_blocks * _width(cell) <= per_repeat]
    left_out = [
        (cell.label, _reason(plan, cell, available, starts)) for cell in plan.cells if cell not in kept
    ]
    if not kept:
        raise UsageError(
            f"no cell can run without asking prompts again: {left_out[0][0]}: {left_out[0][1]}",
            hint="give more prompts, a smaller --batch-size or --min-blocks, or --repeat-prompts",
        )
    # whole batches only: the rest of a division would be filled up by asking prompts again
    most = min(per_repeat // _width(cell) * _width(cell) for cell in kept)
    return replace(
        plan,
        cells=tuple(kept),
        num_prompts=min(plan.num_prompts, most),
        pruned=(*plan.pruned, *left_out),
    )


def _width(cell: Cell) -> int:
    """Requests that are taken together: a batch, or one of those that arrive by the clock."""
    return 1 if cell.is_open_loop else cell.batch_size


def _reason(plan: SweepPlan, cell: Cell, available: int, starts: int) -> str:
    needed = plan.min_blocks * _width(cell) * starts
    return f"{needed} prompts are needed and {available} are there; --repeat-prompts asks them again"
