"""Rows of imported points: speedups only between arms at the same load."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spectune.policy.imported import BASIS, imported_rows
from spectune.records import Durations, ImportedPoint, ServedMeasurement, SpecConfig, Status

K3 = SpecConfig.chain("ngram", 3)


def point(
    config: SpecConfig | None, tpot_s: float, *, users: int = 4, run: int | None = 0, **changes: Any
) -> ImportedPoint:
    """A measurement with this mean time per token."""
    measurement = ServedMeasurement(
        num_requests=10,
        completed=10,
        failed=0,
        duration_s=1.0,
        total_input_tokens=100,
        total_output_tokens=100,
        max_concurrency=users,
        tpot_s=Durations(mean=tpot_s, median=tpot_s, std=0.0),
    )
    values: dict[str, Any] = {"measurement": measurement, "engine": "vllm", "model": "m", "config": config}
    return ImportedPoint(**{**values, "run_number": run, **changes})


def test_speedup_is_plain_time_over_the_arms() -> None:
    """20 ms plain and 10 ms speculative: twice as fast; one run has no interval."""
    plain, arm = imported_rows([point(SpecConfig.off(), 0.020), point(K3, 0.010)])

    assert plain["speedup"] is None
    assert pytest.approx(2.0) == arm["speedup"]
    assert (None, 1, BASIS) == (arm["speedup_ci"], arm["speedup_n"], arm["speedup_basis"])


def test_runs_are_paired_by_number() -> None:
    """Two runs of each: the geometric mean of 2 and 1.5 with an interval around it."""
    rows = imported_rows(
        [
            point(SpecConfig.off(), 0.020, run=0),
            point(SpecConfig.off(), 0.018, run=1),
            point(K3, 0.010, run=0),
            point(K3, 0.012, run=1),
        ]
    )

    assert pytest.approx(math.sqrt(3.0)) == rows[2]["speedup"] == rows[3]["speedup"]
    low, high = rows[2]["speedup_ci"]
    assert low < math.sqrt(3.0) < high


@pytest.mark.parametrize(
    "changes",
    [
        {"users": 8},
        {"model": "other"},
        {"settings": (("random_input_len", 64),)},
        {"run": 7},
        {"status": Status.FAILED},
    ],
    ids=["load", "model", "setting", "run", "failed"],
)
def test_arms_of_other_conditions_are_not_compared(changes: dict[str, Any]) -> None:
    """A speedup across loads, models or settings would be none."""
    rows = imported_rows([point(SpecConfig.off(), 0.020, **changes), point(K3, 0.010)])

    assert rows[1]["speedup"] is None


def test_speculative_settings_do_not_part_the_arms() -> None:
    """What the sweep varied to speculate is the arm, not the condition."""
    rows = imported_rows(
        [
            point(SpecConfig.off(), 0.02, settings=(("_benchmark_name", "off"), ("max_num_seqs", 8))),
            point(
                K3,
                0.01,
                settings=(("_benchmark_name", "k3"), ("max_num_seqs", 8), ("speculative_config", "{}")),
            ),
        ]
    )

    assert pytest.approx(2.0) == rows[1]["speedup"]
    assert 8 == rows[1]["setting:max_num_seqs"]


def test_failed_point_is_a_row_with_its_reason() -> None:
    """It stands in the table and has no figures."""
    (row,) = imported_rows([point(None, 0.01, measurement=None, status=Status.FAILED, reason="died")])

    assert ("failed", "died", None) == (row["status"], row["reason"], row["config"])
    assert "mean_tpot_ms" not in row
