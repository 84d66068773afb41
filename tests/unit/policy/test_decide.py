"""Decisions of a cell and the outcome of a run."""

from __future__ import annotations

import pytest

from spectune.policy import decide
from spectune.records import Interval, Status


def test_decide_every_depth_slower_and_deeper_worse_stays_off(make):
    """A drafter that loses at K=3, 5 and 10 gives off, with the least bad as runner-up."""
    arms = (
        make.plain_arm(),
        make.arm(make.chain(3), 0.75),
        make.arm(make.chain(5), 0.60),
        make.arm(make.chain(10), 0.33),
    )

    decision = make.decide(arms)

    assert (decision.verdict, decision.chosen) == ("off", make.off)
    assert decision.runner_up == make.chain(3)
    assert "slower: 0.75x" in decision.reason


def test_decide_takes_the_fastest_not_the_longest_acceptance(make):
    """K=5 accepts a little more than K=3 and is slower, so K=3 wins."""
    arms = (
        make.plain_arm(),
        make.arm(make.chain(3), 1.40, length=2.18),
        make.arm(make.chain(5), 1.20, length=2.19),
    )

    decision = make.decide(arms)

    assert decision.chosen == make.chain(3)
    assert decision.runner_up == make.chain(5)


def test_decide_among_equals_within_the_noise_takes_the_smaller(make):
    """K=5 is nominally faster, but its paired difference to K=3 holds 1."""
    arms = (make.plain_arm(), make.arm(make.chain(3), 1.39), make.arm(make.chain(5), 1.40))
    tie = Interval(value=1.007, low=0.99, high=1.02, n=8)

    decision = make.decide(arms, {(make.chain(5), make.chain(3)): tie})

    assert decision.chosen == make.chain(3)
    assert decision.runner_up == make.chain(5)
    assert "within the noise of the fastest, eagle3 K=5" in decision.reason


def test_decide_a_clear_difference_is_no_tie(make):
    """K=5 wins where its paired difference to K=3 excludes 1, even if the intervals over off overlap."""
    arms = (make.plain_arm(), make.arm(make.chain(3), 1.39), make.arm(make.chain(5), 1.40))
    gap = Interval(value=1.007, low=1.003, high=1.011, n=8)

    decision = make.decide(arms, {(make.chain(5), make.chain(3)): gap})

    assert decision.chosen == make.chain(5)


def test_decide_uses_the_corrected_level_for_the_number_of_candidates(make):
    """A bound above 1 at 95% is not enough when the corrected bound is below 1."""
    arm = make.arm(make.chain(3), Interval(value=1.05, low=1.01, high=1.09, n=8))
    corrected = {arm.config: Interval(value=1.05, low=0.99, high=1.11, n=8, level=0.99)}

    decision = decide.decide((make.plain_arm(), arm), corrected=corrected, difference=lambda fast, slow: None)

    assert decision.verdict == "off"
    assert "does not beat plain decoding by more than the noise" in decision.reason


@pytest.mark.parametrize(("candidates", "level"), [(1, 0.95), (5, 0.99), (10, 0.995)])
def test_corrected_level_divides_the_error_among_candidates(candidates, level):
    """Five percent over five candidates leaves one percent each."""
    assert decide.corrected_level(candidates) == pytest.approx(level)


@pytest.mark.parametrize("status", [Status.FAILED, Status.SUSPECT, Status.OOM])
def test_decide_ignores_arms_that_are_not_ok(make, status):
    """A suspect or failed arm is no candidate however fast it looks."""
    arms = (
        make.plain_arm(),
        make.arm(make.chain(5), 9.0, status=status),
        make.arm(make.chain(3), 1.5),
    )

    assert make.decide(arms).chosen == make.chain(3)


def test_decide_without_plain_decoding_has_no_data(make):
    """No baseline, no decision."""
    decision = make.decide(
        (make.plain_arm(status=Status.OOM, reason="too big"), make.arm(make.chain(3), 2.0))
    )

    assert decision.verdict == "no data"
    assert "too big" in decision.reason


