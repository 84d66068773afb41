"""Intervals, pooling and power against hand calculations and published tables."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectune.errors import MetricMissing, UsageError
from spectune.stats import (
    clustered_log_ratio_interval,
    geometric_mean,
    holm,
    minimum_detectable_ratio,
    paired_p_value,
    paired_power,
    percentile,
    ratio_interval,
    spread,
)


def test_ratio_interval_of_five_pairs_is_the_t_interval_of_the_logs() -> None:
    """Mean 0.3, sd 0.158114, t(4) = 2.776445: half width 0.196324 on the log scale."""
    interval = ratio_interval([0.1, 0.2, 0.3, 0.4, 0.5])

    assert interval.n == 5
    assert interval.value == pytest.approx(math.exp(0.3))
    assert interval.low == pytest.approx(math.exp(0.103676), rel=1e-5)
    assert interval.high == pytest.approx(math.exp(0.496324), rel=1e-5)


def test_ratio_interval_at_a_higher_level_is_wider() -> None:
    """t(4) at 99% is 4.604095: half width 0.325559."""
    interval = ratio_interval([0.1, 0.2, 0.3, 0.4, 0.5], level=0.99)

    assert interval.low == pytest.approx(math.exp(0.3 - 0.325559), rel=1e-5)


def test_ratio_interval_of_one_pair_has_no_bounds() -> None:
    """One pair gives an estimate and no interval."""
    interval = ratio_interval([math.log(1.5)])

    assert (interval.low, interval.high, interval.n) == (None, None, 1)
    assert interval.value == pytest.approx(1.5)


def test_ratio_interval_without_pairs_is_a_missing_metric() -> None:
    """No pairs is a missing metric, never a ratio of 1."""
    with pytest.raises(MetricMissing, match="no pairs"):
        ratio_interval([])


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=8))
def test_ratio_interval_of_swapped_arms_is_the_reciprocal(log_ratios: list[float]) -> None:
    """Swapping baseline and candidate inverts value and bounds: neither arm is favoured."""
    forward = ratio_interval(log_ratios)
    backward = ratio_interval([-x for x in log_ratios])

    assert forward.value * backward.value == pytest.approx(1)
    assert forward.low is not None
    assert backward.high is not None
    assert forward.low * backward.high == pytest.approx(1)


def test_clustered_interval_counts_clusters_not_members() -> None:
    """Cluster means 0.2 and 0.4 give 0.3 ± 12.7062 · 0.1 over two clusters."""
    pairs = [("a", 0.1), ("a", 0.3), ("b", 0.4), ("b", 0.4)]

    interval = clustered_log_ratio_interval(pairs)

    assert interval.n == 2
    assert interval.value == pytest.approx(math.exp(0.3))
    assert interval.high == pytest.approx(math.exp(0.3 + 1.27062), rel=1e-4)


def test_clustered_interval_of_repeated_members_gains_no_confidence() -> None:
    """Running the same three blocks ten times does not narrow the interval."""
    once = [("a", 0.1), ("b", 0.2), ("c", 0.3)]

    assert clustered_log_ratio_interval(once * 10).low == pytest.approx(
        clustered_log_ratio_interval(once).low
    )


def test_clustered_interval_of_one_cluster_uses_its_members() -> None:
    """With a single block the repeats are all there is."""
    interval = clustered_log_ratio_interval([("a", 0.1), ("a", 0.3)])

    assert interval.n == 2
    assert interval.value == pytest.approx(math.exp(0.2))


def test_paired_p_value_of_a_clear_gain_is_small() -> None:
    """t = 0.3 / 0.0707107 = 4.2426 with 4 degrees: one-sided p 0.00662 (t table: 3.747 is 1%, 4.604 0.5%)."""
    p = paired_p_value([0.1, 0.2, 0.3, 0.4, 0.5])

    assert p is not None
    assert 0.005 < p < 0.01


@pytest.mark.parametrize(
    ("log_ratios", "expected"), [([0.1], None), ([0.0, 0.0], 0.5), ([0.2, 0.2], 0.0), ([-0.2, -0.2], 1.0)]
)
def test_paired_p_value_without_spread_is_decided_by_the_sign(
    log_ratios: list[float], expected: float | None
) -> None:
    """One pair has no p; identical pairs are decided by their sign."""
    assert paired_p_value(log_ratios) == expected


def test_holm_of_four_p_values_matches_the_hand_calculation() -> None:
    """0.005·4, 0.01·3, 0.03·2 and 0.04, the last raised to the one before it."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))


