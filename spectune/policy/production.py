"""What a prefix cache and chunked prefill change: an arm beside itself served as in production."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spectune.policy.arms import ArmData
from spectune.policy.comparison import ArmSummary, CellComparison
from spectune.policy.decide import ratio_text
from spectune.policy.speedup import paired_speedup
from spectune.records import Interval, SpecConfig, Status

ACCEPTANCE_GAP = 0.02
"""Relative change of acceptance length from which on acceptance depends on the state of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`time_ratio` is time per token as in production over that without cache and chunks."""

    acceptance_change: float | None
    time_ratio: Interval | None


def without_production(config: SpecConfig) -> SpecConfig:
    """The same configuration as it is measured otherwise."""
    return replace(config, options=tuple(pair for pair in config.options if pair[0] != "production"))


def change_of(own: ArmSummary, plain: ArmSummary, own_data: ArmData, plain_data: ArmData) -> Change:
    """Of an arm and its twin over the same prompts; the ratio is paired by prompt."""
    lengths = [arm.acceptance.acceptance_length if arm.acceptance else None for arm in (own, plain)]
    change = None if None in lengths else lengths[0] / lengths[1] - 1  # type: ignore[operator]
    speedup = paired_speedup(plain_data, own_data)
    ratio = None
    if speedup is not None:
        bounds = [None if bound is None else 1 / bound for bound in (speedup.high, speedup.low)]
        ratio = replace(speedup, value=1 / speedup.value, low=bounds[0], high=bounds[1])
    return Change(acceptance_change=change, time_ratio=ratio)


def production_notes(cell: CellComparison, arms: Sequence[ArmData]) -> tuple[str, ...]:
    """One sentence for each arm that was also served as in production."""
    by_config = {arm.config: arm for arm in arms}
    told = {arm.config: arm for arm in cell.arms}
    notes = []
    for own in cell.production:
        plain = told.get(without_production(own.config))
        if own.status is not Status.OK or plain is None or plain.status is not Status.OK:
            notes.append(f"{own.config.label} at {cell.cell.label}: {own.status}: {own.reason or 'no twin'}")
            continue
        change = change_of(own, plain, by_config[own.config], by_config[plain.config])
        notes.append(_sentence(cell, own, plain, change))
    return tuple(notes)


def _sentence(cell: CellComparison, own: ArmSummary, plain: ArmSummary, change: Change) -> str:
    hits = None if own.load is None else own.load.prefix_hit_rate
    cached = "hit rate unknown" if hits is None else f"{hits:.0%} of the prompt tokens from the cache"
    parts = [f"{plain.config.label} as in production (prefix cache, {cached}; prefill in chunks) at"]
    parts = [f"{parts[0]} {cell.cell.label}:"]
    if change.time_ratio is not None:
        parts.append(f"time per token {ratio_text(change.time_ratio)},")
    firsts = [arm.latency.ttft_s.p50 if arm.latency and arm.latency.ttft_s else None for arm in (own, plain)]
    if None not in firsts:
        parts.append(f"first token after {firsts[0] * 1e3:.0f} instead of {firsts[1] * 1e3:.0f} ms,")  # type: ignore[operator]
    if change.acceptance_change is None:
        parts.append("acceptance length unknown")
    else:
        parts.append(f"acceptance length {change.acceptance_change:+.1%}")
        if abs(change.acceptance_change) > ACCEPTANCE_GAP:
            parts.append("(acceptance depends on cache state)")
    return " ".join(parts)
