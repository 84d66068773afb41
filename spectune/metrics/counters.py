"""Acceptance from a server's counters; what is unknown is None, never 0 or 1.

Counters count verifications that had a draft. Steps without one are not in them, so these values
compare with vLLM's and not with an acceptance length over all steps.
"""

from __future__ import annotations

from spectune.metrics.acceptance import NO_DRAFTS, conditional_acceptance
from spectune.records import SpecCounts


def drafting_acceptance_length(counts: SpecCounts) -> float | None:
    """1 + accepted / drafts; None where nothing was drafted."""
    return 1 + counts.num_accepted_tokens / counts.num_drafts if counts.num_drafts else None


def drafting_acceptance_rate(counts: SpecCounts) -> float | None:
    """accepted / drafted tokens, 0..1; None where nothing was drafted. Never ranks."""
    return counts.num_accepted_tokens / counts.num_draft_tokens if counts.num_draft_tokens else None


def drafting_survival(counts: SpecCounts) -> tuple[float, ...]:
    """accepted at position j / drafts; () where nothing was drafted.

    Too low at deep positions where the draft length varied: shorter drafts are in the denominator.
    """
    if not counts.num_drafts:
        return ()
    return tuple(accepted / counts.num_drafts for accepted in counts.accepted_per_position)


def drafting_conditional(counts: SpecCounts) -> tuple[float | None, ...]:
    """accepted at position j / accepted at position j-1; None after a zero."""
    return conditional_acceptance(drafting_survival(counts))


def counts_doubt(counts: SpecCounts) -> str | None:
    """Why these counts cannot be taken as they are, or None."""
    if not counts.num_drafts:
        return NO_DRAFTS
    by_position = sum(counts.accepted_per_position)
    if counts.accepted_per_position and by_position != counts.num_accepted_tokens:
        return (
            f"positions sum to {by_position} accepted tokens, the counter says {counts.num_accepted_tokens}"
        )
    if counts.num_accepted_tokens > counts.num_draft_tokens:
        return f"{counts.num_accepted_tokens} of {counts.num_draft_tokens} drafted tokens were accepted"
    if counts.num_draft_tokens < counts.num_drafts * len(counts.accepted_per_position):
        return (
            "the draft length varied: rates of deep positions are too low, "
            "per-request counts give the right ones"
        )
    return None
