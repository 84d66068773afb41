"""Paired comparison of two arms: p values, correction for many metrics, power.

The unit is one independent pair: a start of both arms, or a pass over the same prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectune.errors import UsageError
from spectune.stats.checks import check_finite, check_open_unit, check_pairs
from spectune.stats.moments import standard_deviation, t_quantile, t_tail


def paired_p_value(log_ratios: Sequence[float], *, above: float = 0.0) -> float | None:
    """One-sided p of the paired t test that the mean log ratio exceeds `above`; None for n < 2."""
    check_finite(log_ratios)
    n = len(log_ratios)
    if n < 2:
        return None
    mean, sd = math.fsum(log_ratios) / n - above, standard_deviation(log_ratios)
    if sd == 0:
        return 0.5 if mean == 0 else float(mean < 0)
    return t_tail(mean / (sd / math.sqrt(n)), n - 1)


def two_sided_p_value(log_ratios: Sequence[float]) -> float | None:
    """Two-sided p of the paired t test that the mean log ratio is 0; None for n < 2."""
    p = paired_p_value(log_ratios)
    return None if p is None else min(1.0, 2 * min(p, 1 - p))


def welch_p_value(first: Sequence[float], second: Sequence[float]) -> float | None:
    """One-sided p of Welch's t test that the mean of `first` exceeds that of `second`.

    None where either has fewer than two values. Degrees of freedom by Welch and Satterthwaite.
    """
    check_finite([*first, *second])
    if len(first) < 2 or len(second) < 2:
        return None
    means = [math.fsum(values) / len(values) for values in (first, second)]
    errors = [standard_deviation(values) ** 2 / len(values) for values in (first, second)]
    difference, total = means[0] - means[1], sum(errors)
    if total == 0:
        return 0.5 if difference == 0 else float(difference < 0)
    degrees = total**2 / (errors[0] ** 2 / (len(first) - 1) + errors[1] ** 2 / (len(second) - 1))
    return t_tail(difference / math.sqrt(total), degrees)


def prediction_p_value(baseline: Sequence[float], value: float) -> float | None:
    """One-sided p that one more run of the baseline would be as low as `value`; None for n < 2.

    t = (mean - value) / (sd · √(1 + 1/n)) with n - 1 degrees: the prediction interval of one normal value.
    """
    check_finite([*baseline, value])
    n = len(baseline)
    if n < 2:
        return None
    difference, sd = math.fsum(baseline) / n - value, standard_deviation(baseline)
    if sd == 0:
        return 0.5 if difference == 0 else float(difference < 0)
    return t_tail(difference / (sd * math.sqrt(1 + 1 / n)), n - 1)


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Holm's step-down adjusted p values (Holm 1979), in the order given.

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


def paired_power(effect_log: float, sd_log: float, n: int, *, level: float = 0.99) -> float:
    """Probability that a one-sided paired t test at `level` sees a true log ratio of `effect_log`.

    P(T > t(n-1, level)) with T noncentral t of n-1 degrees and noncentrality effect·√n/sd.
    """
    check_open_unit("level", level)
    check_pairs(sd_log, n)
    from scipy.special import nctdtr

    noncentrality = effect_log / sd_log * math.sqrt(n)
    if noncentrality > 35:
        return 1.0  # the series of scipy ends near 38
    return 1 - float(nctdtr(n - 1, noncentrality, t_quantile(level, n - 1)))


def minimum_detectable_ratio(sd_log: float, n: int, level: float = 0.99, power: float = 0.95) -> float:
    """Smallest true ratio (> 1) that `n` pairs detect with `power` at a one-sided `level`.

    The effect at which `paired_power` equals `power`; `sd_log` is the standard deviation of one pair's
    log ratio. A slowdown of 1/ratio is detected equally well.
    """
    check_open_unit("power", power)
    if sd_log == 0 and n >= 2:
        return 1.0
    check_pairs(sd_log, n)
    low, high = 0.0, 1.0
    while paired_power(high, 1.0, n, level=level) < power:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        if paired_power(middle, 1.0, n, level=level) < power:
            low = middle
        else:
            high = middle
    return math.exp(high * sd_log)
