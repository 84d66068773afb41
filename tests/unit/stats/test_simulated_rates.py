"""Coverage, false-alarm rate and power of every interval and test, by simulation with a fixed seed.

Binomial noise of 4,000 trials at 5% is 0.34%: the limits stand three of it away.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from spectune.errors import MetricMissing, UsageError
from spectune.stats import (
    alarm_levels,
    clustered_log_ratio_interval,
    hierarchical_ratio_interval,
    holm,
    homogeneity_p_value,
    interquartile_mean,
    median,
    paired_p_value,
    paired_power,
    plan_looks,
    pooled_ratio_interval,
    prediction_p_value,
    rate_interval,
    ratio_interval,
    two_sided_p_value,
    upper_deviation,
    welch_p_value,
)
from spectune.stats.sequential import expected_alarm_rate

TRIALS = 4000


def normal_rows(n: int, *, mean: float = 0.0, sd: float = 1.0, seed: int = 1, trials: int = TRIALS):
    return (np.random.default_rng(seed).normal(mean, sd, size=(trials, n))).tolist()


@pytest.mark.parametrize("n", [4, 8])
def test_ratio_interval_covers_the_true_ratio_as_often_as_it_says(n: int) -> None:
    """Nineteen in twenty 95% intervals of noisy pairs hold the true ratio of 1.1."""
    hits = 0
    for row in normal_rows(n, mean=math.log(1.1), sd=0.05):
        interval = ratio_interval(row)
        hits += interval.low <= 1.1 <= interval.high

    assert hits / TRIALS == pytest.approx(0.95, abs=0.011)


def test_clustered_interval_covers_where_repeats_share_their_prompts() -> None:
    """Three repeats of six blocks with a shared block effect: the interval over blocks covers."""
    generator = np.random.default_rng(2)
    hits = 0
    for _ in range(TRIALS):
        effects = generator.normal(0.0, 0.05, size=6)
        pairs = [
            (str(b), float(effects[b] + e)) for b in range(6) for e in generator.normal(0.0, 0.01, size=3)
        ]
        interval = clustered_log_ratio_interval(pairs)
        hits += interval.low <= 1.0 <= interval.high

    assert hits / TRIALS == pytest.approx(0.95, abs=0.011)


@pytest.mark.parametrize(("n", "level"), [(4, 0.05), (8, 0.05), (8, 0.01)])
def test_paired_test_alarms_falsely_as_often_as_its_level(n: int, level: float) -> None:
    """Equal arms are called slower in `level` of the trials."""
    alarms = sum(paired_p_value(row) <= level for row in normal_rows(n, seed=3))

    assert alarms / TRIALS == pytest.approx(level, abs=3 * math.sqrt(level * (1 - level) / TRIALS))


def test_two_sided_test_alarms_on_both_sides_together_at_its_level() -> None:
    """Equal arms are called different, up or down, in 5% of the trials."""
    alarms = sum(two_sided_p_value(row) <= 0.05 for row in normal_rows(6, seed=4, trials=5 * TRIALS))

    assert alarms / (5 * TRIALS) == pytest.approx(0.05, abs=0.005)


def test_welch_keeps_its_level_with_unequal_sizes_and_spreads() -> None:
    """Six quiet baseline runs against four noisy new ones of the same speed."""
    quiet, noisy = normal_rows(6, sd=0.01, seed=5), normal_rows(4, sd=0.03, seed=6)
    alarms = sum(welch_p_value(a, b) <= 0.05 for a, b in zip(quiet, noisy, strict=True))

    assert alarms / TRIALS <= 0.05 + 0.011


def test_prediction_of_one_more_run_keeps_its_level() -> None:
    """A seventh run of an unchanged engine is called slower than six baseline runs in 5% of the trials."""
    alarms = sum(prediction_p_value(row[:6], row[6]) <= 0.05 for row in normal_rows(7, seed=18))

    assert alarms / TRIALS == pytest.approx(0.05, abs=0.011)
    assert prediction_p_value([1.0, 1.0], 1.0) == 0.5
    assert prediction_p_value([1.0], 1.0) is None


def test_holm_keeps_the_rate_of_any_false_alarm_among_four_metrics() -> None:
    """Four equal metrics give at least one alarm at 5% in no more than 5% of the trials."""
    rows = [normal_rows(6, seed=seed) for seed in (7, 8, 9, 10)]
    alarms = sum(min(holm([paired_p_value(row) for row in four])) <= 0.05 for four in zip(*rows, strict=True))

    assert alarms / TRIALS <= 0.05 + 0.011
    assert alarms / TRIALS >= 0.035


@pytest.mark.parametrize(("effect", "n"), [(1.0, 8), (1.5, 6), (0.5, 20)])
def test_paired_power_is_the_share_of_trials_that_see_the_effect(effect: float, n: int) -> None:
    """The announced power is met."""
    seen = sum(paired_p_value(row) <= 0.05 for row in normal_rows(n, mean=effect, seed=11))

    assert seen / TRIALS == pytest.approx(paired_power(effect, 1.0, n, level=0.95), abs=0.024)


@pytest.mark.parametrize("fractions", [(0.5, 1.0), (0.2, 0.4, 0.6, 0.8, 1.0)])
def test_looks_spend_exactly_the_false_alarms_of_the_whole_test(fractions: tuple[float, ...]) -> None:
    """All looks together alarm with 2.5% on normal data."""
    assert expected_alarm_rate(alarm_levels(0.025, fractions), fractions) == pytest.approx(0.025, abs=1e-6)


def test_alarm_levels_are_the_published_boundaries() -> None:
    """Lan-DeMets, O'Brien-Fleming type, one-sided 2.5%: 4.877, 3.357, 2.680, 2.290, 2.031; two looks: 2.963,
    1.969."""
    from scipy.special import ndtri

    five = [-float(ndtri(level)) for level in alarm_levels(0.025, (0.2, 0.4, 0.6, 0.8, 1.0))]
    two = [-float(ndtri(level)) for level in alarm_levels(0.025, (0.5, 1.0))]

    assert five == pytest.approx([4.877, 3.357, 2.680, 2.290, 2.031], abs=2e-3)
    assert two == pytest.approx([2.963, 1.969], abs=2e-3)


@pytest.mark.parametrize("alpha", [0.06, 0.02])
def test_sequential_t_test_of_eight_pairs_keeps_its_false_alarm_rate(alpha: float) -> None:
    """Two looks with Student's t at the nominal levels alarm in no more than alpha of equal trials."""
    plan = plan_looks(8, alpha)
    alarms = sum(
        any(paired_p_value(row[:n]) <= level for n, level in zip(plan.looks, plan.levels, strict=True))
        for row in normal_rows(8, seed=12, trials=5 * TRIALS)
    )

    assert plan.looks == (4, 8)
    assert alarms / (5 * TRIALS) == pytest.approx(alpha, abs=3 * math.sqrt(alpha / (5 * TRIALS)))


