"""Acceptance over the common range: boundaries, both sides, too little, missing, another text."""

from __future__ import annotations

import pytest

from spectune.gate.acceptance import AcceptancePair, acceptance_checks, length_check
from spectune.gate.common import by_request, common_range, steps_before
from spectune.gate.stored import check_acceptance
from spectune.gate.verdicts import Outcome


def outcomes(checks):
    return {check.name: check.outcome for check in checks}


def check(gate, base, head):
    return acceptance_checks(gate, common_range(by_request(base), by_request(head), 3))


def test_common_range_of_equal_texts_is_every_step(gate_of, record):
    """Where nothing parts, the last and cut steps count as well."""
    one = record("a-0", [3, 0, 1])

    common = common_range({"a-0": one}, {"a-0": one}, 3)

    assert (3, 1.0, 1.0) == (len(common.base_steps), common.share, common.agreement)


def test_steps_that_could_reach_the_parting_are_left_out_by_where_they_stand(record):
    """Texts part at token 9: a step at 5 reaches 5 + 3 + 1 = 9 and counts, one at 6 does not."""
    steps = record("a-0", [3, 0, 0, 0]).steps

    assert steps[:2] == steps_before(steps, 9, 3)
    assert steps[:1] == steps_before(steps, 8, 3)


def test_an_answer_that_ends_early_is_compared_as_far_as_it_goes(gate_of, record):
    """775 tokens instead of 2048 with the same acceptance on the same range is no regression."""
    long = [record(f"p{i}-0", [1, 0, 2, 0] * 10) for i in range(4)]
    short = [record(f"p{i}-0", [1, 0, 2, 0] * 4) for i in range(4)]

    assert {Outcome.PASSED} == {c.outcome for c in check(gate_of(), long, short)}


def test_an_early_end_without_the_baselines_text_is_inconclusive(gate_of, record, blocks_of):
    """Without a common range shorter answers decide nothing."""
    gate = gate_of(acceptance={"output_tokens": 2048})
    (found,) = check_acceptance(gate, None, [blocks_of(*[record(f"p{i}-0", [1, 0] * 9) for i in range(3)])])

    assert Outcome.INCONCLUSIVE == found.outcome
    assert "answers end elsewhere" in found.text


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        pytest.param(1.98, Outcome.PASSED, id="exactly-on-the-limit"),
        pytest.param(1.97, Outcome.REGRESSION, id="below"),
        pytest.param(2.02, Outcome.PASSED, id="exactly-on-the-upper-limit"),
        pytest.param(2.03, Outcome.SUSPICIOUS, id="too-high"),
    ],
)
def test_a_value_on_the_limit_passes_and_both_sides_are_watched(head, expected, gate_of):
    """Baseline 2.0 with 1%: 1.98 and 2.02 pass, 1.97 is a regression and 2.03 is too good to be true."""
    pair = AcceptancePair(
        base=2.0,
        head=head,
        base_positions=(1.0, 0.0, 0.0),
        head_positions=(head - 1, 0.0, 0.0),
        num_steps=400,
        num_prompts=4,
    )

    found = length_check(gate_of(), pair)

    assert expected == found.outcome
    for said in (f"{head:.4f}", "1.9800 to 2.0200", "baseline 2.0000", "tolerance 1.00%", "400 steps of 4"):
        assert said in found.text


def test_changes_of_positions_that_cancel_are_seen(gate_of, record):
    """Ten steps of 1 become five of 2 and five of 0: the length stays, two positions move."""
    base = [record(f"p{i}-0", [1, 1] * 20) for i in range(2)]
    head = [record(f"p{i}-0", [2, 0] * 20) for i in range(2)]

    found = outcomes(check(gate_of(), base, head))

    assert Outcome.PASSED == found["acceptance length"]
    assert Outcome.PASSED != found["acceptance by position"]


def test_too_few_prompts_or_steps_are_inconclusive(gate_of, record):
    """One prompt decides nothing, nor do a handful of steps."""
    one = [record("a-0", [1] * 40)]
    few = [record(f"p{i}-0", [1, 1]) for i in range(3)]

    assert {Outcome.INCONCLUSIVE} == {c.outcome for c in check(gate_of(), one, one)}
    assert {Outcome.INCONCLUSIVE} == {c.outcome for c in check(gate_of(), few, few)}


def test_acceptance_that_was_not_observed_is_missing_not_worse(gate_of, record, blocks_of):
    """An engine that reports no steps misses the metric."""
    from dataclasses import replace

    from spectune.records import StepRecord

    plain = [
        replace(
            record(f"p{i}-0", [0] * 40),
            steps=(StepRecord(num_proposed=0, num_verified=0, num_accepted=0, num_emitted=1),) * 40,
        )
        for i in range(3)
    ]
    base = [record(f"p{i}-0", [0] * 40) for i in range(3)]

    (found,) = check(gate_of(), base, plain)

    assert Outcome.MISSING == found.outcome
    assert found.hint is not None


def test_greedy_texts_that_hardly_agree_withhold_all_figures(gate_of, record):
    """Healthy engines agree in most texts: below half, verification or template is broken."""
    base = [record(f"p{i}-0", [1] * 30) for i in range(16)]
    head = [record(f"p{i}-0", [1] * 30, tokens=[9] * 61) for i in range(16)]

    (found,) = check(gate_of(), base, head)

    assert (Outcome.REGRESSION, "text agreement") == (found.outcome, found.name)
    assert "verification or template broken" in found.text


def test_a_dozen_texts_that_part_more_often_than_not_may_be_chance(gate_of, record):
    """Five of twelve agree: engines that agree in four of five do so now and then, so nothing is called broken."""
    base = [record(f"p{i}-0", [1] * 30) for i in range(12)]
    head = [
        record(f"p{i}-0", [1] * 30, tokens=[*range(50), *([9] * 11 if i >= 5 else range(50, 61))])
        for i in range(12)
    ]

    assert {Outcome.PASSED} == {found.outcome for found in check(gate_of(), base, head)}
