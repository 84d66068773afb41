"""Formulas and readings that circulate and are wrong, kept so that they can be named and compared.

Never used to decide. Each says what is wrong. At alpha = 0.8, K = 4, c = 0.1 per draft token the ideal
speedup (speedup.ideal_speedup) is 3.3616 / 1.4 = 2.401; the numbers below are for the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectune.theory.checks import check_count, check_not_negative, check_positive
from spectune.theory.speedup import expected_tokens, ideal_speedup


def speedup_without_bonus(alpha: float, k: int, c: float) -> float:
    """α(1 - α^K)/(1 - α) / (1 + Kc) = 1.687, 30% low.

    Wrong: counts accepted drafts only. Every step also yields one token of the target itself.
    """
    return (expected_tokens(alpha, k) - 1) / _draft_slowdown(k, c)


def speedup_with_k_terms(alpha: float, k: int, c: float) -> float:
    """(1 + α + … + α^(K-1)) / (1 + Kc) = 2.109, 12% low.

    Wrong: K terms where K drafts and the target's token make K + 1.
    """
    check_positive("number of draft tokens", k)
    return expected_tokens(alpha, k - 1) / _draft_slowdown(k, c)


def speedup_with_one_draft_step(alpha: float, k: int, c: float) -> float:
    """(1 - α^(K+1))/(1 - α) / (1 + c) = 3.056, 27% high.

    Wrong: pays one draft step for K draft tokens. Right only where c is the whole draft phase over one
    plain step, as for drafters that propose all tokens in parallel.
    """
    check_not_negative("draft cost ratio c", c)
    return expected_tokens(alpha, k) / (1 + c)


def speedup_over_verify_time(alpha: float, k: int, draft_s: float, verify_s: float) -> float:
    """(1 + α + … + α^(K-1)) / (1 + t_draft/t_verify) = 2.684 with t_draft of one token.

    Wrong twice: the target's token is dropped, and the baseline is a fictitious engine whose plain step
    takes t_verify; the real gain is smaller by T_0 / T_V.
    """
    check_positive("number of draft tokens", k)
    check_not_negative("draft time", draft_s)
    check_positive("verify time", verify_s)
    return expected_tokens(alpha, k - 1) / (1 + draft_s / verify_s)


def speedup_from_draft_rate(draft_acceptance_rate: float, k: int, c: float) -> float:
    """Theorem 3.8 with α := accepted / proposed: 1.619 for the true α of 0.8, 33% low.

    Wrong: drafts behind the first rejection count as refused although they were never judged, so
    (τ - 1)/K = 0.5904 is not α. metrics.acceptance.censored_alpha is the estimator.
    """
    return ideal_speedup(draft_acceptance_rate, k, c)


def speedup_at_any_batch(alpha: float, k: int, c: float, batch: int) -> float:
    """Theorem 3.8 read as valid at every batch: 2.401 whatever `batch` is.

    Wrong: verifying K+1 tokens costs one plain step only while memory is the limit. T_V / T_0 grows with
    batch, context and the experts touched; speedup.general_speedup takes the measured times.
    """
    check_positive("batch size", batch)
    return ideal_speedup(alpha, k, c)


def tau_from_first_position(first_survival: float, k: int) -> float:
    """1 + a_1 + a_1² + … + a_1^K: the acceptance of the first position taken for all.

    Wrong where hazards change with depth: EAGLE-3 heads fall (predicts too much), n-grams rise (too
    little). speedup.tau_from_survival takes every position.
    """
    return expected_tokens(first_survival, k)


def tau_over_positions(emitted: Sequence[int]) -> float:
    """Σ n² / Σ n over the tokens n emitted by each step: acceptance length averaged over text positions.

    Wrong: long steps cover more text and are counted once per token, so easy text weighs double. Steps
    that emit 1 and 4 tokens take 2.5 a step, not 3.4. Up to twice too high for n-grams.
    """
    total = sum(emitted)
    check_positive("emitted tokens", total)
    return sum(count * count for count in emitted) / total


def tau_mean_of_requests(counts: Sequence[tuple[int, int]]) -> float:
    """Mean over requests of tokens / steps, from (tokens, steps) pairs.

    Wrong as a headline: a request of 10 steps weighs as much as one of 200. Rounds cost time, so the
    ratio of the sums predicts it.
    """
    check_positive("number of requests", len(counts))
    return math.fsum(tokens / steps for tokens, steps in counts) / len(counts)


def accept_rate_with_bonus(acceptance_length: float, num_draft_tokens: int) -> float:
    """AL / num_draft_tokens, printed by some engines as the accept rate.

    Wrong as draft quality: the target's token is in the numerator and the root in the denominator. An AL
    of 2.17 with 3 drafts prints 0.54 where 0.39 of the drafts were accepted.
    """
    check_positive("number of draft tokens", num_draft_tokens)
    return acceptance_length / num_draft_tokens


def tpot_from_chunk_gap(gap_s: float) -> float:
    """The gap between stream events read as the time per token.

    Wrong under speculation: one event carries every token of a round, so this is the round time, too
    high by the acceptance length.
    """
    check_not_negative("chunk gap", gap_s)
    return gap_s


def tree_capacity_as_chain(num_steps: int, topk: int) -> int:
    """num_steps · topk + 1 as the largest tree.

    Wrong: each of the topk kept nodes of a level is expanded into topk children, which makes
    1 + topk + (num_steps - 1) · topk² nodes with the root.
    """
    check_count("number of draft steps", num_steps)
    return num_steps * topk + 1


def _draft_slowdown(k: int, c: float) -> float:
    check_not_negative("draft cost ratio c", c)
    return 1 + k * c