def test_a_short_plan_looks_once() -> None:
    """Six pairs are not halved: three tell too little."""
    assert plan_looks(6, 0.05).looks == (6,)
    with pytest.raises(UsageError, match="2 pairs"):
        plan_looks(1, 0.05)


def test_looks_that_do_not_rise_to_the_end_are_refused() -> None:
    """A plan ends with all of its pairs."""
    with pytest.raises(UsageError, match="rise"):
        alarm_levels(0.05, (0.5, 0.4, 1.0))


def test_upper_deviation_lies_above_the_true_spread_in_four_of_five_trials() -> None:
    """The bound at 80% confidence is too low in a fifth of the calibrations, not in half of them."""
    above = sum(upper_deviation(row) >= 1.0 for row in normal_rows(6, seed=13))

    assert above / TRIALS == pytest.approx(0.8, abs=0.02)


def test_upper_deviation_of_equal_values_is_zero() -> None:
    """A deterministic metric has no noise."""
    assert upper_deviation([2.0, 2.0, 2.0]) == 0.0
    with pytest.raises(UsageError, match="2 values"):
        upper_deviation([1.0])


def test_interquartile_mean_drops_a_quarter_at_both_ends() -> None:
    """1, 2, 3, 4 and 100 lose 1 and 100; three values are too few to drop any."""
    assert interquartile_mean([100.0, 2.0, 1.0, 4.0, 3.0]) == 3.0
    assert interquartile_mean([1.0, 2.0, 9.0]) == 4.0


def test_median_of_five_runs_ignores_the_slow_tail() -> None:
    """One slow run of five does not move the baseline."""
    assert median([1.0, 9.0, 1.1, 0.9, 1.2]) == 1.1
    assert median([1.0, 2.0]) == 1.5
    assert median([]) is None


def test_hierarchical_interval_covers_where_rounds_of_a_request_are_alike() -> None:
    """Forty requests of thirty similar steps: nine in ten 90% intervals hold the true mean.

    A bootstrap of the 1,200 steps as if they were independent would cover in less than half.
    """
    generator = np.random.default_rng(14)
    hits, naive, trials = 0, 0, 300
    for _ in range(trials):
        means = generator.normal(1.0, 0.3, size=40)
        requests = [
            [(float(x), 1.0) for x in generator.normal(mean, 0.3, size=30)] for mean in means
        ]  # fmt: skip
        interval = hierarchical_ratio_interval([requests], level=0.9, num_resamples=400)
        hits += interval.low <= 1.0 <= interval.high
        flat = np.array([a for request in requests for a, _ in request])
        half = 1.645 * flat.std() / math.sqrt(len(flat))
        naive += abs(flat.mean() - 1.0) <= half

    assert hits / trials == pytest.approx(0.9, abs=0.06)
    assert naive / trials < 0.5


