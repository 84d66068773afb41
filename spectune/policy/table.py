"""Decisions of a run in, the neutral policy out; and the evaluator that reads it.

A policy is a plain JSON object (policy.schema.json): cells of batch, context, category and
temperature, each with a configuration or "off". The first cell that holds a request decides; where
none does, the fallback decides. No engine is named here but by its fingerprint.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from spectune.errors import NotComparable, UsageError
from spectune.policy import decide
from spectune.policy.comparison import ArmSummary, CellComparison
from spectune.policy.ranges import Choice, Segment, batch_segments, context_bands, merge_rows
from spectune.records import Cell, Fingerprint, SpecConfig

POLICY_SCHEMA_VERSION = 1
OFF = "off"

COMPARABLE_KEYS = (
    "engine", "engine_version", "target", "draft", "device", "dtype", "tensor_parallel_size", "threads",
)  # fmt: skip
"""Validity keys that must be equal before a policy may be used."""

Row = dict[Cell, Choice]


def policy_schema() -> dict[str, Any]:
    """The published JSON schema of a policy file."""
    text = resources.files("spectune.policy").joinpath("policy.schema.json").read_text("utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def build_policy(
    cells: Sequence[CellComparison],
    categories: Sequence[CellComparison],
    *,
    run_name: str,
    fingerprint: Fingerprint | None,
    contexts: Mapping[Cell, tuple[int, int]],
    workload: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The policy of a run; None if no cell was decided.

    Args:
        contexts: tokens per sequence (smallest prompt, largest prompt + output) seen in each cell.
        workload: name and digest, kept in the validity.
    """
    decided = [cell for cell in cells if cell.decision.verdict != decide.NO_DATA]
    if not decided:
        return None
    overall = {cell.cell: _choice(cell, run_name) for cell in decided}
    table: list[dict[str, Any]] = []
    for category, row in _category_rows(overall, decided, categories, run_name).items():
        table += _cells_of(row, contexts, category)
    table += _cells_of(overall, contexts, None)
    return {
        "schema_version": POLICY_SCHEMA_VERSION,
        "kind": "spectune-policy",
        "source_run": run_name,
        "validity": _validity(overall, fingerprint, contexts, workload or {}),
        "fallback": OFF,
        "cells": table,
    }


def _choice(comparison: CellComparison, run_name: str) -> Choice:
    decision = comparison.decision
    arm = next((arm for arm in comparison.arms if arm.config == decision.chosen), None)
    return Choice(
        config=decision.chosen,
        source=f"{run_name}: measured at {comparison.cell.label}",
        speedup=decision.speedup,
        num_steps=_num_steps(arm),
    )


def _num_steps(arm: ArmSummary | None) -> int:
    return 0 if arm is None or arm.acceptance is None else arm.acceptance.num_steps


def _category_rows(
    overall: Row,
    cells: Sequence[CellComparison],
    categories: Sequence[CellComparison],
    run_name: str,
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
            choice = _choice(comparison, run_name)
            row[comparison.cell] = choice
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


def identity_of(fingerprint: Fingerprint) -> dict[str, Any]:
    """What a policy is valid for: engine, models, device and parallelism."""
    return {
        "engine": fingerprint.backend,
        "engine_version": fingerprint.engine_version,
        "target": fingerprint.target,
        "draft": fingerprint.draft,
        "device": fingerprint.device,
        "dtype": fingerprint.dtype,
        "tensor_parallel_size": int(fingerprint.settings.get("tensor_parallel_size", 1)),
        "threads": fingerprint.threads,
        "is_simulated": fingerprint.is_simulated,
    }


def check_validity(policy: Mapping[str, Any], fingerprint: Fingerprint) -> None:
    """Raise NotComparable, naming each difference, if a policy was measured on something else."""
    here = identity_of(fingerprint)
    measured = policy["validity"]
    differing = [
        f"{key} {measured.get(key)!r} against {here[key]!r}"
        for key in COMPARABLE_KEYS
        if measured.get(key) != here[key]
    ]
    if differing:
        raise NotComparable(
            f"the policy of {policy.get('source_run')} was measured elsewhere: {'; '.join(differing)}",
            hint="sweep on this deployment and build a policy from that run",
        )


def load_policy(data: Any, *, origin: str = "policy") -> dict[str, Any]:
    """Check a policy that came from a file; raises UsageError naming `origin` and the key."""
    if not isinstance(data, dict) or data.get("kind") != "spectune-policy":
        raise UsageError(
            f"{origin}: not a spectune policy", hint="a sweep writes policy.json into its run directory"
        )
    if data.get("schema_version") != POLICY_SCHEMA_VERSION:
        raise UsageError(
            f"{origin}: schema_version {data.get('schema_version')!r}, this version reads "
            f"{POLICY_SCHEMA_VERSION}"
        )
    schema = policy_schema()
    _check_keys(data, schema, origin)
    if not isinstance(data["cells"], list):
        raise UsageError(f"{origin}: cells must be a list")
    for index, cell in enumerate(data["cells"]):
        where = f"{origin}: cells[{index}]"
        _check_keys(cell, schema["$defs"]["cell"], where)
        _check_range(cell["batch"], f"{where}.batch")
        if cell["context_tokens"] is not None:
            _check_range(cell["context_tokens"], f"{where}.context_tokens")
        _check_range(cell["temperature"], f"{where}.temperature")
        config_of(cell["config"])
    config_of(data["fallback"])
    return data


def _check_keys(data: Any, schema: Mapping[str, Any], where: str) -> None:
    if not isinstance(data, dict):
        raise UsageError(f"{where}: must be an object")
    if missing := sorted(set(schema["required"]) - set(data)):
        raise UsageError(f"{where}: missing {', '.join(missing)}")
    if unknown := sorted(set(data) - set(schema["properties"])):
        raise UsageError(f"{where}: unknown keys {', '.join(unknown)}")


def _check_range(pair: Any, where: str) -> None:
    good = (
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], int | float)
        and (pair[1] is None or (isinstance(pair[1], int | float) and pair[0] <= pair[1]))
    )
    if not good:
        raise UsageError(f"{where}: {pair!r} is not [low, high] with low <= high")


def config_of(value: Any) -> SpecConfig:
    """The configuration of a cell: "off" or an object."""
    return SpecConfig.off() if value == OFF else SpecConfig.from_dict(value)


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
    found: list[SpecConfig] = []
    for scope in (category, None) if category is not None else (None,):
        found = [
            config_of(cell["config"])
            for cell in policy["cells"]
            if cell["category"] == scope
            and _holds(cell["batch"], batch_size)
            and (context_tokens is None or _holds(cell["context_tokens"], context_tokens))
            and (temperature is None or _holds(cell["temperature"], temperature))
        ]
        if found:
            break
    if not found:
        return config_of(policy["fallback"])
    if context_tokens is None or temperature is None:
        return min(found, key=lambda config: (config.size, config.label))
    return found[0]


def _holds(pair: Iterable[float | None] | None, value: float) -> bool:
    if pair is None:
        return True
    low, high = pair
    return (low is None or low <= value) and (high is None or value <= high)
