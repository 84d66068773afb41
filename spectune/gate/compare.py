"""Two runs side by side: acceptance over their common range, time per token, paired where prompts match."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spectune import stats
from spectune.errors import NotComparable
from spectune.gate import comparable
from spectune.gate.acceptance import MIN_AGREEMENT
from spectune.gate.common import Common, common_range
from spectune.gate.comparable import Difference
from spectune.gate.pairs import requests_of
from spectune.gate.runs import StoredArm, stored_arms
from spectune.metrics.acceptance import acceptance_length
from spectune.metrics.latency import is_success
from spectune.records import Cell, Interval, RequestRecord, SpecConfig, StepRecord
from spectune.store import RunStore

ALL = "all"
LEVEL = 0.05
POWER = 0.95
ONE_START = (
    "each run is one start of its engine: what differs from start to start is in no interval; "
    "spectune gate check with --base measures both in turn"
)


QUANTIZATION_LOSS = 0.30
"""Relative loss of acceptance length from which on a changed number format is named as its cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of one arm over one scope. `ratio` is B / A; `detectable` the relative change that this
    comparison would have seen in 95% of the cases."""

    config: SpecConfig
    cell: Cell
    scope: str
    metric: str
    a: float | None
    b: float | None
    ratio: Interval | None
    p_value: float | None
    detectable: float | None
    basis: str

    @property
    def is_significant(self) -> bool:
        return self.p_value is not None and self.p_value <= LEVEL

    @property
    def text(self) -> str:
        """The answer in words; "no difference seen" says what could have been seen."""
        if self.ratio is None:
            return "not observed in both"
        change = self.ratio.value - 1
        if self.is_significant:
            return f"{change:+.1%} (p {self.p_value:.2g})"
        seen = "nothing, with so few pairs" if self.detectable is None else f"{self.detectable:.1%}"
        return f"no significant difference ({change:+.1%}), could have seen {seen}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All rows, what differs between the runs and whether that was overridden."""

    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    under_test: tuple[Difference, ...]
    was_forced: bool
    notes: tuple[str, ...]


def compare_runs(a: RunStore, b: RunStore, *, force: bool = False) -> Comparison:
    """Arms that both runs have. NotComparable for unlike engines, machines, prompts or sampling unless forced."""
    one, other = stored_arms(a), stored_arms(b)
    differences = _differences(a, b)
    if differences and not force:
        raise NotComparable(
            f"{a.path} and {b.path} are not comparable: {comparable.describe(differences)}",
            hint="--force compares them all the same and says so",
        )
    keys = [key for key in one if key in other and one[key].repeats and other[key].repeats]
    if not keys:
        raise NotComparable(f"{a.path} and {b.path} have no arm in common")
    rows: list[Row] = []
    for key in keys:
        rows += _arm_rows(one[key], other[key])
    adjusted = stats.holm([1.0 if row.p_value is None else row.p_value for row in rows])
    marks = a.manifest.get("fingerprint", {}), b.manifest.get("fingerprint", {})
    return Comparison(
        rows=tuple(
            row if row.p_value is None else replace(row, p_value=p)
            for row, p in zip(rows, adjusted, strict=True)
        ),
        differences=differences,
        under_test=comparable.under_test(*marks),
        was_forced=bool(differences),
        notes=(
            ONE_START,
            *_agreement_notes([(one[key], other[key]) for key in keys]),
            *quantization_notes(*marks, rows),
        ),
    )


def _differences(a: RunStore, b: RunStore) -> tuple[Difference, ...]:
    marks = a.manifest.get("fingerprint", {}), b.manifest.get("fingerprint", {})
    found = comparable.fingerprint_differences(*marks)
    plans = [run.manifest.get("plan", {}).get("sampling", {}) for run in (a, b)]
    found += tuple(
        (f"sampling.{name}", plans[0].get(name), plans[1].get(name))
        for name in plans[0]
        if plans[0].get(name) != plans[1].get(name)
    )
    digests = [run.manifest.get("workload", {}).get("digest") for run in (a, b)]
    if digests[0] != digests[1]:
        found += (("workload", str(digests[0])[:12], str(digests[1])[:12]),)
    return found


def _arm_rows(a: StoredArm, b: StoredArm) -> list[Row]:
    records = [{r.request_id: r for blocks in arm.repeats for r in requests_of(blocks)} for arm in (a, b)]
    shared = sorted(records[0].keys() & records[1].keys())
    categories = sorted({records[0][name].category for name in shared})
    rows: list[Row] = []
    for scope in (ALL, *(categories if len(categories) > 1 else ())):
        names = [name for name in shared if scope in (ALL, records[0][name].category)]
        ours, theirs = ({name: own[name] for name in names} for own in records)
        if not a.point.config.is_off:
            common = common_range(ours, theirs, a.point.config.max_accepted)
            rows.append(_acceptance_row(a, scope, common))
        for metric, value in (("time per token", _tpot), ("time to first token", _ttft)):
            rows.append(_paired_row(a, scope, metric, ours, theirs, value))
    return rows


