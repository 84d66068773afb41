"""Tests on counts: do two samples of tokens come from one distribution, how high may a rate be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectune.errors import UsageError
from spectune.records import Interval
from spectune.stats.checks import check_open_unit


def homogeneity_p_value(
    first: Mapping[int, int], second: Mapping[int, int], *, num_permutations: int = 9999, seed: int = 0
) -> float:
    """p of Pearson's χ² that both counts are draws of one distribution, by random relabelling.

    Given the pooled counts, each relabelling is a multivariate hypergeometric draw, so the p value is
    exact for any counts, rare tokens included; it is (1 + hits) / (1 + permutations), never 0 (Phipson
    and Smyth 2010). 1 where there is only one token.
    """
    tokens = sorted({*first, *second})
    num_first, num_second = sum(first.values()), sum(second.values())
    if not num_first or not num_second:
        raise UsageError("two samples are needed to compare distributions")
    if len(tokens) == 1:
        return 1.0
    import numpy as np

    pooled = np.array([first.get(t, 0) + second.get(t, 0) for t in tokens], dtype=np.int64)
    observed = np.array([[first.get(t, 0) for t in tokens]], dtype=np.int64)
    draws = np.random.default_rng(seed).multivariate_hypergeometric(pooled, num_first, size=num_permutations)
    limit = _chi_square(observed, pooled, num_first)[0]
    hits = int((_chi_square(draws, pooled, num_first) >= limit * (1 - 1e-9)).sum())
    return (1 + hits) / (1 + num_permutations)


def _chi_square(counts: Any, pooled: Any, num_first: int) -> Any:
    """χ² of 2 × tokens tables [R] whose first rows are `counts` [R, tokens]."""
    expected = pooled * (num_first / pooled.sum())
    other = pooled - expected
    return ((counts - expected) ** 2 * (1 / expected + 1 / other)).sum(axis=1)


def rate_interval(hits: int, trials: int, *, level: float = 0.95) -> Interval | None:
    """Clopper and Pearson's exact interval of a probability (1934); None without trials."""
    check_open_unit("level", level)
    if trials == 0:
        return None
    if not 0 <= hits <= trials:
        raise UsageError(f"{hits} hits in {trials} trials")
    from scipy.special import betaincinv

    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, tail))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - tail))
    return Interval(value=hits / trials, low=low, high=high, n=trials, level=level)
