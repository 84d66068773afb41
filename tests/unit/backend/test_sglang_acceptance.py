"""SGLang's counts as our definitions: what is taken over, what is recomputed, what is not believed."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.backend.sglang_acceptance import (
    draft_rate_of_log,
    mean_length_of,
    report_of,
    with_current_names,
)
from spectune.errors import EngineFailure
from spectune.metrics import acceptance
from spectune.metrics.per_request import steps_from_report
from spectune.records import StepRecord


def told(histogram: list[int], *, width: int, **changes: Any) -> dict[str, Any]:
    """What SGLang tells of a request whose rounds accepted as in `histogram`."""
    rounds = sum(histogram)
    accepted = sum(j * count for j, count in enumerate(histogram))
    return {
        "spec_verify_ct": rounds,
        "spec_num_correct_drafts": accepted,
        "spec_num_proposed_drafts": rounds * width,
        "spec_correct_drafts_histogram": histogram,
        **changes,
    }


def steps_of(details: dict[str, Any], num_output_tokens: int) -> tuple[StepRecord, ...]:
    report = report_of(details)
    assert report is not None
    return steps_from_report(report, num_output_tokens=num_output_tokens)


def test_chain_is_counted_by_rounds_and_not_by_the_printed_length() -> None:
    """3 rounds accepted 0, 1 and 3: length 1 + 4/3; 8 tokens / 3 rounds would count the prefill's."""
    details = told([1, 1, 0, 1], width=3, spec_accept_length=8 / 3)
    steps = steps_of(details, 8)

    assert acceptance.acceptance_length(steps) == pytest.approx(1 + 4 / 3)
    assert acceptance.draft_acceptance_rate(steps) == pytest.approx(4 / 9)
    assert 1 + sum(step.num_emitted for step in steps) == 8


def test_rate_in_the_log_holds_the_bonus_token() -> None:
    """Length 2.17 of a chain of 3 is 0.39 a draft, not the printed 2.17 / 4 = 0.54."""
    assert draft_rate_of_log(2.17, 3) == pytest.approx(0.39)


def test_tree_has_a_rate_by_depth_and_another_by_nodes() -> None:
    """Depth 3, 15 drafted nodes, 1.5 accepted a round: 0.50 of the depth, 0.10 of the nodes."""
    steps = steps_of(told([0, 2, 2], width=15), 11)

    assert acceptance.depth_acceptance_rate(steps, 3) == pytest.approx(0.5)
    assert acceptance.draft_acceptance_rate(steps) == pytest.approx(0.1)


def test_survival_comes_from_the_histogram() -> None:
    """Of 4 rounds 3 accept at least one draft, 2 at least two."""
    steps = steps_of(told([1, 1, 2], width=2), 10)

    assert acceptance.survival(steps, 2) == (0.75, 0.5)


def test_rounds_without_drafts_count() -> None:
    """An adaptive server that drafted nothing in 2 of 4 rounds: 1 + 3/4, not 1 + 3/2."""
    steps = steps_of(told([2, 1, 1], width=3), 8)

    assert acceptance.acceptance_length(steps) == pytest.approx(1.75)


def test_adaptive_rounds_deeper_than_the_start_are_kept() -> None:
    """Started with 1 step and moved to 3: the histogram is longer than the width of the start."""
    steps = steps_of(told([0, 0, 0, 2], width=1), 9)

    assert acceptance.acceptance_length(steps) == 4.0


def test_tokens_that_the_end_cut_leave_the_last_round() -> None:
    """2 rounds of 3 accepted make 8 tokens; an answer of 7 was cut by one, the drafts counted whole."""
    steps = steps_of(told([0, 0, 0, 2], width=3), 8)

    assert sorted(step.num_emitted for step in steps) == [3, 4]


@pytest.mark.parametrize("details", [{}, {"spec_verify_ct": 0}])
def test_nothing_verified_is_nothing_known(details: dict[str, Any]) -> None:
    """A request of one token, or a server without speculation: None, not 1."""
    assert report_of(details) is None


def test_names_of_older_versions_are_read() -> None:
    """spec_accept_histogram and spec_accept_token_num were the names before."""
    old = {"spec_verify_ct": 2, "spec_accept_token_num": 3, "spec_accept_histogram": [0, 1, 1]}

    assert with_current_names(old) == {
        "spec_verify_ct": 2,
        "spec_num_correct_drafts": 3,
        "spec_correct_drafts_histogram": [0, 1, 1],
    }
    assert report_of(old) is not None


@pytest.mark.parametrize(
    ("details", "text"),
    [
        ({"spec_verify_ct": 3}, "no spec_correct_drafts_histogram"),
        (told([1, 1], width=1, spec_verify_ct=5), "counts 2 rounds, spec_verify_ct is 5"),
    ],
)
def test_counts_that_contradict_each_other_are_named(details: dict[str, Any], text: str) -> None:
    """Rather no acceptance than a wrong one."""
    with pytest.raises(EngineFailure, match=text):
        report_of(details)


def test_length_of_the_server_counts_only_after_a_flush() -> None:
    """avg_spec_accept_length averages since the start: warm-up and other traffic are in it."""
    info = {"internal_states": [{"avg_spec_accept_length": 2.5}]}

    assert mean_length_of(info, was_flushed=True) == 2.5
    assert mean_length_of(info, was_flushed=False) is None
    assert mean_length_of({"internal_states": [{}]}, was_flushed=True) is None
