"""The speed gate: base and head started side by side, their ratio tested, one confirmation before failing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from spectune import stats
from spectune.gate.acceptance import (
    ACCEPTANCE,
    NOISE_FACTOR,
    AcceptancePair,
    agreement_check,
    length_check,
    pair_of,
    too_few,
)
from spectune.gate.common import Common
from spectune.gate.design import MIN_STARTS, PASS_LEVEL, looks_of
from spectune.gate.file import GateFile
from spectune.gate.pairs import BASE, HEAD, THROUGHPUT, TPOT, StartPair, measure_start, pair_start
from spectune.gate.verdicts import Outcome
from spectune.records import MeasureSides, Point, SideArm
from spectune.stats import LookPlan

DRIFT_LEVEL = 0.001


@dataclass(slots=True, kw_only=True)
class Stage:
    """One series of starts. `alarms` are the metrics that look worse, `missing` says why there is none."""

    pairs: list[StartPair] = field(default_factory=list)
    alarms: frozenset[str] = frozenset()
    missing: str | None = None

    def slowdowns(self, metric: str) -> list[float]:
        return [pair.slowdowns[metric] for pair in self.pairs if metric in pair.slowdowns]

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(m for m in (TPOT, THROUGHPUT) if len(self.slowdowns(m)) == len(self.pairs) > 1)


def run_stage(
    gate: GateFile,
    measure: MeasureSides,
    *,
    first_start: int,
    confirm: frozenset[str] | None = None,
    points: tuple[Point, Point] | None = None,
) -> Stage:
    """Start both sides again and again until a look decides.

    Args:
        points: what base and head decode, where heads differ; the gate's own point for both otherwise.
        confirm: metrics that an earlier stage found worse: only they are looked at.
    """
    base_point, head_point = points or (gate.point(), gate.point())
    arms = (SideArm(side=BASE, point=base_point), SideArm(side=HEAD, point=head_point))
    stage = Stage()
    plan = _plan(gate, confirm)
    level_of_look = dict(zip(plan.looks, plan.levels, strict=True))
    for start in range(plan.num_pairs):
        base, head = measure_start(measure, arms, start=first_start + start)
        pair = pair_start(base, head, gate.subject.batch_size, gate.config.max_accepted)
        if isinstance(pair, str):
            stage.missing = pair
            return stage
        stage.pairs.append(pair)
        if agreement_check(gate, pair.common) is not None:
            return stage  # figures of another text are withheld, so more of them are not needed
        level = level_of_look.get(len(stage.pairs))
        if level is None:
            continue
        stage.alarms = _alarms(gate, stage, level, confirm)
        if stage.alarms or _is_clear(gate, stage):
            return stage
    return stage


def _plan(gate: GateFile, confirm: frozenset[str] | None) -> LookPlan:
    if not gate.speed.is_enabled or confirm == frozenset({ACCEPTANCE}):
        return LookPlan(looks=(2,), levels=(1.0,))
    return looks_of(gate)


def _alarms(gate: GateFile, stage: Stage, level: float, confirm: frozenset[str] | None) -> frozenset[str]:
    found = set()
    asked = [m for m in stage.metrics if gate.speed.is_enabled and (confirm is None or m in confirm)]
    p_values = [stats.paired_p_value(stage.slowdowns(metric)) for metric in asked]
    adjusted = stats.holm([1.0 if p is None else p for p in p_values])
    least = math.log1p(gate.speed.max_slowdown) / 2
    for metric, p in zip(asked, adjusted, strict=True):
        slowdowns = stage.slowdowns(metric)
        if p <= level and math.fsum(slowdowns) / len(slowdowns) >= least:
            found.add(metric)
    if (confirm is None or ACCEPTANCE in confirm) and acceptance_alarm(gate, stage.pairs):
        found.add(ACCEPTANCE)
    return frozenset(found)


def acceptance_alarm(gate: GateFile, pairs: Sequence[StartPair]) -> bool:
    """Acceptance outside its tolerance, and further than equal starts are apart.

    The spread of equal starts comes from the calibration; where many starts show a wider one, that counts.
    """
    if not gate.acceptance.is_enabled:
        return False
    found = [acceptance_of(gate, pair.common) for pair in pairs]
    ratios = [pair.log_ratio for pair in found if pair is not None]
    pooled = pooled_acceptance(gate, pairs)
    if not ratios or pooled is None or length_check(gate, pooled).outcome is Outcome.PASSED:
        return False
    noise = gate.acceptance.noise
    if len(ratios) >= MIN_STARTS:
        noise = max(noise, stats.standard_deviation(ratios))
    return abs(pooled.log_ratio) >= NOISE_FACTOR * noise / math.sqrt(len(ratios))


def acceptance_of(gate: GateFile, common: Common) -> AcceptancePair | None:
    """Acceptance of both sides in one start; None where too little is common or nothing was drafted."""
    if too_few(gate, common) is not None:
        return None
    return pair_of(common.base_steps, common.head_steps, gate, common.num_requests)


def pooled_acceptance(gate: GateFile, pairs: Sequence[StartPair]) -> AcceptancePair | None:
    """Acceptance of both sides over all starts together."""
    base = [step for pair in pairs for step in pair.common.base_steps]
    head = [step for pair in pairs for step in pair.common.head_steps]
    return pair_of(base, head, gate, max((pair.common.num_requests for pair in pairs), default=0))


def _is_clear(gate: GateFile, stage: Stage) -> bool:
    """The slowdown to be caught is excluded for every metric."""
    limit = math.log1p(gate.speed.max_slowdown)
    for metric in stage.metrics if gate.speed.is_enabled else ():
        p = stats.paired_p_value([-value for value in stage.slowdowns(metric)], above=-limit)
        if p is None or p > PASS_LEVEL:
            return False
    return True


def drift_of(gate: GateFile, pairs: Sequence[StartPair]) -> float | None:
    """How much the ratio of head to base moves within a start, if beyond noise and tolerance."""
    drifts = [pair.drift for pair in pairs if pair.drift is not None]
    p = stats.two_sided_p_value(drifts) if drifts else None
    if p is None or p > DRIFT_LEVEL:
        return None
    mean = math.fsum(drifts) / len(drifts)
    return mean if abs(mean) > math.log1p(gate.speed.max_slowdown) else None
