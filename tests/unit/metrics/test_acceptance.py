"""Acceptance from counts: one definition, raw counts pooled, unknown stays unknown."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectune.errors import PhysicsError, UsageError
from spectune.metrics.acceptance import (
    NO_DRAFTS,
    acceptance_counts,
    acceptance_length,
    acceptance_length_per_request,
    censored_alpha,
    check_acceptance_length,
    conditional_acceptance,
    depth_acceptance_rate,
    draft_acceptance_rate,
    draft_rate_from_length,
    missing_reason,
    per_position_rates,
    pooled_steps,
    proposed_per_step,
    survival,
    vllm_acceptance_length,
    wasted_drafts,
    zero_accept_share,
)
from spectune.metrics.histogram import steps_from_histogram
from spectune.records import RequestRecord, StepRecord


def step(
    accepted: int, proposed: int = 3, *, verified: int | None = None, emitted: int | None = None
) -> StepRecord:
    """A step that drafted `proposed`; with `emitted` it is cut by the end of text."""
    return StepRecord(
        num_proposed=proposed,
        num_verified=proposed if verified is None else verified,
        num_accepted=accepted,
        num_emitted=accepted + 1 if emitted is None else emitted,
        cut=None if emitted is None else "eos",
    )


def request(steps: list[StepRecord], *, error: str | None = None, lost_tokens: int = 0) -> RequestRecord:
    """A finished request whose output is the first token and all that the steps emitted."""
    num_tokens = 1 + sum(s.num_emitted for s in steps) - lost_tokens
    return RequestRecord(
        request_id="r",
        category="chat",
        num_prompt_tokens=4,
        output_ids=tuple(range(num_tokens)),
        arrival_s=0.0,
        first_token_s=1.0,
        finish_s=2.0,
        finish_reason="length",
        steps=tuple(steps),
        error=error,
    )


def short_and_long() -> list[RequestRecord]:
    """10 steps with 40 tokens, and 200 steps with 260."""
    return [request([step(3)] * 10), request([step(1)] * 60 + [step(0)] * 140)]


def test_acceptance_length_of_short_and_long_requests_is_pooled() -> None:
    """10 steps for 40 tokens and 200 steps for 260 pool to 300/210."""
    assert acceptance_length(pooled_steps(short_and_long())) == pytest.approx(1.4286, abs=5e-5)


def test_acceptance_length_per_request_has_its_own_name_and_value() -> None:
    """The mean of 4.0 and 1.3 is 2.65: another number under another name."""
    assert acceptance_length_per_request(short_and_long()) == pytest.approx(2.65)


def test_acceptance_length_includes_the_targets_own_token() -> None:
    """43 steps that accept 10 drafts give 1 + 10/43, between 1 and K + 1."""
    assert acceptance_length([step(1)] * 10 + [step(0)] * 33) == pytest.approx(1.2326, abs=5e-5)
    assert acceptance_length([step(0)]) == 1
    assert acceptance_length([step(3)]) == 4


@pytest.mark.parametrize("value", [0.43, 4.2])
def test_check_acceptance_length_outside_its_range_is_a_unit_error(value: float) -> None:
    """An adapter that reports accepted/steps, or more than K + 1, has misread a unit."""
    with pytest.raises(PhysicsError, match=r"outside 1\.\.4") as caught:
        check_acceptance_length(value, 3)

    assert caught.value.hint is not None
    assert "own token included" in caught.value.hint


@pytest.mark.parametrize("histogram", [[39, 1, 0, 3], {"0": 39, "1": 1, "3": 3}], ids=["dense", "sparse"])
def test_steps_from_histogram_in_both_shapes_gives_the_same_record(
    histogram: list[int] | dict[str, int],
) -> None:
    """A dense list and a map with string keys parse to the same counts; a missing bucket is 0."""
    steps = steps_from_histogram(histogram, 3)

    counts = acceptance_counts(steps)
    assert (counts.num_steps, counts.num_accepted, counts.num_proposed) == (43, 10, 129)
    assert acceptance_length(steps) == pytest.approx(1.2326, abs=5e-5)
    assert draft_acceptance_rate(steps) == pytest.approx(0.0775, abs=5e-5)
    assert zero_accept_share(steps) == pytest.approx(39 / 43)


@pytest.mark.parametrize("histogram", [[1, 1, 1, 1, 1], {"4": 1}, {"x": 1}, {"-1": 1}, {"0": -1}])
def test_steps_from_histogram_with_an_impossible_bucket_is_refused(
    histogram: list[int] | dict[str, int],
) -> None:
    """A bucket above K, a bucket that is no number and a negative count are errors."""
    with pytest.raises(UsageError, match="acceptance histogram"):
        steps_from_histogram(histogram, 3)


def test_draft_rate_from_length_leaves_the_bonus_token_out() -> None:
    """An engine that prints length 2.17 and rate 0.54 accepts 39% of its three drafts."""
    assert draft_rate_from_length(2.17, 3) == pytest.approx(0.39)


def test_tree_has_a_depth_rate_and_a_node_utilisation() -> None:
    """1.5 accepted of depth 3 and 15 verified nodes: 0.50 by depth, 0.10 by node."""
    steps = [step(1, 15), step(2, 15)]

    assert depth_acceptance_rate(steps, 3) == pytest.approx(0.50)
    assert draft_acceptance_rate(steps) == pytest.approx(0.10)


def test_draft_acceptance_rate_ignores_drafts_that_were_never_verified() -> None:
    """Drafts thrown away before verification are wasted, not refused: 2 of 4 verified, 6 wasted."""
    steps = [step(2, 4), step(0, 6, verified=0)]

    assert draft_acceptance_rate(steps) == pytest.approx(0.5)
    assert wasted_drafts(steps) == 6
    assert zero_accept_share(steps) == 0.0


def test_conditional_acceptance_removes_the_fall_with_depth() -> None:
    """Marginal rates 0.543, 0.357, 0.264 are conditional rates 0.543, 0.657, 0.739."""
    assert conditional_acceptance((0.543, 0.357, 0.264)) == pytest.approx((0.543, 0.657, 0.739), abs=1e-3)


def test_conditional_acceptance_after_a_zero_is_unknown() -> None:
    """What follows a position that nobody reached was not observed."""
    assert conditional_acceptance((0.5, 0.0, 0.0)) == (0.5, 0.0, None)
    assert conditional_acceptance(()) == ()


@pytest.mark.parametrize("steps", [[], [step(0, 0)] * 5], ids=["one-token answers", "speculation off"])
def test_acceptance_without_drafts_is_null_with_a_reason(steps: list[StepRecord]) -> None:
    """No draft happened: every figure is None, never 0, 1 or NaN, and the reason is named."""
    figures = [
        acceptance_length(steps),
        vllm_acceptance_length(steps),
        draft_acceptance_rate(steps),
        depth_acceptance_rate(steps, 3),
        zero_accept_share(steps),
        proposed_per_step(steps),
        censored_alpha(steps),
        acceptance_length_per_request([request(steps)]),
    ]

    assert figures == [None] * 8
    assert survival(steps, 3) == ()
    assert missing_reason(steps) == NO_DRAFTS == "no draft steps observed"


def test_high_rate_with_few_drafts_is_shown_with_its_coverage() -> None:
    """101 tokens with 19 drafted and 18 accepted: 94.7% of the drafts, yet 1.217 tokens a step."""
    steps = [step(1, 1)] * 18 + [step(0, 1)] + [step(0, 0)] * 64

    assert acceptance_counts(steps).num_emitted == 101
    assert len(steps) == 83
    assert draft_acceptance_rate(steps) == pytest.approx(0.947, abs=5e-4)
    assert acceptance_length(steps) == pytest.approx(1.217, abs=5e-4)
    assert proposed_per_step(steps) == pytest.approx(0.23, abs=5e-3)


def test_vllm_acceptance_length_counts_drafting_steps_only() -> None:
    """Of those 83 steps 19 drafted: vLLM prints 1 + 18/19."""
    steps = [step(1, 1)] * 18 + [step(0, 1)] + [step(0, 0)] * 64

    assert vllm_acceptance_length(steps) == pytest.approx(37 / 19)
    assert per_position_rates(steps, 1) == pytest.approx((18 / 19,))


def test_acceptance_over_two_turns_keeps_every_step_of_every_turn() -> None:
    """Turns that accept 3 and 0 drafts a step average 2.5, not the last step's 1."""
    turns = [request([step(3), step(3)]), request([step(0), step(0)])]

    assert acceptance_length(pooled_steps(turns)) == pytest.approx(2.5)


