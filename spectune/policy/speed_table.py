"""A run's measured speeds in, speed at any batch size, configuration and category out."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spectune.errors import UsageError
from spectune.policy.comparison import CellComparison, RunSummary
from spectune.records import SpecConfig, Status

Curve = Mapping[int, float]
"""A value by measured batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedTable:
    """Measured speeds of one context and temperature.

    `plain_s` is the time per token of a sequence without speculation by batch size; `speedups` are by
    configuration and category, None for all categories together.
    """

    plain_s: Curve
    speedups: Mapping[tuple[SpecConfig, str | None], Curve]
    output_tokens: Mapping[str, float]  # mean length of an answer by category
    context_tokens: int
    temperature: float

    @property
    def largest(self) -> int:
        """Largest batch size at which plain decoding was measured."""
        return max(self.plain_s)

    @property
    def configs(self) -> tuple[SpecConfig, ...]:
        """Off and everything that was measured."""
        return tuple(dict.fromkeys((SpecConfig.off(), *(config for config, _ in self.speedups))))

    @property
    def categories(self) -> frozenset[str]:
        """Categories that were measured; empty for runs that tell none."""
        return frozenset((*self.output_tokens, *(name for _, name in self.speedups if name is not None)))

    def token_s(self, config: SpecConfig, batch_size: int, category: str) -> float:
        """Seconds per token of a sequence; between measured batch sizes linear in them."""
        plain = interpolate(self.plain_s, batch_size)
        return plain / self.speedup(config, batch_size, category)

    def speedup(self, config: SpecConfig, batch_size: int, category: str) -> float:
        """Over off at the same batch size; a category that was not measured is like all together, and a
        configuration that was not measured anywhere near is as slow as where it was."""
        if config.is_off:
            return 1.0
        own = self.speedups.get((config, category)) or {}
        whole = self.speedups.get((config, None)) or {}
        curve = {**whole, **own}
        if not curve:
            raise UsageError(f"{config.label} was not measured in the run that is simulated")
        return math.exp(interpolate({size: math.log(value) for size, value in curve.items()}, batch_size))

    def mean_output_tokens(self, category: str) -> float | None:
        """Mean answer of a category; of all where it is not known; None for a run without requests."""
        known = list(self.output_tokens.values())
        return self.output_tokens.get(category, sum(known) / len(known) if known else None)


def interpolate(curve: Curve, batch_size: int) -> float:
    """Linear between measured batch sizes, flat beyond them."""
    sizes = sorted(curve)
    right = bisect_left(sizes, batch_size)
    if right == 0 or right == len(sizes):
        return curve[sizes[min(right, len(sizes) - 1)]]
    low, high = sizes[right - 1], sizes[right]
    share = (batch_size - low) / (high - low)
    return curve[low] + share * (curve[high] - curve[low])


def speed_table(summaries: Sequence[RunSummary]) -> SpeedTable:
    """The table of the context and temperature that has the most batch sizes; UsageError without any."""
    cells = [cell for summary in summaries for cell in summary.cells if _plain_s(cell) is not None]
    if not cells:
        raise UsageError("no cell has a timed plain decoding: there is nothing to simulate with")
    groups: dict[tuple[int, float], list[CellComparison]] = {}
    for cell in cells:
        groups.setdefault((cell.cell.context_tokens, cell.cell.temperature), []).append(cell)
    (context, temperature), own = max(groups.items(), key=lambda item: len(item[1]))
    categories = [
        one
        for summary in summaries
        for one in summary.categories
        if (one.cell.context_tokens, one.cell.temperature) == (context, temperature)
    ]
    speedups: dict[tuple[SpecConfig, str | None], dict[int, float]] = {}
    for comparison in (*own, *categories):
        scope = None if comparison.scope == "all" else comparison.scope
        for arm in comparison.arms:
            if arm.speedup is not None and arm.status is Status.OK and not arm.config.is_off:
                speedups.setdefault((arm.config, scope), {})[comparison.cell.batch_size] = arm.speedup.value
    plain = {cell.cell.batch_size: seconds for cell in own if (seconds := _plain_s(cell)) is not None}
    return SpeedTable(
        plain_s=plain,
        speedups=speedups,
        output_tokens=_lengths(categories or own),
        context_tokens=context,
        temperature=temperature,
    )


def _plain_s(cell: CellComparison) -> float | None:
    off = next((arm for arm in cell.arms if arm.config.is_off and arm.status is Status.OK), None)
    return None if off is None or off.rounds is None else off.rounds.round_tpot_s


def _lengths(comparisons: Sequence[CellComparison]) -> dict[str, float]:
    totals: dict[str, tuple[int, int]] = {}
    for comparison in comparisons:
        for arm in comparison.arms:
            if arm.num_requests:
                tokens, count = totals.get(comparison.scope, (0, 0))
                totals[comparison.scope] = (tokens + arm.output_tokens, count + arm.num_requests)
    return {scope: tokens / count for scope, (tokens, count) in totals.items()}
