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

from spectune.backend.ceiling import ClientCeiling, ceiling_note, client_share
from spectune.backend.chat import chat_answers
from spectune.backend.client import ClientOptions, run_requests
from spectune.backend.open_load import mean_in_flight, open_queue, open_seconds, overload_note
from spectune.backend.prometheus import Scrape, cache_hit_rate, grown, spec_counts
from spectune.backend.server_api import next_gap, reset_prefix_cache, scrape, served_models
from spectune.backend.server_words import VLLM_WORDS, ServerWords
from spectune.errors import EngineFailure
from spectune.metrics.served import max_in_flight
from spectune.records import (
    NEAR_TIE,
    BlockResult,
    ChatAnswer,
    FailureKind,
    Gap,
    LoadRecord,
    Point,
    Prompt,
    Request,
    RequestRecord,
    Sampling,
    ServedRequest,
    SpecCounts,
)
from spectune.workload.arrivals import ClosedLoop, Load

SILENCE_S = 120.0
HIT_LIMIT = 0.01
"""Share of prompt tokens from the prefix cache that is worth a word: every prompt is asked once."""

MOST_TIMEOUTS = 2
"""Requests in a row without an answer after which an engine hangs, rather than one of its requests."""

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
    near_tie: float = NEAR_TIE["bfloat16"]


