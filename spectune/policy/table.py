"""Decisions of a run in, the neutral policy out; and the evaluator that reads it.

A policy is a plain JSON object (policy.schema.json): cells of batch, context, category and
temperature, each with a configuration or "off". The first cell that holds a request decides; where
none does, the fallback decides. No engine is named here but by its fingerprint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spectune.policy import decide
from spectune.policy.comparison import ArmSummary, CellComparison
from spectune.policy.deadband import ASSUMED_COST_ROUNDS, edges_of
from spectune.policy.file import COMPARABLE_KEYS, OFF, POLICY_SCHEMA_VERSION, config_of, identity_of
from spectune.policy.ranges import Choice, Segment, batch_segments, context_bands, merge_rows
from spectune.policy.smallest import shrink
from spectune.policy.starts import standby_cost
from spectune.records import Cell, Fingerprint, SpecConfig

Row = dict[Cell, Choice]


def build_policy(
    cells: Sequence[CellComparison],
    categories: Sequence[CellComparison],
    *,
    run_name: str,
    fingerprint: Fingerprint | None,
    contexts: Mapping[Cell, tuple[int, int]],
    workload: Mapping[str, Any] | None = None,
    sources: Mapping[Cell, str] | None = None,
    max_loss: float = 0.0,
    switch_cost_rounds: float | None = None,
) -> dict[str, Any] | None:
    """The policy of a run; None if no cell was decided.

    Args:
        contexts: tokens per sequence (smallest prompt, largest prompt + output) seen in each cell.
        workload: name and digest, kept in the validity.
        sources: the run of each cell, where they come from several.
        max_loss: share of a cell's speedup that may be given up for a table with fewer edges.
        switch_cost_rounds: plain rounds that a switch to more speculation costs; assumed if None.
    """
    names = {cell.cell: (sources or {}).get(cell.cell, run_name) for cell in cells}
    decided = [cell for cell in cells if cell.decision.verdict != decide.NO_DATA]
    if not decided:
        return None
    measured = shrink(
        {cell.cell: _choice(cell, names[cell.cell]) for cell in decided}, decided, max_loss=max_loss
    )
    overall = measured | {
        cell.cell: _no_data(cell, names[cell.cell]) for cell in cells if cell not in decided
    }
    table: list[dict[str, Any]] = []
    for category, row in _category_rows(overall, decided, categories, names).items():
        table += _cells_of(row, contexts, category)
    table += _cells_of(overall, contexts, None)
    cost = ASSUMED_COST_ROUNDS if switch_cost_rounds is None else switch_cost_rounds
    return {
        "schema_version": POLICY_SCHEMA_VERSION,
        "kind": "spectune-policy",
        "source_run": run_name,
        "validity": _validity(measured, fingerprint, contexts, workload or {}),
        "fallback": OFF,
        "max_loss": max_loss,
        "deadband": {
            "switch_cost_rounds": cost,
            "is_assumed": switch_cost_rounds is None,
            "edges": edges_of(measured, decided, switch_cost_rounds=cost),
        },
        "standby": [_standby_json(cell, arm) for cell in cells for arm in cell.standby if arm.speedup],
        "cells": table,
    }


def _no_data(comparison: CellComparison, run_name: str) -> Choice:
    """A measured place that gave no answer is off, and says so instead of taking its neighbours' word."""
    reason = comparison.decision.reason
    return Choice(
        config=comparison.decision.chosen, source=f"{run_name}: no data at {comparison.cell.label}: {reason}"
    )


def _standby_json(comparison: CellComparison, arm: ArmSummary) -> dict[str, Any]:
    """What an engine that could speculate and does not costs: time per token over that of one that cannot."""
    assert arm.speedup is not None
    cost = standby_cost(arm.speedup)
    return {
        "method": arm.config.method,
        "batch": comparison.cell.batch_size,
        "cost": cost.value,
        "cost_ci": None if cost.low is None else [cost.low, cost.high],
    }


def _choice(comparison: CellComparison, run_name: str) -> Choice:
    decision = comparison.decision
    arm = next((arm for arm in comparison.arms if arm.config == decision.chosen), None)
    return Choice(
        config=decision.chosen,
        source=f"{run_name}: measured at {comparison.cell.label}",
        speedup=decision.speedup,
        num_steps=_num_steps(arm),
        break_even=None if arm is None else break_even_of(comparison, arm),
    )


def break_even_of(comparison: CellComparison, arm: ArmSummary) -> float | None:
    """Accepted drafts a round at which an arm is as fast as plain decoding, from both measured rounds."""
    tokens = comparison.break_even(arm)
    return None if tokens is None else max(0.0, tokens - 1)


def _num_steps(arm: ArmSummary | None) -> int:
    return 0 if arm is None or arm.acceptance is None else arm.acceptance.num_steps


def _category_rows(
    overall: Row,
    cells: Sequence[CellComparison],
    categories: Sequence[CellComparison],
    names: Mapping[Cell, str],
) -> dict[str, Row]:
    """Rows of the categories whose on or off is clearly another than the cell's."""
    by_cell = {cell.cell: cell.decision for cell in cells}
    rows: dict[str, Row] = {}
    for comparison in categories:
        decision = by_cell.get(comparison.cell)
        if decision is None or comparison.decision.verdict == decision.verdict:
            continue
        if comparison.decision.verdict == "on" or decide.loses(comparison, decision):
            row = rows.setdefault(comparison.scope, dict(overall))
            row[comparison.cell] = _choice(comparison, names[comparison.cell])
    return rows


