"""The report's section on tuning: prediction beside measurement, and what was not tried."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.report.tuning_charts import scatter
from spectune.report.tuning_section import tuning_section


def interval(value: float) -> dict[str, Any]:
    return {"value": value, "low": value * 0.9, "high": value * 1.1, "n": 9, "level": 0.95}


def row(label: str, tpot_s: float, speedup: float | None) -> dict[str, Any]:
    return {
        "label": label,
        "speedup": None if speedup is None else interval(speedup),
        "tpot_s": interval(tpot_s),
        "acceptance_length": None if speedup is None else 1.8,
        "break_even_acceptance_length": None if speedup is None else 1.4,
        "zero_accept_share": None if speedup is None else 0.3,
    }


def told(**race: Any) -> dict[str, Any]:
    """One cell: plain decoding and K=3 ran, K=5 did not."""
    cell = {
        "cell": {"batch_size": 1, "context_tokens": 0, "temperature": 0.0},
        "predicted": [row("K=3", 0.008, 1.25), row("<K=5>", 0.009, 1.1), row("off", 0.010, None)],
        "categories": [],
        "measured": [
            {
                "label": "K=3",
                "predicted_tpot_s": interval(0.008),
                "measured_tpot_s": 0.0082,
                "residual": 0.025,
            },
            {"label": "off", "predicted_tpot_s": interval(0.010), "measured_tpot_s": 0.010, "residual": 0.0},
        ],
        "race": {
            "winner_label": "K=3",
            "fastest_label": "K=3",
            "reason": "K=3 runs at 1.22x",
            "end": "settled",
            "failed": [],
            "stages": [
                {
                    "number": 0,
                    "num_blocks": 8,
                    "challengers": [
                        {
                            "label": "off",
                            "expected": None,
                            "speedup": None,
                            "against": interval(0.8),
                            "estimate": 1.0,
                            "status": "settled",
                            "reason": "at most 0.880 of the speed of K=3",
                        }
                    ],
                }
            ],
            **race,
        },
        "waterfall": {"acceptance": 0.6, "verify": -0.2, "draft": -0.15, "other": 0.0, "residual": -0.02},
        "not_tried": {"num": 1, "labels": ["<K=5>"], "best_label": "<K=5>", "could_be_better_by": 0.012},
    }
    return {
        "cells": [cell],
        "seconds": {"trace": 3.0, "profile": 20.0},
        "space": {
            "num_configs": 3,
            "num_cells": 1,
            "num_predicted": 3,
            "refused": [["eagle3 K=9", "num-tokens 9 is deeper than the traced 8"]],
            "excluded": [],
            "pruned": [],
        },
        "surface": {
            "num_points": 72,
            "duration_s": 20.0,
            "held_out": {"num_points": 9, "median": 0.012, "p95": 0.03, "rms": 0.015},
        },
        "traces": [{"context_tokens": 0, "temperature": 0.0, "num_requests": 24, "num_positions": 900}],
    }


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("3 predicted, 2 measured", id="how-many"),
        pytest.param("72 points in 20 s, off by 1.2%", id="the-surface"),
        pytest.param("acceptance 1.82", id="why-it-won"),
        pytest.param("not explained 0.98", id="the-residual"),
        pytest.param("by 1.2% at most", id="what-could-be-missed"),
        pytest.param("at most 0.880 of the speed of K=3", id="the-stages"),
        pytest.param("num-tokens 9 is deeper than the traced 8", id="what-was-refused"),
        pytest.param("+2.5%", id="measured-over-predicted"),
    ],
)
def test_the_section_tells(words: str) -> None:
    """What was measured and what was not, and why the winner won."""
    assert words in tuning_section(told(), is_simulated=False)


def test_a_reason_begins_with_a_capital_unless_with_the_name_of_a_configuration() -> None:
    """eagle3 stays eagle3."""
    named = told(reason="eagle3 K=3 runs at 1.22x")
    named["cells"][0]["predicted"][0]["label"] = "eagle3 K=3"

    assert "<li>eagle3 K=3 runs at 1.22x" in tuning_section(named, is_simulated=False)
    assert "<li>No finalist is faster" in tuning_section(
        told(reason="no finalist is faster"), is_simulated=False
    )


def test_labels_are_escaped() -> None:
    """A label of a stored file is text, not markup."""
    text = tuning_section(told(), is_simulated=False)

    assert "<K=5>" not in text
    assert "&lt;K=5&gt;" in text


def test_a_failed_finalist_is_named() -> None:
    """With its reason."""
    text = tuning_section(told(failed=[["K=8", "oom: no memory"]]), is_simulated=False)

    assert "K=8 failed: oom: no memory" in text


def test_the_scatter_is_absent_before_anything_was_measured() -> None:
    """And is stamped where its data is simulated."""
    drawn = scatter(told()["cells"], is_simulated=True)

    assert scatter([{"cell": {}, "predicted": []}], is_simulated=False) is None
    assert drawn is not None
    assert "SIMULATED" in drawn
