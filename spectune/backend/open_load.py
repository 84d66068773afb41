"""Requests of a point that arrive by the clock: the queue with its fillers, and what became of the load.

The first measured request does not meet an empty server: fillers, thrown away, arrive before it at the
same rate, and others go on arriving until the last measured request has ended. All arms of a cell see
the same arrivals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from spectune.records import Point, Request, ServedRequest
from spectune.workload.arrivals import OpenLoop, constant_arrivals, gamma_arrivals, trace_rate

LEAD_SHARE = 0.25
MIN_LEAD, MAX_LEAD = 4, 32
TAIL_FACTOR = 4
GROWTH_FACTOR, GROWTH_ROOM = 2, 4
"""Requests pile up where more than twice as many and four are in the system at the end; chance gives less."""
MIN_REQUESTS = 12


def open_queue(
    point: Point, requests: Sequence[Request], fillers: Sequence[Request], trace_s: Sequence[float] = ()
) -> tuple[list[Request], OpenLoop]:
    """Fillers, requests, fillers, and when each of them arrives.

    A trace has its own arrivals, stretched to the rate, and gets no fillers before it: it starts where it
    was recorded.
    """
    rate = point.cell.request_rate
    assert rate is not None
    if point.cell.arrivals == "trace":
        count = min(len(trace_s), len(requests) + TAIL_FACTOR * len(requests))
        later = list(_fillers(fillers, "tail", count - len(requests), point.sampling.max_tokens))
        scale = trace_rate(trace_s) / rate
        times = tuple(at * scale for at in trace_s[: len(requests) + len(later)])
        return [*requests, *later], OpenLoop(arrivals_s=times, request_rate=rate)
    lead = num_lead(len(requests)) if fillers else 0
    tail = TAIL_FACTOR * len(requests) if fillers else 0
    queue = [
        *_fillers(fillers, "lead", lead, point.sampling.max_tokens),
        *requests,
        *_fillers(fillers, "tail", tail, point.sampling.max_tokens),
    ]
    if point.cell.arrivals == "constant":
        times = constant_arrivals(len(queue), request_rate=rate)
    else:
        seed = 1000 * point.sampling.seed + point.repeat
        times = gamma_arrivals(
            len(queue), request_rate=rate, burstiness=point.cell.burstiness or 1.0, seed=seed
        )
    return queue, OpenLoop(arrivals_s=times, request_rate=rate, burstiness=point.cell.burstiness)


def num_lead(num_requests: int) -> int:
    """Fillers that arrive before `num_requests` measured ones."""
    return min(MAX_LEAD, max(MIN_LEAD, math.ceil(LEAD_SHARE * num_requests)))


def open_seconds(measured: Sequence[ServedRequest]) -> float:
    """From the first measured arrival to the end of the last of them."""
    return max(one.ended_s for one in measured) - min(one.scheduled_s for one in measured)


def mean_in_flight(measured: Sequence[ServedRequest], request_rate: float) -> float | None:
    """Little's law: arrivals/s times the mean seconds that a request is in flight."""
    held = [one.ended_s - one.sent_s for one in measured if one.is_success]
    return request_rate * math.fsum(held) / len(held) if held else None


def overload_note(
    done: Sequence[ServedRequest], measured: Sequence[ServedRequest], request_rate: float
) -> str | None:
    """That requests piled up while the load ran, which no longer run would end; None for a steady load.

    Compared is how many were in the system when the first and when the last measured one arrived; `done`
    are all that ended, fillers included.
    """
    if len(measured) < MIN_REQUESTS:
        return None
    arrivals = sorted(one.scheduled_s for one in measured)
    before, after = (
        sum(one.scheduled_s <= at < one.ended_s for one in done) for at in (arrivals[0], arrivals[-1])
    )
    if after < GROWTH_FACTOR * before + GROWTH_ROOM:
        return None
    return (
        f"the server does not keep up with {request_rate:g} requests/s: {before} requests were in it when the "
        f"first measured one arrived and {after} when the last did; a longer run would wait longer"
    )


def _fillers(fillers: Sequence[Request], name: str, count: int, max_tokens: int) -> Iterator[Request]:
    for i, request in zip(range(max(0, count)), itertools.cycle(fillers), strict=False):
        sampling = replace(request.sampling, max_tokens=max(2, max_tokens), ignore_eos=True, stop=())
        yield replace(request, request_id=f"filler-{name}-{i}", sampling=sampling)
