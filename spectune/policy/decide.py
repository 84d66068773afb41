"""Arms of a cell in, a decision out; cells in, the outcome of the run out.

Off must be beaten by more than the noise, ties go to the smaller configuration, and acceptance
never ranks anything: only time does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from spectune.policy.comparison import ArmSummary, CellComparison, Decision
from spectune.records import Interval, SpecConfig, Status

SPECULATE = "speculate"
DO_NOT = "do not speculate"
LOAD = "depends on load"
WORKLOAD = "depends on workload"
NO_DATA = "no data"

POOLED_BASIS = "pooled round time"
POOLED_MARGIN = 1.05
"""A pooled ratio has no interval; it counts only when it is at least this factor away from 1."""

POOLED_ERRORS = 3.0
"""And at least so many standard errors of its acceptance length: a category of few steps says little."""

FAMILY_ERROR = 0.05
"""Chance that any candidate of a cell that is no faster than off is called faster."""

Difference = Callable[[SpecConfig, SpecConfig], Interval | None]
"""Speed of the first over the second, paired on the blocks that both decoded."""


def corrected_level(num_candidates: int) -> float:
    """Two-sided confidence level of each candidate's interval (Bonferroni): 1 - 0.05 / candidates."""
    return 1.0 - FAMILY_ERROR / max(1, num_candidates)


def decide(
    arms: Sequence[ArmSummary],
    *,
    corrected: Mapping[SpecConfig, Interval],
    difference: Difference,
) -> Decision:
    """Choose for one cell.

    Args:
        arms: off and the candidates; only status ok with a speedup takes part.
        corrected: speedups over off at `corrected_level`; an arm without one is judged by its own
            `speedup`, with `pooled_margin` in place of a lower bound.
        difference: paired speed ratio of two candidates; None where it was not observed.
    """
    off = next((arm for arm in arms if arm.config.is_off), None)
    if off is None or off.status is not Status.OK or off.rounds is None:
        why = "was not measured" if off is None else f"is {off.status}: {off.reason or 'no timed rounds'}"
        return Decision(verdict=NO_DATA, chosen=SpecConfig.off(), reason=f"plain decoding {why}")
    candidates = [
        arm for arm in arms if not arm.config.is_off and arm.status is Status.OK and arm.speedup is not None
    ]
    if not candidates:
        return Decision(
            verdict=NO_DATA, chosen=SpecConfig.off(), reason="no candidate has a measured speedup"
        )
    ranked = sorted(candidates, key=_speed, reverse=True)
    qualified = [arm for arm in ranked if lower_bound(arm, corrected) > 1.0]
    if not qualified:
        return _stay_off(ranked[0], corrected)
    best = qualified[0]
    tied = [arm for arm in qualified if arm is best or _ties(best, arm, difference)]
    chosen = min(tied, key=lambda arm: (arm.config.size, -_speed(arm)))
    return _switch_on(chosen, best, ranked, tied, difference)


def lower_bound(arm: ArmSummary, corrected: Mapping[SpecConfig, Interval]) -> float:
    """What the speedup of an arm is at least: the corrected bound, or value / margin."""
    if arm.speedup_basis == POOLED_BASIS:
        return _speed(arm) / pooled_margin(arm)
    interval = corrected.get(arm.config)
    return 0.0 if interval is None or interval.low is None else interval.low


def is_clear_loss(arm: ArmSummary) -> bool:
    """Whether an arm is slower than off by more than the noise."""
    if arm.status is not Status.OK or arm.speedup is None:
        return False
    if arm.speedup_basis == POOLED_BASIS:
        return arm.speedup.value < 1.0 / pooled_margin(arm)
    return arm.speedup.high is not None and arm.speedup.high < 1.0


def pooled_margin(arm: ArmSummary) -> float:
    """Factor from 1 beyond which a pooled ratio counts: POOLED_MARGIN or, if more, three standard errors
    of the acceptance length, from the spread of accepted drafts over steps.

    E[A] = Σ survival_j and E[A²] = Σ (2j - 1)·survival_j for j from 1.
    """
    told = arm.acceptance
    if told is None or told.acceptance_length is None or not told.survival:
        return POOLED_MARGIN
    mean = math.fsum(told.survival)
    variance = math.fsum((2 * j + 1) * share for j, share in enumerate(told.survival)) - mean**2
    error = math.sqrt(max(variance, 0.0) / told.num_steps)
    return max(POOLED_MARGIN, 1 + POOLED_ERRORS * error / told.acceptance_length)


