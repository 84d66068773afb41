"""Request latencies: token counts from usage, chunks never taken for tokens."""

from __future__ import annotations

import pytest

from spectune.metrics.latency import (
    e2es,
    inter_chunks,
    is_success,
    success_rate,
    tpot_contradiction,
    tpots,
    ttfts,
)
from spectune.records import RequestRecord


def request(
    num_tokens: int = 11,
    *,
    chunks: tuple[float, ...] = (1.0, 1.5, 2.0),
    finish_s: float | None = 2.0,
    finish_reason: str | None = "stop",
    error: str | None = None,
) -> RequestRecord:
    """A request sent at 0.5 with its first token at 1.0."""
    return RequestRecord(
        request_id="r",
        category="chat",
        num_prompt_tokens=3,
        output_ids=tuple(range(num_tokens)),
        arrival_s=0.5,
        first_token_s=chunks[0] if chunks else None,
        finish_s=finish_s,
        finish_reason=finish_reason,
        chunk_s=chunks,
        error=error,
    )


def test_tpot_comes_from_token_counts_not_from_chunks() -> None:
    """11 tokens in 3 chunks over 1 s after the first: 0.1 s per token, 0.5 s per chunk."""
    assert tpots([request()]) == pytest.approx([0.1])
    assert inter_chunks([request()]) == pytest.approx([0.5, 0.5])


def test_ttft_and_e2e_are_measured_from_arrival() -> None:
    """Sent at 0.5, first token at 1.0, done at 2.0."""
    assert ttfts([request()]) == pytest.approx([0.5])
    assert e2es([request()]) == pytest.approx([1.5])


def test_inter_chunks_of_n_chunks_are_n_minus_one_gaps() -> None:
    """Five chunks give four gaps and the time to the first token appears only once."""
    five = request(chunks=(1.0, 1.1, 1.3, 1.6, 2.0))

    assert inter_chunks([five]) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert ttfts([five]) == pytest.approx([0.5])


def test_inter_chunks_of_one_chunk_are_empty() -> None:
    """One chunk has no gap."""
    assert inter_chunks([request(chunks=(1.0,))]) == []


def test_tpot_of_a_single_token_is_absent() -> None:
    """One token has no time per further token; it is left out, not 0."""
    assert tpots([request(1)]) == []


@pytest.mark.parametrize(
    "failed",
    [
        request(error="error object in the stream"),
        request(0),
        request(finish_s=None),
        request(finish_reason=None),
        request(chunks=()),
    ],
    ids=["error", "empty", "unfinished", "truncated", "no-first-token"],
)
def test_failed_requests_have_no_latency(failed: RequestRecord) -> None:
    """Errors, empty and truncated answers look fast; they count as failures only."""
    requests = [request(), failed]

    assert not is_success(failed)
    assert success_rate(requests) == 0.5
    assert [len(f(requests)) for f in (tpots, ttfts, e2es)] == [1, 1, 1]
    assert len(inter_chunks(requests)) == 2


def test_success_rate_without_requests_is_unknown() -> None:
    """Nothing sent is neither success nor failure."""
    assert success_rate([]) is None


def test_tpot_contradiction_catches_chunk_gaps_taken_for_tokens() -> None:
    """At 292.29 tokens/s and concurrency 1 a token takes 3.42 ms; 8.72 ms is a chunk gap."""
    assert tpot_contradiction(0.00342, 292.29) is None

    reason = tpot_contradiction(0.00872, 292.29)

    assert reason == (
        "tpot of 8.72 ms at concurrency 1 means 114.7 tokens/s, but 292.3 tokens/s were decoded"
    )
