"""What became of a point, judged from its stored blocks only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spectune.metrics.latency import MIN_SUCCESS_RATE, is_success
from spectune.metrics.throughput import reached_batch
from spectune.records import BlockResult, Point, PointOutcome, RequestRecord, RoundRecord, Status

MIN_REACHED = 0.9
"""Share of the requested concurrency that a server must really run."""


def judge_point(point: Point, blocks: Mapping[int, BlockResult]) -> PointOutcome:
    """`ok` only if at least 99% of the requests succeeded, every token is accounted for and the
    requested batch was reached; otherwise failed, suspect or capped with the reason."""
    requests = [request for block in blocks.values() for request in block.requests]
    rounds = [turn for block in blocks.values() for turn in block.rounds]
    status, reason = _judge(point, requests, rounds, list(blocks.values()))
    peaks = [block.peak_memory_bytes for block in blocks.values() if block.peak_memory_bytes is not None]
    return PointOutcome(
        point=point,
        status=status,
        reason=reason,
        num_requests=len(requests),
        num_failed=sum(not is_success(request) for request in requests),
        reached_batch=reached_batch(rounds) or reached_load(list(blocks.values())),
        peak_memory_bytes=max(peaks, default=None),
        duration_s=sum(block.duration_s for block in blocks.values()),
    )


def failure_text(request: RequestRecord) -> str:
    """Why a request counts as failed."""
    if request.error is not None:
        return request.error
    return "no output" if request.num_output_tokens == 0 else "the answer has no end"


def _judge(
    point: Point,
    requests: Sequence[RequestRecord],
    rounds: Sequence[RoundRecord],
    blocks: Sequence[BlockResult],
) -> tuple[Status, str | None]:
    if not requests:
        return Status.FAILED, "no requests were run"
    failed = [request for request in requests if not is_success(request)]
    if len(requests) - len(failed) < MIN_SUCCESS_RATE * len(requests):
        return (
            Status.FAILED,
            f"{len(failed)} of {len(requests)} requests failed: {failure_text(failed[0])}",
        )
    tells_steps = all(block.load is None or block.load.tells_steps for block in blocks)
    broken = [text for request in requests if (text := _broken(point, request)) is not None]
    if broken and tells_steps:
        return Status.SUSPECT, f"{len(broken)} of {len(requests)} requests do not add up: {broken[0]}"
    if (capped := _capped(point, blocks)) is not None:
        return Status.CAPPED, capped
    sizes = [turn.batch_size for turn in rounds if turn.kind == "decode"]
    if sizes and max(sizes) < point.cell.batch_size:
        return (
            Status.CAPPED,
            f"decoded at most {max(sizes)} sequences together, {point.cell.batch_size} requested",
        )
    return Status.OK, None


def reached_load(blocks: Sequence[BlockResult]) -> float | None:
    """Mean requests that a server ran together, over the blocks that tell it."""
    told = [
        block.load.reached for block in blocks if block.load is not None and block.load.reached is not None
    ]
    return sum(told) / len(told) if told else None


def _capped(point: Point, blocks: Sequence[BlockResult]) -> str | None:
    """A server that queues what it was asked for would be measured at another load."""
    if point.cell.is_open_loop:
        return None  # how many run together is what is measured
    reached = reached_load(blocks)
    if reached is None or reached >= MIN_REACHED * point.cell.batch_size:
        return None
    return (
        f"server capped: it ran {reached:.1f} requests together, {point.cell.batch_size} were in flight; "
        "the others waited in its queue"
    )


def _broken(point: Point, request: RequestRecord) -> str | None:
    identity = request.broken_identity()
    if identity is not None:
        return identity
    most = point.config.max_accepted
    accepted = max((step.num_accepted for step in request.steps), default=0)
    if accepted > most:
        return f"accepted {accepted} drafts in a step of {point.config.label}, which can accept {most}"
    return None
