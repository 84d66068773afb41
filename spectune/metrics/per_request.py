"""The acceptance that a server reports for one request, turned into the step records that metrics read.

vLLM's `metrics.speculative_decoding` counts only steps that verified a draft, and counts what the
target accepted before a stop or the token limit cut it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectune.errors import EngineFailure
from spectune.metrics.histogram import steps_from_histogram
from spectune.records import Cut, StepRecord

PLAIN = StepRecord(num_proposed=0, num_verified=0, num_accepted=0, num_emitted=1)


def steps_from_report(
    report: Mapping[str, Any],
    *,
    num_output_tokens: int,
    cut: Cut = Cut.LENGTH,
    chunk_tokens: Sequence[int] | None = None,
) -> tuple[StepRecord, ...]:
    """All steps of a request with `num_output_tokens` tokens, the first of which is no step's.

    1 + Σ emitted = output tokens fixes (plain steps - tokens cut from the last step). Both are taken
    as small as possible, unless `chunk_tokens`, the tokens of every event of the stream, rule that out:
    an event holds one step, or several where the server was too busy to send each (vLLM then joins
    them). Plain steps come first, because their place is not reported. Without per-step counts the
    histogram gives the steps, in no particular order. EngineFailure where the counts contradict each
    other.
    """
    steps, is_ordered = _drafting_steps(report)
    emitted = sum(step.num_emitted for step in steps)
    excess = num_output_tokens - 1 - emitted
    num_plain, num_cut = max(0, excess), max(0, -excess)
    if chunk_tokens is not None and steps and is_ordered:
        for more in range(num_cut, steps[-1].num_accepted + 1):
            if _fits_events([step.num_emitted for step in steps], more, chunk_tokens):
                num_plain, num_cut = excess + more, more
                break
    if num_cut == 0:
        return (PLAIN,) * num_plain + steps
    cut_at = _last_that_holds(steps, num_cut, is_ordered=is_ordered)
    if cut_at is None:
        raise EngineFailure(
            f"{num_output_tokens} output tokens are {num_cut} fewer than the accepted drafts and steps make"
        )
    return (
        (PLAIN,) * num_plain + steps[:cut_at] + steps[cut_at + 1 :] + (_shorten(steps[cut_at], num_cut, cut),)
    )


def _fits_events(emitted: Sequence[int], num_cut: int, chunk_tokens: Sequence[int]) -> bool:
    """Whether drafting steps of these sizes, in order, and plain steps anywhere between fill the events.

    Every event holds whole steps. A step that is cut is the last of all. The first token of the first
    event is no step's. Walks the events with the set of numbers of drafting steps that may be done.
    """
    sizes = [chunk_tokens[0] - 1, *chunk_tokens[1:]]
    sizes = [size for size in sizes if size > 0]
    whole = [*emitted[:-1], emitted[-1] - num_cut]
    done = {0}
    for index, size in enumerate(sizes):
        is_last = index == len(sizes) - 1
        reached = set()
        for count in done:
            left = size
            reached.add(count)  # plain steps alone
            while count < len(whole) and whole[count] <= left:
                if num_cut and count == len(whole) - 1 and not is_last:
                    break
                left -= whole[count]
                count += 1
                reached.add(count)
        done = reached
    return len(whole) in done


def _drafting_steps(report: Mapping[str, Any]) -> tuple[tuple[StepRecord, ...], bool]:
    """Steps that verified a draft, uncut, and whether they are in the order in which they ran."""
    accepted, drafted = report.get("per_step_accepted"), report.get("per_step_drafted")
    is_ordered = accepted is not None and drafted is not None
    if accepted is not None and drafted is not None:
        if len(accepted) != len(drafted):
            raise EngineFailure(f"{len(accepted)} steps accepted and {len(drafted)} drafted")
        steps = tuple(_step(int(d), int(a)) for d, a in zip(drafted, accepted, strict=True))
    else:
        steps = _from_histogram(report)
    _check_sum(report, "num_spec_steps", len(steps))
    _check_sum(report, "num_accepted_draft_tokens", sum(step.num_accepted for step in steps))
    _check_sum(report, "num_draft_tokens", sum(step.num_verified for step in steps))
    return steps, is_ordered


def _from_histogram(report: Mapping[str, Any]) -> tuple[StepRecord, ...]:
    histogram, num_tokens = report.get("acceptance_histogram"), report.get("num_spec_tokens")
    if not isinstance(histogram, Sequence | Mapping) or not isinstance(num_tokens, int):
        raise EngineFailure("neither per-step counts nor an acceptance histogram were reported")
    return steps_from_histogram(histogram, num_tokens)


def _step(drafted: int, accepted: int) -> StepRecord:
    if not 0 <= accepted <= drafted:
        raise EngineFailure(f"a step accepted {accepted} of {drafted} drafts")
    return StepRecord(
        num_proposed=drafted, num_verified=drafted, num_accepted=accepted, num_emitted=accepted + 1
    )


def _check_sum(report: Mapping[str, Any], name: str, found: int) -> None:
    told = report.get(name)
    if told is not None and told != found:
        raise EngineFailure(
            f"{name} is {told}, but the steps give {found}",
            hint="drafts of varying length need per-step counts, not a histogram",
        )


def _last_that_holds(steps: Sequence[StepRecord], num_cut: int, *, is_ordered: bool) -> int | None:
    """Index of the step from which `num_cut` tokens were cut: the last, or the last that can be."""
    places = reversed(range(len(steps)))
    if is_ordered:
        places = reversed(range(len(steps) - 1, len(steps)))
    return next((i for i in places if i >= 0 and steps[i].num_accepted >= num_cut), None)


def _shorten(step: StepRecord, num_cut: int, cut: Cut) -> StepRecord:
    emitted = step.num_emitted - num_cut
    return StepRecord(
        num_proposed=step.num_proposed,
        num_verified=step.num_verified,
        num_accepted=min(step.num_accepted, emitted),
        num_emitted=emitted,
        cut=cut.value,
    )