def ratio_text(interval: Interval) -> str:
    """`1.62x (1.55 to 1.70)`, or `1.62x` where there is no interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.value:.2f}x"
    return f"{interval.value:.2f}x ({interval.low:.2f} to {interval.high:.2f})"


def _speed(arm: ArmSummary) -> float:
    assert arm.speedup is not None, arm.config.label
    return arm.speedup.value


def _ties(best: ArmSummary, arm: ArmSummary, difference: Difference) -> bool:
    if best.speedup_basis == POOLED_BASIS or arm.speedup_basis == POOLED_BASIS:
        return _speed(best) / _speed(arm) <= max(pooled_margin(best), pooled_margin(arm))
    interval = difference(best.config, arm.config)
    return interval is None or interval.low is None or interval.low <= 1.0


def _stay_off(best: ArmSummary, corrected: Mapping[SpecConfig, Interval]) -> Decision:
    assert best.speedup is not None
    if is_clear_loss(best):
        reason = f"the best candidate, {best.config.label}, is slower: {ratio_text(best.speedup)}"
    elif best.speedup_basis == POOLED_BASIS:
        reason = (
            f"the best candidate, {best.config.label}, runs at {best.speedup.value:.2f}x; a pooled ratio "
            f"over so many steps counts from {pooled_margin(best):.2f}x"
        )
    else:
        shown = corrected.get(best.config, best.speedup)
        reason = (
            f"the best candidate, {best.config.label}, does not beat plain decoding by more than the "
            f"noise: {ratio_text(shown)} at level {shown.level:.3g}"
        )
    return Decision(
        verdict="off",
        chosen=SpecConfig.off(),
        reason=reason,
        speedup=None,
        runner_up=best.config,
        runner_up_reason=f"{ratio_text(best.speedup)} of plain decoding",
    )


def _switch_on(
    chosen: ArmSummary,
    best: ArmSummary,
    ranked: Sequence[ArmSummary],
    tied: Sequence[ArmSummary],
    difference: Difference,
) -> Decision:
    assert chosen.speedup is not None
    if chosen is best:
        reason = f"fastest of {len(ranked)} candidates: {ratio_text(chosen.speedup)}"
    else:
        reason = (
            f"{ratio_text(chosen.speedup)}, within the noise of the fastest, {best.config.label} at "
            f"{_speed(best):.2f}x, and smaller"
        )
    others = [arm for arm in ranked if arm is not chosen]
    runner_up = next((arm for arm in others if arm in tied), others[0] if others else None)
    return Decision(
        verdict="on",
        chosen=chosen.config,
        reason=reason,
        speedup=chosen.speedup,
        runner_up=None if runner_up is None else runner_up.config,
        runner_up_reason=None if runner_up is None else _rejected(chosen, runner_up, tied, difference),
    )


def _rejected(chosen: ArmSummary, arm: ArmSummary, tied: Sequence[ArmSummary], difference: Difference) -> str:
    """Why the runner-up lost."""
    assert arm.speedup is not None
    if arm in tied:
        return f"{ratio_text(arm.speedup)}: the same within the noise, but larger"
    gap = difference(chosen.config, arm.config)
    behind = f", {chosen.config.label} is {ratio_text(gap)} of it" if gap is not None else ""
    return f"slower: {ratio_text(arm.speedup)}{behind}"


def outcome(cells: Sequence[CellComparison], categories: Sequence[CellComparison]) -> str:
    """The answer of a run in one phrase.

    Opposite verdicts over batch sizes depend on load; over contexts, temperatures or categories of
    one cell they depend on the workload.
    """
    decided = [cell for cell in cells if cell.decision.verdict != NO_DATA]
    if not decided:
        return NO_DATA
    by_conditions: dict[tuple[int, float], set[str]] = {}
    for cell in decided:
        key = (cell.cell.context_tokens, cell.cell.temperature)
        by_conditions.setdefault(key, set()).add(cell.decision.verdict)
    if any(len(verdicts) > 1 for verdicts in by_conditions.values()):
        return LOAD
    if len({cell.decision.verdict for cell in decided}) > 1 or opposed_categories(cells, categories):
        return WORKLOAD
    return SPECULATE if decided[0].decision.verdict == "on" else DO_NOT


def opposed_categories(
    cells: Sequence[CellComparison], categories: Sequence[CellComparison]
) -> tuple[tuple[CellComparison, CellComparison], ...]:
    """Pairs (a category that gains, a category that loses) of the same cell, both beyond the noise."""
    pairs = []
    for cell in cells:
        own = [category for category in categories if category.cell == cell.cell]
        gains = [category for category in own if category.decision.verdict == "on"]
        losses = [category for category in own if loses(category, cell.decision)]
        pairs += [(gain, loss) for gain in gains for loss in losses]
    return tuple(pairs)


def loses(category: CellComparison, overall: Decision) -> bool:
    """Whether speculation is a clear loss in a category: with every candidate, or with the one that
    the cell chose over all categories."""
    if category.decision.verdict != "off":
        return False
    arms = [arm for arm in category.arms if not arm.config.is_off and arm.speedup is not None]
    if arms and all(is_clear_loss(arm) for arm in arms):
        return True
    return any(is_clear_loss(arm) for arm in arms if arm.config == overall.chosen)
