"""Speedup formulas against enumeration, published tables and hand calculations."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest

from spectune.errors import UsageError
from spectune.theory.speedup import (
    break_even_acceptance_length,
    break_even_batch,
    expected_tokens,
    general_speedup,
    ideal_speedup,
    marginal_keep,
    min_guarantee,
    ops_factor,
    optimal_gamma,
    slowdown_cause,
    speedup_from_ratios,
    tau_from_hazards,
    tau_from_survival,
    verify_cost_per_token,
)


def enumerated_tokens(hazards: list[Fraction]) -> Fraction:
    """Expected tokens of one step by walking all accept/refuse outcomes."""
    total = Fraction(0)
    for outcome in itertools.product([True, False], repeat=len(hazards)):
        weight = Fraction(1)
        for accepted, hazard in zip(outcome, hazards, strict=True):
            weight *= hazard if accepted else 1 - hazard
        total += weight * (1 + next((i for i, ok in enumerate(outcome) if not ok), len(outcome)))
    return total


@pytest.mark.parametrize("k", [0, 1, 3, 6])
@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 3), Fraction(4, 5), Fraction(1)])
def test_expected_tokens_equals_the_enumeration(alpha: Fraction, k: int) -> None:
    """All 2^K outcomes with their weights give the same mean, at both ends of alpha too."""
    assert expected_tokens(float(alpha), k) == pytest.approx(float(enumerated_tokens([alpha] * k)))


def test_tau_from_hazards_equals_the_enumeration() -> None:
    """Unequal acceptance by position: 1 + 9/10 + 9/10·1/2 + 9/10·1/2·2/3 = 2.65."""
    hazards = [Fraction(9, 10), Fraction(1, 2), Fraction(2, 3)]

    assert enumerated_tokens(hazards) == Fraction(53, 20)
    assert tau_from_hazards([float(h) for h in hazards]) == pytest.approx(2.65)


@pytest.mark.parametrize(
    ("survival", "tau"),
    [
        ((0.7296, 0.5208, 0.3545), 2.60),
        ((0.6541, 0.3993, 0.2020), 2.26),
        ((0.7165, 0.5120, 0.3337), 2.56),
    ],
)
def test_tau_from_survival_matches_published_lengths(survival: tuple[float, ...], tau: float) -> None:
    """Per-position acceptance published with the acceptance length of the same run."""
    assert tau_from_survival(survival) == pytest.approx(tau, abs=0.006)


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_ideal_speedup_and_ops_factor_match_leviathan_table_1(
    alpha: float, gamma: int, operations: float, speed: float
) -> None:
    """The paper's table for a free draft: operations and walltime."""
    assert ideal_speedup(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.006)
    assert ops_factor(alpha, gamma, 0.0) == pytest.approx(operations, abs=0.006)


def test_ideal_speedup_of_a_known_example_has_the_right_denominator() -> None:
    """Alpha 0.44, gamma 5, c 0.11: 0.992744 / (0.56 · 1.55) = 1.144."""
    assert ideal_speedup(0.44, 5, 0.11) == pytest.approx(1.144, abs=5e-4)


def test_ideal_speedup_at_the_ends_of_alpha_is_the_limit() -> None:
    """Alpha 1 gives (gamma+1)/(c·gamma+1), alpha 0 gives 1/(c·gamma+1)."""
    assert ideal_speedup(1.0, 4, 0.25) == pytest.approx(2.5)
    assert ideal_speedup(0.0, 4, 0.25) == pytest.approx(0.5)
    assert ideal_speedup(1.0, 4, 0.0) == 5


@pytest.mark.parametrize(
    ("alpha", "gamma", "c"),
    [(-0.1, 3, 0.1), (1.1, 3, 0.1), (math.nan, 3, 0.1), (0.5, -1, 0.1), (0.5, 3, -0.1)],
)
def test_ideal_speedup_outside_its_domain_is_refused(alpha: float, gamma: int, c: float) -> None:
    """Acceptance outside 0..1, negative lengths and negative costs are refused with the value."""
    with pytest.raises(UsageError):
        ideal_speedup(alpha, gamma, c)


def test_min_guarantee_is_one_draft_token() -> None:
    """Alpha 0.8 at c 0.2 gives at least 1.8 / 1.2."""
    assert min_guarantee(0.8, 0.2) == pytest.approx(1.5)


def test_ops_factor_at_full_acceptance_is_the_limit() -> None:
    """Alpha 1: (gamma·c + gamma + 1) / (gamma + 1)."""
    assert ops_factor(1.0, 4, 0.1) == pytest.approx(5.4 / 5)


def test_optimal_gamma_stops_where_the_next_token_does_not_pay() -> None:
    """Alpha 0.5, c 0.1: 1, 1.364, 1.458, 1.442, so two tokens are best."""
    assert optimal_gamma(0.5, 0.1) == 2


def test_optimal_gamma_where_the_draft_costs_more_than_it_brings_is_off() -> None:
    """A gain needs alpha > c; otherwise nothing is drafted."""
    assert optimal_gamma(0.3, 0.4) == 0
    assert optimal_gamma(0.3, 0.3) == 0