def test_hierarchical_interval_over_starts_is_wider_than_over_requests() -> None:
    """Six starts that differ by 8% have an interval that says so."""
    generator = np.random.default_rng(15)
    starts = [
        [[(float(generator.normal(level, 0.01)), 1.0)] for _ in range(20)]
        for level in (0.92, 0.98, 1.0, 1.02, 1.05, 1.08)
    ]
    by_start = hierarchical_ratio_interval(starts)
    pooled = hierarchical_ratio_interval([[request for start in starts for request in start]])

    assert by_start.n == 6
    assert pooled.n == 120
    assert by_start.high - by_start.low > 2 * (pooled.high - pooled.low)


def test_hierarchical_interval_of_nothing_is_missing() -> None:
    """No steps, no acceptance."""
    with pytest.raises(MetricMissing):
        hierarchical_ratio_interval([[]])
    assert hierarchical_ratio_interval([[[(1.0, 2.0)]]]).low is None


def test_homogeneity_test_keeps_its_level_with_rare_tokens() -> None:
    """Two samples of 60 of one long-tailed distribution are called different in 5% of the trials."""
    generator = np.random.default_rng(16)
    weights = 1 / np.arange(1, 31)
    weights /= weights.sum()
    trials, alarms = 600, 0
    for seed in range(trials):
        first, second = (Counter(generator.choice(30, size=60, p=weights).tolist()) for _ in range(2))
        alarms += homogeneity_p_value(first, second, num_permutations=199, seed=seed) <= 0.05

    assert alarms / trials == pytest.approx(0.05, abs=0.027)


def test_homogeneity_test_sees_a_temperature_that_one_side_ignores() -> None:
    """Always the best token against a sample where it has 60%: seen with 50 draws each."""
    p = homogeneity_p_value({1: 50}, {1: 30, 2: 12, 3: 8})

    assert p == pytest.approx(1e-4)


def test_homogeneity_of_a_single_token_is_certain() -> None:
    """Where both samples know one token only, nothing differs."""
    assert homogeneity_p_value({5: 10}, {5: 20}) == 1.0
    with pytest.raises(UsageError, match="two samples"):
        homogeneity_p_value({5: 10}, {})


def test_rate_interval_of_no_hits_is_the_rule_of_three() -> None:
    """0 of 60 at 95%: the upper end is 1 - 0.025^(1/60) = 5.96%."""
    interval = rate_interval(0, 60)

    assert (interval.low, interval.value) == (0.0, 0.0)
    assert interval.high == pytest.approx(1 - 0.025 ** (1 / 60))
    assert rate_interval(60, 60).low == pytest.approx(0.025 ** (1 / 60))
    assert rate_interval(0, 0) is None


def test_rate_interval_covers_at_least_as_often_as_it_says() -> None:
    """Clopper-Pearson is conservative: a rate of 10% in 50 trials is covered in at least 95%."""
    draws = np.random.default_rng(17).binomial(50, 0.1, size=TRIALS)
    covered = Counter()
    for hits in draws.tolist():
        interval = rate_interval(hits, 50)
        covered[interval.low <= 0.1 <= interval.high] += 1

    assert covered[True] / TRIALS >= 0.95


def test_pooled_interval_covers_as_often_as_it_says_and_is_shorter():
    """Three arms of four blocks against one base, the same noise on every side: 95% of the intervals hold
    the true ratio of 1, and they are a fifth shorter than those of one arm by itself (t of 3 degrees is 3.18,
    of 6 it is 2.45)."""
    sides = [np.array(normal_rows(4, sd=0.05, seed=seed)) for seed in range(1, 5)]
    base, arms = sides[0], sides[1:]
    covered, shares = 0, []
    for trial in range(TRIALS):
        first, *others = [(base[trial] - arm[trial]).tolist() for arm in arms]
        pooled, own = pooled_ratio_interval(first, others), ratio_interval(first)
        covered += pooled.low < 1 < pooled.high
        shares.append(math.log(pooled.high / pooled.low) / math.log(own.high / own.low))

    assert 0.94 < covered / TRIALS < 0.96
    assert median(shares) < 0.85


def test_pooled_interval_of_a_lone_arm_is_its_own():
    """Nothing to pool with, or others of one block: the plain t interval."""
    ratios = [0.1, 0.2, 0.4]

    assert pooled_ratio_interval(ratios, []) == ratio_interval(ratios)
    assert pooled_ratio_interval(ratios, [[0.3]]) == ratio_interval(ratios)
    assert pooled_ratio_interval([0.1], [[0.3, 0.2]]).low is None