def test_pooled_steps_leave_out_failures_and_broken_counts() -> None:
    """A failed request and one whose tokens do not add up contribute no step."""
    requests = [
        request([step(0)]),
        request([step(3)], error="reset"),
        request([step(3)], lost_tokens=1),
    ]

    assert pooled_steps(requests) == (step(0),)


def test_survival_counts_steps_that_accept_at_least_so_many() -> None:
    """Of four steps accepting 0, 1, 3, 3: three accept one, two accept two and three."""
    assert survival([step(0), step(1), step(3), step(3)], 3) == (0.75, 0.5, 0.5)


def test_survival_below_the_accepted_depth_is_refused() -> None:
    """A depth that cuts accepted drafts off would break the sum."""
    with pytest.raises(UsageError, match="depth 2"):
        survival([step(3)], 2)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30))
def test_survival_sums_to_acceptance_length_minus_one(pairs: list[tuple[int, int]]) -> None:
    """Σ survival = acceptance length - 1 for steps of any mix of lengths, undrafted ones included."""
    steps = [step(min(pair), max(pair)) for pair in pairs]
    length = acceptance_length(steps)

    assert sum(survival(steps, 5)) == pytest.approx(0 if length is None else length - 1)


def test_censored_alpha_treats_full_acceptance_as_unfinished() -> None:
    """Accepting 3, 1 and 0 of 3 saw 4 acceptances and 2 refusals; the first saw no refusal."""
    steps = [step(3), step(1), step(0)]

    assert censored_alpha(steps) == pytest.approx(4 / 6)
    assert draft_acceptance_rate(steps) == pytest.approx(4 / 9)


