"""Times of answers that came at one moment, and servers that draft although nobody asked them to."""

from __future__ import annotations

from dataclasses import replace

from spectune.records import StepRecord
from tests.support.served import served


def test_answer_that_came_at_one_moment_has_no_time_per_token() -> None:
    """Ten tokens in one network read take no time that could be measured: None, never zero."""
    record = served(chunks=(1.0, 2.0), output_ids=(5, 6, 7)).to_record()

    assert record.tpot_s is not None
    assert replace(record, finish_s=record.first_token_s).tpot_s is None


def test_plain_server_that_reports_drafts_is_a_failure() -> None:
    """Its tokens are not one step each, whatever it was taken for."""
    drafted = StepRecord(num_proposed=3, num_verified=3, num_accepted=1, num_emitted=2)
    answer = replace(served(chunks=(1.0, 2.0), output_ids=(5, 6, 7)), steps=(drafted,))

    assert answer.to_record(is_plain=False).error is None
    assert "the server drafted" in (answer.to_record(is_plain=True).error or "")
