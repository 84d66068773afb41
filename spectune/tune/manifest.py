"""The manifest of a run, and whether a plan is the one that a run was started with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from spectune.errors import NotComparable, UsageError
from spectune.measure.cautions import workload_cautions
from spectune.provenance import collect
from spectune.records import SCHEMA_VERSION, Backend, Fingerprint
from spectune.store import RunStore, dump_strict
from spectune.tune.plan import SweepPlan

RESOLVED = "resolved_"
"""Begins the settings that a server resolved its arguments to."""

# Measured or told anew at every start, so they never decide whether two starts are the same.
MEASURED_FIELDS = frozenset({"read_bandwidth_bytes_per_s", "is_simulated"})


def build_manifest(
    plan: SweepPlan, backend: Backend, *, argv: Sequence[str], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that is known before the first launch; `config` holds the resolved flags."""
    provenance = collect(argv)
    described = describe_plan(plan)
    described["workload"]["template_digest"] = getattr(backend, "template_digest", None)
    described["workload"]["accounting"] = {**plan.workload.account(), "repeated": num_repeated(plan)}
    return {
        "schema_version": SCHEMA_VERSION,
        "head_context": getattr(backend, "head_context", None),
        "created": provenance["date"],
        "argv": list(argv),
        "backend": backend.capabilities().name,
        "fingerprint": asdict(backend.fingerprint()),
        "provenance": provenance,
        **described,
        "points": [{"point_id": point.point_id, **point.canonical} for point in plan.points],
        "pruned": [list(entry) for entry in plan.pruned],
        "cautions": [caution.text for caution in _cautions(plan)],
        "config": dict(config),
    }


def num_repeated(plan: SweepPlan) -> int:
    """Requests of the largest cell for which a prompt is asked again, over all repeats."""
    return max(0, _num_asked(plan) - len(plan.workload.prompts))


def _num_asked(plan: SweepPlan) -> int:
    """Most requests of different prompts that a cell asks for."""
    starts = 1 if plan.has_boots else plan.repeats  # a start is repeated on the same prompts
    return max(plan.num_cell_requests(cell) for cell in plan.cells) * starts


def describe_plan(plan: SweepPlan) -> dict[str, Any]:
    """The part of the manifest that a resumed run must share, the most telling field first."""
    workload = plan.workload
    categories: dict[str, int] = {}
    for prompt in workload.prompts:
        categories[prompt.category] = categories.get(prompt.category, 0) + 1
    context = plan.context_text.encode()
    return {
        "workload": {
            "name": workload.name,
            "digest": workload.digest,
            "num_prompts": len(workload.prompts),
            "categories": categories,
            "dropped": list(workload.dropped),
        },
        "plan": {
            "configs": [config.to_dict() for config in plan.configs],
            "cells": [asdict(cell) for cell in plan.cells],
            "sampling": asdict(plan.sampling),
            "num_prompts": plan.num_prompts,
            "min_blocks": plan.min_blocks,
            "repeats": plan.repeats,
            "has_boots": plan.has_boots,
            "context_digest": hashlib.sha256(context).hexdigest()[:12] if context else None,
        },
        "num_blocks": {cell.label: plan.num_blocks(cell) for cell in plan.cells},
    }


def check_same_run(store: RunStore, plan: SweepPlan, backend: Backend) -> None:
    """Raise if `plan` on `backend` would not continue the run in `store`; names the first field.

    NotComparable for another engine, model or device; UsageError for another plan.
    """
    manifest = store.manifest
    for entry in ("backend", "fingerprint", "workload", "plan", "points"):
        if entry not in manifest:
            raise UsageError(f"{store.path / 'manifest.json'} has no {entry}: not a sweep")
    name = backend.capabilities().name
    if name != manifest["backend"]:
        _refuse(NotComparable, store, "backend", manifest["backend"], name)
    ours = _strict(comparable(backend.fingerprint()))
    theirs = {key: value for key, value in manifest["fingerprint"].items() if key in ours}
    if "settings" in theirs:  # what a server told of itself is known only once one has run
        told = {key: value for key, value in theirs["settings"].items() if not key.startswith(RESOLVED)}
        theirs["settings"] = told
        ours["settings"] = {
            key: value for key, value in ours["settings"].items() if not key.startswith(RESOLVED)
        }
    observed = {key: ours[key] for key, value in theirs.items() if value is not None}
    theirs = {key: theirs[key] for key in observed}
    if difference := first_difference(theirs, observed, "fingerprint"):
        _refuse(NotComparable, store, *difference)
    described = _strict(describe_plan(plan))
    for key in ("workload", "plan"):
        theirs = {name: value for name, value in manifest[key].items() if name in described[key]}
        if difference := first_difference(theirs, described[key], key):
            _refuse(UsageError, store, *difference)
    ids = [point.point_id for point in plan.points]
    if difference := first_difference([row["point_id"] for row in manifest["points"]], ids, "points"):
        _refuse(UsageError, store, *difference)


def comparable(fingerprint: Fingerprint) -> dict[str, Any]:
    """The fields that were observed and that must be equal."""
    return {
        key: value
        for key, value in asdict(fingerprint).items()
        if value is not None and key not in MEASURED_FIELDS
    }


def merged_fingerprint(store: RunStore, backend: Backend) -> dict[str, Any]:
    """What the manifest knows, completed by what an open engine knows better."""
    known = {key: value for key, value in store.manifest["fingerprint"].items() if value is not None}
    ours = asdict(backend.fingerprint())
    # a server says so only once it runs, and what was simulated once stays so
    settings = {**ours["settings"], **known.get("settings", {})}
    return {
        **ours,
        **known,
        "settings": settings,
        "is_simulated": ours["is_simulated"] or known.get("is_simulated", False),
    }


def first_difference(old: Any, new: Any, where: str) -> tuple[str, Any, Any] | None:
    """(path, old, new) of the first place where two JSON values differ, or None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if found := first_difference(old.get(key), new.get(key), f"{where}.{key}"):
                return found
        return None
    if isinstance(old, list) and isinstance(new, list):
        for i, (before, after) in enumerate(zip(old, new, strict=False)):
            if found := first_difference(before, after, f"{where}[{i}]"):
                return found
        return None if len(old) == len(new) else (f"len({where})", len(old), len(new))
    return None if old == new else (where, old, new)


def _refuse(
    kind: type[NotComparable] | type[UsageError], store: RunStore, where: str, old: Any, new: Any
) -> None:
    raise kind(
        f"{store.path} was started with {where} = {json.dumps(old)}, now it is {json.dumps(new)}",
        hint="resume with the flags it was started with, or start another --output-dir",
    )


def _strict(value: Any) -> Any:
    return json.loads(dump_strict(value))


def _cautions(plan: SweepPlan) -> tuple[Any, ...]:
    has_calibration = bool(plan.workload.calibration)
    return workload_cautions(plan.workload.prompts, _num_asked(plan), has_calibration=has_calibration)