def test_holm_outside_the_unit_interval_is_refused() -> None:
    """A p value of 1.5 is a mistake."""
    with pytest.raises(UsageError, match=r"1\.5"):
        holm([0.1, 1.5])


def test_geometric_mean_of_opposite_speedups_is_one() -> None:
    """2x and 0.5x cancel: their geometric mean is 1, not 1.25."""
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([]) is None


def test_geometric_mean_of_zero_is_refused() -> None:
    """A throughput of 0 is a failure, not a factor."""
    with pytest.raises(UsageError, match="positive"):
        geometric_mean([1.0, 0.0])


def test_spread_of_five_values_interpolates_the_percentiles() -> None:
    """1..5: mean 3, median 3, p90 at position 3.6 and p99 at position 3.96."""
    assert spread([5, 3, 1, 2, 4]) == pytest.approx((5, 3.0, 3.0, 4.6, 4.96))


def test_spread_of_nothing_is_absent() -> None:
    """No observations give no row, never zeros."""
    assert spread([]) is None
    assert percentile([], 50) is None


@pytest.mark.parametrize("q", [-1, 0.5, 101])
def test_percentile_outside_percent_is_refused(q: float) -> None:
    """0.5 is nearly always the median meant as a fraction."""
    with pytest.raises(UsageError, match="percentile"):
        percentile([1.0, 2.0], q)


@pytest.mark.parametrize(
    ("n", "effect", "power"),
    [
        (5, 3.0, 0.97),
        (5, 1.5, 0.48),
        (5, 1.0, 0.22),
        (5, 0.75, 0.13),
        (12, 1.5, 0.99),
        (12, 1.0, 0.75),
        (12, 0.75, 0.48),
        (20, 1.0, 0.97),
        (20, 0.75, 0.79),
    ],
)
def test_paired_power_matches_the_simulated_table(n: int, effect: float, power: float) -> None:
    """Power of a one-sided 1% paired t test at effect/sd, from simulation."""
    assert paired_power(effect, 1.0, n) == pytest.approx(power, abs=0.015)


def test_minimum_detectable_ratio_of_five_pairs_is_three_deviations() -> None:
    """Five pairs with 1% spread see 3% in 97% of the runs, at 1% false alarms."""
    ratio = minimum_detectable_ratio(0.01, 5, level=0.99, power=0.97)

    assert math.log(ratio) == pytest.approx(0.03, rel=0.04)


def test_minimum_detectable_ratio_with_many_pairs_needs_a_standard_error_of_0755_percent() -> None:
    """A standard error of 0.755% finds 3% with 95% power at 1% false alarms."""
    ratio = minimum_detectable_ratio(0.00755 * 100, 10_000)

    assert math.log(ratio) == pytest.approx(0.03, abs=1e-4)


def test_minimum_detectable_ratio_without_noise_is_one() -> None:
    """Exactly equal pairs detect everything."""
    assert minimum_detectable_ratio(0.0, 3) == 1.0


def test_minimum_detectable_ratio_of_one_pair_is_refused() -> None:
    """One pair has no noise estimate and so no power."""
    with pytest.raises(UsageError, match="at least 2 pairs"):
        minimum_detectable_ratio(0.01, 1)


def test_stats_metrics_and_theory_import_without_numpy() -> None:
    """Help and reports of stored runs start without the heavy libraries."""
    code = (
        "import sys, spectune.stats, spectune.metrics.acceptance, spectune.metrics.throughput, "
        "spectune.theory.speedup, spectune.theory.waterfall, spectune.theory.roofline, spectune.theory.cost; "
        "sys.exit(sum(name in sys.modules for name in ('numpy', 'scipy', 'torch', 'pandas')))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