@pytest.mark.parametrize(("value", "verdict"), [(1.04, "off"), (1.06, "on")])
def test_decide_counts_a_pooled_ratio_only_beyond_its_margin(make, value, verdict):
    """Without an interval 4% faster is not enough and 6% is."""
    pooled = Interval(value=value, low=None, high=None, n=50)
    arm = make.arm(make.chain(3), pooled, speedup_basis="pooled round time")

    assert make.decide((make.plain_arm(), arm)).verdict == verdict


@pytest.mark.parametrize(
    ("num_steps", "verdict"),
    [pytest.param(16, "off", id="few-steps"), pytest.param(10_000, "on", id="many-steps")],
)
def test_decide_counts_a_pooled_ratio_only_beyond_the_noise_of_its_steps(make, num_steps, verdict):
    """A chain of one that accepts half has a spread of 0.5 a step: over 16 steps the length of 1.5 is known
    to 0.125, so three errors are 25% and 1.2x is no gain; over 10000 steps it is one."""
    pooled = Interval(value=1.2, low=None, high=None, n=50)
    acceptance = make.acceptance(1.5, survival=(0.5,), num_steps=num_steps)
    arm = make.arm(make.chain(1), pooled, speedup_basis="pooled round time", acceptance=acceptance)

    assert make.decide((make.plain_arm(), arm)).verdict == verdict
    assert decide.pooled_margin(arm) == pytest.approx(1.25 if num_steps == 16 else 1.05)


def test_decide_a_single_block_is_not_evidence(make):
    """A paired speedup without an interval never switches speculation on."""
    arm = make.arm(make.chain(3), Interval(value=3.0, low=None, high=None, n=1))

    assert make.decide((make.plain_arm(), arm)).verdict == "off"


def _run(make, *speedups: tuple[int, float], context: int = 0):
    return [
        make.compare(make.cell(batch, context), make.arm(make.chain(3), value)) for batch, value in speedups
    ]


@pytest.mark.parametrize(
    ("speedups", "outcome"),
    [
        (((1, 1.5), (16, 1.2)), "speculate"),
        (((1, 0.8), (16, 0.5)), "do not speculate"),
        (((1, 1.5), (16, 0.7)), "depends on load"),
        ((), "no data"),
    ],
    ids=["all on", "all off", "mixed over batch", "nothing"],
)
def test_outcome_over_batch_sizes(make, speedups, outcome):
    """The answer of a run follows from its verdicts over the load."""
    assert decide.outcome(_run(make, *speedups), []) == outcome


def test_outcome_opposite_over_context_depends_on_workload(make):
    """The same batch size gains on short prompts and loses on long ones."""
    cells = _run(make, (1, 1.5)) + _run(make, (1, 0.8), context=100_000)

    assert decide.outcome(cells, []) == "depends on workload"


def test_outcome_one_category_wins_tenfold_and_another_loses_depends_on_workload(make):
    """876.5 against 89.1 tokens/s on verbatim repeats, 87.9 on prose: the mean must not hide the loss."""
    cell = make.cell()
    overall = make.compare(cell, make.arm(make.chain(3), 2.5))
    repeat = make.compare(cell, make.arm(make.chain(3), 876.5 / 89.1), scope="repeat")
    prose = make.compare(cell, make.arm(make.chain(3), make.interval(87.9 / 89.1, 0.005)), scope="prose")

    assert decide.outcome([overall], [repeat, prose]) == "depends on workload"
    assert decide.opposed_categories([overall], [repeat, prose]) == ((repeat, prose),)


def test_outcome_a_category_within_the_noise_does_not_oppose(make):
    """A category that is not clearly slower leaves the answer alone."""
    cell = make.cell()
    overall = make.compare(cell, make.arm(make.chain(3), 1.5))
    code = make.compare(cell, make.arm(make.chain(3), 1.8), scope="code")
    prose = make.compare(cell, make.arm(make.chain(3), make.interval(0.99, 0.05)), scope="prose")

    assert decide.outcome([overall], [code, prose]) == "speculate"