class ServerSession:
    """Runs points on one server.

    Args:
        check_alive: raises the failure that explains the server's death; returns while it lives.
        memory_bytes: memory that the server holds, for the record.
        is_plain: whether the server does not speculate at all.
        resets_cache: empty the prefix cache before a stream, if the server has one and a route for it.
        ceiling: tells what this client can take at a concurrency; nothing is said of it if None.
        trace_s: arrivals of a recorded trace, for cells that replay it.
        words: what the engine calls its counters and routes.
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
        ceiling: Callable[[int], ClientCeiling | None] | None = None,
        trace_s: Sequence[float] = (),
        words: ServerWords = VLLM_WORDS,
    ) -> None:
        self._words = words
        self.address = address
        self._is_plain = is_plain
        self._check_alive = check_alive
        self._memory_bytes = memory_bytes
        self._resets_cache = resets_cache
        self._ceiling = ceiling
        self._trace_s = tuple(trace_s)
        self._options = options or ClientOptions(silence_timeout_s=SILENCE_S)

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult:
        """All requests in a closed loop, ramp and drain included: for warming up, not for timing.

        The counters of the server must say what the requests say; if not, that is a note.
        """
        before = self._scrape()
        done = self._ask(requests, _closed(point), measured=requests)
        self._check_alive()
        load = self._load(point, before, done, is_whole=True)
        return self._result(point, requests, done, load)

    def stream(self, point: Point, requests: Sequence[Request], fillers: Sequence[Request]) -> BlockResult:
        """See `LoadSession.stream`; at a request rate the fillers arrive before and after."""
        concurrency = point.cell.batch_size
        ceiling = None if self._ceiling is None else self._ceiling(concurrency)
        if self._resets_cache:
            reset_prefix_cache(
                self.address.url, self._words.reset_path
            )  # where it cannot be, the hit rate tells
        if point.config.is_production:
            self._ask(_warmers(requests), _closed(point), measured=_warmers(requests))
        before = self._scrape()
        load: Load = _closed(point)
        queue = [
            *ramp(fillers, concurrency, point.sampling.max_tokens),
            *requests,
            *tail(fillers, concurrency, point.sampling.max_tokens),
        ]
        if point.cell.is_open_loop:
            queue, load = open_queue(point, requests, fillers, self._trace_s)
        done = self._ask(queue, load, measured=requests)
        self._check_alive()
        is_whole = concurrency == 1 and not point.cell.is_open_loop
        record = self._load(point, before, done, is_whole=is_whole)
        return self._result(point, requests, done, _with_client(record, ceiling, list(done.values())))

    def converse(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[ChatAnswer]:
        """See `Converses`."""
        url, name = self.address.url, self.address.served_model
        return chat_answers(url, name, prompts, sampling, self._options)

    def gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        """The text so far as a prompt, one token asked for: it comes from prefill, which no draft changes."""
        if request.sampling.temperature > 0 or not request.prompt_ids:
            return None
        ids = (*request.prompt_ids, *output_ids[:index])
        value = next_gap(self.address.url, self.address.served_model, ids)
        return None if value is None else Gap(value=value, tolerance=self.address.near_tie)

    def _ask(
        self, queue: Sequence[Request], load: Load, measured: Sequence[Request]
    ) -> dict[str, ServedRequest]:
        """What became of every request that ended before the last measured one did."""
        waiting = {request.request_id for request in measured}
        done: dict[str, ServedRequest] = {}
        silent = 0

        def take(served: ServedRequest) -> None:
            nonlocal silent
            done[served.request_id] = served
            silent = silent + 1 if served.failure is FailureKind.TIMEOUT else 0
            if silent >= MOST_TIMEOUTS:
                self._check_alive()
                raise EngineFailure(
                    f"{silent} requests in a row had no answer, the last one after "
                    f"{served.ended_s - served.sent_s:.0f} s: the engine at {self.address.url} hangs",
                    hint="its log says what it was doing; a load beyond its memory swaps",
                )
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

        with contextlib.suppress(_Enough):
            run_requests(
                self.address.url, self.address.served_model, queue, load, self._options, on_done=take
            )
        return done

    def _result(
        self, point: Point, requests: Sequence[Request], done: dict[str, ServedRequest], load: LoadRecord
    ) -> BlockResult:
        """The measured requests; their seconds are slot time, or the whole window of an open loop."""
        served = [done[request.request_id] for request in requests if request.request_id in done]
        if self._is_plain and load.num_drafts:
            raise EngineFailure(
                f"the server counted {load.num_drafts} drafts, although it was taken for one without speculation",
                hint="look for speculation in --server-cmd, --extra-server-args or a config file of the engine",
            )
        rate = point.cell.request_rate
        records: tuple[RequestRecord, ...] = tuple(
            one.to_record(is_plain=self._is_plain, keeps_schedule=rate is not None) for one in served
        )
        if not self._is_plain:
            load = _with_acceptance_notes(load, served)
        duration_s = math.fsum(one.ended_s - one.sent_s for one in served) / load.concurrency
        if rate is not None and served:
            duration_s = open_seconds(served)
            share = 1.0 if load.reached is None else load.reached / load.concurrency
            held = mean_in_flight(served, rate)
            note = overload_note(list(done.values()), served, rate)
            load = replace(
                load,
                reached=None if held is None else held * share,
                notes=load.notes if note is None else (*load.notes, note),
            )
        return BlockResult(
            requests=records,
            rounds=(),
            duration_s=duration_s,
            peak_memory_bytes=self._memory_bytes(),
            load=load,
        )

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
        name, words = self.address.served_model, self._words
        counts = spec_counts(before, after, model=name)
        hits = cache_hit_rate(before, after, model=name, words=self._words)
        preemptions = grown(before, after, words.preemptions, model=name)
        queued, lived = (grown(before, after, series, model=name) for series in (words.queue_s, words.life_s))
        notes = [
            *self.address.notes,
            *_counter_notes(counts, list(done.values()), is_whole=is_whole),
            *(() if point.config.is_production else _hit_notes(hits)),
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


def _with_acceptance_notes(load: LoadRecord, served: Sequence[ServedRequest]) -> LoadRecord:
    """The load with what stands in for acceptance where the requests of a speculating server tell none."""
    done = [one for one in served if one.is_success]
    notes = list(load.notes)
    if reasons := sorted({one.steps_reason for one in done if one.steps_reason}):
        notes.append(f"the server's report of drafts could not be used: {'; '.join(reasons)}")
    if not done or any(one.steps for one in done):
        return replace(load, notes=tuple(notes))
    own = ", and there are no counters"
    if load.num_drafts and load.num_accepted is not None:
        length = 1 + load.num_accepted / load.num_drafts
        own = (
            f"; its counters say {length:.2f} tokens a drafting step over {load.num_drafts} steps, those that only "
            "held the load up included"
        )
    notes.append(
        f"the server's requests tell no acceptance{own}: vLLM tells it when started with its flag "
        "per-request-spec-decode-metrics detailed"
    )
    return replace(load, tells_steps=False, notes=tuple(notes))


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


def _warmers(requests: Sequence[Request]) -> list[Request]:
    """The same prompts asked once before, for two tokens: a prefix cache holds them afterwards."""
    return [
        replace(
            request,
            request_id=f"warm-{request.request_id}",
            sampling=replace(request.sampling, max_tokens=2, ignore_eos=True, stop=()),
        )
        for request in requests
    ]


def _closed(point: Point) -> ClosedLoop:
    return ClosedLoop(concurrency=point.cell.batch_size)


def _with_client(
    load: LoadRecord, ceiling: ClientCeiling | None, done: Sequence[ServedRequest]
) -> LoadRecord:
    """The load with what this client can take and what it had to; a doubt above half of it."""
    load = replace(load, max_in_flight=max_in_flight(done))
    if ceiling is None or not done:
        return load
    note = ceiling_note(ceiling, done)
    return replace(
        load,
        client_requests_per_s=ceiling.requests_per_s,
        client_events_per_s=ceiling.events_per_s,
        client_share=client_share(ceiling, done),
        notes=load.notes if note is None else (*load.notes, note),
    )


def _counter_notes(
    counts: SpecCounts | None, done: Sequence[ServedRequest], *, is_whole: bool
) -> Iterator[str]:
    """Where the server's counters contradict the per-request counts of the same time.

    Requests that were cancelled are in the counters alone, so only more is allowed there.
    """
    if counts is None or any(not one.is_success for one in done):
        return
    if not any(one.steps for one in done):
        return  # requests that tell nothing contradict nothing
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
