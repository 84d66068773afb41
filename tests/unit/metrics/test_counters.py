"""Acceptance from counters: vLLM's formulas, and None where nothing was drafted."""

from __future__ import annotations

import pytest

from spectune.metrics.counters import (
    counts_doubt,
    drafting_acceptance_length,
    drafting_acceptance_rate,
    drafting_conditional,
    drafting_survival,
)
from spectune.records import SpecCounts

COUNTS = SpecCounts(
    num_drafts=1000, num_draft_tokens=3000, num_accepted_tokens=1164, accepted_per_position=(543, 357, 264)
)
NOTHING = SpecCounts(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0, accepted_per_position=(0, 0))


def test_acceptance_of_a_window() -> None:
    """1000 drafts of three tokens, 1164 accepted: 2.164 tokens a draft, 38.8% of the drafted tokens."""
    assert pytest.approx(2.164) == drafting_acceptance_length(COUNTS)
    assert 0.388 == drafting_acceptance_rate(COUNTS)
    assert (0.543, 0.357, 0.264) == drafting_survival(COUNTS)
    assert pytest.approx((0.543, 0.657, 0.739), abs=6e-4) == drafting_conditional(COUNTS)
    assert counts_doubt(COUNTS) is None


def test_without_drafts_acceptance_is_unknown() -> None:
    """Never 0, 1 or NaN, and with the reason."""
    assert drafting_acceptance_length(NOTHING) is None
    assert drafting_acceptance_rate(NOTHING) is None
    assert () == drafting_survival(NOTHING) == drafting_conditional(NOTHING)
    assert "no draft steps observed" == counts_doubt(NOTHING)


@pytest.mark.parametrize(
    ("counts", "doubt"),
    [
        ((10, 30, 12, (5, 4, 2)), "positions sum to 11"),
        ((10, 10, 12, (12,)), "12 of 10 drafted tokens"),
        ((10, 25, 12, (6, 4, 2)), "the draft length varied"),
    ],
    ids=["positions", "more than drafted", "varying drafts"],
)
def test_counts_that_cannot_be_taken_as_they_are_say_why(
    counts: tuple[int, int, int, tuple[int, ...]], doubt: str
) -> None:
    """Identities are checked, and rates that shorter drafts bias are marked."""
    drafts, drafted, accepted, positions = counts

    told = counts_doubt(
        SpecCounts(
            num_drafts=drafts,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            accepted_per_position=positions,
        )
    )

    assert told is not None
    assert told.startswith(doubt)
