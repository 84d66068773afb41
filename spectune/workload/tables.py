"""Prompt files that are no JSON: CSV or TSV with a header, parquet, plain text with a prompt a line.

Each gives (line or row number, value) pairs like the JSON reader. A cell of a CSV file is text, so a
list or an object in it is read as JSON and a limit as a number.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spectune.errors import BackendMissing, WorkloadError
from spectune.workload.rows import BadRow, Rows, decode_lines, open_regular
from spectune.workload.shapes import LIMIT_KEYS, QUESTION_KEYS

MAX_CELL = 1 << 27
_DELIMITERS = (",", "\t", ";")
_BATCH = 256


def read_csv_rows(path: Path) -> Rows:
    """Rows of a CSV file; the first line names the columns, its delimiter is a comma, tab or semicolon."""
    before = csv.field_size_limit(MAX_CELL)  # the package's own limit of 128 KiB is below a long prompt
    try:
        yield from _csv_rows(path)
    finally:
        csv.field_size_limit(before)


def _csv_rows(path: Path) -> Rows:
    lines = decode_lines(path)
    start, header = next(((number, line) for number, line in lines if line.strip()), (0, ""))
    if not header:
        raise WorkloadError(
            f"{path}: the file is empty", hint="the first line of a CSV file names its columns"
        )
    columns, delimiter = _columns(path, start, header)
    reader = csv.reader((line for _, line in lines), delimiter=delimiter, strict=True)
    while True:
        line = start + reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise WorkloadError(f"{path}, line {line}: not CSV: {error}") from error
        if cells is None:
            return
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(columns):
            yield line, BadRow(message=f"the row has {len(cells)} cells, the header names {len(columns)}")
        else:
            yield line, _typed(dict(zip(columns, cells, strict=True)))


def _columns(path: Path, line: int, header: str) -> tuple[list[str], str]:
    """Column names, and the delimiter under which one of them is known."""
    seen: list[str] = []
    for delimiter in _DELIMITERS:
        try:
            row = next(csv.reader([header], delimiter=delimiter, strict=True), [])
        except csv.Error:
            continue
        names = [name.strip() for name in row]
        if set(names) & QUESTION_KEYS:
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise WorkloadError(f"{path}, line {line}: column {twice[0]} appears twice")
            return names, delimiter
        seen = max(seen, names, key=len)
    raise WorkloadError(
        f"{path}, line {line}: no column of a question: the columns are {', '.join(seen) or 'none'}"[:500],
        hint=f"accepted: {', '.join(sorted(QUESTION_KEYS))}",
    )


def _typed(row: dict[str, str]) -> Any:
    """Cells as JSON would have them; an empty cell of an optional column is an absent one."""
    typed: dict[str, Any] = {}
    for key, cell in row.items():
        text = cell.strip()
        if key in LIMIT_KEYS:
            typed[key] = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else text or None
        elif key in ("turns", "messages", "conversations", "conversation") and text[:1] in ("[", "{"):
            try:
                typed[key] = json.loads(text)
            except (ValueError, RecursionError) as error:
                return BadRow(message=f"column {key} holds no JSON: {str(error).lower()}")
        elif text or key in QUESTION_KEYS:
            typed[key] = cell
    return typed


def read_text_rows(path: Path) -> Rows:
    """A plain text file: every line that is not blank is a prompt."""
    for number, line in decode_lines(path):
        if line.strip():
            yield number, {"prompt": line.rstrip("\r\n")}


def read_parquet_rows(path: Path) -> Rows:
    """Rows of a parquet file, numbered from 1."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as missing:
        raise BackendMissing(
            f"{path}: reading parquet needs pyarrow", hint="pip install 'spectune[parquet]'"
        ) from missing
    open_regular(path).close()
    try:
        yield from _parquet_rows(parquet.ParquetFile(path))
    except WorkloadError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WorkloadError(f"{path}: cannot be read as parquet: {first}"[:500]) from error


def _parquet_rows(file: Any) -> Iterator[tuple[int, Any]]:
    number = 0
    for batch in file.iter_batches(batch_size=_BATCH):
        for row in batch.to_pylist():
            number += 1
            yield (
                number,
                {key: value for key, value in row.items() if value is not None or key in QUESTION_KEYS},
            )
