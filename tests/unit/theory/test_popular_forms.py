"""The wrong forms give the wrong values that are documented, and the right form differs."""

from __future__ import annotations

import pytest

from spectune.theory import popular_forms as popular
from spectune.theory.speedup import general_speedup, ideal_speedup

ALPHA, K, C = 0.8, 4, 0.1


def test_ideal_speedup_is_the_reference_of_the_table() -> None:
    """3.3616 tokens over 1.4 steps."""
    assert ideal_speedup(ALPHA, K, C) == pytest.approx(2.401, abs=5e-4)


@pytest.mark.parametrize(
    ("value", "expected", "error_percent"),
    [
        (popular.speedup_without_bonus(ALPHA, K, C), 1.687, -30),
        (popular.speedup_with_k_terms(ALPHA, K, C), 2.109, -12),
        (popular.speedup_with_one_draft_step(ALPHA, K, C), 3.056, 27),
        (popular.speedup_over_verify_time(ALPHA, K, 0.1, 1.0), 2.684, 12),
        (popular.speedup_from_draft_rate(0.5904, K, C), 1.619, -33),
    ],
    ids=["bonus-dropped", "k-terms", "one-draft-step", "over-verify-time", "draft-rate-as-alpha"],
)
def test_popular_form_is_off_by_the_documented_error(
    value: float, expected: float, error_percent: int
) -> None:
    """Each form's value at alpha 0.8, K 4, c 0.1 and its error against 2.401."""
    assert value == pytest.approx(expected, abs=5e-4)
    assert round((value / 2.4011 - 1) * 100) == error_percent


def test_speedup_at_any_batch_misses_the_growth_of_verification() -> None:
    """At batch 64 a pass of 4 tokens each takes 11.265 ms where a plain one takes 7.231: 1.56x, not flat."""
    assert popular.speedup_at_any_batch(0.7, 3, 0.0, 1) == popular.speedup_at_any_batch(0.7, 3, 0.0, 64)
    assert popular.speedup_at_any_batch(0.7, 3, 0.0, 64) == pytest.approx(2.533)

    assert general_speedup(2.533, 7.231, 0.0, 11.265) == pytest.approx(1.626, abs=5e-4)


@pytest.mark.parametrize(
    ("first", "tau", "error_percent"), [(0.7296, 2.6049, 1.7), (0.6541, 2.2554, 4.7), (0.7165, 2.5622, 1.4)]
)
def test_tau_from_first_position_overstates_falling_acceptance(
    first: float, tau: float, error_percent: float
) -> None:
    """Published survival vectors of three heads: the first position alone predicts 1.4 to 4.7% too much."""
    assert (popular.tau_from_first_position(first, 3) / tau - 1) * 100 == pytest.approx(
        error_percent, abs=0.06
    )


def test_tau_over_positions_weighs_easy_text_double() -> None:
    """Steps of 1 and 4 tokens take 2.5 a step; over positions it reads 3.4."""
    assert popular.tau_over_positions([1, 4]) == pytest.approx(3.4)


def test_tau_mean_of_requests_is_not_the_pooled_value() -> None:
    """40 tokens in 10 steps and 260 in 200 average 2.65 where 300/210 is 1.43."""
    assert popular.tau_mean_of_requests([(40, 10), (260, 200)]) == pytest.approx(2.65)


def test_accept_rate_with_bonus_overstates_the_draft() -> None:
    """Length 2.17 of 4 verified tokens prints 0.54 where 0.39 of the drafts were accepted."""
    assert popular.accept_rate_with_bonus(2.17, 4) == pytest.approx(0.5425)


def test_tpot_from_chunk_gap_is_the_round_time() -> None:
    """8.72 ms between events at 292.29 tokens/s is 2.55 tokens, not one."""
    assert popular.tpot_from_chunk_gap(0.00872) * 292.29 == pytest.approx(2.55, abs=5e-3)


def test_tree_capacity_as_chain_misses_the_square() -> None:
    """Three steps of four children: 13 by the form, 1 + 4 + 16 + 16 = 37 in truth."""
    assert popular.tree_capacity_as_chain(3, 4) == 13
