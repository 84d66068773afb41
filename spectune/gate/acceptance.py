"""The acceptance gate: head against baseline over their common range, two-sided, without a clock.

Equal drafts on equal prompts give equal counts on any machine, so this gate can be tight where a speed
gate cannot. Acceptance that is too high is suspicious: loops are easy to draft, and a verification that
accepts what the target would not say looks like a gain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spectune.gate.common import Common
from spectune.gate.file import GateFile
from spectune.gate.verdicts import Check, Outcome
from spectune.metrics.acceptance import NO_DRAFTS, acceptance_length, survival
from spectune.records import StepRecord
from spectune.stats import rate_interval

ACCEPTANCE = "acceptance length"
POSITIONS = "acceptance by position"
AGREEMENT = "text agreement"

MIN_AGREEMENT = 0.5
"""Healthy engines agree on 76% of the texts and more; below half, verification or template is broken."""

AGREEMENT_ERROR = 1e-4
"""One-sided error of calling an agreement of one half too low; a check asks at every start."""

EPSILON = 1e-9
NOISE_FACTOR = 3.0
"""A tolerance below three deviations of equal runs would fail on noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePair:
    """Acceptance of base and head over the same positions."""

    base: float
    head: float
    base_positions: tuple[float, ...]
    head_positions: tuple[float, ...]
    num_steps: int
    num_prompts: int

    @property
    def log_ratio(self) -> float:
        return math.log(self.head / self.base)


def pair_of(base: Sequence[StepRecord], head: Sequence[StepRecord], gate: GateFile, num_prompts: int
            ) -> AcceptancePair | None:  # fmt: skip
    """Both arms' acceptance; None where one of them never drafted."""
    lengths = acceptance_length(base), acceptance_length(head)
    if lengths[0] is None or lengths[1] is None:
        return None
    depth = max(gate.config.max_accepted, *(step.num_accepted for step in (*base, *head)))
    return AcceptancePair(
        base=lengths[0],
        head=lengths[1],
        base_positions=survival(base, depth),
        head_positions=survival(head, depth),
        num_steps=min(len(base), len(head)),
        num_prompts=num_prompts,
    )


def acceptance_checks(gate: GateFile, common: Common) -> tuple[Check, ...]:
    """Agreement of the texts, acceptance length and acceptance by position of one pair of arms."""
    if not gate.acceptance.is_enabled:
        return (_skipped(ACCEPTANCE),)
    if found := agreement_check(gate, common):
        return (found,)
    if few := too_few(gate, common):
        return (few,)
    pair = pair_of(common.base_steps, common.head_steps, gate, common.num_requests)
    if pair is None:
        return (missing_acceptance(),)
    return (length_check(gate, pair), positions_check(gate, pair))


def agreement_check(gate: GateFile, common: Common) -> Check | None:
    """Bad where base and head surely write different texts for most prompts; None where they may agree.

    Of a dozen texts more than half part by chance now and then: the upper end of the rate decides.
    """
    if not common.num_requests or common.agreement >= MIN_AGREEMENT:
        return None
    bounds = rate_interval(common.num_agreeing, common.num_requests, level=1 - 2 * AGREEMENT_ERROR)
    if bounds is None or bounds.high is None or bounds.high >= MIN_AGREEMENT:
        return None
    share = f"{common.num_agreeing} of {common.num_requests}"
    if not gate.sampling.is_greedy:
        return Check(
            name=AGREEMENT,
            outcome=Outcome.INCONCLUSIVE,
            value=common.agreement,
            n=common.num_requests,
            text=f"sampled texts agree in {share} requests: acceptance cannot be compared position by position",
            hint="guard acceptance at temperature 0, or on an engine with keyed sampling",
        )
    return Check(
        name=AGREEMENT,
        outcome=Outcome.REGRESSION,
        value=common.agreement,
        limit=MIN_AGREEMENT,
        limit_is="at least",
        n=common.num_requests,
        text=f"greedy texts agree in {share} requests, healthy engines in most: verification or template "
        "broken, figures of acceptance and speed are withheld",
        hint="spectune verify tells near ties from a lossy engine",
    )


