"""Requests of a point at a server, each decoded at the concurrency that was asked for.

A closed loop: as soon as a request ends the next is sent. While it starts and while it drains fewer
requests are in flight, and the requests seen then would be counted at a load that they did not have;
cutting a window out instead would end it with the fast requests and count too many tokens a step. So
fillers, requests of other prompts that are thrown away, hold the load up before the first measured
request is sent and until the last one has ended: every measured request lives at full load from its
first token to its last, and all of its steps and seconds count.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from spectune.backend.client import ClientOptions, run_requests
from spectune.backend.prometheus import Scrape, cache_hit_rate, grown, spec_counts
from spectune.backend.server_api import reset_prefix_cache, scrape, served_models
from spectune.errors import EngineFailure
from spectune.records import (
    BlockResult,
    FailureKind,
    Gap,
    LoadRecord,
    Point,
    Request,
    RequestRecord,
    ServedRequest,
    SpecCounts,
)
from spectune.workload.arrivals import ClosedLoop

SILENCE_S = 120.0
HIT_LIMIT = 0.01
"""Share of prompt tokens from the prefix cache that is worth a word: every prompt is asked once."""

QUEUE_S = "vllm:request_queue_time_seconds_sum"
LIFE_S = "vllm:e2e_request_latency_seconds_sum"
PREEMPTIONS = "vllm:num_preemptions_total"

_LOST = frozenset({FailureKind.CONNECTION, FailureKind.RESET, FailureKind.TRUNCATED})


class _Enough(Exception):
    """The last measured request has ended: what else is in flight is cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is, what it is called there, and what is known of its start."""

    url: str
    served_model: str
    kv_capacity_tokens: int | None = None
    notes: tuple[str, ...] = ()


class ServerSession:
    """Runs points on one server.

    Args:
        check_alive: raises the failure that explains the server's death; returns while it lives.
        memory_bytes: memory that the server holds, for the record.
        is_plain: whether the server does not speculate at all.
        resets_cache: empty the prefix cache before a stream, if the server has one and a route for it.
    """

    def __init__(
        self,
        address: Address,
        *,
        is_plain: bool,
        check_alive: Callable[[], None] = lambda: None,
        memory_bytes: Callable[[], int | None] = lambda: None,
        options: ClientOptions | None = None,
        resets_cache: bool = False,
    ) -> None:
        self.address = address
        self._is_plain = is_plain
        self._check_alive = check_alive
        self._memory_bytes = memory_bytes
        self._resets_cache = resets_cache
        self._options = options or ClientOptions(silence_timeout_s=SILENCE_S)

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult:
        """All requests in a closed loop, ramp and drain included: for warming up, not for timing.

        The counters of the server must say what the requests say; if not, that is a note.
        """
        before = self._scrape()
        done = self._ask(point, requests, measured=requests)
        self._check_alive()
        load = self._load(point, before, done, is_whole=True)
        return _result(requests, done, load, self._memory_bytes(), is_plain=self._is_plain)

    def stream(self, point: Point, requests: Sequence[Request], fillers: Sequence[Request]) -> BlockResult:
        """See `LoadSession.stream`."""
        concurrency = point.cell.batch_size
        if self._resets_cache:
            reset_prefix_cache(self.address.url)  # where it cannot be, the hit rate tells
        before = self._scrape()
        queue = [
            *ramp(fillers, concurrency, point.sampling.max_tokens),
            *requests,
            *tail(fillers, concurrency, point.sampling.max_tokens),
        ]
        done = self._ask(point, queue, measured=requests)
        self._check_alive()
        load = self._load(point, before, done, is_whole=concurrency == 1)
        return _result(requests, done, load, self._memory_bytes(), is_plain=self._is_plain)

    def gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        """A server tells no logits of its own choice."""
        return None

    def _ask(
        self, point: Point, queue: Sequence[Request], measured: Sequence[Request]
    ) -> dict[str, ServedRequest]:
        """What became of every request that ended before the last measured one did."""
        waiting = {request.request_id for request in measured}
        done: dict[str, ServedRequest] = {}

        def take(served: ServedRequest) -> None:
            done[served.request_id] = served
            if served.failure in _LOST:
                self._check_alive()
            if served.failure is FailureKind.NOT_FOUND:
                names = ", ".join(served_models(self.address.url))
                raise EngineFailure(
                    f"{self.address.url} does not serve {self.address.served_model}, it serves {names}"
                )
            waiting.discard(served.request_id)
            if not waiting:
                raise _Enough

        load = ClosedLoop(concurrency=point.cell.batch_size)
        with contextlib.suppress(_Enough):
            run_requests(
                self.address.url, self.address.served_model, queue, load, self._options, on_done=take
            )
        return done

    def _scrape(self) -> Scrape | None:
        """The counters, or None where the server keeps none: nothing depends on them alone."""
        try:
            return scrape(self.address.url)
        except EngineFailure:
            self._check_alive()
            return None

    def _load(
        self, point: Point, before: Scrape | None, done: dict[str, ServedRequest], *, is_whole: bool
    ) -> LoadRecord:
        """`is_whole` says that `done` is everything that the server did between the two readings."""
        concurrency = point.cell.batch_size
        after = self._scrape()
        if before is None or after is None:
            return LoadRecord(concurrency=concurrency, notes=self.address.notes)
        name = self.address.served_model
        counts = spec_counts(before, after, model=name)
        hits = cache_hit_rate(before, after, model=name)
        preemptions = grown(before, after, PREEMPTIONS, model=name)
        queued, lived = (grown(before, after, series, model=name) for series in (QUEUE_S, LIFE_S))
        notes = [
            *self.address.notes,
            *_counter_notes(counts, list(done.values()), is_whole=is_whole),
            *_hit_notes(hits),
        ]
        return LoadRecord(
            concurrency=concurrency,
            reached=concurrency * (1 - queued / lived) if queued is not None and lived else None,
            num_drafts=None if counts is None else counts.num_drafts,
            num_draft_tokens=None if counts is None else counts.num_draft_tokens,
            num_accepted=None if counts is None else counts.num_accepted_tokens,
            prefix_hit_rate=hits,
            num_preemptions=None if preemptions is None else round(preemptions),
            kv_capacity_tokens=self.address.kv_capacity_tokens,
            notes=tuple(notes),
        )


def ramp(fillers: Sequence[Request], concurrency: int, max_tokens: int) -> list[Request]:
    """One filler a slot, of lengths that end one after the other, so that slots are refilled in turn
    as they are later on, and not all at once."""
    if concurrency == 1:
        return []
    return [
        _filler(request, f"ramp-{i}", math.ceil(max_tokens * (i + 1) / concurrency))
        for i, request in zip(range(concurrency), itertools.cycle(fillers), strict=False)
    ]


def tail(fillers: Sequence[Request], concurrency: int, max_tokens: int) -> Iterator[Request]:
    """Fillers that outlast any measured request; cancelled when the last of those has ended."""
    if concurrency == 1:
        return
    for i, request in zip(range(16 * concurrency), itertools.cycle(fillers), strict=False):
        yield _filler(request, f"tail-{i}", max_tokens)


def _filler(request: Request, name: str, max_tokens: int) -> Request:
    sampling = replace(request.sampling, max_tokens=max(2, max_tokens), ignore_eos=True, stop=())
    return replace(request, request_id=f"filler-{name}", sampling=sampling)


def _result(
    requests: Sequence[Request],
    done: dict[str, ServedRequest],
    load: LoadRecord,
    memory_bytes: int | None,
    *,
    is_plain: bool,
) -> BlockResult:
    served = [done[request.request_id] for request in requests if request.request_id in done]
    records: tuple[RequestRecord, ...] = tuple(one.to_record(is_plain=is_plain) for one in served)
    held_s = math.fsum(one.ended_s - one.sent_s for one in served)
    return BlockResult(
        requests=records,
        rounds=(),
        duration_s=held_s / load.concurrency,
        peak_memory_bytes=memory_bytes,
        load=load,
    )


def _counter_notes(
    counts: SpecCounts | None, done: Sequence[ServedRequest], *, is_whole: bool
) -> Iterator[str]:
    """Where the server's counters contradict the per-request counts of the same time.

    Requests that were cancelled are in the counters alone, so only more is allowed there.
    """
    if counts is None or any(not one.is_success for one in done):
        return
    steps = [step for one in done for step in one.steps or () if step.num_verified > 0]
    drafts, tokens = len(steps), sum(step.num_verified for step in steps)
    pairs = ((counts.num_drafts, drafts, "drafting steps"), (counts.num_draft_tokens, tokens, "draft tokens"))
    for counted, told, what in pairs:
        if counted < told or (is_whole and counted != told):
            yield f"the server counted {counted} {what}, its requests tell of {told}: other traffic was in the window"


def _hit_notes(hits: float | None) -> Iterator[str]:
    if hits is not None and hits > HIT_LIMIT:
        yield (
            f"{hits:.0%} of the prompt tokens came from the prefix cache although no prompt was asked twice: "
            "prefill was cheaper than for fresh prompts"
        )
