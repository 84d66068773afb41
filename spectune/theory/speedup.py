"""Speedup of speculative over plain decoding, from acceptance and times.

Leviathan et al. 2023 (arXiv 2211.17192) for the ideal case, the general form for measured times. Wrong
forms that circulate are in popular_forms.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectune.theory.checks import (
    check_count,
    check_not_negative,
    check_positive,
    check_probability,
    check_tau,
)


def expected_tokens(alpha: float, k: int) -> float:
    """1 + α + … + α^k = (1 - α^(k+1)) / (1 - α), the target's own token included (Eq. 1).

    k + 1 at α = 1, 1 at α = 0. Holds for the same α at every position.
    """
    check_probability("alpha", alpha)
    check_count("number of draft tokens", k)
    return math.fsum(alpha**j for j in range(k + 1))


def ideal_speedup(alpha: float, gamma: int, c: float) -> float:
    """(1 - α^(γ+1)) / ((1 - α)(γc + 1)) (Theorem 3.8).

    Assumes that verifying γ+1 tokens costs one plain step and that nothing else costs anything. `c` is
    one draft step / one plain step.
    """
    check_not_negative("draft cost ratio c", c)
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def min_guarantee(alpha: float, c: float) -> float:
    """(1 + α) / (1 + c): what γ = 1 gives, so the best γ gives at least this if α > c (Corollary 3.9)."""
    return ideal_speedup(alpha, 1, c)


def ops_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """(1 - α)(γĉ + γ + 1) / (1 - α^(γ+1)): arithmetic operations over plain decoding (Theorem 3.11).

    Never below 1: where arithmetic is the limit, speculation loses. ĉ is draft operations per token /
    target operations per token.
    """
    check_not_negative("draft operations ratio", c_hat)
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(alpha: float, c: float, max_gamma: int = 64) -> int:
    """The γ in 0..max_gamma with the largest ideal speedup, the smallest among equals; 0 is off."""
    check_count("largest number of draft tokens", max_gamma)
    return max(range(max_gamma + 1), key=lambda gamma: ideal_speedup(alpha, gamma, c))


def tau_from_hazards(hazards: Sequence[float]) -> float:
    """1 + Σ_j Π_{i<=j} h_i: tokens per step from conditional acceptance by position.

    Real heads are not geometric: hazards fall for EAGLE-3 on chat and rise for n-grams.
    """
    tau, survival = 1.0, 1.0
    for hazard in hazards:
        check_probability("conditional acceptance", hazard)
        survival *= hazard
        tau += survival
    return tau


def tau_from_survival(survival: Sequence[float]) -> float:
    """1 + Σ survival: tokens per step from P(at least j drafts accepted)."""
    for share in survival:
        check_probability("survival", share)
    return 1 + math.fsum(survival)


def general_speedup(tau: float, t0: float, draft: float, verify: float, other: float = 0.0) -> float:
    """τ · T_0 / (T_D + T_V + T_oh): all seconds measured at the same batch and context.

    `t0` is the whole plain round, `draft` the whole draft phase of a round.
    """
    check_tau(tau)
    return tau / break_even_acceptance_length(t0, draft, verify, other)


def speedup_from_ratios(tau: float, k: int, c: float, v: float = 1.0, o: float = 0.0) -> float:
    """τ / (K·c + v + o): c one draft step, v verification, o the rest, each over one plain step."""
    check_count("number of draft tokens", k)
    return general_speedup(tau, 1.0, k * c, v, o)


def break_even_acceptance_length(t0: float, draft: float, verify: float, other: float = 0.0) -> float:
    """(T_D + T_V + T_oh) / T_0: the acceptance length at which speculation is as fast as none."""
    check_positive("plain round time", t0)
    for name, seconds in (("draft", draft), ("verify", verify), ("other", other)):
        check_not_negative(f"{name} time", seconds)
    round_s = draft + verify + other
    check_positive("round time", round_s)
    return round_s / t0


def break_even_batch(tau: float, k: int, fixed_s: float, per_token_s: float, draft_s: float) -> float | None:
    """B* = ((τ-1)·a - d) / (g·(K+1-τ)) for rounds of a + g·tokens seconds and a draft of d.

    Above B* speculation loses. 0 if it loses at every batch, None if it loses at none (τ = K+1). `fixed_s`
    holds the overhead. Short contexts: cached keys and values are not in this model.
    """
    check_tau(tau)
    check_count("number of draft tokens", k)
    check_positive("time per token", per_token_s)
    check_not_negative("fixed time", fixed_s)
    check_not_negative("draft time", draft_s)
    gain = (tau - 1) * fixed_s - draft_s
    if gain <= 0:
        return 0.0
    extra_tokens = k + 1 - tau
    return gain / (per_token_s * extra_tokens) if extra_tokens > 0 else None


def marginal_keep(next_survival: float, tau: float, extra_s: float, round_s: float) -> bool:
    """Keep one more draft token iff its survival > τ · ΔT / T_R: it must earn more than the average.

    `extra_s` is what the token adds to the round of `round_s` seconds that yields `tau` tokens.
    """
    check_probability("survival", next_survival)
    check_tau(tau)
    check_positive("round time", round_s)
    return next_survival > tau * extra_s / round_s


def verify_cost_per_token(verify_one_s: float, verify_n_s: float, n: int) -> float:
    """(T_V(n) - T_V(1)) / ((n - 1) · T_V(1)): share of a step that each further verified token costs."""
    check_positive("time of one token", verify_one_s)
    check_positive("tokens beyond the first", n - 1)
    return (verify_n_s - verify_one_s) / ((n - 1) * verify_one_s)


def slowdown_cause(tau: float, t0: float, draft: float, verify: float, other: float = 0.0) -> str | None:
    """Which part makes speculation slower than none, in words; None if it is not slower.

    The first part without whose extra cost speculation would pay: draft, verification, overhead.
    """
    speedup = general_speedup(tau, t0, draft, verify, other)
    if speedup >= 1:
        return None
    numbers = f"break-even acceptance length {tau / speedup:.2f}, measured {tau:.2f}"
    if draft > 0 and tau * t0 > verify + other:
        return f"draft too expensive: {draft / t0:.2f} plain steps a round, {numbers}"
    if verify > t0 and tau * t0 > draft + t0 + other:
        return f"verification too expensive: {verify / t0:.2f} plain steps a round, {numbers}"
    if other > 0 and tau * t0 > draft + verify:
        return f"overhead too large: {other / t0:.2f} plain steps a round, {numbers}"
    return f"acceptance too low for these costs: {numbers}"
