"""Mean and spread of a few numbers, and the quantiles they are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectune.errors import UsageError


def t_quantile(probability: float, degrees: float) -> float:
    """The value that a Student t variable stays below with `probability`."""
    from scipy.special import stdtrit  # scipy.stats takes seconds to import

    return float(stdtrit(degrees, probability))


def t_tail(t: float, degrees: float) -> float:
    """P(T > t) of a Student t variable."""
    from scipy.special import stdtr

    return float(stdtr(degrees, -t))


def standard_deviation(values: Sequence[float]) -> float:
    """√(Σ(x - mean)² / (n - 1)); needs two values. Equal values have exactly 0."""
    if min(values) == max(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def median(values: Sequence[float]) -> float | None:
    """The middle value, or the mean of the two in the middle; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def interquartile_mean(values: Sequence[float]) -> float:
    """Mean without the lowest and the highest quarter (rounded down); the mean itself below four values.

    Occasional disturbances do not move it, and for normal values it needs a fifth more of them than the mean.
    """
    ordered = sorted(values)
    cut = len(ordered) // 4
    middle = ordered[cut : len(ordered) - cut]
    return math.fsum(middle) / len(middle)


def upper_deviation(values: Sequence[float], *, confidence: float = 0.8) -> float:
    """One-sided upper bound of the standard deviation of normal values: sd · √((n-1) / χ²(1-c, n-1)).

    A handful of values shows too small a spread as often as too large a one: plans made from `sd`
    itself fall short of their power half of the time.
    """
    if len(values) < 2:
        raise UsageError(f"a spread needs at least 2 values, got {len(values)}")
    from scipy.special import chdtri

    degrees = len(values) - 1
    # chdtri inverts the upper tail: P(χ² > x) = confidence
    return standard_deviation(values) * math.sqrt(degrees / float(chdtri(degrees, confidence)))
