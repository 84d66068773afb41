"""How much this client can take, measured against a mock server that needs no time at all.

A measurement near the ceiling measures the client. Server and client share the machine here as they
do on the machine of a user, so the ceiling is that of both; it depends on the concurrency.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from spectune.backend.client import ClientOptions, run_requests
from spectune.backend.mock_server import MockSettings, mock_process
from spectune.errors import RunError, SpectuneError
from spectune.records import Request, Sampling, ServedRequest
from spectune.workload.arrivals import ClosedLoop

SAFE_SHARE = 0.5
"""Share of the ceiling from which on a point's times are partly the client's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientCeiling:
    """Most that the client took at `concurrency`: whole requests and events, per second.

    One event carried one token, so `events_per_s` is also the tokens/s of a server without speculation;
    with it an event carries more and the client can take more tokens. `requests_per_s` is of answers of
    one token.
    """

    concurrency: int
    requests_per_s: float
    events_per_s: float
    num_requests: int
    num_events: int

    def share(self, *, requests_per_s: float, events_per_s: float) -> float:
        """Share of the client's time that a load needs: requests and events both cost some."""
        return requests_per_s / self.requests_per_s + events_per_s / self.events_per_s


def client_ceiling(
    concurrency: int,
    *,
    num_requests: int | None = None,
    output_tokens: int = 128,
    options: ClientOptions | None = None,
) -> ClientCeiling:
    """Measure it: answers of one token, then answers of `output_tokens`, each token its own event.

    Takes a second or two; `num_requests` (default: four a user, at least 64) is of the short answers,
    a quarter of them are asked for long ones. RunError if the mock server did not answer them all.
    """
    count = num_requests or max(64, 4 * concurrency)
    options = options or ClientOptions()
    load = ClosedLoop(concurrency=concurrency)
    with mock_process(MockSettings(max_num_seqs=max(concurrency, 1))) as server:
        run_requests(server.url, server.model, _requests(concurrency, 1), load, options)  # connections
        short = run_requests(server.url, server.model, _requests(count, 1), load, options)
        num_long = max(concurrency, math.ceil(count / 4))
        long = run_requests(server.url, server.model, _requests(num_long, output_tokens), load, options)
    num_events = sum(len(request.chunk_s) for request in long)
    return ClientCeiling(
        concurrency=concurrency,
        requests_per_s=count / _seconds(short),
        events_per_s=num_events / _seconds(long),
        num_requests=count,
        num_events=num_events,
    )


@functools.lru_cache(maxsize=32)
def known_ceiling(concurrency: int) -> ClientCeiling | None:
    """The ceiling of this process at `concurrency`, measured once; None where it cannot be measured."""
    try:
        return client_ceiling(concurrency)
    except (SpectuneError, OSError):
        return None


def client_share(ceiling: ClientCeiling, requests: Sequence[ServedRequest]) -> float:
    """Share of the ceiling that these requests needed while they ran."""
    seconds = _span(requests)
    return ceiling.share(
        requests_per_s=len(requests) / seconds,
        events_per_s=sum(len(request.chunk_s) for request in requests) / seconds,
    )


def ceiling_note(ceiling: ClientCeiling, requests: Sequence[ServedRequest]) -> str | None:
    """What must be said of requests that needed more than half of what the client can take, or None."""
    share = client_share(ceiling, requests)
    if share <= SAFE_SHARE:
        return None
    return (
        f"this load took {share:.0%} of what the client itself can take at concurrency "
        f"{ceiling.concurrency} ({ceiling.requests_per_s:.0f} requests/s, {ceiling.events_per_s:.0f} "
        "events/s): times are partly the client's"
    )


def _requests(count: int, output_tokens: int) -> list[Request]:
    sampling = Sampling(max_tokens=output_tokens, ignore_eos=True)
    return [
        Request(request_id=f"ceiling-{i}", prompt_ids=(i,) * 8, category="ceiling", sampling=sampling)
        for i in range(count)
    ]


def _seconds(requests: Sequence[ServedRequest]) -> float:
    failed = [request for request in requests if not request.is_success]
    if failed:
        raise RunError(f"the mock server did not answer {len(failed)} of {len(requests)}: {failed[0].error}")
    return _span(requests)


def _span(requests: Sequence[ServedRequest]) -> float:
    return max(request.ended_s for request in requests) - min(request.sent_s for request in requests)
