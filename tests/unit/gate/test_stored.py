"""A stored run against a baseline: acceptance anywhere, speed on an equal machine, each refusal by name."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from spectune.backend.truth import SimulatedTruth
from spectune.cli.gate_check import confirmed, stale_notes
from spectune.gate.pairs import block_tpot, measure_start
from spectune.gate.stored import THROUGHPUT_LIMIT, TPOT_LIMIT, Measured, check_measured
from spectune.gate.tell import junit_text, markdown_text, report_document
from spectune.gate.verdicts import Check, GateReport, Outcome, exit_code, worst
from spectune.records import SideArm, SpecConfig

MARK = {"backend": "simulated", "device": "cpu", "threads": 2, "engine_version": "1", "settings": {"seed": 0}}


@pytest.fixture
def run_of(gate_of, sides_of):
    """Makes what a run has of the guarded arm, from a simulated engine."""

    def make(truth=None, *, repeats=3, seed=1, **changes):
        gate = gate_of()
        arms = [
            SideArm(side="head", point=gate.point()),
            SideArm(side="head", point=gate.point(SpecConfig.off())),
        ]
        sides = sides_of({}, truth or {}, seed=seed)
        starts = [measure_start(sides, arms, start=start) for start in range(repeats)]
        values = {
            "spec": tuple(start[0] for start in starts),
            "off": tuple(start[1] for start in starts),
            "sampling": gate.sampling,
            "workload_digest": "d",
            "fingerprint": MARK,
        }
        return Measured(**{**values, **changes})

    return make


@pytest.fixture
def baseline(gate_of, run_of):
    """A gate whose speedup baseline is what the simulated engine gives, and its blocks."""
    from spectune.gate.calibrate import speedup_of

    run = run_of(repeats=6)
    speedups = tuple(speedup_of(off, spec, 1) for off, spec in zip(run.off, run.spec, strict=True))
    gate = gate_of(speed={"speedup_runs": speedups, "min_speedup": 0.9 * min(speedups)})
    return replace(gate, fingerprint=MARK), run.spec[0]


def outcomes(checks):
    return {check.name: check.outcome for check in checks}


def test_the_same_engine_passes_acceptance_and_speed(baseline, run_of):
    """Nothing changed: every check passes."""
    gate, blocks = baseline

    assert {Outcome.PASSED} == set(outcomes(check_measured(gate, blocks, run_of(seed=1))).values())


def test_a_slower_verification_is_a_regression_of_the_speedup_alone(baseline, run_of):
    """30% dearer verification of drafts: plain decoding keeps its time, the ratio falls, acceptance stays."""
    gate, blocks = baseline
    found = outcomes(check_measured(gate, blocks, run_of({"verify_s_per_token": 6e-3}, repeats=5)))

    assert Outcome.REGRESSION == found["speedup"]
    assert Outcome.PASSED == found["acceptance length"]


def slower(factor):
    """Everything that the simulated engine declares, by one factor."""
    truth = SimulatedTruth()
    return {
        "plain_s_by_batch": {b: factor * s for b, s in truth.plain_s_by_batch.items()},
        "verify_s_per_token": factor * truth.verify_s_per_token,
        "draft_step_s": {m: factor * s for m, s in truth.draft_step_s.items()},
        "other_s": factor * truth.other_s,
    }


@pytest.fixture
def limited(baseline, run_of):
    """The baseline with absolute limits half as far again from its own figures."""
    gate, blocks = baseline
    tpots = [block_tpot(block, 1) for block in blocks.values()]
    seconds = sum(block.duration_s for block in blocks.values())
    tokens = sum(r.num_output_tokens for block in blocks.values() for r in block.requests)
    speed = replace(
        gate.speed, max_tpot_s=1.5 * sorted(tpots)[len(tpots) // 2], min_tokens_per_s=tokens / seconds / 1.5
    )
    return replace(gate, speed=speed), blocks


def test_a_machine_that_is_slower_as_a_whole_keeps_its_ratio(limited, run_of):
    """13% slower in everything is no regression: the gate is on the ratio, absolute limits are wide."""
    gate, blocks = limited
    found = outcomes(check_measured(gate, blocks, run_of(slower(1.13))))

    assert Outcome.PASSED == found["speedup"] == found[TPOT_LIMIT] == found[THROUGHPUT_LIMIT]


def test_a_machine_far_slower_keeps_its_ratio_and_fails_the_absolute_limits(limited, run_of):
    """1.8 times the time of everything: the ratio alone would not tell."""
    gate, blocks = limited
    found = outcomes(check_measured(gate, blocks, run_of(slower(1.8))))

    assert Outcome.PASSED == found["speedup"]
    assert Outcome.REGRESSION == found[TPOT_LIMIT] == found[THROUGHPUT_LIMIT]


def test_another_temperature_is_not_comparable(baseline, run_of, gate_of):
    """A client that falls back to the server's own temperature is refused with both values."""
    gate, blocks = baseline
    (found,) = check_measured(
        gate, blocks, run_of(repeats=1, sampling=replace(gate.sampling, temperature=0.6))
    )

    assert Outcome.NOT_COMPARABLE == found.outcome
    assert "sampling.temperature is 0.0 in the baseline and 0.6 now" in found.text


