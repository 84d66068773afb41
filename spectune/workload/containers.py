"""What kind of file a prompt file is, by its first bytes and its name, and the rows that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spectune.errors import WorkloadError
from spectune.workload.rows import BOM, Rows, open_regular, read_json_rows
from spectune.workload.shapes import SHAPES_BY_NAME
from spectune.workload.tables import read_csv_rows, read_parquet_rows, read_text_rows

READERS: dict[str, Callable[[Path], Rows]] = {
    "json": read_json_rows,
    "jsonl": read_json_rows,
    "csv": read_csv_rows,
    "parquet": read_parquet_rows,
    "text": read_text_rows,
}
SUFFIXES = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
}
FORMATS = (*READERS, *SHAPES_BY_NAME)
"""What --dataset-format takes: the kind of file, the shape of its rows, or both."""

_ARCHIVES = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2"}


def split_format(names: Sequence[str]) -> tuple[str | None, str | None]:
    """(container, shape) of --dataset-format; either may be left to detection."""
    containers = [name for name in names if name in READERS]
    shapes = [name for name in names if name in SHAPES_BY_NAME]
    if unknown := [name for name in names if name not in FORMATS]:
        raise WorkloadError(
            f"--dataset-format {unknown[0]} is not known", hint=f"one of: {', '.join(FORMATS)}"
        )
    if len(containers) > 1 or len(shapes) > 1:
        raise WorkloadError(
            f"--dataset-format {','.join(names)}: give at most one kind of file and one shape of its rows"
        )
    return next(iter(containers), None), next(iter(shapes), None)


def rows_of(path: Path, container: str | None = None) -> Rows:
    """(line or row number, value) of every row of a prompt file."""
    return READERS[container or _detect(path)](path)


def _detect(path: Path) -> str:
    with open_regular(path) as file:
        start = file.read(4096)
    for magic, name in _ARCHIVES.items():
        if start.startswith(magic):
            raise WorkloadError(f"{path}: this is a {name} archive", hint="unpack it first")
    if start.startswith(b"PAR1"):
        return "parquet"
    if path.suffix.lower() in SUFFIXES:
        return SUFFIXES[path.suffix.lower()]
    if start.removeprefix(BOM).lstrip()[:1] in (b"{", b"[") or not start.strip():
        return "json"
    raise WorkloadError(
        f"{path}: cannot tell what kind of file this is",
        hint="--dataset-format json, csv, parquet or text says it",
    )
