"""Theory beside measurement."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from spectune.policy.predict import halves, predict
from spectune.records import RoundTimes

PLAIN = RoundTimes(draft_s=0.0, verify_s=0.9, other_s=0.1, num_rounds=20)
TIMES = RoundTimes(draft_s=0.2, verify_s=1.0, other_s=0.2, num_rounds=20)


def arms(make, *, early=(1, 1), late=(0, 0), late_tpot=0.77):
    """Off and K=2 over four blocks of one category, which take turns; acceptance differs between the
    halves."""
    accepted = (early, late, early, late)
    off = make.arm_data(make.off, {(0, i): make.block(tpot_s=1.0, name=f"p{i}-0") for i in range(4)})
    arm = make.arm_data(
        make.chain(2),
        {
            (0, i): make.block(
                tpot_s=late_tpot if i % 2 else 5.0, name=f"p{i}-0", steps=make.steps(accepted[i], 2)
            )
            for i in range(4)
        },
    )
    return off, arm


def test_prediction_takes_acceptance_from_one_half_and_measures_the_other(make):
    """Calibrated round 1.4 s over acceptance length 2 is 0.70 s; the other half measured 0.77 s."""
    off, arm = arms(make)

    told = predict(arm, off, TIMES, PLAIN)

    assert told.predicted_tpot_s == pytest.approx(0.70)
    assert told.measured_tpot_s == pytest.approx(0.77)
    assert told.residual_fraction == pytest.approx(0.10)
    assert told.predicted_speedup == pytest.approx(2 / 1.4)


def test_prediction_is_blind_to_acceptance_and_time_it_is_judged_by(make):
    """Changing what the measured half accepted or took leaves the predicted time alone."""
    first = predict(*reversed(arms(make)), TIMES, PLAIN)
    second = predict(*reversed(arms(make, late=(2, 2), late_tpot=0.1)), TIMES, PLAIN)

    assert first.predicted_tpot_s == second.predicted_tpot_s


def test_prediction_splits_the_measured_speedup_exactly(make):
    """The parts add up to the log of the measured 1 / 0.77, acceptance among them log 2."""
    off, arm = arms(make)

    parts = dict(predict(arm, off, TIMES, PLAIN).waterfall)

    assert list(parts) == ["acceptance", "verify", "draft", "other", "residual"]
    assert parts["acceptance"] == pytest.approx(math.log(2))
    assert math.fsum(parts.values()) == pytest.approx(math.log(1 / 0.77))
    assert parts["residual"] == pytest.approx(math.log(0.70 / 0.77))


def test_prediction_tells_break_even_and_draft_cost(make):
    """A round of 1.4 plain rounds needs 1.4 tokens; two draft steps of 0.2 s cost 0.1 each."""
    off, arm = arms(make)

    told = predict(arm, off, TIMES, PLAIN)

    assert told.break_even_acceptance_length == pytest.approx(1.4)
    assert told.draft_cost_ratio == pytest.approx(0.1)


def test_prediction_uses_the_measured_cost_of_verification(make):
    """Three tokens at 41.28 ms against one at 30.77 ms make the break-even 1.34, not 1.04."""
    off, arm = arms(make)
    plain = RoundTimes(draft_s=0.0, verify_s=30.77e-3, other_s=0.0, num_rounds=20)
    times = RoundTimes(draft_s=0.0, verify_s=41.28e-3, other_s=0.0, num_rounds=20)

    told = predict(arm, off, times, plain)

    assert told.break_even_acceptance_length == pytest.approx(1.3416, abs=1e-4)
    assert dict(told.waterfall)["verify"] == pytest.approx(-0.2939, abs=1e-4)
    assert dict(told.waterfall)["draft"] == 0


def test_prediction_of_a_draft_as_slow_as_the_target_is_below_one(make):
    """Acceptance length 3 over two draft steps of 0.95 and a verification of 1.1 plain steps is 1.0."""
    off, arm = arms(make, early=(2, 2))
    plain = RoundTimes(draft_s=0.0, verify_s=1.0, other_s=0.0, num_rounds=20)
    times = RoundTimes(draft_s=1.9, verify_s=1.1, other_s=0.2, num_rounds=20)

    told = predict(arm, off, times, plain)

    assert told.predicted_speedup == pytest.approx(3 / 3.2)
    assert told.draft_cost_ratio == pytest.approx(0.95)


def test_prediction_of_plain_decoding_is_its_calibrated_round(make):
    """Off is predicted too, so that drift between calibration and measurement shows."""
    off, _ = arms(make)

    told = predict(off, off, PLAIN, PLAIN)

    assert (told.predicted_tpot_s, told.measured_tpot_s) == (1.0, 1.0)
    assert told.predicted_speedup is None


def test_prediction_shows_the_floor_of_the_bytes(make):
    """600 bytes of weights and 100 of cache at 1000 bytes/s over acceptance length 2 is 0.35 s."""
    off, arm = arms(make)
    fingerprint = make.fingerprint(weight_bytes=600, kv_bytes_per_token=1, read_bandwidth_bytes_per_s=1000.0)

    told = predict(arm, off, TIMES, PLAIN, fingerprint=fingerprint)

    assert told.floor_tpot_s == pytest.approx(0.35)
    assert told.floor_share == pytest.approx(0.35 / 0.77)


@pytest.mark.parametrize(
    ("times", "plain", "reason"),
    [(None, PLAIN, "of this arm"), (TIMES, None, "of plain decoding")],
    ids=["arm", "plain"],
)
def test_prediction_without_calibration_says_so(make, times, plain, reason):
    """No calibrated times, no prediction, and the reason why."""
    off, arm = arms(make)

    told = predict(arm, off, times, plain)

    assert told.predicted_tpot_s is None
    assert reason in (told.reason or "")


@pytest.mark.parametrize("index", [0, 1])
def test_prediction_from_one_block_is_absent(make, index):
    """One block cannot give both the acceptance and the measurement."""
    off, arm = arms(make)

    told = predict(arm.only([(0, index)]), off, TIMES, PLAIN)

    assert told.predicted_tpot_s is None
    assert "one block only" in (told.reason or "")


def test_prediction_of_a_category_with_one_block_says_one_block(make):
    """A block of code beside two of chat is in one half only, whatever drafts that half has."""
    off, arm = (
        make.arm_data(
            config,
            {
                (0, i): make.block(category=category, name=f"p{i}-0", steps=steps)
                for i, category in enumerate(("code", "chat", "chat"))
            },
        )
        for config, steps in ((make.off, ()), (make.chain(2), make.steps([1], 2)))
    )

    assert "one block only" in (predict(arm, off, TIMES, PLAIN, scope="code").reason or "")
    assert predict(arm, off, TIMES, PLAIN, scope="chat").predicted_tpot_s == pytest.approx(0.70)


@pytest.mark.parametrize(
    ("categories", "early"),
    [
        pytest.param(("a", "b", "c", "d") * 2, [0, 2, 5, 7], id="each-category-in-both-halves"),
        pytest.param(("a", "b", "c", "d"), [0, 2], id="one-block-each-fills-both-alike"),
        pytest.param(("a", "b") * 3, [0, 3, 4], id="odd-counts-fill-both-alike"),
        pytest.param(("a",) * 4, [0, 2], id="one-category-takes-turns"),
    ],
)
def test_halves_split_within_each_category(make, categories, early):
    """Single-prompt blocks in category order: no half gets the first categories and none the last."""
    data = make.arm_data(
        make.off, {(0, i): make.block(category=category) for i, category in enumerate(categories)}
    )

    first, second = halves(data)

    assert [index for _, index in first.blocks] == early
    assert sorted([*first.blocks, *second.blocks]) == sorted(data.blocks)


def test_halves_of_mixed_blocks_hold_the_same_mixes(make):
    """Blocks of a+b and of c+d in turn: taking every second block would part the mixes."""
    mixes = (("a", "b"), ("c", "d")) * 2
    data = make.arm_data(
        make.off,
        {
            (0, i): replace(make.block(), requests=tuple(make.request(category=name) for name in mix))
            for i, mix in enumerate(mixes)
        },
    )

    first, second = halves(data)

    assert first.categories == second.categories == ("a", "b", "c", "d")
