"""Intervals, paired comparison, power, pooling: numbers in, numbers out.

Knows nothing of runs or engines. Speedups are ratios, so everything is averaged as logarithms and
turned back at the end. The Student t interval is used because a percentile bootstrap of five pairs
fires six times as often as it claims. numpy and scipy are imported inside functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectune.errors import MetricMissing, UsageError
from spectune.records import Interval

SPREAD = tuple[int, float, float, float, float]


def ratio_interval(log_ratios: Sequence[float], *, level: float = 0.95) -> Interval:
    """exp(mean ± t(n-1, level) · sd / √n) of log ratios; `low` and `high` are None for n < 2.

    The value is the geometric mean of the ratios. Raises MetricMissing without any ratio.
    """
    _check_open_unit("level", level)
    _check_finite(log_ratios)
    n = len(log_ratios)
    if n == 0:
        raise MetricMissing("no pairs to compare", hint="both arms need at least one block in common")
    mean = math.fsum(log_ratios) / n
    if n < 2:
        return Interval(value=math.exp(mean), low=None, high=None, n=n, level=level)
    half = _t_quantile(0.5 + level / 2, n - 1) * _standard_deviation(log_ratios) / math.sqrt(n)
    return Interval(
        value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), n=n, level=level
    )


def clustered_log_ratio_interval(pairs: Sequence[tuple[str, float]], *, level: float = 0.95) -> Interval:
    """Interval of (cluster, log ratio) pairs: the mean of each cluster, then t over the clusters.

    Repeats of one block share its prompts and are not independent: the cluster is the unit, `n` counts
    clusters. With a single cluster its members are the unit.
    """
    members: dict[str, list[float]] = {}
    for cluster, log_ratio in pairs:
        members.setdefault(cluster, []).append(log_ratio)
    if len(members) == 1:
        return ratio_interval([log_ratio for _, log_ratio in pairs], level=level)
    means = [math.fsum(values) / len(values) for values in members.values()]
    return ratio_interval(means, level=level)


def paired_p_value(log_ratios: Sequence[float]) -> float | None:
    """One-sided p of the paired t test that the mean log ratio exceeds 0; None for n < 2."""
    _check_finite(log_ratios)
    n = len(log_ratios)
    if n < 2:
        return None
    mean, sd = math.fsum(log_ratios) / n, _standard_deviation(log_ratios)
    if sd == 0:
        return 0.5 if mean == 0 else float(mean < 0)
    from scipy.special import stdtr

    return float(stdtr(n - 1, -mean / (sd / math.sqrt(n))))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's step-down adjusted p values, in the order given.

    The i-th smallest of m is multiplied by m - i (i from 0), capped at 1 and never below an earlier one.
    """
    if bad := [p for p in p_values if not 0 <= p <= 1]:
        raise UsageError(f"p value {bad[0]} is outside 0..1")
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return tuple(adjusted)


def geometric_mean(values: Sequence[float]) -> float | None:
    """exp of the mean logarithm; None for no values, UsageError for one that is not positive."""
    if not values:
        return None
    if bad := [value for value in values if not value > 0]:
        raise UsageError(f"a geometric mean needs positive values, got {bad[0]}")
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-th percentile (q in 0..100) with linear interpolation; None for no values.

    A q between 0 and 1 is refused: it is nearly always a fraction by mistake.
    """
    if not 0 <= q <= 100 or 0 < q < 1:
        raise UsageError(f"percentile {q} is not in 0..100", hint="percentiles are given in percent")
    return _interpolate(sorted(values), q) if values else None


def spread(values: Sequence[float]) -> SPREAD | None:
    """(n, mean, p50, p90, p99) of durations; None for no values, never a row of zeros."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (_interpolate(ordered, q) for q in (50, 90, 99))
    return len(values), math.fsum(values) / len(values), p50, p90, p99


def paired_power(effect_log: float, sd_log: float, n: int, *, level: float = 0.99) -> float:
    """Probability that a one-sided paired t test at `level` sees a true log ratio of `effect_log`.

    P(T > t(n-1, level)) with T noncentral t of n-1 degrees and noncentrality effect·√n/sd.
    """
    _check_open_unit("level", level)
    _check_pairs(sd_log, n)
    from scipy.stats import nct

    return float(nct.sf(_t_quantile(level, n - 1), n - 1, effect_log / sd_log * math.sqrt(n)))


def minimum_detectable_ratio(sd_log: float, n: int, level: float = 0.99, power: float = 0.95) -> float:
    """Smallest true ratio (> 1) that `n` pairs detect with `power` at a one-sided `level`.

    The effect at which `paired_power` equals `power`; `sd_log` is the standard deviation of one pair's
    log ratio. A slowdown of 1/ratio is detected equally well.
    """
    _check_open_unit("power", power)
    if sd_log == 0 and n >= 2:
        return 1.0
    _check_pairs(sd_log, n)
    from scipy.optimize import brentq

    upper = 1.0
    while paired_power(upper, 1.0, n, level=level) < power:
        upper *= 2
    effect = brentq(lambda ratio: paired_power(ratio, 1.0, n, level=level) - power, 0.0, upper)
    return math.exp(float(effect) * sd_log)


def _interpolate(ordered: Sequence[float], q: float) -> float:
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _t_quantile(probability: float, degrees: int) -> float:
    from scipy.special import stdtrit  # scipy.stats takes seconds to import

    return float(stdtrit(degrees, probability))


def _standard_deviation(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _check_finite(values: Sequence[float]) -> None:
    if bad := [value for value in values if not math.isfinite(value)]:
        raise UsageError(f"log ratio {bad[0]} is not finite")


def _check_open_unit(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise UsageError(f"{name} {value} is not between 0 and 1")


def _check_pairs(sd_log: float, n: int) -> None:
    if n < 2:
        raise UsageError(f"power needs at least 2 pairs, got {n}")
    if not sd_log > 0:
        raise UsageError(f"standard deviation {sd_log} of the log ratios is not positive")
