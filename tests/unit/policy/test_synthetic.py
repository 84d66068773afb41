"""Synthetic prompts decide nothing unless that is forced."""

from __future__ import annotations

import pytest

from spectune.policy.synthetic import refusal


@pytest.mark.parametrize(
    ("workload", "config", "is_refused"),
    [
        pytest.param({"accounting": {"is_synthetic": True}}, {}, True, id="synthetic"),
        pytest.param({"accounting": {"is_synthetic": True}}, {"allow_synthetic": True}, False, id="forced"),
        pytest.param({"accounting": {"is_synthetic": False}}, {}, False, id="real"),
        pytest.param({"name": "w"}, None, False, id="older-run"),
        pytest.param(None, {}, False, id="no-workload"),
    ],
)
def test_runs_on_synthetic_prompts_are_refused(workload: object, config: object, is_refused: bool) -> None:
    """A run decides on real prompts, or where the user forced it."""
    text = refusal({"workload": workload, "config": config})

    assert (text is not None) is is_refused
