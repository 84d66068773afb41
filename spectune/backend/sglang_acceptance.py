"""What SGLang says of acceptance, as counts that our definitions are computed from.

Its own rates are not taken over. `spec_accept_rate` divides by nodes of the tree and by the width that
the server was started with, `spec_accept_length` counts the token of the prefill, gauges are windows of
some decode iterations, and /server_info counts since the start or the last flush.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spectune.errors import EngineFailure
from spectune.metrics.acceptance import draft_rate_from_length

VERIFY_CT = "spec_verify_ct"
CORRECT = "spec_num_correct_drafts"
PROPOSED = "spec_num_proposed_drafts"
HISTOGRAM = "spec_correct_drafts_histogram"

RENAMED = {
    "spec_accept_token_num": CORRECT,
    "spec_accept_histogram": HISTOGRAM,
    "spec_draft_token_num": PROPOSED,
}
"""Names of older versions."""


def with_current_names(told: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under the names of 0.5.23, whatever version told them."""
    return {RENAMED.get(name, name): value for name, value in told.items()}


def report_of(told: Mapping[str, Any]) -> dict[str, Any] | None:
    """`meta_info` or spec_tokens_details of one request, in the shape that `steps_from_report` reads.

    None where nothing was verified: a request of one token, or a server without speculation. The width
    is that of the server's start; where deeper rounds were accepted (the server adapts), the deepest.
    """
    fields = with_current_names(told)
    rounds, histogram = fields.get(VERIFY_CT), fields.get(HISTOGRAM)
    if not rounds:
        return None
    if not isinstance(histogram, list) or not histogram:
        raise EngineFailure(
            f"the server tells {VERIFY_CT} {rounds} and no {HISTOGRAM}: its version names it otherwise"
        )
    if sum(histogram) != rounds:
        raise EngineFailure(f"{HISTOGRAM} counts {sum(histogram)} rounds, {VERIFY_CT} is {rounds}")
    width = (fields.get(PROPOSED) or 0) // rounds
    report = {
        "acceptance_histogram": histogram,
        "num_spec_tokens": max(width, len(histogram) - 1),
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": fields.get(CORRECT),
    }
    return report


def mean_length_of(server_info: Mapping[str, Any], *, was_flushed: bool) -> float | None:
    """`avg_spec_accept_length` of /server_info, if the server was flushed before the window; else None.

    Without a flush it averages everything since the start, warm-up and other traffic included.
    """
    states = server_info.get("internal_states") or ()
    values = [
        state["avg_spec_accept_length"]
        for state in states
        if isinstance(state, Mapping) and isinstance(state.get("avg_spec_accept_length"), int | float)
    ]
    if not was_flushed or not values:
        return None
    return float(sum(values) / len(values))


def draft_rate_of_log(accept_length: float, num_steps: int) -> float:
    """Accepted / drafted of a chain from the accept length of SGLang's log line: (length - 1) / steps.

    The rate printed beside it divides the length by num_draft_tokens, the bonus token in both.
    """
    return draft_rate_from_length(accept_length, num_steps)


def resolved_settings(server_info: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """What the server runs with, by name; absent ones are left out. Belongs in the fingerprint."""
    return {name: server_info[name] for name in names if name in server_info}