def test_general_speedup_uses_the_measured_verification() -> None:
    """One token takes 30.77 ms and three take 41.28: length 2 gives 1.491, not 2."""
    assert general_speedup(2.0, 30.77, 0.0, 41.28) == pytest.approx(1.4908, abs=5e-5)


def test_verify_cost_per_token_is_the_measured_slope() -> None:
    """41.28 ms for three tokens against 30.77 for one is 17% of a step per further token."""
    assert verify_cost_per_token(30.77, 41.28, 3) == pytest.approx(0.1708, abs=5e-5)


def test_speedup_from_ratios_of_a_free_draft_is_capped_by_verification() -> None:
    """A quarter of a pass per verified token, length 2.39 at K=3: at most 1.37x."""
    assert speedup_from_ratios(2.39, 3, 0.0, 1.75) == pytest.approx(1.37, abs=5e-3)


def test_speedup_of_a_draft_as_large_as_the_target_is_below_one() -> None:
    """A higher acceptance length with a draft of 0.9 steps loses: 4.5 / (5·0.9 + 1) = 0.818."""
    assert speedup_from_ratios(4.5, 5, 0.9, 1.0) == pytest.approx(0.818, abs=5e-4)

    cause = slowdown_cause(4.5, 1.0, 4.5, 1.0)

    assert cause == (
        "draft too expensive: 4.50 plain steps a round, break-even acceptance length 5.50, measured 4.50"
    )


def test_break_even_of_a_third_sized_draft_is_above_its_length() -> None:
    """Five drafts of a third each: 2.67 with free verification, 7.67 if each token costs a pass.

    At length 3.5 the latter runs at 0.457 of plain speed, 54% slower.
    """
    assert break_even_acceptance_length(1.0, 5 / 3, 1.0) == pytest.approx(2.667, abs=5e-4)
    assert break_even_acceptance_length(1.0, 5 / 3, 6.0) == pytest.approx(7.667, abs=5e-4)
    assert general_speedup(3.5, 1.0, 5 / 3, 6.0) == pytest.approx(0.457, abs=5e-4)


@pytest.mark.parametrize(
    ("tau", "draft", "verify", "other", "expected"),
    [
        (2.0, 0.2, 1.1, 0.1, None),
        (2.0, 1.5, 1.1, 0.1, "draft too expensive"),
        (2.0, 0.1, 2.5, 0.1, "verification too expensive"),
        (2.0, 0.1, 1.0, 1.5, "overhead too large"),
        (1.1, 1.0, 2.0, 1.0, "acceptance too low"),
    ],
)
def test_slowdown_cause_names_the_part(
    tau: float, draft: float, verify: float, other: float, expected: str | None
) -> None:
    """The part without whose extra cost speculation would pay is named; nothing if it pays."""
    cause = slowdown_cause(tau, 1.0, draft, verify, other)

    assert (cause and cause.split(":")[0].removesuffix(" for these costs")) == expected


def test_break_even_batch_is_where_both_rounds_cost_the_same_per_token() -> None:
    """a=6, g=0.02, d=2, K=3, length 2.5: at batch 700/3 both take 10.667 per token."""
    batch = break_even_batch(2.5, 3, 6.0, 0.02, 2.0)

    assert batch == pytest.approx(700 / 3)
    assert batch is not None
    assert 6 + 0.02 * batch == pytest.approx(10.6667, abs=1e-4)
    assert (6 + 0.02 * batch * 4 + 2) / 2.5 == pytest.approx(10.6667, abs=1e-4)


def test_break_even_batch_of_published_constants_is_about_230() -> None:
    """8B model on one H100 with an EAGLE chain of three, length 2.39: about 230 sequences."""
    batch = break_even_batch(2.39, 3, 5.886e-3 + 1.207e-3, 2.101e-5, 2.135e-3)

    assert batch == pytest.approx(230, rel=0.01)


@pytest.mark.parametrize(
    ("tau", "draft_s", "expected"), [(1.2, 2.0, 0.0), (4.0, 1.0, None)], ids=["never-pays", "always-pays"]
)
def test_break_even_batch_without_a_crossing_says_so(
    tau: float, draft_s: float, expected: float | None
) -> None:
    """0 where speculation loses at every batch, None where all drafts are accepted."""
    assert break_even_batch(tau, 3, 6.0, 0.02, draft_s) == expected


def test_marginal_keep_needs_more_than_the_average_token() -> None:
    """Length 2 in 10 ms earns 0.2 a ms: 1 ms more must bring more than 0.2 tokens."""
    assert marginal_keep(0.21, 2.0, 0.001, 0.010)
    assert not marginal_keep(0.19, 2.0, 0.001, 0.010)


def test_length_below_one_is_refused_as_a_unit_error() -> None:
    """Accepted drafts per step without the target's token is another unit."""
    with pytest.raises(UsageError, match=r"0\.7 is below 1"):
        general_speedup(0.7, 1.0, 0.1, 1.0)
