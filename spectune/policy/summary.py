"""A run directory in, everything that report, CSV, policy and gate read out.

The only module of policy/ that touches a store. A damaged or missing point is a named failure, never
an exception: what can be told is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from spectune.errors import StoreError
from spectune.metrics.goodput import Promises, parse_goodput
from spectune.policy import decide
from spectune.policy.advice import advise
from spectune.policy.arms import ALL, ArmData, BlockKey, summarize_arm
from spectune.policy.cautions import run_cautions
from spectune.policy.comparison import ArmSummary, CellComparison, Decision, Failure, RunSummary
from spectune.policy.definitions import DEFINITIONS
from spectune.policy.emit import emit_all
from spectune.policy.lengths import acceptance_by_length
from spectune.policy.predict import predict
from spectune.policy.production import production_notes
from spectune.policy.speedup import last_start_ratio, paired_speedup, with_speedup
from spectune.policy.starts import start_notes
from spectune.policy.synthetic import refusal
from spectune.policy.table import build_policy
from spectune.policy.verdict import verdict_text
from spectune.records import (
    SCHEMA_VERSION,
    BlockResult,
    Cell,
    Fingerprint,
    Interval,
    Point,
    PointOutcome,
    RoundTimes,
    SpecConfig,
    Status,
)
from spectune.store import RunStore

Surface = dict[tuple[str, Cell], RoundTimes]


def summarize(run: RunStore) -> RunSummary:
    """Arms, decisions, policy, commands and advice of a run, finished or not."""
    fingerprint = _fingerprint(run.manifest)
    points = _points(run.manifest)
    outcomes = run.outcomes()
    surface = run.surface()
    cells: list[CellComparison] = []
    categories: list[CellComparison] = []
    failures: list[Failure] = []
    contexts: dict[Cell, tuple[int, int]] = {}
    rates: list[CellComparison] = []
    notes: list[str] = []
    for cell in _cells(points):
        own = [point for point in points if point.cell == cell]
        arms = _load_arms(run, own, outcomes, failures)
        compared = compare_cell(cell, arms, surface, fingerprint)
        lengths = acceptance_by_length(arms, head_context=run.manifest.get("head_context"))
        compared[0] = replace(compared[0], lengths=lengths)
        notes += production_notes(compared[0], arms)
        if cell.is_open_loop:
            rates.append(compared[0])
            failures += _dismissed(compared[0])
            continue
        cells.append(compared[0])
        categories += compared[1:]
        failures += _dismissed(compared[0])
        if (seen := _context_range(arms)) is not None:
            contexts[cell] = seen
    summary = _assemble(run, fingerprint, points, outcomes, cells, categories, failures, contexts, notes)
    return replace(summary, rates=tuple(rates))


def compare_cell(
    cell: Cell, arms: Sequence[ArmData], surface: Surface, fingerprint: Fingerprint | None
) -> list[CellComparison]:
    """The comparison over all categories, then one for each category if there are several."""
    whole = _compare_scope(cell, arms, ALL, surface, fingerprint, {})
    by_label = {arm.config.label: arm for arm in whole.arms}
    names = sorted({name for arm in arms for name in arm.categories})
    if len(names) < 2:
        return [whole]
    return [whole] + [_compare_scope(cell, arms, name, surface, fingerprint, by_label) for name in names]


def _compare_scope(
    cell: Cell,
    arms: Sequence[ArmData],
    scope: str,
    surface: Surface,
    fingerprint: Fingerprint | None,
    whole: dict[str, ArmSummary],
) -> CellComparison:
    off = next((arm for arm in arms if arm.config.is_off), None)
    plain = surface.get((SpecConfig.off().label, cell))
    base = {arm.config.label: summarize_arm(arm, scope, fingerprint) for arm in arms}
    told: list[ArmSummary] = []
    for arm in arms:
        summary = with_speedup(base[arm.config.label], arm, off, base if scope == ALL else whole)
        if summary.status is Status.OK:
            times = surface.get((arm.config.label, cell))
            prediction = predict(arm, off, times, plain, scope=scope, fingerprint=fingerprint)
            summary = replace(summary, prediction=prediction)
        told.append(summary)
    candidates = tuple(arm for arm in told if not arm.config.is_probe)
    return CellComparison(
        cell=cell,
        scope=scope,
        arms=candidates,
        decision=_decide(arms, candidates, off, scope),
        standby=tuple(arm for arm in told if arm.config.is_standby),
        production=tuple(arm for arm in told if arm.config.is_production),
        last_start=None if off is None else last_start_ratio(off.of_scope(scope)),
    )


def _decide(arms: Sequence[ArmData], told: Sequence[ArmSummary], off: ArmData | None, scope: str) -> Decision:
    by_config = {arm.config: arm.of_scope(scope) for arm in arms}
    candidates = [arm for arm in told if not arm.config.is_off and arm.speedup is not None]
    level = decide.corrected_level(len(candidates))
    corrected: dict[SpecConfig, Interval] = {}
    for candidate in candidates:
        if off is not None and candidate.speedup_basis != decide.POOLED_BASIS:
            interval = paired_speedup(off.of_scope(scope), by_config[candidate.config], level=level)
            if interval is not None:
                corrected[candidate.config] = interval

    def difference(fast: SpecConfig, slow: SpecConfig) -> Interval | None:
        return paired_speedup(by_config[slow], by_config[fast])

    return decide.decide(told, corrected=corrected, difference=difference)


# Reading ------------------------------------------------------------------------------------------


def _fingerprint(manifest: dict[str, Any]) -> Fingerprint | None:
    data = manifest.get("fingerprint")
    return None if not data else Fingerprint(**data)


def _points(manifest: dict[str, Any]) -> list[Point]:
    return [
        Point.from_dict({key: value for key, value in row.items() if key != "point_id"})
        for row in manifest.get("points", [])
    ]


def _cells(points: Iterable[Point]) -> list[Cell]:
    """Cells in the order temperature, context, batch size."""
    cells = {point.cell for point in points}
    return sorted(
        cells,
        key=lambda cell: (cell.temperature, cell.context_tokens, cell.request_rate or 0, cell.batch_size),
    )


def _load_arms(
    run: RunStore,
    points: Sequence[Point],
    outcomes: dict[str, PointOutcome],
    failures: list[Failure],
) -> list[ArmData]:
    """Arms of one cell, off first; appends what gave no result to `failures`."""
    configs = list(dict.fromkeys(point.config for point in points))
    configs.sort(key=lambda config: not config.is_off)
    cautions = run.cautions()
    return [
        _load_arm(run, [point for point in points if point.config == config], outcomes, cautions, failures)
        for config in configs
    ]


def _load_arm(
    run: RunStore,
    points: Sequence[Point],
    outcomes: dict[str, PointOutcome],
    cautions: dict[str, tuple[str, ...]],
    failures: list[Failure],
) -> ArmData:
    blocks: dict[BlockKey, BlockResult] = {}
    used: list[str] = []
    peaks: list[int] = []
    bad: list[tuple[Status, str]] = []
    for point in points:
        outcome = outcomes.get(point.point_id)
        if outcome is None:
            bad.append((Status.FAILED, "not finished: resume the run"))
            continue
        if outcome.status is not Status.OK:
            bad.append((outcome.status, outcome.reason or "no reason was stored"))
            failures.append(Failure(label=point.label, status=outcome.status, reason=bad[-1][1]))
            continue
        try:
            stored = run.blocks(point.point_id)
        except StoreError as error:
            bad.append((Status.FAILED, error.message))
            failures.append(Failure(label=point.label, status=Status.FAILED, reason=error.message))
            continue
        blocks.update({(point.repeat, index): block for index, block in stored.items()})
        used.append(point.point_id)
        found = (outcome.peak_memory_bytes, *(block.peak_memory_bytes for block in stored.values()))
        peaks += [peak for peak in found if peak is not None]
    status, reason = (Status.OK, None) if used else bad[0]
    doubts = dict.fromkeys(text for point_id in used for text in cautions.get(point_id, ()))
    return ArmData(
        config=points[0].config,
        cell=points[0].cell,
        blocks=blocks,
        status=status,
        reason=reason,
        point_ids=tuple(used),
        cautions=tuple(doubts),
        peak_memory_bytes=max(peaks, default=None),
        has_boots=bool(run.manifest.get("plan", {}).get("has_boots", False)),
        promises=_promises(run.manifest),
    )


def _promises(manifest: dict[str, Any]) -> Promises | None:
    pairs = manifest.get("config", {}).get("goodput")
    return parse_goodput(pairs) if pairs else None


def _dismissed(comparison: CellComparison) -> list[Failure]:
    """Arms whose points ran but whose numbers cannot be used."""
    return [
        Failure(
            label=f"{arm.config.label} @ {comparison.cell.label}",
            status=arm.status,
            reason=arm.reason or "",
        )
        for arm in comparison.arms
        if arm.status is not Status.OK and arm.point_ids
    ]


def _context_range(arms: Sequence[ArmData]) -> tuple[int, int] | None:
    """Tokens per sequence seen in a cell: shortest prompt, longest prompt with its output."""
    requests = [request for arm in arms for request in arm.requests if request.error is None]
    if not requests:
        return None
    return (
        min(request.num_prompt_tokens for request in requests),
        max(request.num_prompt_tokens + request.num_output_tokens for request in requests),
    )


# Telling ------------------------------------------------------------------------------------------


def _assemble(
    run: RunStore,
    fingerprint: Fingerprint | None,
    points: Sequence[Point],
    outcomes: dict[str, PointOutcome],
    cells: Sequence[CellComparison],
    categories: Sequence[CellComparison],
    failures: Sequence[Failure],
    contexts: dict[Cell, tuple[int, int]],
    notes: Sequence[str],
) -> RunSummary:
    manifest = run.manifest
    workload = dict(manifest.get("workload") or {})
    name = run.path.name
    policy = build_policy(
        cells, categories, run_name=name, fingerprint=fingerprint, contexts=contexts, workload=workload
    )
    outcome = decide.outcome(cells, categories)
    if (refused := refusal(manifest)) is not None:
        policy, outcome = None, decide.NO_DATA
    is_simulated = fingerprint is not None and fingerprint.is_simulated
    missing = sum(point.point_id not in outcomes for point in points)
    return RunSummary(
        schema_version=SCHEMA_VERSION,
        run_name=name,
        outcome=outcome,
        verdict=refused or verdict_text(outcome, cells, categories),
        is_simulated=is_simulated,
        fingerprint=fingerprint,
        cells=tuple(cells),
        categories=tuple(categories),
        failures=tuple(failures),
        pruned=tuple((label, reason) for label, reason in manifest.get("pruned", [])),
        policy=policy,
        commands={} if policy is None else emit_all(policy),
        advice=advise(cells, categories, fingerprint),
        cautions=run_cautions(
            cells,
            categories,
            is_simulated=is_simulated,
            num_missing=missing,
            num_points=len(points),
            notes=tuple(
                dict.fromkeys(
                    (
                        *_weight_notes(fingerprint),
                        *_start_notes(manifest, cells),
                        *notes,
                        *manifest.get("cautions", ()),
                        *run.notes,
                    )
                )
            ),
        ),
        workload=workload,
        provenance=dict(manifest.get("provenance") or {}),
        definitions=dict(DEFINITIONS),
    )


def _start_notes(manifest: dict[str, Any], cells: Sequence[CellComparison]) -> tuple[str, ...]:
    plan = manifest.get("plan", {})
    return start_notes(cells, num_starts=plan.get("repeats", 1)) if plan.get("has_boots") else ()


def _weight_notes(fingerprint: Fingerprint | None) -> tuple[str, ...]:
    """What must be said of weights that were never trained."""
    if fingerprint is None or fingerprint.settings.get("load_format") != "dummy":
        return ()
    return ("random weights (--load-format dummy): times are real, texts and acceptance mean nothing",)
