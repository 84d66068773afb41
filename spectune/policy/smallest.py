"""Decisions over batch sizes in, the table with the fewest edges within a stated loss out.

An edge costs: the engine switches there, and a load that crosses it often pays often. So a decision
may be replaced by its neighbour's where that loses less than was allowed. What is faster at a larger
batch size than at a smaller one stays so: nothing here makes a table monotone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spectune.policy.comparison import CellComparison
from spectune.policy.decide import POOLED_BASIS, pooled_margin
from spectune.policy.ranges import Choice
from spectune.records import Cell, Interval, SpecConfig, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What may run at a measured place; `value` is its speedup, 1 for off."""

    config: SpecConfig
    value: float
    speedup: Interval | None = None
    num_steps: int = 0
    break_even: float | None = None


def options_of(comparison: CellComparison) -> dict[SpecConfig, Option]:
    """Off, the chosen configuration, and every other that beats off by more than the noise."""
    off = SpecConfig.off()
    found = {off: Option(config=off, value=1.0)}
    for arm in comparison.arms:
        if arm.config.is_off or arm.status is not Status.OK or arm.speedup is None:
            continue
        if arm.speedup_basis == POOLED_BASIS:
            beats = arm.speedup.value > pooled_margin(arm)
        else:
            beats = arm.speedup.low is not None and arm.speedup.low > 1.0
        if beats or arm.config == comparison.decision.chosen:
            steps = 0 if arm.acceptance is None else arm.acceptance.num_steps
            tokens = comparison.break_even(arm)
            found[arm.config] = Option(
                config=arm.config,
                value=arm.speedup.value,
                speedup=arm.speedup,
                num_steps=steps,
                break_even=None if tokens is None else max(0.0, tokens - 1),
            )
    return found


def fewest_edges(
    chosen: Sequence[SpecConfig], options: Sequence[Mapping[SpecConfig, Option]], *, max_loss: float
) -> tuple[SpecConfig, ...]:
    """One configuration for each place, in their order: fewest changes, then the least time lost.

    A place allows its own choice and whatever reaches (1 - max_loss) of that choice's speedup; where off
    was decided nothing else: speculation has to win its place, not to be near.
    """
    best: dict[SpecConfig, tuple[int, float, tuple[SpecConfig, ...]]] = {}
    for index, (own, known) in enumerate(zip(chosen, options, strict=True)):
        needed = (1 - max_loss) * known[own].value
        allowed = [
            config
            for config, option in known.items()
            if config == own or (not own.is_off and option.value >= needed)
        ]
        step: dict[SpecConfig, tuple[int, float, tuple[SpecConfig, ...]]] = {}
        for config in allowed:
            lost = max(0.0, known[own].value / known[config].value - 1)
            paths = (
                (edges + (path[-1] != config), total + lost, (*path, config))
                for edges, total, path in best.values()
            )
            step[config] = min(paths, key=_cost) if index else (0, lost, (config,))
        best = step
    return min(best.values(), key=_cost)[2] if best else ()


def _cost(found: tuple[int, float, tuple[SpecConfig, ...]]) -> tuple[int, float, tuple[tuple[int, ...], ...]]:
    edges, lost, path = found
    return edges, round(lost, 12), tuple(config.size for config in path)


def shrink(
    row: Mapping[Cell, Choice], comparisons: Sequence[CellComparison], *, max_loss: float
) -> dict[Cell, Choice]:
    """The row with the fewest edges over the batch sizes of each context and temperature."""
    if max_loss <= 0:
        return dict(row)
    by_cell = {comparison.cell: comparison for comparison in comparisons}
    shrunk = dict(row)
    key = _conditions
    for _, group in itertools.groupby(sorted(row, key=lambda cell: (*key(cell), cell.batch_size)), key=key):
        cells = [cell for cell in group if cell in by_cell]
        options = [options_of(by_cell[cell]) for cell in cells]
        chosen = [row[cell].config for cell in cells]
        for cell, old, new, known in zip(
            cells, chosen, fewest_edges(chosen, options, max_loss=max_loss), options, strict=True
        ):
            if new != old:
                shrunk[cell] = _replaced(row[cell], known[new], known[old], max_loss)
    return shrunk


def _conditions(cell: Cell) -> tuple[float, int]:
    return cell.temperature, cell.context_tokens


def _replaced(choice: Choice, option: Option, best: Option, max_loss: float) -> Choice:
    source = (
        f"{choice.source}; {best.config.label} ({best.value:.2f}x) was the decision there, "
        f"{option.config.label} ({option.value:.2f}x) saves an edge within the allowed loss of {max_loss:.0%}"
    )
    return Choice(
        config=option.config,
        source=source,
        speedup=option.speedup,
        num_steps=option.num_steps,
        break_even=option.break_even,
    )
