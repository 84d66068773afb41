"""The split of a speedup is exact, free of order, and names what is left."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectune.theory.waterfall import change, waterfall


def test_waterfall_of_a_known_round_matches_the_hand_calculation() -> None:
    """Length 2.5, plain 10, draft 2, verify 13, rest 1: log 2.5 minus log 1.6 shared as 3:2:1."""
    parts = dict(waterfall(tau=2.5, plain_s=10, draft_s=2, verify_s=13, other_s=1, measured_speedup=1.5))

    assert parts == pytest.approx(
        {
            "acceptance": 0.916291,
            "verify": -0.235002,
            "draft": -0.156668,
            "other": -0.078334,
            "residual": -0.040822,
        },
        abs=1e-6,
    )


def test_waterfall_splits_the_gap_of_a_measured_verification() -> None:
    """Three tokens in 41.28 ms where one takes 30.77: log 1.3416 = 0.2938 goes to verification alone."""
    parts = dict(waterfall(tau=2.0, plain_s=30.77, draft_s=0, verify_s=41.28, other_s=0))

    assert parts["verify"] == pytest.approx(-0.2938, abs=5e-5)
    assert (parts["draft"], parts["other"], parts["residual"]) == (0, 0, 0)


def test_waterfall_of_a_plain_round_is_all_zero() -> None:
    """A round that is a plain round loses nothing, its own overhead included."""
    parts = waterfall(tau=1.0, plain_s=10, draft_s=0, verify_s=9, other_s=1, plain_other_s=1)

    assert [gain for _, gain in parts] == pytest.approx([0, 0, 0, 0, 0], abs=1e-12)


POSITIVE = st.floats(0.01, 50)


@given(
    tau=st.floats(1, 9), plain=POSITIVE, draft=POSITIVE, verify=POSITIVE, other=POSITIVE, measured=POSITIVE
)
def test_waterfall_sums_to_the_measured_speedup(
    tau: float, plain: float, draft: float, verify: float, other: float, measured: float
) -> None:
    """The parts add up to the log of what was measured, whatever the inputs."""
    parts = waterfall(
        tau=tau, plain_s=plain, draft_s=draft, verify_s=verify, other_s=other, measured_speedup=measured
    )

    assert math.fsum(gain for _, gain in parts) == pytest.approx(math.log(measured), abs=1e-9)


@given(tau=st.floats(1, 9), plain=POSITIVE, draft=POSITIVE, verify=POSITIVE, other=POSITIVE)
def test_waterfall_without_a_measurement_sums_to_the_model(
    tau: float, plain: float, draft: float, verify: float, other: float
) -> None:
    """Without a measurement nothing is left over and the sum is length times plain over round time."""
    parts = waterfall(tau=tau, plain_s=plain, draft_s=draft, verify_s=verify, other_s=other)

    total = math.exp(math.fsum(gain for _, gain in parts))
    assert total * (draft + verify + other) == pytest.approx(tau * plain, rel=1e-6)


def test_change_of_a_slower_verify_is_all_in_verify() -> None:
    """Rounds of 2 + 8 ms that become 2 + 8.8 ms: log(10.8 / 10) lost, all of it in verify."""
    parts = dict(
        change(tau_before=2.0, tau_after=2.0, before_s=(2e-3, 8e-3, 0.0), after_s=(2e-3, 8.8e-3, 0.0))
    )

    assert parts["verify"] == pytest.approx(-math.log(1.08))
    assert (parts["acceptance"], parts["draft"], parts["other"]) == (0.0, 0.0, 0.0)


def test_change_splits_exactly_into_its_parts() -> None:
    """Acceptance 2.0 to 1.9, draft 2 to 3 ms, verify 8 to 7 ms: the parts add up to what was measured."""
    parts = change(
        tau_before=2.0,
        tau_after=1.9,
        before_s=(2e-3, 8e-3, 1e-3),
        after_s=(3e-3, 7e-3, 1e-3),
        measured_gain=0.93,
    )

    assert math.fsum(gain for _, gain in parts) == pytest.approx(math.log(0.93))
    assert dict(parts)["acceptance"] == pytest.approx(math.log(0.95))
    assert dict(parts)["draft"] == pytest.approx(-1 / 11, rel=1e-3)
