"""Promises of latency, in vLLM's words and kept as a user sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spectune.errors import UsageError
from spectune.metrics.goodput import Promises, goodput, parse_goodput
from spectune.records import RequestRecord
from tests.support.served import failed, served


def test_goodput_is_read_in_milliseconds() -> None:
    """Separate words, one text and commas are the same promises."""
    expected = Promises(ttft_s=0.2, tpot_s=0.02, e2el_s=5.0)

    assert expected == parse_goodput(["ttft:200", "tpot:20", "e2el:5000"])
    assert expected == parse_goodput(["ttft:200 tpot:20,e2el:5000"])
    assert Promises(tpot_s=0.0125) == parse_goodput(["tpot:12.5"])


@pytest.mark.parametrize(
    "text", ["itl:20", "ttft", "ttft:", "ttft:fast", "ttft:0", "ttft:-1", "ttft:nan", "ttft:1 ttft:2", ""]
)
def test_wrong_promises_are_usage_errors(text: str) -> None:
    """The pair that cannot be read is quoted."""
    with pytest.raises(UsageError, match="--goodput"):
        parse_goodput([text])


def test_only_requests_that_keep_every_promise_count() -> None:
    """Of five in ten seconds one is slow to start, one slow to go on, one failed: two are good."""
    requests = [
        served(chunks=(0.1, 0.2, 0.3)),
        served(chunks=(0.2, 0.4)),
        served(chunks=(0.4, 0.5, 0.6)),
        served(chunks=(0.1, 1.0, 2.0)),
        failed(),
    ]

    assert 0.2 == goodput(requests, Promises(ttft_s=0.3, tpot_s=0.2), 10.0)


def test_waiting_in_the_clients_own_queue_breaks_promises_too() -> None:
    """A user does not care where the request waited."""
    waited = served(scheduled_s=0.0, sent_s=5.0, chunks=(5.1, 5.2))

    assert not Promises(ttft_s=1.0).are_kept_by(waited)
    assert not Promises(e2el_s=1.0).are_kept_by(waited)


def test_one_token_cannot_break_a_promise_of_time_per_token() -> None:
    """There is no time per token to judge."""
    assert Promises(tpot_s=0.001).are_kept_by(served(chunks=(0.5,), num_tokens=1))


def test_no_requests_have_no_goodput() -> None:
    """Unknown is not zero."""
    assert goodput([], Promises(ttft_s=1.0), 1.0) is None


def test_stored_requests_are_judged_by_the_same_promises() -> None:
    """A record asked for at 0 s, sent at 1 s, first token at 1.1 s: the user waited 1.1 s, not 100 ms."""
    record = RequestRecord(
        request_id="r",
        category="chat",
        num_prompt_tokens=5,
        output_ids=(1, 2, 3),
        arrival_s=1.0,
        first_token_s=1.1,
        finish_s=1.3,
        finish_reason="length",
        scheduled_s=0.0,
    )
    closed = replace(record, scheduled_s=None)
    promise = parse_goodput(["ttft:200"])

    assert not promise.are_kept_by(record)
    assert promise.are_kept_by(closed)
    assert not promise.are_kept_by(replace(closed, error="reset"))
    assert goodput([record, closed], promise, 2.0) == 0.5