def too_few(gate: GateFile, common: Common) -> Check | None:
    """Inconclusive below the minimum of prompts, steps or common text; None where there is enough."""
    least = gate.minimum
    num_steps = min(len(common.base_steps), len(common.head_steps))
    if common.num_requests < least.num_prompts:
        why = f"{common.num_requests} prompts answered by both, {least.num_prompts} needed"
    elif common.share < least.common_share:
        why = (
            f"the texts have {common.num_common_tokens} of {common.num_tokens} tokens in common, "
            f"{least.common_share:.0%} needed"
        )
    elif num_steps < least.num_steps:
        why = f"{num_steps} steps over the common range, {least.num_steps} needed"
    else:
        return None
    return Check(
        name=ACCEPTANCE, outcome=Outcome.INCONCLUSIVE, text=why, n=num_steps, hint="give more prompts"
    )


def length_check(gate: GateFile, pair: AcceptancePair) -> Check:
    """Head's acceptance length within the tolerance of the baseline's over the same positions."""
    tolerance = gate.acceptance.tolerance
    low, high = pair.base * (1 - tolerance), pair.base * (1 + tolerance)
    outcome, word = Outcome.PASSED, "within"
    if pair.head < low - EPSILON:
        outcome, word = Outcome.REGRESSION, "below"
    elif pair.head > high + EPSILON:
        outcome, word = Outcome.SUSPICIOUS, "above"
    return Check(
        name=ACCEPTANCE,
        outcome=outcome,
        value=pair.head,
        reference=pair.base,
        limit=high if outcome is Outcome.SUSPICIOUS else low,
        limit_is="within",
        tolerance=tolerance,
        interval=(low, high),
        n=pair.num_steps,
        unit="tokens a step",
        text=f"acceptance length {pair.head:.4f} is {word} {low:.4f} to {high:.4f} (baseline {pair.base:.4f}, "
        f"tolerance {tolerance:.2%}, {pair.num_steps} steps of {pair.num_prompts} prompts)",
        hint=_hint(outcome),
    )


def positions_check(gate: GateFile, pair: AcceptancePair) -> Check:
    """No position may move by more than acceptance length as a whole may: changes that cancel are seen."""
    limit = gate.acceptance.tolerance * pair.base
    moves = [head - base for base, head in zip(pair.base_positions, pair.head_positions, strict=True)]
    worst = max(range(len(moves)), key=lambda index: abs(moves[index]))
    move = moves[worst]
    outcome = Outcome.PASSED
    if abs(move) > limit + EPSILON:
        outcome = Outcome.REGRESSION if move < 0 else Outcome.SUSPICIOUS
    return Check(
        name=POSITIONS,
        outcome=outcome,
        value=pair.head_positions[worst],
        reference=pair.base_positions[worst],
        limit=limit,
        limit_is="within",
        tolerance=gate.acceptance.tolerance,
        n=pair.num_steps,
        unit="share of steps",
        text=f"position {worst + 1} moved most, from {pair.base_positions[worst]:.3f} to "
        f"{pair.head_positions[worst]:.3f} (limit {limit:.3f} either way, {pair.num_steps} steps)",
        hint=_hint(outcome),
    )


def missing_acceptance() -> Check:
    """The metric was never observed: not a regression."""
    return Check(
        name=ACCEPTANCE,
        outcome=Outcome.MISSING,
        text=f"acceptance is missing: {NO_DRAFTS}",
        hint="see that the engine speculated and reported its steps (a profiler may have turned them off)",
    )


def _skipped(name: str) -> Check:
    return Check(name=name, outcome=Outcome.SKIPPED, text="not guarded by this gate")


def _hint(outcome: Outcome) -> str | None:
    if outcome is Outcome.REGRESSION:
        return "the draft is accepted less often: head, chat template, draft features, cache"
    if outcome is Outcome.SUSPICIOUS:
        return "more acceptance than the same drafts gave: loops, a broken verification, or a better head "\
            "(then --update-baseline)"  # fmt: skip
    return None
