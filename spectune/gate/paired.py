"""Check a gate by running base and head against each other: evidence in two stages, then the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from spectune import stats
from spectune.gate.acceptance import (
    ACCEPTANCE,
    acceptance_checks,
    agreement_check,
    length_check,
    missing_acceptance,
    positions_check,
    too_few,
)
from spectune.gate.design import detectable_slowdown
from spectune.gate.file import GateFile
from spectune.gate.pairs import THROUGHPUT, TPOT, StartPair
from spectune.gate.speed import Stage, drift_of, pooled_acceptance, run_stage
from spectune.gate.verdicts import Check, GateReport, Outcome
from spectune.metrics.throughput import RoundTotals
from spectune.records import Interval, MeasureSides, Point
from spectune.theory.waterfall import change

DRIFT = "steadiness"
SLOW_ROUNDS_LEVEL = 0.001
BLIND_FACTOR = 2.0
"""Noise that hides twice the slowdown to be caught makes a pass worth nothing."""


def check_paired(
    gate: GateFile,
    measure: MeasureSides,
    *,
    points: tuple[Point, Point] | None = None,
    is_simulated: bool = False,
) -> GateReport:
    """Base against head, started in turn; an alarm is measured once more on fresh starts before it fails."""
    first = run_stage(gate, measure, first_start=0, points=points)
    stages = [first]
    if first.alarms and first.missing is None:
        stages.append(
            run_stage(gate, measure, first_start=len(first.pairs), confirm=first.alarms, points=points)
        )
    pairs = [pair for stage in stages for pair in stage.pairs]
    confirmed = first.alarms & stages[-1].alarms
    checks = _checks(gate, stages, pairs, confirmed)
    slowdowns = [pair.slowdowns[TPOT] for pair in pairs]
    parts, culprit = attribute(pairs)
    return GateReport(
        gate=gate.name,
        mode="base against head",
        checks=checks,
        is_simulated=is_simulated,
        num_starts=len(pairs),
        was_repeated=len(stages) > 1,
        detectable_slowdown=_detectable(gate, slowdowns),
        change=parts,
        culprit=culprit if any(check.is_bad for check in checks) else None,
        notes=_notes(gate, first, confirmed, pairs),
        raw={
            "starts": [
                {
                    "slowdowns": dict(pair.slowdowns),
                    "mean_slowdown": pair.mean_slowdown,
                    "base_tpot_s": pair.base_tpot_s,
                    "head_tpot_s": pair.head_tpot_s,
                    "drift": pair.drift,
                    "base_rounds": _rounds_dict(pair.base_rounds),
                    "head_rounds": _rounds_dict(pair.head_rounds),
                }
                for pair in pairs
            ],
            "stage_sizes": [len(stage.pairs) for stage in stages],
        },
    )


def attribute(pairs: Sequence[StartPair]) -> tuple[tuple[tuple[str, float], ...], str | None]:
    """(part, log gain) of head against base from the rounds of all starts, and the part that lost most."""
    timed = [(pair.base_rounds, pair.head_rounds) for pair in pairs if pair.base_rounds and pair.head_rounds]
    if not timed:
        return (), None
    base, head = (_pooled([one for one, _ in timed]), _pooled([other for _, other in timed]))
    gain = math.exp(-math.fsum(pair.slowdowns[TPOT] for pair in pairs) / len(pairs))
    parts = change(
        tau_before=base[1],
        tau_after=head[1],
        before_s=base[0],
        after_s=head[0],
        measured_gain=gain,
    )
    return parts, min(parts[:-1], key=lambda part: part[1])[0]


def _pooled(rounds: Sequence[RoundTotals | None]) -> tuple[tuple[float, float, float], float]:
    """Mean (draft, verify, other) seconds of a round, and tokens of a sequence in it; starts weigh alike."""
    known = [turn for turn in rounds if turn is not None]
    means = tuple(
        math.fsum(getattr(turn, name) for turn in known) / len(known)
        for name in ("draft_s", "verify_s", "other_s")
    )
    tokens = math.fsum(turn.tokens_per_sequence for turn in known) / len(known)
    return (means[0], means[1], means[2]), tokens


def _checks(
    gate: GateFile, stages: Sequence[Stage], pairs: Sequence[StartPair], confirmed: frozenset[str]
) -> tuple[Check, ...]:
    missing = next((stage.missing for stage in stages if stage.missing), None)
    if missing is not None:
        return (
            Check(
                name=TPOT,
                outcome=Outcome.MISSING,
                text=f"no figures: {missing}",
                hint="failed requests are never results: see the engine's log",
            ),
        )
    for pair in pairs:
        if (broken := agreement_check(gate, pair.common)) is not None:
            return (broken,)
    found = list(_acceptance(gate, pairs, confirmed))
    if gate.speed.is_enabled:
        found += [_speed_check(gate, metric, pairs, confirmed) for metric in (TPOT, THROUGHPUT)]
        found.append(_drift_check(gate, pairs))
    return tuple(found)


def _acceptance(gate: GateFile, pairs: Sequence[StartPair], confirmed: frozenset[str]) -> tuple[Check, ...]:
    first = pairs[0].common
    if not gate.acceptance.is_enabled:
        return acceptance_checks(gate, first)
    if (few := too_few(gate, first)) is not None:
        return (few,)
    pair = pooled_acceptance(gate, pairs)
    if pair is None:
        return (missing_acceptance(),)
    length, positions = length_check(gate, pair), positions_check(gate, pair)
    if length.outcome is not Outcome.PASSED and ACCEPTANCE not in confirmed:
        # outside the tolerance, but no more than equal starts are apart, or not again
        return (_but_noise(length),)
    return (length, positions)


def _but_noise(check: Check) -> Check:
    return Check(
        name=check.name,
        outcome=Outcome.INCONCLUSIVE,
        value=check.value,
        reference=check.reference,
        n=check.n,
        unit=check.unit,
        text=f"{check.text}, within what equal starts differ by, or not seen again on fresh starts",
        hint="more prompts, or replay of recorded text",
    )


def _speed_check(gate: GateFile, metric: str, pairs: Sequence[StartPair], confirmed: frozenset[str]) -> Check:
    values = [pair.slowdowns[metric] for pair in pairs if metric in pair.slowdowns]
    if len(values) < max(2, len(pairs)):
        return Check(
            name=metric,
            outcome=Outcome.MISSING,
            text=f"{metric} was observed in {len(values)} of {len(pairs)} starts",
            hint="the check needs at least two starts of both sides",
        )
    interval = stats.ratio_interval(values)
    slower = interval.value - 1
    noise = stats.standard_deviation(values)
    seen = detectable_slowdown(noise, len(values), gate.statistics)
    outcome = Outcome.REGRESSION if metric in confirmed else Outcome.PASSED
    limit = gate.speed.max_slowdown
    if outcome is Outcome.PASSED and seen > BLIND_FACTOR * limit and not _excludes(interval, limit):
        outcome = Outcome.INCONCLUSIVE
    said = f"{slower:+.2%} [{_bound(interval.low)}, {_bound(interval.high)}] ({len(values)} starts)"
    ends = {
        Outcome.REGRESSION: f"slower twice in a row; {limit:.1%} was to be caught",
        Outcome.PASSED: f"no regression; could have seen {seen:.1%}",
        Outcome.INCONCLUSIVE: f"could only have seen {seen:.1%}, {limit:.1%} was to be caught",
    }
    return Check(
        name=metric,
        outcome=outcome,
        value=interval.value,
        reference=1.0,
        limit=1 + limit,
        limit_is="at most",
        tolerance=limit,
        interval=None if interval.low is None or interval.high is None else (interval.low, interval.high),
        p_value=stats.paired_p_value(values),
        n=len(values),
        unit="head / base time",
        text=f"{metric} {said}: {ends[outcome]}",
        hint="a noisier machine than at calibration: repeat it alone, or spectune gate init again"
        if outcome is Outcome.INCONCLUSIVE
        else None,
    )


def _drift_check(gate: GateFile, pairs: Sequence[StartPair]) -> Check:
    drift = drift_of(gate, pairs)
    observed = [pair.drift for pair in pairs if pair.drift is not None]
    if not observed:
        return Check(name=DRIFT, outcome=Outcome.SKIPPED, text="fewer than three blocks a start")
    mean = math.fsum(observed) / len(observed)
    return Check(
        name=DRIFT,
        outcome=Outcome.PASSED if drift is None else Outcome.DRIFT,
        value=mean,
        n=len(observed),
        unit="log ratio",
        text=f"the ratio of head to base moved by {math.expm1(mean):+.2%} from the first to the last third",
        hint=None if drift is None else "one side warms up, throttles or fills its cache: measure it longer",
    )


def _detectable(gate: GateFile, slowdowns: Sequence[float]) -> float | None:
    if not gate.speed.is_enabled or len(slowdowns) < 2:
        return None
    return detectable_slowdown(stats.standard_deviation(slowdowns), len(slowdowns), gate.statistics)


def _notes(
    gate: GateFile, first: Stage, confirmed: frozenset[str], pairs: Sequence[StartPair]
) -> tuple[str, ...]:
    notes = []
    if gone := sorted(first.alarms - confirmed):
        notes.append(f"{', '.join(gone)} looked worse at first and not again on fresh starts")
    if TPOT not in confirmed and (slower := _slow_rounds(gate, pairs)) is not None:
        notes.append(
            f"the slowest rounds grew: with them head / base time is {math.expm1(slower):+.1%}; "
            "the gate judges the middle half of the rounds"
        )
    return tuple(notes)


def _slow_rounds(gate: GateFile, pairs: Sequence[StartPair]) -> float | None:
    """Mean log slowdown over all rounds where it is beyond noise and half of what the gate is to catch."""
    whole = [pair.mean_slowdown for pair in pairs]
    p = stats.paired_p_value(whole)
    mean = math.fsum(whole) / len(whole) if whole else 0.0
    is_clear = p is not None and p < SLOW_ROUNDS_LEVEL
    return mean if is_clear and mean > math.log1p(gate.speed.max_slowdown) / 2 else None


def _excludes(interval: Interval, limit: float) -> bool:
    return interval.high is not None and interval.high <= 1 + limit


def _bound(value: float | None) -> str:
    return "-" if value is None else f"{value - 1:+.2%}"


def _rounds_dict(rounds: RoundTotals | None) -> dict[str, float] | None:
    return None if rounds is None else asdict(rounds)
