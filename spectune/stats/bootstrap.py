"""Hierarchical bootstrap of a pooled ratio: starts contain requests, requests contain steps.

Rounds of one request are alike and requests of one start are alike, so resampling rounds as if they
were independent claims too narrow an interval. Resampled is the highest level that has several members
and the one below it (Davison and Hinkley 1997, section 3.8); what is lower stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spectune.errors import MetricMissing
from spectune.records import Interval
from spectune.stats.checks import check_open_unit

Step = tuple[float, float]
"""(numerator, denominator), for example (accepted drafts, 1) or (seconds, tokens)."""


def hierarchical_ratio_interval(
    starts: Sequence[Sequence[Sequence[Step]]],
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Σ numerators / Σ denominators with a percentile interval; None bounds for a single step.

    Args:
        starts: steps by request by start. `n` of the interval counts members of the level resampled
            first: starts, or requests of a single start, or steps of a single request.
    """
    check_open_unit("level", level)
    sums = [[(math.fsum(a for a, _ in request), math.fsum(b for _, b in request)) for request in start]
            for start in starts if start]  # fmt: skip
    total = sum(b for start in sums for _, b in start)
    if not total > 0:
        raise MetricMissing("nothing to pool: no request has a step")
    value = sum(a for start in sums for a, _ in start) / total
    if len(sums) == 1:
        requests = [request for start in starts for request in start if request]
        sums = [[pair] for pair in sums[0]] if len(requests) > 1 else [[step] for step in requests[0]]
    if len(sums) < 2:
        return Interval(value=value, low=None, high=None, n=len(sums), level=level)
    low, high = _bounds(sums, level, num_resamples, seed)
    return Interval(value=value, low=low, high=high, n=len(sums), level=level)


def _bounds(
    groups: Sequence[Sequence[Step]], level: float, num_resamples: int, seed: int
) -> tuple[float, float]:
    import numpy as np

    generator = np.random.default_rng(seed)
    arrays = [np.asarray(group, dtype=float) for group in groups]
    picks: Any = generator.integers(len(arrays), size=(num_resamples, len(arrays)))
    totals = np.zeros((num_resamples, 2))
    for index, members in enumerate(arrays):
        times = (picks == index).sum(axis=1)
        if len(members) == 1:
            totals += times[:, None] * members[0]
            continue
        for row in np.flatnonzero(times):
            chosen = generator.integers(len(members), size=(int(times[row]), len(members)))
            totals[row] += members[chosen].sum(axis=(0, 1))
    ratios = totals[:, 0] / totals[:, 1]
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