def test_other_prompts_are_not_comparable(baseline, run_of):
    """A changed dataset moves acceptance for no reason of the engine."""
    gate, blocks = baseline
    (found,) = check_measured(gate, blocks, run_of(repeats=1, workload_digest="e"))

    assert Outcome.NOT_COMPARABLE == found.outcome


def test_another_machine_leaves_acceptance_to_be_judged_and_refuses_speed(baseline, run_of):
    """Counts know no machine, seconds do."""
    gate, blocks = baseline
    found = outcomes(check_measured(gate, blocks, run_of(repeats=1, fingerprint={**MARK, "threads": 4})))

    assert Outcome.PASSED == found["acceptance length"]
    assert Outcome.NOT_COMPARABLE == found["comparable"]


def test_another_engine_version_is_what_a_gate_is_for(baseline, run_of):
    """The version may differ: it is under test."""
    gate, blocks = baseline
    run = run_of(fingerprint={**MARK, "engine_version": "2"})

    assert {Outcome.PASSED} == set(outcomes(check_measured(gate, blocks, run)).values())


def test_a_run_without_plain_decoding_misses_the_speedup(baseline, run_of):
    """No ratio, no verdict on it: exit code 6, not 3."""
    gate, blocks = baseline
    found = check_measured(gate, blocks, run_of(repeats=1, off=()))

    assert Outcome.MISSING == outcomes(found)["speedup"]
    assert 6 == exit_code(worst([check.outcome for check in found]))


def test_a_speedup_below_its_floor_fails_only_if_the_interval_says_so(baseline, run_of):
    """A floor far above the value fails; one inside the interval is inconclusive."""
    gate, blocks = baseline
    run = run_of(repeats=6)
    base = check_measured(gate, blocks, run)
    floor = next(check for check in base if check.name == "speedup floor")
    inside = replace(gate, speed=replace(gate.speed, min_speedup=floor.interval[1] * 0.9999))
    above = replace(gate, speed=replace(gate.speed, min_speedup=2 * floor.value))

    assert Outcome.INCONCLUSIVE == outcomes(check_measured(inside, blocks, run))["speedup floor"]
    assert Outcome.REGRESSION == outcomes(check_measured(above, blocks, run))["speedup floor"]


def test_an_old_baseline_and_a_hidden_gain_are_called_stale(baseline):
    """Age and improvement are both told; neither fails the gate."""
    gate, _ = baseline
    now = datetime.fromisoformat(gate.origin.created) + timedelta(days=91)
    gain = Check(name="speedup", outcome=Outcome.PASSED, text="", value=1.5, reference=1.2)

    notes = stale_notes(gate, GateReport(gate="g", mode="m", checks=(gain,)), now.astimezone(UTC))

    assert 2 == len(notes)
    assert "91 days old" in notes[0]
    assert "hide behind the gain" in notes[1]


def test_a_check_that_is_bad_only_the_second_time_is_undecided():
    """Failing takes two measurements that agree."""
    good = Check(name="speedup", outcome=Outcome.PASSED, text="fine")
    bad = replace(good, outcome=Outcome.REGRESSION, text="worse")

    assert [Outcome.INCONCLUSIVE] == [check.outcome for check in confirmed([good], [bad])]
    assert [Outcome.REGRESSION] == [check.outcome for check in confirmed([bad], [bad])]
    assert [Outcome.PASSED] == [check.outcome for check in confirmed([bad], [good])]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome.PASSED, 0),
        (Outcome.REGRESSION, 3),
        (Outcome.SUSPICIOUS, 3),
        (Outcome.INCONCLUSIVE, 4),
        (Outcome.DRIFT, 4),
        (Outcome.NOT_COMPARABLE, 5),
        (Outcome.MISSING, 6),
    ],
)
def test_each_outcome_has_its_exit_code_and_a_regression_wins(outcome, code):
    """What is worse is said before what is unknown."""
    assert code == exit_code(worst([Outcome.PASSED, outcome]))
    assert 3 == exit_code(worst([outcome, Outcome.REGRESSION]))


def test_reports_for_machines_carry_every_check():
    """JUnit counts failures, errors and skipped apart; Markdown and JSON name what was found."""
    checks = (
        Check(name="a", outcome=Outcome.PASSED, text="fine"),
        Check(name="b", outcome=Outcome.REGRESSION, text="worse <by> 5% | all\x00", hint="look there"),
        Check(name="c", outcome=Outcome.MISSING, text="gone"),
        Check(name="d", outcome=Outcome.SKIPPED, text="off"),
    )
    report = GateReport(
        gate="g",
        mode="base against head",
        checks=checks,
        num_starts=6,
        was_repeated=True,
        detectable_slowdown=0.021,
        change=(("acceptance", 0.0), ("verify", -0.05)),
        culprit="verify",
    )
    suite = ElementTree.fromstring(junit_text(report))
    page = markdown_text(report)

    assert ("4", "1", "1", "1") == tuple(suite.get(n) for n in ("tests", "failures", "errors", "skipped"))
    assert "worse <by> 5% | all" in suite.find("testcase[@name='b']/failure").text
    assert "worse <by> 5% \\| all" in page
    assert "2.1%" in page
    assert "comes from verify" in page
    assert (3, "regression") == (report_document(report)["exit_code"], report_document(report)["outcome"])
