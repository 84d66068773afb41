"""What a reader must know where every arm was a start of its own: notes on starts and standby.

Engines that serve are started once an arm; arms cannot take turns block by block, so what differs from
start to start is either in the interval (several starts) or said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectune.policy.comparison import CellComparison
from spectune.policy.decide import ratio_text
from spectune.policy.speedup import MIN_STARTS
from spectune.records import Interval

STEADY = 0.05
"""Change of plain decoding between its first and last start that is worth a caution of its own."""


def start_notes(cells: Sequence[CellComparison], *, num_starts: int) -> tuple[str, ...]:
    """Sentences on starts; `num_starts` is how often each candidate was started."""
    found = []
    if num_starts < MIN_STARTS:
        times = "once" if num_starts == 1 else f"{num_starts} times"
        found.append(
            f"each arm was started {times}: of what differs between starts of the same engine the intervals hold "
            f"only what plain decoding showed between its own; --num-boots {MIN_STARTS} or more puts all of it in"
        )
    told = [(cell, cell.last_start) for cell in cells if cell.last_start is not None]
    if told:
        ends = "; ".join(f"{ratio_text(ratio)} at {cell.cell.label}" for cell, ratio in told)
        unsteady = any(abs(ratio.value - 1) > STEADY for _, ratio in told)
        word = "the machine was not steady" if unsteady else "the machine was steady"
        found.append(
            f"{word}: plain decoding's time per token in its last start over that in its first is {ends}; "
            "every candidate is compared with the mean of the starts before and after it"
        )
    found += [
        f"standby: {standby_text(arm.speedup)} at {cell.cell.label} (launched for {arm.config.method} "
        f"K={arm.config.num_steps}, drafting nothing)"
        for cell in cells
        for arm in cell.standby
        if arm.speedup is not None
    ]
    found += _capacities(cells)
    return tuple(found)


def _capacities(cells: Sequence[CellComparison]) -> list[str]:
    """A draft's weights and cache take room from the target's: told where the arms' caches differ."""
    held = {
        arm.config.label: arm.kv_capacity_tokens
        for cell in cells
        for arm in (*cell.arms, *cell.standby)
        if arm.kv_capacity_tokens is not None
    }
    if len(set(held.values())) < 2:
        return []
    told = ", ".join(f"{label} {tokens:,}" for label, tokens in held.items())
    return [f"the servers' caches hold different numbers of tokens: {told}"]


def standby_cost(speedup: Interval) -> Interval:
    """Time per token of an engine on standby over that of one without speculation: 1 / speedup."""
    bounds = [None if bound is None else 1 / bound for bound in (speedup.high, speedup.low)]
    return Interval(value=1 / speedup.value, low=bounds[0], high=bounds[1], n=speedup.n, level=speedup.level)


def standby_text(speedup: Interval) -> str:
    """`1.06x (1.03 to 1.09) the time per token of an engine without speculation`."""
    cost = standby_cost(speedup)
    assert math.isfinite(cost.value), cost
    return f"{ratio_text(cost)} the time per token of an engine without speculation"