def _acceptance_row(arm: StoredArm, scope: str, common: Common) -> Row:
    """Pooled acceptance of both; p and detectable change from the prompts' own ratios."""
    logs = []
    for name in common.base:
        pair = [acceptance_length(side[name]) for side in (common.base, common.head)]
        if pair[0] is not None and pair[1] is not None:
            logs.append(math.log(pair[1] / pair[0]))
    a, b = acceptance_length(common.base_steps), acceptance_length(common.head_steps)
    if a is None or b is None:
        return _row(arm, scope, "acceptance length", a, b, None, [], "nothing was drafted")
    bounds = _log_bounds(common.base, common.head, math.log(b / a))
    ratio = Interval(value=b / a, low=bounds[0], high=bounds[1], n=len(logs))
    basis = f"{len(common.base_steps)} steps of the common range"
    return _row(arm, scope, "acceptance length", a, b, ratio, logs, basis)


def _log_bounds(
    base: Mapping[str, Sequence[StepRecord]], head: Mapping[str, Sequence[StepRecord]], log_ratio: float
) -> tuple[float | None, float | None]:
    """Jackknife over prompts of the log ratio of two pooled lengths, Student's t."""
    names = [name for name in base if base[name] and head[name]]
    if len(names) < 2:
        return None, None
    totals = [_sums([step for name in names for step in side[name]]) for side in (base, head)]
    leaves = []
    for name in names:
        own = [_sums(side[name]) for side in (base, head)]
        rest = [(t[0] - o[0], t[1] - o[1]) for t, o in zip(totals, own, strict=True)]
        leaves.append(math.log((1 + rest[1][0] / rest[1][1]) / (1 + rest[0][0] / rest[0][1])))
    n = len(names)
    # pseudo-values of the jackknife are a sample whose mean is the estimate
    pseudo = [n * log_ratio - (n - 1) * leaf for leaf in leaves]
    interval = stats.ratio_interval(pseudo)
    return interval.low, interval.high


def _sums(steps: Sequence[StepRecord]) -> tuple[int, int]:
    return sum(step.num_accepted for step in steps), len(steps)


def _paired_row(
    arm: StoredArm,
    scope: str,
    metric: str,
    ours: Mapping[str, RequestRecord],
    theirs: Mapping[str, RequestRecord],
    value: object,
) -> Row:
    assert callable(value)
    pairs = [(value(ours[name]), value(theirs[name])) for name in ours]
    logs = [math.log(b / a) for a, b in pairs if a and b]
    if not logs:
        return _row(arm, scope, metric, None, None, None, [], "not observed in both")
    known = [(a, b) for a, b in pairs if a and b]
    a, b = (stats.geometric_mean([pair[side] for pair in known]) for side in (0, 1))
    return _row(arm, scope, metric, a, b, stats.ratio_interval(logs), logs, f"{len(logs)} prompts paired")


def _row(
    arm: StoredArm,
    scope: str,
    metric: str,
    a: float | None,
    b: float | None,
    ratio: Interval | None,
    logs: Sequence[float],
    basis: str,
) -> Row:
    detectable = None
    if len(logs) > 1:
        sd = stats.standard_deviation(logs)
        detectable = stats.minimum_detectable_ratio(sd, len(logs), 1 - LEVEL / 2, POWER) - 1
    return Row(
        config=arm.point.config,
        cell=arm.point.cell,
        scope=scope,
        metric=metric,
        a=a,
        b=b,
        ratio=ratio,
        p_value=stats.two_sided_p_value(logs) if logs else None,
        detectable=detectable,
        basis=basis,
    )


def quantization_notes(base: Mapping[str, Any], head: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Arms that lost more than 30% of their acceptance length where number formats changed as well: a head
    that was made for the plain target, or one that does not survive its own quantisation."""
    settings = [{**mark.get("settings", {}), "dtype": mark.get("dtype")} for mark in (base, head)]
    changed = [
        f"{name} {settings[0].get(name)} -> {settings[1].get(name)}"
        for name in ("dtype", "quantization", "target_quantization", "draft_quantization")
        if settings[0].get(name) != settings[1].get(name)
    ]
    if not changed:
        return []
    return [
        f"{row.config.label} at {row.cell.label}: acceptance length {row.a:.2f} -> {row.b:.2f} while "
        f"{', '.join(changed)}: quantisation destroys acceptance here"
        for row in rows
        if row.metric == "acceptance length" and row.scope == ALL
        if row.a is not None and row.b is not None and row.b < (1 - QUANTIZATION_LOSS) * row.a
    ]


def _agreement_notes(pairs: Sequence[tuple[StoredArm, StoredArm]]) -> list[str]:
    notes = []
    for a, b in pairs:
        records = [{r.request_id: r for blocks in arm.repeats for r in requests_of(blocks)} for arm in (a, b)]
        common = common_range(records[0], records[1], a.point.config.max_accepted)
        if common.num_requests and common.agreement < MIN_AGREEMENT:
            notes.append(
                f"{a.point.label}: texts agree in {common.num_agreeing} of {common.num_requests} requests, so "
                "acceptance is compared over little common text"
            )
    return notes


def _tpot(record: RequestRecord) -> float | None:
    return record.tpot_s if is_success(record) else None


def _ttft(record: RequestRecord) -> float | None:
    return record.ttft_s if is_success(record) else None
