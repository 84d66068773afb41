"""Acceptance from step records: what the target kept of what was drafted.

A step is one verification of one sequence; steps of an arm with a drafter count even if nothing was
drafted in them (an n-gram without a match). Cut steps count with the drafts kept in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spectune.errors import PhysicsError, UsageError
from spectune.metrics.latency import is_success
from spectune.records import RequestRecord, StepRecord

NO_DRAFTS = "no draft steps observed"


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceCounts:
    """The raw sums that every rate is derived from; they add up over requests, blocks and repeats."""

    num_steps: int
    num_draft_steps: int  # steps in which the target scored at least one draft
    num_proposed: int
    num_verified: int
    num_accepted: int
    num_emitted: int


def acceptance_counts(steps: Sequence[StepRecord]) -> AcceptanceCounts:
    """Sums of proposed, verified, accepted and emitted tokens over all steps."""
    return AcceptanceCounts(
        num_steps=len(steps),
        num_draft_steps=sum(step.num_verified > 0 for step in steps),
        num_proposed=sum(step.num_proposed for step in steps),
        num_verified=sum(step.num_verified for step in steps),
        num_accepted=sum(step.num_accepted for step in steps),
        num_emitted=sum(step.num_emitted for step in steps),
    )


def pooled_steps(requests: Sequence[RequestRecord]) -> tuple[StepRecord, ...]:
    """All steps of all requests (every turn is a request) that succeeded and whose counts add up."""
    return tuple(
        step
        for request in requests
        if is_success(request) and request.broken_identity() is None
        for step in request.steps
    )


def missing_reason(steps: Sequence[StepRecord]) -> str | None:
    """Why acceptance is None for these steps, or None if it is not."""
    return None if _has_drafts(steps) else NO_DRAFTS


def acceptance_length(steps: Sequence[StepRecord]) -> float | None:
    """1 + Σ accepted / Σ steps over all steps, the target's own token included.

    None where nothing was ever proposed (plain decoding, runs without a draft).
    """
    if not _has_drafts(steps):
        return None
    return 1 + sum(step.num_accepted for step in steps) / len(steps)


def emitted_per_step(steps: Sequence[StepRecord]) -> float | None:
    """Σ emitted / Σ steps: what a step really gives. None without steps.

    Below the acceptance length by the steps that an end of the request cut short.
    """
    return sum(step.num_emitted for step in steps) / len(steps) if steps else None


def vllm_acceptance_length(steps: Sequence[StepRecord]) -> float | None:
    """1 + Σ accepted / Σ drafting steps: vLLM leaves steps without a draft out. None without any."""
    drafting = [step for step in steps if step.num_proposed > 0]
    return acceptance_length(drafting)


def acceptance_length_per_request(requests: Sequence[RequestRecord]) -> float | None:
    """Mean over requests of each one's own acceptance length: short requests weigh as much as long ones.

    A second number beside the pooled one, never the headline. Requests without a draft are left out.
    """
    lengths = [acceptance_length(pooled_steps([request])) for request in requests]
    known = [length for length in lengths if length is not None]
    return sum(known) / len(known) if known else None


def survival(steps: Sequence[StepRecord], depth: int) -> tuple[float, ...]:
    """survival[j] = #(accepted >= j+1) / #steps for j < depth; () where nothing was proposed.

    The denominator is all steps, those without a draft included, so that Σ survival = acceptance
    length - 1 holds exactly for chains of any length, trees and n-grams as long as `depth` is the
    largest number of drafts a step can accept. `per_position_rates` divides by drafting steps.
    """
    if depth < max((step.num_accepted for step in steps), default=0):
        raise UsageError(f"depth {depth} is below the accepted drafts of a step")
    if not _has_drafts(steps):
        return ()
    return tuple(sum(step.num_accepted > j for step in steps) / len(steps) for j in range(depth))


def per_position_rates(steps: Sequence[StepRecord], depth: int) -> tuple[float, ...]:
    """vLLM's per-position acceptance: #(accepted >= j+1) / #drafting steps; () without a draft."""
    return survival([step for step in steps if step.num_proposed > 0], depth)


