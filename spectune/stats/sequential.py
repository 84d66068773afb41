"""Looking at paired data before all of it is there, with the false-alarm rate kept.

Group-sequential test with alpha spending: the spending function of Lan and DeMets (1983) that
resembles O'Brien and Fleming, boundaries by the recursive integration of Armitage, McPherson and Rowe
(1969), used with Student's t by the significance-level approach (Jennison and Turnbull 2000, ch. 4.4).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spectune.errors import UsageError
from spectune.stats.checks import check_open_unit

_GRID = 801

T_ALLOWANCE = 0.95
"""The nominal levels hold for normal scores. With Student's t on 4 to 16 pairs they spend up to 5% more
than alpha (200,000 simulated trials each), so a plan hands out that much less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookPlan:
    """After how many pairs to look, and the one-sided p at or below which each look is an alarm."""

    looks: tuple[int, ...]
    levels: tuple[float, ...]

    @property
    def num_pairs(self) -> int:
        """Pairs of the last look."""
        return self.looks[-1]


def plan_looks(num_pairs: int, alpha: float) -> LookPlan:
    """A look at half of the pairs where that leaves four or more, and one at the end."""
    if num_pairs < 2:
        raise UsageError(f"a paired test needs at least 2 pairs, got {num_pairs}")
    half = math.ceil(num_pairs / 2)
    looks = (half, num_pairs) if 4 <= half < num_pairs else (num_pairs,)
    fractions = tuple(look / num_pairs for look in looks)
    allowance = T_ALLOWANCE if len(looks) > 1 else 1.0
    return LookPlan(looks=looks, levels=alarm_levels(allowance * alpha, fractions))


def spent(alpha: float, fraction: float) -> float:
    """2 - 2·Φ(z(1 - α/2) / √t): the false alarms used up when a share t of the pairs is there."""
    from scipy.special import ndtr, ndtri

    check_open_unit("alpha", alpha)
    if not 0 < fraction <= 1:
        raise UsageError(f"share {fraction} of the pairs is not in (0, 1]")
    return float(2 * ndtr(ndtri(alpha / 2) / math.sqrt(fraction)))


@functools.lru_cache(maxsize=256)
def alarm_levels(alpha: float, fractions: tuple[float, ...]) -> tuple[float, ...]:
    """Nominal one-sided p of each look so that all looks together alarm falsely with `alpha`.

    Args:
        fractions: share of the pairs that is there at each look, rising, the last one 1.
    """
    if list(fractions) != sorted(set(fractions)) or not fractions or fractions[-1] != 1:
        raise UsageError(f"looks at {fractions} of the pairs do not rise to 1")
    from scipy.special import ndtr

    levels: list[float] = []
    density: Any = None
    grid: Any = None
    before, used = 0.0, 0.0
    for fraction in fractions:
        wanted = spent(alpha, fraction) - used
        bound = _boundary(density, grid, before, fraction, wanted)
        levels.append(float(ndtr(-bound)))
        density, grid = _go_on(density, grid, before, fraction, bound)
        before, used = fraction, used + wanted
    return tuple(levels)


def expected_alarm_rate(levels: Sequence[float], fractions: Sequence[float]) -> float:
    """Probability that some look alarms where nothing changed, by the same integration."""
    from scipy.special import ndtri

    total, before = 0.0, 0.0
    density: Any = None
    grid: Any = None
    for level, fraction in zip(levels, fractions, strict=True):
        bound = -float(ndtri(level))
        total += _crossing(density, grid, before, fraction, bound)
        density, grid = _go_on(density, grid, before, fraction, bound)
        before = fraction
    return total


def _boundary(density: Any, grid: Any, before: float, fraction: float, wanted: float) -> float:
    low, high = -1.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        if _crossing(density, grid, before, fraction, middle) > wanted:
            low = middle
        else:
            high = middle
    return high


def _crossing(density: Any, grid: Any, before: float, fraction: float, bound: float) -> float:
    """P(no earlier alarm, Z ≥ bound); `density` is that of the score Z·√t without an alarm so far."""
    from scipy.special import ndtr

    if density is None:
        return float(ndtr(-bound))
    import numpy as np

    step = math.sqrt(fraction - before)
    tail = ndtr((grid - bound * math.sqrt(fraction)) / step)
    return float(np.trapezoid(density * tail, grid))


def _go_on(density: Any, grid: Any, before: float, fraction: float, bound: float) -> tuple[Any, Any]:
    """Density of the score at this look over the part that did not alarm."""
    import numpy as np

    new_grid = np.linspace(-8 * math.sqrt(fraction), bound * math.sqrt(fraction), _GRID)
    if density is None:
        return np.exp(-(new_grid**2) / (2 * fraction)) / math.sqrt(2 * math.pi * fraction), new_grid
    variance = fraction - before
    moves = np.exp(-((new_grid[:, None] - grid[None, :]) ** 2) / (2 * variance))
    moves /= math.sqrt(2 * math.pi * variance)
    return np.trapezoid(moves * density[None, :], grid, axis=1), new_grid