def _cells_of(
    row: Row, contexts: Mapping[Cell, tuple[int, int]], category: str | None
) -> list[dict[str, Any]]:
    """All cells of one category: measured temperatures first, then the bands between them."""
    temperatures = sorted({cell.temperature for cell in row})
    bands = {t: _context_table(row, contexts, t) for t in temperatures}
    table = [
        _cell_json(segment, context, (t, t), category)
        for t in temperatures
        for context, segments in bands[t]
        for segment in segments
    ]
    for low, high in itertools.pairwise(temperatures):
        source = f"between the measured temperatures {low:g} and {high:g}: the smaller speculation of both"
        for context, segments in _overlap(bands[low], bands[high], source):
            table += [_cell_json(segment, context, (low, high), category) for segment in segments]
    return table


ContextTable = list[tuple[tuple[int, int | None], tuple[Segment, ...]]]


def _context_table(row: Row, contexts: Mapping[Cell, tuple[int, int]], temperature: float) -> ContextTable:
    """Bands of the context axis of one temperature, each with its batch ranges."""
    cells = [cell for cell in row if cell.temperature == temperature]
    rows = {}
    for context in sorted({cell.context_tokens for cell in cells}):
        own = [cell for cell in cells if cell.context_tokens == context]
        seen = [contexts.get(cell, (context, context)) for cell in own]
        lows, highs = zip(*seen, strict=True)
        segments = batch_segments({cell.batch_size: row[cell] for cell in own})
        rows[context] = ((min(lows), max(highs)), segments)
    return context_bands(rows)


def _overlap(first: ContextTable, second: ContextTable, source: str) -> ContextTable:
    """Context bands of both tables, the smaller speculation in each."""
    merged: ContextTable = []
    for (low, high), row in first:
        for (other_low, other_high), other in second:
            start = max(low, other_low)
            ends = [end for end in (high, other_high) if end is not None]
            end = min(ends) if ends else None
            if end is None or start <= end:
                merged.append(((start, end), merge_rows(row, other, source)))
    return merged


def _cell_json(
    segment: Segment,
    context: tuple[int, int | None],
    temperature: tuple[float, float],
    category: str | None,
) -> dict[str, Any]:
    choice = segment.choice
    speedup = choice.speedup
    has_interval = speedup is not None and speedup.low is not None and speedup.high is not None
    return {
        "batch": [segment.low, segment.high],
        "context_tokens": list(context),
        "category": category,
        "temperature": list(temperature),
        "config": OFF if choice.config.is_off else choice.config.to_dict(),
        "speedup": None if speedup is None else speedup.value,
        "speedup_ci": [speedup.low, speedup.high] if speedup is not None and has_interval else None,
        "num_steps": choice.num_steps,
        "break_even_accepted": choice.break_even,
        "source": choice.source,
    }


def _validity(
    row: Row,
    fingerprint: Fingerprint | None,
    contexts: Mapping[Cell, tuple[int, int]],
    workload: Mapping[str, Any],
) -> dict[str, Any]:
    seen = [contexts.get(cell, (cell.context_tokens, cell.context_tokens)) for cell in row]
    sizes = [cell.batch_size for cell in row]
    identity = (
        dict.fromkeys((*COMPARABLE_KEYS, "is_simulated")) if fingerprint is None else identity_of(fingerprint)
    )
    return {
        **identity,
        "workload": workload.get("name"),
        "workload_digest": workload.get("digest"),
        "batch": [min(sizes), max(sizes)],
        "context_tokens": [0, max(high for _, high in seen)],
        "temperatures": sorted({cell.temperature for cell in row}),
    }


def choose(
    policy: Mapping[str, Any],
    batch_size: int,
    context_tokens: int | None = None,
    category: str | None = None,
    temperature: float | None = None,
) -> SpecConfig:
    """The configuration that a policy runs; the first cell that holds everything given decides.

    A context or temperature that is not known (None) takes the smallest speculation of all cells
    that hold the rest. No category means the cells of all categories together.
    """
    cells = cells_that_hold(policy, batch_size, context_tokens, category, temperature)
    if not cells:
        return config_of(policy["fallback"])
    found = [config_of(cell["config"]) for cell in cells]
    if context_tokens is None or temperature is None:
        return min(found, key=lambda config: (config.size, config.label))
    return found[0]


def cells_that_hold(
    policy: Mapping[str, Any],
    batch_size: int,
    context_tokens: int | None,
    category: str | None,
    temperature: float | None,
) -> list[Mapping[str, Any]]:
    """The cells of a category that hold everything given, in their order; of all categories together where
    the category has none."""
    found: list[Mapping[str, Any]] = []
    for scope in (category, None) if category is not None else (None,):
        found = [
            cell
            for cell in policy["cells"]
            if cell["category"] == scope
            and _holds(cell["batch"], batch_size)
            and (context_tokens is None or _holds(cell["context_tokens"], context_tokens))
            and (temperature is None or _holds(cell["temperature"], temperature))
        ]
        if found:
            break
    return found


def _holds(pair: Iterable[float | None] | None, value: float) -> bool:
    if pair is None:
        return True
    low, high = pair
    return (low is None or low <= value) and (high is None or value <= high)
