"""Acceptance by prompt length: a head that was trained on short texts may fail on long ones."""

from __future__ import annotations

from collections.abc import Sequence

from spectune import stats
from spectune.metrics.latency import is_success
from spectune.policy.arms import ArmData
from spectune.policy.comparison import LengthBucket
from spectune.records import Interval, RequestRecord

FIRST_EDGE = 128
"""Prompts below it are one bucket; every further one is twice as wide."""


def bucket_of(num_tokens: int) -> tuple[int, int]:
    """(lowest, highest) prompt length of the bucket that holds `num_tokens`: 0-127, 128-255, 256-511 ..."""
    low, high = 0, FIRST_EDGE
    while num_tokens >= high:
        low, high = high, 2 * high
    return low, high - 1


def acceptance_by_length(
    arms: Sequence[ArmData], *, head_context: int | None = None
) -> tuple[LengthBucket, ...]:
    """Buckets of every arm that drafts, shortest prompts first.

    `head_context` is the longest context that the head was made for, if that is known.
    """
    found = []
    for arm in arms:
        if arm.config.is_off or arm.config.is_probe:
            continue
        by_bucket: dict[tuple[int, int], list[RequestRecord]] = {}
        for request in arm.requests:
            if is_success(request) and request.broken_identity() is None:
                by_bucket.setdefault(bucket_of(request.num_prompt_tokens), []).append(request)
        for (low, high), own in sorted(by_bucket.items()):
            longest = max(request.num_prompt_tokens + request.num_output_tokens for request in own)
            found.append(
                LengthBucket(
                    config=arm.config,
                    low=low,
                    high=high,
                    num_requests=len(own),
                    num_steps=sum(len(request.steps) for request in own),
                    acceptance_length=_length(own),
                    is_beyond_head=head_context is not None and longest > head_context,
                )
            )
    return tuple(found)


def _length(requests: Sequence[RequestRecord]) -> Interval | None:
    """1 + accepted / steps pooled, with an interval over prompts; None where nothing was drafted.

    A prompt that was asked in several starts is one prompt.
    """
    if not any(step.num_proposed for request in requests for step in request.steps):
        return None
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for request in requests:
        own = by_prompt.setdefault(request.request_id.rsplit("-", 1)[0], [])
        own += [(1.0 + step.num_accepted, 1.0) for step in request.steps]
    return stats.hierarchical_ratio_interval([[steps for steps in by_prompt.values() if steps]])
