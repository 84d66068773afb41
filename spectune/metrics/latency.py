"""Latency of requests in seconds, one list a metric; failed requests are never in it.

Token counts come from the engine's output, never from stream events: under speculation one chunk
holds several tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from spectune.records import RequestRecord

MIN_SUCCESS_RATE = 0.99
"""Below it a point has no latency: what failed might have been the slow part."""


def is_success(request: RequestRecord) -> bool:
    """No error, at least one output token, and a finish: an empty or truncated answer is a failure."""
    return (
        request.error is None
        and request.num_output_tokens > 0
        and request.first_token_s is not None
        and request.finish_s is not None
        and request.finish_reason is not None
    )


def success_rate(requests: Sequence[RequestRecord]) -> float | None:
    """Successful requests / requests, 0..1; None without requests."""
    return sum(map(is_success, requests)) / len(requests) if requests else None


def tpots(requests: Sequence[RequestRecord]) -> list[float]:
    """(e2e - ttft) / (output tokens - 1) of each successful request with at least two tokens."""
    return _present(request.tpot_s for request in requests if is_success(request))


def ttfts(requests: Sequence[RequestRecord]) -> list[float]:
    """First token - arrival of each successful request."""
    return _present(request.ttft_s for request in requests if is_success(request))


def e2es(requests: Sequence[RequestRecord]) -> list[float]:
    """Finish - arrival of each successful request."""
    return _present(request.e2e_s for request in requests if is_success(request))


def inter_chunks(requests: Sequence[RequestRecord]) -> list[float]:
    """Gaps between stream events: n chunks give n - 1 gaps, the time to the first is not one of them.

    Close to the round time under speculation, not to the time per token.
    """
    return [
        after - before
        for request in requests
        if is_success(request)
        for before, after in pairwise(request.chunk_s)
    ]


def tpot_contradiction(
    tpot_s: float, tokens_per_s: float, concurrency: int = 1, *, tolerance: float = 0.10
) -> str | None:
    """How TPOT and decode throughput disagree, or None: concurrency / tpot must be tokens_per_s.

    Catches chunk gaps taken for token times. `tokens_per_s` is the decode rate, prefill excluded.
    """
    implied = concurrency / tpot_s
    if abs(implied / tokens_per_s - 1) <= tolerance:
        return None
    return (
        f"tpot of {tpot_s * 1e3:.2f} ms at concurrency {concurrency} means {implied:.1f} tokens/s, "
        f"but {tokens_per_s:.1f} tokens/s were decoded"
    )


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
