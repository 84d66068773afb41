"""Base against head on the simulated backend: equal, slower, less accepted, failing, blind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spectune.backend.truth import SimulatedTruth
from spectune.errors import Inconclusive, UsageError
from spectune.gate.calibrate import Wishes, calibrate, make_gate, speed_gate
from spectune.gate.design import detectable_slowdown, power_of, refuse_noise, starts_needed
from spectune.gate.file import Origin, Statistics
from spectune.gate.paired import check_paired
from spectune.gate.verdicts import Outcome

TRUTH = SimulatedTruth()
SLOW_VERIFY = {
    "plain_s_by_batch": {b: s * 1.08 for b, s in TRUTH.plain_s_by_batch.items()},
    "verify_s_per_token": TRUTH.verify_s_per_token * 1.08,
}
SLOW_DRAFT = {"draft_step_s": {method: s * 2 for method, s in TRUTH.draft_step_s.items()}}
LESS = {"hazards": {"eagle3": {"default": (0.3, 0.2, 0.1)}}}
FULL = {"hazards": {"eagle3": {"default": (0.45, 0.35, 0.30)}}}


def outcomes(report):
    return {check.name: check.outcome for check in report.checks}


def test_equal_engines_pass_and_the_report_says_what_could_have_been_seen(gate_of, sides_of):
    """A/A is quiet and tells the smallest slowdown that it would have caught."""
    report = check_paired(gate_of(), sides_of({}, {}))

    assert {Outcome.PASSED} == set(outcomes(report).values())
    assert 0 == report.exit_code
    assert 0 < report.detectable_slowdown < 0.06
    assert report.culprit is None


def test_acceptance_of_equal_engines_is_equal_to_the_last_count(gate_of, sides_of):
    """Noise of the clock never touches acceptance: A/A of it is exact."""
    report = check_paired(gate_of(), sides_of({}, {}))
    length = next(check for check in report.checks if check.name == "acceptance length")

    assert length.value == length.reference


@pytest.mark.parametrize(
    ("head", "culprit"), [(SLOW_VERIFY, "verify"), (SLOW_DRAFT, "draft")], ids=["verify", "draft"]
)
def test_a_slower_head_fails_after_a_second_look_and_the_part_is_named(head, culprit, gate_of, sides_of):
    """8% slower verification, or drafts twice as dear: regression, measured twice, attributed."""
    report = check_paired(gate_of(), sides_of({}, head))

    assert Outcome.REGRESSION == outcomes(report)["time per token"]
    assert 3 == report.exit_code
    assert report.was_repeated
    assert culprit == report.culprit


class Stalling:
    """An engine of which every tenth decode round takes six times as long."""

    def __init__(self, inner):
        self._inner = inner

    def __call__(self, arms, *, start):
        for arm, index, block in self._inner(arms, start=start):
            if arm.side == "head":
                rounds = tuple(
                    replace(one, verify_s=6 * one.verify_s) if place % 10 == 9 else one
                    for place, one in enumerate(block.rounds)
                )
                block = replace(block, rounds=rounds)
            yield arm, index, block


def test_stalls_in_few_rounds_are_told_though_they_are_not_judged(gate_of, sides_of):
    """The middle half of the rounds is as fast as before, so the gate passes, and a note says what grew."""
    report = check_paired(gate_of(), Stalling(sides_of({}, {})))

    assert Outcome.PASSED == outcomes(report)["time per token"]
    assert any("the slowest rounds grew" in note for note in report.notes)
    assert not check_paired(gate_of(), sides_of({}, {})).notes


def test_a_worse_draft_is_named_acceptance_and_not_time(gate_of, sides_of):
    """Lower acceptance costs time as well: the report says where it comes from."""
    report = check_paired(gate_of(), sides_of(FULL, LESS))

    assert Outcome.REGRESSION == outcomes(report)["acceptance length"]
    assert "acceptance" == report.culprit


def test_more_acceptance_than_the_same_drafts_gave_is_suspicious(gate_of, sides_of):
    """Too high fails as too low does: loops and broken verification look like gains."""
    report = check_paired(gate_of(), sides_of(LESS, FULL))

    assert Outcome.SUSPICIOUS == outcomes(report)["acceptance length"]
    assert 3 == report.exit_code


def test_acceptance_and_speed_can_be_guarded_alone(gate_of, sides_of):
    """A slow head passes the gate of acceptance, a worse draft the gate of nothing else."""
    only_acceptance = check_paired(gate_of(speed={"is_enabled": False}), sides_of({}, SLOW_VERIFY))
    only_speed = check_paired(gate_of(acceptance={"is_enabled": False}), sides_of({}, SLOW_VERIFY))

    assert {"acceptance length": Outcome.PASSED, "acceptance by position": Outcome.PASSED} == outcomes(
        only_acceptance
    )
    assert 3 == only_speed.exit_code
    assert Outcome.SKIPPED == outcomes(only_speed)["acceptance length"]


def test_failed_requests_are_a_missing_metric_not_a_regression(gate_of, sides_of):
    """An engine that refuses every request has no figures: exit code 6."""
    sides = sides_of({}, {})
    sides._backends["head"].failing = {gate_of().config.label: "requests"}

    report = check_paired(gate_of(), sides)

    assert 6 == report.exit_code
    assert "requests failed" in report.checks[0].text


def test_a_check_that_is_blind_does_not_pass(gate_of, sides_of):
    """Noise far above the calibration: four starts that could only have seen 20% are inconclusive."""
    noisy = {"boot_noise_sd": 0.10}

    report = check_paired(gate_of(statistics={"num_starts": 4}), sides_of(noisy, noisy, seed=5))

    assert Outcome.INCONCLUSIVE == outcomes(report)["time per token"]
    assert 4 == report.exit_code


def test_a_threshold_inside_the_noise_is_refused_with_the_starts_it_would_take():
    """2% noise and four starts cannot guard 3%; the refusal names how many could, and that is enough."""
    statistics = Statistics()
    needed = starts_needed(0.02, 0.03, statistics)

    with pytest.raises(Inconclusive) as caught:
        refuse_noise(0.02, 0.03, 4, statistics)

    assert f"--num-starts {needed}" in caught.value.hint
    assert power_of(0.02, 0.03, needed, statistics) >= 0.95 > power_of(0.02, 0.03, needed - 1, statistics)
    refuse_noise(0.02, 0.03, needed, statistics)


def test_the_detectable_slowdown_is_the_one_with_the_power_asked_for():
    """At it, and not 5% below it, the power is reached."""
    statistics = Statistics()
    seen = detectable_slowdown(0.015, 8, statistics)

    assert power_of(0.015, seen, 8, statistics) == pytest.approx(0.95, abs=1e-3)


def test_calibration_refuses_engines_that_are_said_to_be_equal_and_are_not(gate_of, sides_of):
    """An A/A that finds a difference says so instead of hiding it in a tolerance."""
    quiet = {"boot_noise_sd": 0.0005, "request_noise_sd": 0.0, "noise_sd": 0.005}

    with pytest.raises(Inconclusive, match="equal engines differ"):
        calibrate(sides_of(quiet, {**quiet, **SLOW_VERIFY}), gate_of().point(), num_starts=8)


def test_calibration_makes_a_gate_whose_tolerances_stand_above_the_noise(gate_of, sides_of):
    """Speed by starts, acceptance at no less than three deviations; the baseline has every run in it."""
    point = gate_of().point()
    found = calibrate(sides_of({}, {}), point, num_starts=6)

    gate, blocks = make_gate("made", Origin(created="now"), point, {}, {}, found, Wishes())

    assert 6 == len(gate.speed.speedup_runs) == len(gate.statistics.aa_log_ratios)
    assert gate.acceptance.tolerance >= max(0.01, 3 * gate.acceptance.noise)
    assert power_of(gate.statistics.pair_noise, 0.03, gate.statistics.num_starts, gate.statistics) >= 0.95
    assert 12 == len(blocks)
    assert gate.speed.min_speedup is not None


def test_fewer_than_five_runs_are_no_baseline(gate_of, sides_of):
    """One slow run of four could hide a loss."""
    with pytest.raises(UsageError, match="--calibration-starts 4 is below 5"):
        calibrate(sides_of({}, {}), gate_of().point(), num_starts=4)


def test_limits_follow_the_median_run_and_absolute_ones_are_wide(gate_of, sides_of):
    """One run of the slow tail (ten times the time, a tenth of the speedup) moves no limit: nine tenths of
    the median speedup, one and a half times the median time per token, two thirds of the median rate."""
    found = calibrate(sides_of({}, {}), gate_of().point(), num_starts=5)
    told = replace(
        found,
        speedups=(1.4, 1.5, 1.6, 1.5, 0.15),
        tpots_s=(0.010, 0.011, 0.010, 0.010, 0.100),
        tokens_per_s=(90.0, 91.0, 90.0, 90.0, 9.0),
    )

    speed = speed_gate(told, max_slowdown=0.03)

    assert speed.min_speedup == pytest.approx(0.9 * 1.5)
    assert speed.max_tpot_s == pytest.approx(0.015)
    assert speed.min_tokens_per_s == pytest.approx(60.0)


def test_a_tolerance_inside_the_noise_of_acceptance_is_refused(gate_of, sides_of):
    """Texts that part at random make acceptance noisy where the range is not common."""
    from spectune.gate.calibrate import acceptance_gate

    found = calibrate(sides_of({}, {}), gate_of().point(), num_starts=5)

    with pytest.raises(Inconclusive, match="inside the noise"):
        acceptance_gate(gate_of().config, found.blocks, tolerance=0.01, noise=0.02)


def test_texts_that_part_in_some_requests_do_not_move_acceptance(gate_of, sides_of):
    """Three in ten texts leave plain's somewhere: over the common range acceptance stays equal."""
    parting = {"text_flip_rate": 0.3}
    gate = replace(gate_of(), speed=replace(gate_of().speed, is_enabled=False))

    report = check_paired(gate, sides_of(parting, parting))

    assert {Outcome.PASSED} == set(outcomes(report).values())
