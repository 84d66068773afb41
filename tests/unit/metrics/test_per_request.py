"""A server's report on one request becomes the steps that made its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.errors import EngineFailure, UsageError
from spectune.metrics.acceptance import acceptance_length, draft_acceptance_rate, zero_accept_share
from spectune.metrics.per_request import PLAIN, steps_from_report
from spectune.records import Cut, StepRecord


def step(drafted: int, accepted: int, *, emitted: int | None = None, cut: Cut | None = None) -> StepRecord:
    """A step of a chain; uncut unless told."""
    return StepRecord(
        num_proposed=drafted,
        num_verified=drafted,
        num_accepted=accepted,
        num_emitted=accepted + 1 if emitted is None else emitted,
        cut=cut,
    )


def detailed(*pairs: tuple[int, int], **more: Any) -> dict[str, Any]:
    """The per-step part of a report, (drafted, accepted) a step."""
    return {
        "num_spec_tokens": 3,
        "per_step_drafted": [drafted for drafted, _ in pairs],
        "per_step_accepted": [accepted for _, accepted in pairs],
        **more,
    }


@pytest.mark.parametrize(
    "histogram", [[39, 1, 0, 3], {"0": 39, "1": 1, "3": 3}], ids=["dense list", "sparse map"]
)
def test_both_shapes_of_a_histogram_are_one_record(histogram: Any) -> None:
    """43 steps that accepted 10 of 129 drafts: 1.2326 tokens a step, 7.75% of the drafts, 39 steps without any."""
    report = {
        "acceptance_histogram": histogram,
        "num_spec_tokens": 3,
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
    }

    steps = steps_from_report(report, num_output_tokens=54)

    assert pytest.approx(1.2326, abs=5e-5) == acceptance_length(steps)
    assert pytest.approx(0.0775, abs=5e-5) == draft_acceptance_rate(steps)
    assert 39 / 43 == zero_accept_share(steps)


def test_steps_without_a_draft_are_the_tokens_that_no_draft_explains() -> None:
    """Eight tokens, two drafting steps of three and two: two plain steps are missing from the report."""
    steps = steps_from_report(detailed((3, 2), (2, 1)), num_output_tokens=8)

    assert (PLAIN, PLAIN, step(3, 2), step(2, 1)) == steps


def test_last_step_is_cut_to_the_tokens_that_were_kept() -> None:
    """vLLM counts what was accepted before the limit cut it; only what stayed in the output counts here."""
    steps = steps_from_report(detailed((3, 1), (3, 3)), num_output_tokens=5, cut=Cut.EOS)

    assert (step(3, 1), step(3, 2, emitted=2, cut=Cut.EOS)) == steps


def test_chunks_tell_plain_steps_and_cut_tokens_apart() -> None:
    """Five tokens in four chunks: first token, a plain step, a step of two, and one token left of the last."""
    report = detailed((3, 1), (3, 1))

    blind = steps_from_report(report, num_output_tokens=5)
    seen = steps_from_report(report, num_output_tokens=5, chunk_tokens=[1, 1, 2, 1])

    assert (step(3, 1), step(3, 1)) == blind
    assert (PLAIN, step(3, 1), step(3, 1, emitted=1, cut=Cut.LENGTH)) == seen


def test_chunks_that_hold_several_steps_leave_the_smallest_explanation() -> None:
    """First token and a step of two in one event, a step of two in the next: nothing was cut."""
    report = detailed((3, 1), (3, 1))

    assert steps_from_report(report, num_output_tokens=5) == steps_from_report(
        report, num_output_tokens=5, chunk_tokens=[3, 2]
    )


@pytest.mark.parametrize(
    "plain",
    [[1] * 13, [2, 2, 2, *[1] * 7], [1] * 10 + [3]],
    ids=["an event a step", "three pairs joined", "three joined"],
)
def test_steps_are_the_same_however_busy_the_server_was(plain: list[int]) -> None:
    """Real counts of vLLM 0.32, n-gram K=3, 32 tokens: events joined under load once made 19 steps of 22.

    The last step accepted three drafts, of which the limit left none: the last event holds one token, and
    two earlier events hold the two other steps of four.
    """
    report = detailed((3, 3), (3, 2), (3, 0), (3, 3), (3, 0), (3, 0), (3, 1), (3, 0), (3, 3))

    steps = steps_from_report(
        report, num_output_tokens=32, chunk_tokens=[1, *plain, 4, 3, 1, 4, 1, 1, 2, 1, 1]
    )

    assert len(steps) == 22
    assert steps[:13] == (PLAIN,) * 13
    assert steps[-1] == step(3, 1, emitted=1, cut=Cut.LENGTH)


@pytest.mark.parametrize(
    ("chunks", "num_plain", "num_cut"),
    [
        ([1, 1, 4], 1, 0),
        ([1, 1, 1, 3], 2, 1),
        ([1, 1, 1, 1, 2], 3, 2),
        ([1, 2, 3], 2, 1),
        ([1, 3, 1, 1], 4, 3),
    ],
    ids=["whole", "one cut", "two cut", "one cut, plain steps joined", "all cut, plain steps joined"],
)
def test_the_last_event_tells_what_was_cut(chunks: list[int], num_plain: int, num_cut: int) -> None:
    """Six tokens, one drafting step that accepted three; a cut step cannot have others after it."""
    steps = steps_from_report(detailed((3, 3)), num_output_tokens=6, chunk_tokens=chunks)

    assert len(steps) == num_plain + 1
    assert steps[-1].num_emitted == 4 - num_cut


def test_one_token_has_no_step() -> None:
    """The first token is the prefill's."""
    report = {"acceptance_histogram": [0, 0, 0, 0], "num_spec_tokens": 3, "num_spec_steps": 0}

    assert () == steps_from_report(report, num_output_tokens=1)


@pytest.mark.parametrize(
    ("report", "num_tokens", "error"),
    [
        (detailed((3, 3)), 1, "1 output tokens are 4 fewer"),
        (detailed((3, 3), (3, 0)), 4, "fewer than"),
        (detailed((2, 3)), 9, "a step accepted 3 of 2 drafts"),
        (detailed((3, 1), num_spec_steps=2), 3, "num_spec_steps is 2, but the steps give 1"),
        (detailed((3, 1), num_accepted_draft_tokens=2), 3, "num_accepted_draft_tokens is 2"),
        ({"per_step_accepted": [1], "per_step_drafted": [3, 3]}, 3, "1 steps accepted and 2 drafted"),
        ({"acceptance_histogram": [1, 1], "num_spec_tokens": 1, "num_draft_tokens": 1}, 9, "num_draft_tokens is 1"),
        ({}, 3, "neither per-step counts"),
    ],
    ids=["cut to nothing", "cut in an earlier step", "accepted above drafted", "steps", "accepted", "lengths",
         "varying drafts in a histogram", "nothing"],
)  # fmt: skip
def test_counts_that_contradict_each_other_are_an_error(
    report: dict[str, Any], num_tokens: int, error: str
) -> None:
    """Nothing is guessed where the counts cannot be true together."""
    with pytest.raises(EngineFailure, match=error):
        steps_from_report(report, num_output_tokens=num_tokens)


def test_bucket_above_the_draft_length_is_an_error() -> None:
    """A histogram of three drafts has no fourth bucket."""
    with pytest.raises(UsageError, match="bucket '4'"):
        steps_from_report({"acceptance_histogram": {"4": 1}, "num_spec_tokens": 3}, num_output_tokens=6)