def conditional_acceptance(survival: Sequence[float]) -> tuple[float | None, ...]:
    """conditional[j] = survival[j] / survival[j-1] with survival[-1] = 1; None after a zero.

    Unlike the rate over all drafts it does not shrink when K grows, so different K may be compared.
    """
    before = (1.0, *survival)
    return tuple(now / last if last > 0 else None for now, last in zip(survival, before, strict=False))


def draft_acceptance_rate(steps: Sequence[StepRecord]) -> float | None:
    """Σ accepted / Σ verified; drafts dropped before verification are not counted. Never ranks.

    For a tree this is the utilisation of its nodes. None where nothing was verified.
    """
    counts = acceptance_counts(steps)
    return counts.num_accepted / counts.num_verified if counts.num_verified else None


def depth_acceptance_rate(steps: Sequence[StepRecord], depth: int) -> float | None:
    """Σ accepted / (steps · D): accepted share of the longest path; None where nothing was proposed."""
    if not _has_drafts(steps):
        return None
    _check_depth(depth)
    return sum(step.num_accepted for step in steps) / (len(steps) * depth)


def zero_accept_share(steps: Sequence[StepRecord]) -> float | None:
    """Share of the steps that verified a draft and kept none of it; None without such a step."""
    verified = [step for step in steps if step.num_verified > 0]
    return sum(step.num_accepted == 0 for step in verified) / len(verified) if verified else None


def proposed_per_step(steps: Sequence[StepRecord]) -> float | None:
    """Σ proposed / Σ steps: a high rate means little where almost nothing is drafted."""
    return sum(step.num_proposed for step in steps) / len(steps) if _has_drafts(steps) else None


def wasted_drafts(steps: Sequence[StepRecord]) -> int:
    """Σ (proposed - verified): drafted and thrown away before the target saw them."""
    return sum(step.num_proposed - step.num_verified for step in steps)


def censored_alpha(steps: Sequence[StepRecord], depth: int | None = None) -> float | None:
    """Σ accepted / (Σ accepted + rejections): maximum likelihood of a constant acceptance probability.

    A step that accepts all it verified, or that was cut before the target disagreed, saw no rejection
    (it is right-censored). `depth` caps the drafts on one path and is needed for trees, where
    num_verified counts nodes. None where nothing was verified. accepted / proposed would be biased low.
    """
    accepted = sum(step.num_accepted for step in steps)
    rejections = sum(_is_rejection(step, depth) for step in steps)
    return accepted / (accepted + rejections) if accepted + rejections else None


def draft_rate_from_length(acceptance_length: float, num_steps: int) -> float:
    """(AL - 1) / D for an engine that prints only its acceptance length.

    An engine's own printed rate may hold the target's token in the numerator and the root below.
    """
    _check_depth(num_steps)
    return (check_acceptance_length(acceptance_length, num_steps) - 1) / num_steps


def check_acceptance_length(value: float, max_accepted: int) -> float:
    """The value, or PhysicsError outside [1, max accepted + 1].

    Below 1 an adapter has read accepted/steps, which leaves the target's own token out: a unit error.
    """
    if not 1 <= value <= max_accepted + 1:
        raise PhysicsError(
            f"acceptance length {value:g} is outside 1..{max_accepted + 1}",
            hint="acceptance length is 1 + accepted / steps, the target's own token included",
        )
    return value


def _has_drafts(steps: Sequence[StepRecord]) -> bool:
    return any(step.num_proposed > 0 for step in steps)


def _is_rejection(step: StepRecord, depth: int | None) -> bool:
    longest = step.num_verified if depth is None else min(step.num_verified, depth)
    saw_own_token = step.num_emitted == step.num_accepted + 1
    return step.num_accepted < longest and saw_own_token


def _check_depth(depth: int) -> None:
    if depth < 1:
        raise UsageError(f"depth {depth} is below 1")
