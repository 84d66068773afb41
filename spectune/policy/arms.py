"""Blocks of one arm in, its summary over one scope out; knows nothing of the other arms.

Counts are pooled before anything is divided. An arm that failed, whose counts do not add up or that
is physically impossible keeps its counts and loses every time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from spectune import stats
from spectune.metrics import acceptance as accept
from spectune.metrics import latency as lat
from spectune.metrics import throughput
from spectune.metrics.goodput import Promises, goodput
from spectune.policy.comparison import Acceptance, ArmSummary, Latency, Rounds, ServedLoad, Spread
from spectune.records import (
    BlockResult,
    Cell,
    Fingerprint,
    RequestRecord,
    RoundRecord,
    SpecConfig,
    Status,
    StepRecord,
)
from spectune.theory import roofline

ALL = "all"
BlockKey = tuple[int, int]
"""(repeat, block index)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmData:
    """All that was measured of one configuration in one cell. `status` is not ok where no point is."""

    config: SpecConfig
    cell: Cell
    blocks: Mapping[BlockKey, BlockResult] = field(default_factory=dict)
    status: Status = Status.OK
    reason: str | None = None
    point_ids: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    peak_memory_bytes: int | None = None
    has_boots: bool = False
    promises: Promises | None = None

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        return tuple(request for block in self.blocks.values() for request in block.requests)

    @property
    def rounds(self) -> tuple[RoundRecord, ...]:
        return tuple(turn for block in self.blocks.values() for turn in block.rounds)

    def only(self, keys: Iterable[BlockKey]) -> ArmData:
        """The same arm restricted to some blocks."""
        return replace(self, blocks={key: self.blocks[key] for key in keys if key in self.blocks})

    def of_scope(self, scope: str) -> ArmData:
        """The blocks whose requests all belong to a category; every block for scope "all"."""
        if scope == ALL:
            return self
        return self.only(
            key
            for key, block in self.blocks.items()
            if block.requests and all(request.category == scope for request in block.requests)
        )

    def requests_of(self, scope: str) -> tuple[RequestRecord, ...]:
        """The requests of a category, from mixed blocks too."""
        return tuple(request for request in self.requests if scope in (ALL, request.category))

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(sorted({request.category for request in self.requests}))


def summarize_arm(data: ArmData, scope: str = ALL, fingerprint: Fingerprint | None = None) -> ArmSummary:
    """Everything of an arm but its speedup and prediction."""
    requests = data.requests_of(scope)
    status, reason = _status(data, requests, fingerprint)
    succeeded = [request for request in requests if lat.is_success(request)]
    sound = status is Status.OK
    duration_s = sum(block.duration_s for block in data.of_scope(scope).blocks.values())
    return ArmSummary(
        config=data.config,
        scope=scope,
        status=status,
        reason=reason,
        num_requests=len(requests),
        num_failed=len(requests) - len(succeeded),
        input_tokens=sum(request.num_prompt_tokens for request in succeeded),
        output_tokens=sum(request.num_output_tokens for request in succeeded),
        output_tokens_per_s=_throughput(data, scope, duration_s) if sound else None,
        reached_batch=throughput.reached_batch(data.rounds) or _reached_load(data),
        peak_memory_bytes=data.peak_memory_bytes,
        acceptance=measure_acceptance(data.config, requests),
        latency=_latency(requests) if sound else None,
        rounds=pool_rounds(data.of_scope(scope)) if sound else None,
        point_ids=data.point_ids,
        cautions=data.cautions,
        kv_capacity_tokens=_capacity(data),
        output_lengths=_spread([float(request.num_output_tokens) for request in succeeded]),
        load=_served_load(data, requests, duration_s) if sound else None,
    )


