"""Measured speedups on both sides of an edge in, how many rounds a switch has to wait out.

A switch to more speculation has a price (the draft catches up), so it waits until running on as before
has lost as much: whatever the load does, no more than twice the time is lost that somebody would lose
who knew it beforehand. An edge whose two sides are close, or not known apart, waits longer. Less
speculation costs nothing to switch to and is switched to at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spectune.policy.comparison import CellComparison
from spectune.policy.ranges import Choice
from spectune.records import Cell, Interval, SpecConfig, Status

MAX_ROUNDS = 16
"""Longest wait: by then a load has settled."""

ASSUMED_COST_ROUNDS = 1.0
"""Price of a switch to more speculation in plain rounds, where nobody measured it."""


def edges_of(
    row: Mapping[Cell, Choice], comparisons: Iterable[CellComparison], *, switch_cost_rounds: float
) -> list[dict[str, Any]]:
    """One entry for each pair of neighbouring batch sizes whose configurations differ."""
    by_cell = {comparison.cell: comparison for comparison in comparisons}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    ordered = sorted(row, key=lambda cell: (cell.temperature, cell.context_tokens, cell.batch_size))
    for below, above in itertools.pairwise(ordered):
        same = (below.temperature, below.context_tokens) == (above.temperature, above.context_tokens)
        first, second = row[below].config, row[above].config
        if not same or first == second:
            continue
        for leave, enter, cell in ((first, second, above), (second, first, below)):
            comparison = by_cell.get(cell)
            rounds = rounds_to_wait(leave, enter, comparison, switch_cost_rounds=switch_cost_rounds)
            key = (leave.label, enter.label)
            if key not in found or found[key]["rounds"] < rounds:
                found[key] = {
                    "from": leave.label,
                    "to": enter.label,
                    "batch": cell.batch_size,
                    "rounds": rounds,
                }
    return list(found.values())


def rounds_to_wait(
    leave: SpecConfig, enter: SpecConfig, comparison: CellComparison | None, *, switch_cost_rounds: float
) -> int:
    """cost / (share of a round lost by running on with `leave`), from the cautious end of its interval.

    1 where the switch is to less speculation; MAX_ROUNDS where the two are not known apart.
    """
    if enter.size < leave.size:
        return 1
    lost = None if comparison is None else share_lost(leave, enter, comparison)
    if lost is None or lost <= 0:
        return MAX_ROUNDS
    return max(1, min(MAX_ROUNDS, math.ceil(switch_cost_rounds / lost)))


def share_lost(leave: SpecConfig, enter: SpecConfig, comparison: CellComparison) -> float | None:
    """1 - speed of `leave` / speed of `enter`, at the end of the interval where it is smallest.

    The logarithms of both speedups are taken as independent, which makes the interval too wide rather
    than too narrow: both were paired with the same plain decoding.
    """
    speeds = [_speedup(config, comparison) for config in (leave, enter)]
    if speeds[0] is None or speeds[1] is None:
        return None
    gap = math.log(speeds[1].value / speeds[0].value)
    half = math.hypot(*(_half_width(speed) for speed in speeds if speed is not None))
    return 1 - math.exp(-max(0.0, gap - half))


def _speedup(config: SpecConfig, comparison: CellComparison) -> Interval | None:
    if config.is_off:
        return Interval(value=1.0, low=1.0, high=1.0, n=1)
    arm = next((arm for arm in comparison.arms if arm.config == config), None)
    return arm.speedup if arm is not None and arm.status is Status.OK else None


def _half_width(speedup: Interval) -> float:
    if speedup.low is None or speedup.high is None or speedup.low <= 0:
        return 0.0
    return math.log(speedup.high / speedup.low) / 2


def patience_of(policy: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Rounds by (label of what runs, label of what is asked for); empty for a policy without a deadband."""
    deadband = policy.get("deadband") or {}
    edges: Sequence[Mapping[str, Any]] = deadband.get("edges", ())
    return {(edge["from"], edge["to"]): int(edge["rounds"]) for edge in edges}
