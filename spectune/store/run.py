"""One run directory: manifest.json, points.jsonl, requests/<point_id>.jsonl.gz, surface.json, cautions.json.

Reading changes nothing on disk; a half-written last line or file is named, never used. Every write is
complete or absent: appends are undone when they break off, whole files are renamed into place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spectune.errors import SpectuneError, StoreError, UsageError
from spectune.records import SCHEMA_VERSION, BlockResult, Cell, PointOutcome, RoundTimes
from spectune.store.codec import outcome_from_dict, outcome_to_dict, pack_block, unpack_blocks
from spectune.store.files import naming_errors, replacing
from spectune.store.strict_json import dump_strict

Surface = dict[tuple[str, Cell], RoundTimes]

MANIFEST = "manifest.json"
POINTS = "points.jsonl"
REQUESTS = "requests"


class RunStore:
    """A run directory. `notes` collects what was found damaged and left out while reading."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.notes: list[str] = []

    @classmethod
    def create(cls, path: Path | str, manifest: Mapping[str, Any]) -> RunStore:
        """A new run; refuses a directory that already holds one."""
        path = Path(path)
        if (path / MANIFEST).exists():
            raise UsageError(f"{path} already holds a run", hint=f"--resume {path}, or another --output-dir")
        try:
            (path / REQUESTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output-dir {path} cannot be created: {error.strerror}") from error
        store = cls(path, {"schema_version": SCHEMA_VERSION})
        store.update_manifest(manifest)
        return store

    @classmethod
    def open(cls, path: Path | str) -> RunStore:
        """An existing run of this schema version."""
        path = Path(path)
        file = path / MANIFEST
        if not file.exists():
            raise StoreError(f"{path} is not a run directory: it holds no {MANIFEST}")
        manifest = _load_json(file)
        if not isinstance(manifest, dict) or "schema_version" not in manifest:
            raise StoreError(f"{file} has no schema_version")
        if manifest["schema_version"] != SCHEMA_VERSION:
            raise StoreError(
                f"{file} has schema_version {manifest['schema_version']}, this spectune reads {SCHEMA_VERSION}",
                hint="read it with the spectune that wrote it",
            )
        return cls(path, manifest)

    def update_manifest(self, entries: Mapping[str, Any]) -> None:
        """Replace some entries of manifest.json."""
        text = dump_strict({**self.manifest, **entries}, indent=1, where="manifest")
        self.write_text(MANIFEST, text + "\n")
        self.manifest = json.loads(text)

    def append_outcome(self, outcome: PointOutcome) -> None:
        """One line of points.jsonl, on disk when this returns."""
        file = self.path / POINTS
        line = dump_strict(outcome_to_dict(outcome), where=f"outcome of {outcome.point.label}")
        _mend_last_line(file)
        _append(file, (line + "\n").encode())

    def outcomes(self) -> dict[str, PointOutcome]:
        """Outcome by point_id; the last line of a point wins. A broken last line goes to `notes`."""
        file = self.path / POINTS
        if not file.exists():
            return {}
        with naming_errors(file, "read"):
            lines = file.read_bytes().splitlines()
        found: dict[str, PointOutcome] = {}
        for i, line in enumerate(lines, start=1):
            try:
                outcome = outcome_from_dict(json.loads(line))
            except (ValueError, KeyError, TypeError, SpectuneError) as error:
                if i < len(lines):
                    raise StoreError(f"{file} line {i} is damaged: {error}") from error
                self.notes.append(f"{POINTS} line {i} was half-written and is left out")
                continue
            found[outcome.point.point_id] = outcome
        return found

    def block_file(self, point_id: str) -> Path:
        """The file that holds the requests and rounds of a point."""
        return self.path / REQUESTS / f"{point_id}.jsonl.gz"

    def append_block(self, point_id: str, index: int, block: BlockResult) -> None:
        """One gzip member, on disk when this returns."""
        _append(self.block_file(point_id), pack_block(index, block))

    def blocks(self, point_id: str) -> dict[int, BlockResult]:
        """Blocks by index, empty if none were stored; StoreError if the file is damaged."""
        file = self.block_file(point_id)
        if not file.exists():
            return {}
        with naming_errors(file, "read"):
            data = file.read_bytes()
        return unpack_blocks(data, where=str(file))

    def set_aside(self, point_id: str) -> Path | None:
        """Rename the file of a point to `.broken-N`, never over an older one; None if there is none."""
        file = self.block_file(point_id)
        if not file.exists():
            return None
        number = 1
        while (aside := file.with_name(f"{file.name}.broken-{number}")).exists():
            number += 1
        with naming_errors(file, "set aside"):
            file.rename(aside)
        return aside

    def write_text(self, name: str, text: str) -> Path:
        """Write to a temporary file, then rename: readers see the old file or the whole new one."""
        file = self.path / name
        with naming_errors(file), replacing(file) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="")
        return file

    def write_json(self, name: str, value: Any) -> Path:
        """Strict JSON: NaN and infinity are refused by the key they stand under."""
        return self.write_text(name, dump_strict(value, indent=1, where=name) + "\n")

    def read_json(self, name: str) -> Any:
        """A JSON file of the run; StoreError if it is missing or damaged."""
        return _load_json(self.path / name)

    def surface(self) -> Surface:
        """Calibrated round times by (config label, cell); empty before any calibration."""
        if not (self.path / "surface.json").exists():
            return {}
        rows = self.read_json("surface.json")
        try:
            return {(row["config"], Cell(**row["cell"])): RoundTimes(**row["times"]) for row in rows}
        except (TypeError, KeyError) as error:
            raise StoreError(f"{self.path / 'surface.json'} is damaged: {error}") from error

    def write_surface(self, surface: Mapping[tuple[str, Cell], RoundTimes]) -> None:
        """Replace surface.json."""
        rows = [
            {"config": label, "cell": asdict(cell), "times": asdict(times)}
            for (label, cell), times in surface.items()
        ]
        self.write_json("surface.json", rows)

    def cautions(self) -> dict[str, tuple[str, ...]]:
        """Doubts by point_id, as sentences; empty where nothing is doubted."""
        if not (self.path / "cautions.json").exists():
            return {}
        return {point_id: tuple(texts) for point_id, texts in self.read_json("cautions.json").items()}

    def write_cautions(self, cautions: Mapping[str, Sequence[str]]) -> None:
        """Replace cautions.json."""
        self.write_json("cautions.json", cautions)


def _append(file: Path, data: bytes) -> None:
    """Append and sync; whatever breaks it off, an interrupt included, the file keeps its old length."""
    with naming_errors(file), file.open("ab") as stream:
        before = stream.seek(0, os.SEEK_END)
        try:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        except BaseException:
            os.ftruncate(stream.fileno(), before)
            raise


def _mend_last_line(file: Path) -> None:
    """Cut a half-written last line, or end a whole one, so that the next line stands alone."""
    if not file.exists():
        return
    with naming_errors(file), file.open("r+b") as stream:
        data = stream.read()
        if not data or data.endswith(b"\n"):
            return
        start = data.rfind(b"\n") + 1
        try:
            json.loads(data[start:])
        except ValueError:
            stream.truncate(start)
        else:
            stream.write(b"\n")


def _load_json(file: Path) -> Any:
    with naming_errors(file):
        text = file.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise StoreError(f"{file} is damaged: {error}") from error
