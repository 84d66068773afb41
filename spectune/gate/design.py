"""How many starts a gate needs, and at which levels it looks: the error budget in one place.

A check that fails is measured once more on fresh starts, and fails only if the same metric fails again:
false alarms of both stages multiply, so each stage works at the square root of the whole rate. The
first stage looks half-way and at the end (alpha spending); an alarm also needs half of the slowdown
that the gate is to catch, so that a large sample does not fail on a tenth of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spectune.errors import Inconclusive
from spectune.gate.file import GateFile, Statistics
from spectune.stats import LookPlan, minimum_detectable_ratio, paired_power, plan_looks

NUM_SPEED_METRICS = 2
MIN_STARTS = 4
MAX_STARTS = 60

SPEED_SHARE = 0.8
"""Of the false alarms; the rest is for acceptance, whose tolerance is three deviations wide and which has
to leave it twice."""

PASS_LEVEL = 0.005
"""A look passes at once where the slowdown to be caught is excluded with this error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """One-sided error of a stage for speed."""

    speed: float

    @classmethod
    def of(cls, statistics: Statistics) -> Levels:
        return cls(speed=math.sqrt(SPEED_SHARE * statistics.false_alarm_rate))


def looks_of(gate: GateFile) -> LookPlan:
    """The looks of one stage."""
    return plan_looks(gate.statistics.num_starts, Levels.of(gate.statistics).speed)


def power_of(noise: float, slowdown: float, num_starts: int, statistics: Statistics) -> float:
    """Probability that both stages catch a true slowdown; `noise` is the sd of a start's log ratio."""
    if noise == 0:
        return 1.0
    effect = math.log1p(slowdown)
    stages = 1.0
    for num_metrics in (NUM_SPEED_METRICS, 1):
        level = Levels.of(statistics).speed / num_metrics
        misses = 1 - paired_power(effect, noise, num_starts, level=1 - level)
        # the other condition: an estimate of at least half of the slowdown; and stops for a pass
        misses += _below_half(effect, noise, num_starts) + PASS_LEVEL
        stages *= max(0.0, 1 - misses)
    return stages


def starts_needed(noise: float, slowdown: float, statistics: Statistics, limit: int = 100_000) -> int | None:
    """Fewest starts with the power asked for; None above `limit`."""
    low = MIN_STARTS
    if power_of(noise, slowdown, low, statistics) >= statistics.power:
        return low
    high = low
    while power_of(noise, slowdown, high, statistics) < statistics.power:
        low, high = high, 2 * high
        if low > limit:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if power_of(noise, slowdown, middle, statistics) < statistics.power:
            low = middle
        else:
            high = middle
    return high


def refuse_noise(noise: float, slowdown: float, num_starts: int, statistics: Statistics) -> None:
    """Raise Inconclusive where the slowdown lies inside the noise of so many starts."""
    if power_of(noise, slowdown, num_starts, statistics) >= statistics.power:
        return
    needed = starts_needed(noise, slowdown, statistics)
    seen = detectable_slowdown(noise, num_starts, statistics)
    raise Inconclusive(
        f"a slowdown of {slowdown:.1%} lies inside the noise: one start's ratio of equal engines varies by "
        f"{noise:.2%}, {num_starts} starts would see {seen:.1%}",
        hint=f"--num-starts {needed}, more prompts, or --max-slowdown {seen:.3f}"
        if needed is not None
        else f"--max-slowdown {seen:.3f}, or a quieter machine",
    )


def detectable_slowdown(noise: float, num_starts: int, statistics: Statistics) -> float:
    """The slowdown that so many starts catch with the power asked for."""
    if noise == 0:
        return 0.0
    low = 0.0
    high = minimum_detectable_ratio(noise, num_starts, 0.5, statistics.power) - 1
    while power_of(noise, high, num_starts, statistics) < statistics.power:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        if power_of(noise, middle, num_starts, statistics) < statistics.power:
            low = middle
        else:
            high = middle
    return high


def _below_half(effect: float, noise: float, num_starts: int) -> float:
    """P(estimate < effect / 2) of a mean of `num_starts` normal ratios."""
    return 0.5 * math.erfc(effect / 2 * math.sqrt(num_starts) / noise / math.sqrt(2))