def measure_acceptance(config: SpecConfig, requests: tuple[RequestRecord, ...]) -> Acceptance:
    """Acceptance pooled over the steps of successful requests whose counts add up."""
    steps = accept.pooled_steps(requests)
    counts = accept.acceptance_counts(steps)
    depth = max(config.max_accepted, max((step.num_accepted for step in steps), default=0))
    survival = accept.survival(steps, depth)
    return Acceptance(
        num_steps=counts.num_steps,
        num_proposed=counts.num_proposed,
        num_verified=counts.num_verified,
        num_accepted=counts.num_accepted,
        acceptance_length=accept.acceptance_length(steps),
        reason=accept.missing_reason(steps),
        acceptance_length_per_request=accept.acceptance_length_per_request(requests),
        survival=survival,
        conditional_acceptance=accept.conditional_acceptance(survival),
        depth_acceptance_rate=None
        if config.is_off
        else accept.depth_acceptance_rate(steps, config.num_steps),
        draft_acceptance_rate=accept.draft_acceptance_rate(steps),
        zero_accept_share=accept.zero_accept_share(steps),
        proposed_per_step=accept.proposed_per_step(steps),
        alpha=accept.censored_alpha(steps, depth),
        num_drafting_steps=counts.num_draft_steps,
    )


def _served_load(data: ArmData, requests: tuple[RequestRecord, ...], duration_s: float) -> ServedLoad | None:
    loads = [block.load for block in data.blocks.values() if block.load is not None]
    if not loads:
        return None
    done = [request for request in requests if lat.is_success(request)]
    waits = [request.scheduled_ttft_s for request in done if request.scheduled_ttft_s is not None]
    ends = [request.scheduled_e2e_s for request in done if request.scheduled_e2e_s is not None]
    delays = [request.arrival_s - request.asked_s for request in done]
    kept = None
    if data.promises is not None and requests:
        kept = sum(map(data.promises.are_kept_by, requests)) / len(requests)
    known = duration_s > 0
    return ServedLoad(
        scheduled_ttft_s=_spread(waits),
        scheduled_e2e_s=_spread(ends),
        dispatch_delay_s=sum(delays) / len(delays) if delays else None,
        requests_per_s=len(done) / duration_s if known else None,
        goodput_per_s=goodput(requests, data.promises, duration_s) if data.promises and known else None,
        share_kept=kept,
        max_in_flight=max(
            (one.max_in_flight for one in loads if one.max_in_flight is not None), default=None
        ),
        prefix_hit_rate=max(
            (one.prefix_hit_rate for one in loads if one.prefix_hit_rate is not None), default=None
        ),
        num_preemptions=max(
            (one.num_preemptions for one in loads if one.num_preemptions is not None), default=None
        ),
        client_requests_per_s=min(
            (one.client_requests_per_s for one in loads if one.client_requests_per_s is not None),
            default=None,
        ),
        client_events_per_s=min(
            (one.client_events_per_s for one in loads if one.client_events_per_s is not None), default=None
        ),
        client_share=max((one.client_share for one in loads if one.client_share is not None), default=None),
    )


def _capacity(data: ArmData) -> int | None:
    """The smallest cache of any of its starts."""
    told = (block.load.kv_capacity_tokens for block in data.blocks.values() if block.load is not None)
    return min((tokens for tokens in told if tokens is not None), default=None)


def _reached_load(data: ArmData) -> float | None:
    loads = [block.load for block in data.blocks.values() if block.load is not None]
    told = [load.reached for load in loads if load.reached is not None]
    return sum(told) / len(told) if told else None


def pool_rounds(data: ArmData, *, is_steady: bool = False) -> Rounds | None:
    """Mean full-batch decode round of an arm; None where the batch was never full.

    `is_steady`: the interquartile mean, for arms whose rounds all have one size (`throughput.round_tpot`).
    """
    if not data.rounds:
        return _served_rounds(data)
    totals = throughput.round_tpot(data.rounds, data.cell.batch_size, is_steady=is_steady)
    if totals is None:
        return None
    return Rounds(
        num_rounds=totals.num_rounds,
        draft_s=totals.draft_s,
        verify_s=totals.verify_s,
        other_s=totals.other_s,
        tokens_per_sequence=totals.tokens_per_sequence,
        round_tpot_s=totals.round_tpot_s,
    )


