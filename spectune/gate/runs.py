"""A run directory in, the arms that a gate or a comparison reads out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spectune.errors import UsageError
from spectune.gate.file import GateFile
from spectune.gate.pairs import Blocks
from spectune.gate.stored import Measured
from spectune.records import Cell, Point, PointOutcome, SpecConfig, Status
from spectune.store import RunStore

USABLE = (Status.OK, Status.CAPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArm:
    """One configuration in one cell: blocks of each repeat, in order; `reason` says why there are none."""

    point: Point
    repeats: tuple[Blocks, ...]
    reason: str | None = None


def stored_arms(run: RunStore) -> dict[tuple[SpecConfig, Cell], StoredArm]:
    """All arms of a run that have usable points."""
    found: dict[tuple[SpecConfig, Cell], list[PointOutcome]] = {}
    for outcome in run.outcomes().values():
        found.setdefault((outcome.point.config, outcome.point.cell), []).append(outcome)
    arms = {}
    for key, outcomes in found.items():
        outcomes.sort(key=lambda outcome: outcome.point.repeat)
        usable = [outcome for outcome in outcomes if outcome.status in USABLE]
        reason = None if usable else f"{outcomes[0].status}: {outcomes[0].reason}"
        arms[key] = StoredArm(
            point=outcomes[0].point,
            repeats=tuple(run.blocks(outcome.point.point_id) for outcome in usable),
            reason=reason,
        )
    return arms


def guarded_arm(
    run: RunStore,
    *,
    label: str | None = None,
    batch_size: int | None = None,
    context_tokens: int | None = None,
) -> StoredArm:
    """The arm that a new gate guards: the one asked for, or the only one; UsageError lists the choices."""
    arms = [
        arm
        for (config, cell), arm in stored_arms(run).items()
        if not config.is_off
        and arm.repeats
        and label in (None, config.label)
        and batch_size in (None, cell.batch_size)
        and context_tokens in (None, cell.context_tokens)
    ]
    if len(arms) == 1:
        return arms[0]
    every = sorted({arm.point.label for (config, _), arm in stored_arms(run).items() if not config.is_off})
    what = "no arm" if not arms else f"{len(arms)} arms"
    raise UsageError(
        f"{run.path}: {what} to guard match --arm {label or 'any'}, --batch-size {batch_size or 'any'}",
        hint=f"arms of the run: {'; '.join(every) or 'none that speculates'}",
    )


def measured_of(gate: GateFile, run: RunStore) -> Measured:
    """What a run has of the guarded arm. A run of another temperature is not comparable, not missing."""
    arms = stored_arms(run)
    own = [arm for (config, _), arm in arms.items() if _is_same(config, gate.config) and arm.repeats]
    exact = [arm for arm in own if arm.point.cell == gate.cell] or [
        arm
        for arm in own
        if (arm.point.cell.batch_size, arm.point.cell.context_tokens)
        == (gate.subject.batch_size, gate.subject.context_tokens)
    ]
    workload: Mapping[str, Any] = run.manifest.get("workload", {})
    if not exact:
        points = "; ".join(sorted(arm.point.label for arm in arms.values()))
        raise UsageError(
            f"{run.path} has no usable point of {gate.point().label}", hint=f"points of the run: {points}"
        )
    arm = exact[0]
    off = arms.get((SpecConfig.off(), arm.point.cell))
    return Measured(
        spec=arm.repeats,
        off=off.repeats if off is not None else (),
        sampling=arm.point.sampling,
        workload_digest=arm.point.workload_hash,
        template_digest=workload.get("template_digest"),
        fingerprint=run.manifest.get("fingerprint", {}),
    )


def _is_same(one: SpecConfig, other: SpecConfig) -> bool:
    """Equal but for the head's place: a new head is what a gate may be about."""
    return (one.method, one.size, one.options) == (other.method, other.size, other.options)
