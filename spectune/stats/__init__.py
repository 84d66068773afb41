"""Intervals, paired comparison, sequential plans, power, pooling: numbers in, numbers out.

Knows nothing of runs or engines. numpy and scipy are imported inside functions. Every interval and
test is validated by simulation in tests/unit/stats.
"""

from __future__ import annotations

from spectune.stats.bootstrap import hierarchical_ratio_interval
from spectune.stats.counts import homogeneity_p_value, rate_interval
from spectune.stats.intervals import (
    SPREAD,
    clustered_log_ratio_interval,
    geometric_mean,
    percentile,
    pooled_ratio_interval,
    ratio_interval,
    spread,
)
from spectune.stats.moments import interquartile_mean, median, standard_deviation, upper_deviation
from spectune.stats.paired import (
    holm,
    minimum_detectable_ratio,
    paired_p_value,
    paired_power,
    prediction_p_value,
    two_sided_p_value,
    welch_p_value,
)
from spectune.stats.sequential import LookPlan, alarm_levels, plan_looks, spent

__all__ = [
    "LookPlan",
    "SPREAD",
    "alarm_levels",
    "clustered_log_ratio_interval",
    "geometric_mean",
    "hierarchical_ratio_interval",
    "holm",
    "homogeneity_p_value",
    "interquartile_mean",
    "median",
    "minimum_detectable_ratio",
    "paired_p_value",
    "paired_power",
    "percentile",
    "plan_looks",
    "pooled_ratio_interval",
    "prediction_p_value",
    "rate_interval",
    "ratio_interval",
    "spent",
    "spread",
    "standard_deviation",
    "two_sided_p_value",
    "upper_deviation",
    "welch_p_value",
]
