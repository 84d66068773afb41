"""Requests at a server in, one measurement out, and its fields under vLLM's names.

Latencies are of successful requests only. Token counts come from the server's usage, times from
stream events; a gap between events is not a time per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from spectune import stats
from spectune.errors import UsageError
from spectune.metrics.counters import (
    drafting_acceptance_length,
    drafting_acceptance_rate,
    drafting_survival,
)
from spectune.metrics.goodput import Promises, goodput
from spectune.metrics.latency import MIN_SUCCESS_RATE
from spectune.records import Durations, ServedMeasurement, ServedRequest, SpecCounts

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


def measure_served(
    requests: Sequence[ServedRequest],
    *,
    request_rate: float | None = None,
    burstiness: float | None = None,
    max_concurrency: int | None = None,
    promises: Promises | None = None,
    spec: SpecCounts | None = None,
    percentiles: Sequence[float] = PERCENTILES,
) -> ServedMeasurement:
    """Everything that one load on one server says. UsageError without requests.

    Below 99% success there are no durations: what failed might have been the slow part.
    """
    if not requests:
        raise UsageError("no requests were run")
    done = [request for request in requests if request.is_success]
    start_s, duration_s = window(requests)
    sound = done if len(done) >= MIN_SUCCESS_RATE * len(requests) else []

    def durations(values: Sequence[float | None]) -> Durations | None:
        return spread([value for value in values if value is not None], percentiles)

    return ServedMeasurement(
        num_requests=len(requests),
        completed=len(done),
        failed=len(requests) - len(done),
        duration_s=duration_s,
        total_input_tokens=_sum([request.num_prompt_tokens for request in done]),
        total_output_tokens=_sum([request.num_output_tokens for request in done]),
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        ttft_s=durations([request.ttft_s for request in sound]),
        tpot_s=durations([request.tpot_s for request in sound]),
        inter_chunk_s=durations([b - a for request in sound for a, b in pairwise(request.chunk_s)]),
        e2e_s=durations([request.e2e_s for request in sound]),
        scheduled_e2e_s=durations([request.scheduled_e2e_s for request in sound]),
        dispatch_delay_s=durations([request.dispatch_delay_s for request in sound]),
        goodput_per_s=None if promises is None else goodput(requests, promises, duration_s),
        peak_output_tokens_per_s=peak_output_throughput(done, start_s, duration_s),
        max_in_flight=max_in_flight(requests),
        spec=spec,
    )


def window(requests: Sequence[ServedRequest]) -> tuple[float, float]:
    """(start, duration): from the first that was asked for to the end of the last, failed ones included."""
    start_s = min(request.scheduled_s for request in requests)
    return start_s, max(request.ended_s for request in requests) - start_s


def spread(values: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> Durations | None:
    """Mean, median, standard deviation (of these values, not of a sample) and percentiles; None for none."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    kept = tuple((float(q), stats.percentile(values, q) or 0.0) for q in percentiles)
    return Durations(
        mean=mean,
        median=stats.percentile(values, 50) or 0.0,
        std=math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)),
        percentiles=kept,
    )


def peak_output_throughput(
    requests: Sequence[ServedRequest], start_s: float, duration_s: float, *, bucket_s: float = 1.0
) -> float | None:
    """Most tokens/s in equal buckets of about `bucket_s` that tile the window; None if unknown.

    Each event weighs its tokens, so the peak is never below the mean of the same window. None where
    an event's tokens are not known: counting events would be wrong by the acceptance length.
    """
    events: list[tuple[float, int]] = []
    for request in requests:
        if request.chunk_tokens is None or sum(request.chunk_tokens) != request.num_output_tokens:
            return None
        events.extend(zip(request.chunk_s, request.chunk_tokens, strict=True))
    if not events:
        return None
    num_buckets = max(1, math.floor(duration_s / bucket_s))
    buckets = [0] * num_buckets
    for at, tokens in events:
        place = int((at - start_s) / duration_s * num_buckets)
        buckets[min(max(place, 0), num_buckets - 1)] += tokens
    return max(buckets) * num_buckets / duration_s


def max_in_flight(requests: Sequence[ServedRequest]) -> int:
    """Most requests sent and not yet ended at one moment; one that ends as another starts is not with it."""
    moments = sorted([(r.sent_s, 1) for r in requests] + [(r.ended_s, -1) for r in requests])
    most = running = 0
    for _, change in moments:
        running += change
        most = max(most, running)
    return most


def vllm_fields(measurement: ServedMeasurement) -> dict[str, Any]:
    """The measurement under the names and in the units of `vllm bench serve` (milliseconds, percent).

    `itl` is the gap between stream events there too, not a time per token. Unknown values are None.
    """
    spec = measurement.spec
    fields: dict[str, Any] = {
        "num_prompts": measurement.num_requests,
        "request_rate": "inf" if measurement.request_rate is None else measurement.request_rate,
        "burstiness": measurement.burstiness,
        "max_concurrency": measurement.max_concurrency,
        "duration": measurement.duration_s,
        "completed": measurement.completed,
        "failed": measurement.failed,
        "total_input_tokens": measurement.total_input_tokens,
        "total_output_tokens": measurement.total_output_tokens,
        "request_throughput": measurement.request_throughput,
        "request_goodput": measurement.goodput_per_s,
        "output_throughput": measurement.output_throughput,
        "total_token_throughput": measurement.total_token_throughput,
        "max_output_tokens_per_s": measurement.peak_output_tokens_per_s,
        "max_concurrent_requests": measurement.max_in_flight,
    }
    for name, durations in (
        ("ttft", measurement.ttft_s),
        ("tpot", measurement.tpot_s),
        ("itl", measurement.inter_chunk_s),
        ("e2el", measurement.e2e_s),
        ("client_queue_time", measurement.dispatch_delay_s),
        ("e2el_including_client_queue", measurement.scheduled_e2e_s),
    ):
        fields |= _millis(name, durations)
    if spec is not None and spec.num_drafts:
        rate = drafting_acceptance_rate(spec)
        fields |= {
            "spec_decode_acceptance_rate": None if rate is None else 100 * rate,
            "spec_decode_acceptance_length": drafting_acceptance_length(spec),
            "spec_decode_num_drafts": spec.num_drafts,
            "spec_decode_draft_tokens": spec.num_draft_tokens,
            "spec_decode_accepted_tokens": spec.num_accepted_tokens,
            "spec_decode_per_position_acceptance_rates": list(drafting_survival(spec)),
        }
    return fields


def _sum(counts: Sequence[int | None]) -> int | None:
    """None as soon as one count is unknown: the sum of the others would be too small."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _millis(name: str, durations: Durations | None) -> dict[str, float | None]:
    if durations is None:
        return {f"{statistic}_{name}_ms": None for statistic in ("mean", "median", "std", "p99")}
    fields: dict[str, float | None] = {
        f"mean_{name}_ms": durations.mean * 1e3,
        f"median_{name}_ms": durations.median * 1e3,
        f"std_{name}_ms": durations.std * 1e3,
    }
    return fields | {f"p{percent:g}_{name}_ms": value * 1e3 for percent, value in durations.percentiles}
