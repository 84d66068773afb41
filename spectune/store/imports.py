"""Imported measurements in a run directory: manifest.json, and served.jsonl with one point a line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spectune.errors import StoreError
from spectune.records import Durations, ImportedPoint, ServedMeasurement, SpecConfig, SpecCounts, Status
from spectune.store.run import RunStore
from spectune.store.strict_json import dump_strict

SERVED = "served.jsonl"
KIND = "import"


def create_import(
    path: Path | str, points: Sequence[ImportedPoint], *, provenance: Mapping[str, Any]
) -> RunStore:
    """A new run directory with these points, the raw files named by their sha256."""
    sources = list(dict.fromkeys(point.source for point in points))
    manifest = {
        "kind": KIND,
        "provenance": provenance,
        "sources": [{"path": source, "sha256": _digest(Path(source))} for source in sources],
        "points": [],
    }
    store = RunStore.create(path, manifest)
    lines = [dump_strict(point_to_dict(point), where=point.source) for point in points]
    store.write_text(SERVED, "".join(f"{line}\n" for line in lines))
    return store


def read_imports(store: RunStore) -> list[ImportedPoint]:
    """The points of an import, in the order in which they were read."""
    file = store.path / SERVED
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        return [point_from_dict(json.loads(line)) for line in lines if line]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file} is damaged: {error}") from error


def point_to_dict(point: ImportedPoint) -> dict[str, Any]:
    """One line of served.jsonl."""
    config = None if point.config is None else point.config.to_dict()
    return {**asdict(point), "config": config, "settings": dict(point.settings)}


def point_from_dict(row: Mapping[str, Any]) -> ImportedPoint:
    """The reverse."""
    config, measurement = row["config"], row["measurement"]
    return ImportedPoint(
        **{
            **row,
            "config": None if config is None else SpecConfig.from_dict(config),
            "measurement": None if measurement is None else _measurement(measurement),
            "settings": tuple(sorted(row["settings"].items())),
            "status": Status(row["status"]),
            "cautions": tuple(row["cautions"]),
        }
    )


def _measurement(row: Mapping[str, Any]) -> ServedMeasurement:
    values: dict[str, Any] = dict(row)
    for name, value in row.items():
        if isinstance(value, dict) and name != "spec":
            pairs = tuple((float(percent), float(at)) for percent, at in value["percentiles"])
            values[name] = Durations(**{**value, "percentiles": pairs})
    if (spec := row["spec"]) is not None:
        values["spec"] = SpecCounts(**{**spec, "accepted_per_position": tuple(spec["accepted_per_position"])})
    return ServedMeasurement(**values)


def _digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