def _served_rounds(data: ArmData) -> Rounds | None:
    served = throughput.request_totals(data.requests)
    if served is None:
        return None
    return Rounds(
        num_rounds=served.num_steps,
        draft_s=None,
        verify_s=None,
        other_s=None,
        tokens_per_sequence=served.tokens_per_step,
        round_tpot_s=served.tpot_s,
        whole_s=served.step_s,
    )


def mean_kv_tokens(data: ArmData) -> float | None:
    """Mean cached tokens of the whole batch over full-batch decode rounds."""
    full = [turn for turn in data.rounds if turn.kind == "decode" and turn.batch_size >= data.cell.batch_size]
    return sum(turn.kv_tokens for turn in full) / len(full) if full else None


MEASURED_FLOOR_TOLERANCE = 0.5
"""A bandwidth measured while other work ran is too low, so only twice the speed of it is impossible."""


def floor_round_s(data: ArmData, fingerprint: Fingerprint | None) -> float | None:
    """Least seconds of one round: target weights and cached keys and values over the measured read
    bandwidth. The head's bytes are left out: a small head may stay in a cache."""
    if fingerprint is None or not fingerprint.weight_bytes or not fingerprint.read_bandwidth_bytes_per_s:
        return None
    kv_bytes = (fingerprint.kv_bytes_per_token or 0) * (mean_kv_tokens(data) or 0.0)
    return roofline.floor_round_s(fingerprint.weight_bytes, kv_bytes, fingerprint.read_bandwidth_bytes_per_s)


def _status(
    data: ArmData, requests: tuple[RequestRecord, ...], fingerprint: Fingerprint | None
) -> tuple[Status, str | None]:
    if data.status is not Status.OK:
        return data.status, data.reason
    rate = lat.success_rate(requests)
    if rate is None:
        return Status.FAILED, "no requests were stored"
    if rate < lat.MIN_SUCCESS_RATE:
        succeeded = sum(map(lat.is_success, requests))
        first = next((request.error for request in requests if request.error), "no answer")
        return Status.FAILED, (
            f"{succeeded} of {len(requests)} requests succeeded, below {lat.MIN_SUCCESS_RATE:.0%}; first: {first}"
        )
    broken = [(request, why) for request in requests if (why := request.broken_identity()) is not None]
    if broken:
        request, why = broken[0]
        return Status.SUSPECT, (
            f"counts do not add up in {len(broken)} of {len(requests)} requests; {request.request_id}: {why}"
        )
    if violation := _impossible(data, requests, fingerprint):
        return Status.SUSPECT, violation
    return Status.OK, None


def _impossible(
    data: ArmData, requests: tuple[RequestRecord, ...], fingerprint: Fingerprint | None
) -> str | None:
    """Why an arm cannot be true."""
    steps: tuple[StepRecord, ...] = accept.pooled_steps(requests)
    most = max((step.num_accepted for step in steps), default=0)
    if most > data.config.max_accepted:
        return f"a step accepted {most} drafts, {data.config.label} can accept {data.config.max_accepted}"
    rounds = pool_rounds(data)
    return roofline.physics_violation(
        round_s=None if rounds is None else rounds.total_s,
        floor_s=floor_round_s(data, fingerprint),
        acceptance_length=accept.acceptance_length(steps),
        num_steps=data.config.num_steps,
        num_draft_tokens=data.config.num_draft_tokens,
        floor_tolerance=MEASURED_FLOOR_TOLERANCE,
    )


def _throughput(data: ArmData, scope: str, duration_s: float) -> float | None:
    requests = data.of_scope(scope).requests
    return throughput.output_throughput(requests, duration_s) if duration_s > 0 else None


def _latency(requests: tuple[RequestRecord, ...]) -> Latency:
    return Latency(
        tpot_s=_spread(lat.tpots(requests)),
        ttft_s=_spread(lat.ttfts(requests)),
        inter_chunk_s=_spread(lat.inter_chunks(requests)),
        e2e_s=_spread(lat.e2es(requests)),
    )


def _spread(values: list[float]) -> Spread | None:
    row = stats.spread(values)
    if row is None:
        return None
    n, mean, p50, p90, p99 = row
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / n)
    return Spread(n=n, mean=mean, p50=p50, p90=p90, p99=p99, std=std)