def test_censored_alpha_of_a_cut_step_has_no_refusal() -> None:
    """A step cut inside its accepted drafts never saw the target disagree."""
    assert censored_alpha([step(2, 3, emitted=2)]) == 1.0


def test_censored_alpha_of_a_tree_needs_the_depth() -> None:
    """A full path of depth 2 in a tree of 15 nodes saw no refusal."""
    assert censored_alpha([step(2, 15), step(0, 15)], depth=2) == pytest.approx(2 / 3)


def test_censored_alpha_of_a_constant_acceptance_is_unbiased() -> None:
    """Enumerating all outcomes of three drafts at 3/4 with their weights returns exactly 3/4."""
    alpha = Fraction(3, 4)
    steps: list[StepRecord] = []
    for outcome in itertools.product([True, False], repeat=3):
        weight = Fraction(1)
        for accepted in outcome:
            weight *= alpha if accepted else 1 - alpha
        kept = outcome.index(False) if False in outcome else 3
        steps.extend([step(kept)] * int(weight * 64))

    assert len(steps) == 64
    assert censored_alpha(steps) == pytest.approx(0.75)


def test_censored_alpha_of_published_survival_predicts_its_length() -> None:
    """Survival .7296/.5208/.3545 gives alpha .7132: length 2.584 against 2.605, 0.8% low."""
    steps = [step(3)] * 3545 + [step(2)] * 1663 + [step(1)] * 2088 + [step(0)] * 2704

    assert acceptance_length(steps) == pytest.approx(2.6049)
    assert survival(steps, 3) == pytest.approx((0.7296, 0.5208, 0.3545))
    assert conditional_acceptance(survival(steps, 3)) == pytest.approx((0.730, 0.714, 0.681), abs=5e-4)
    assert censored_alpha(steps) == pytest.approx(0.7132, abs=5e-5)
