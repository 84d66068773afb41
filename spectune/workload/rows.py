"""A prompt file as (line, value) pairs: JSON Lines, a JSON array, or an object with a "data" array.

Bytes are always UTF-8, whatever the platform's locale; a byte-order mark and CRLF are tolerated.
Knows nothing of what a row means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spectune.errors import WorkloadError

_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def read_rows(path: Path) -> list[tuple[int, Any]]:
    """Every row of a file with the line on which it starts, counted from 1."""
    text = _read_text(path)
    if not text.strip():
        raise WorkloadError(f"{path}: the file is empty", hint="one JSON object a line is expected")
    try:
        rows = list(_rows(text))
    except json.JSONDecodeError as error:
        raise WorkloadError(
            f"{path}, line {error.lineno}, column {error.colno}: not JSON: {error.msg.lower()}",
            hint='expected is one JSON object a line, a JSON array of objects or {"data": [...]}',
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deeply, a number of too many digits
        raise WorkloadError(f"{path}: cannot be read as JSON: {error}") from error
    if not rows:
        raise WorkloadError(f"{path}: the file holds no rows")
    return rows


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    start = len(_BOM) if data.startswith(_BOM) else 0
    try:
        return data[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        offset = start + error.start
        line = data.count(b"\n", 0, offset) + 1
        raise WorkloadError(
            f"{path}, line {line}: byte 0x{data[offset]:02x} at byte offset {offset} is not UTF-8",
            hint="save the file as UTF-8",
        ) from error


def _rows(text: str) -> Iterator[tuple[int, Any]]:
    start = _skip_space(text, 0)
    if text[start] == "[":
        yield from _array(text, start, must_end=True)
    elif (data := _find_data_array(text, start)) is not None:
        yield from _array(text, data, must_end=False)
    elif (whole := _single_object(text, start)) is not None:
        yield 1 + text.count("\n", 0, start), whole
    else:
        yield from _json_lines(text)


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    # Not splitlines(): it also breaks at U+2028 and the like, which JSON strings may hold.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                error.lineno = number
                raise


def _single_object(text: str, start: int) -> Any | None:
    """The value of a file that is one JSON object, maybe over several lines; None for JSON Lines."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError:
        if text[start:].split("\n", 1)[0].rstrip().endswith(("{", "[")):
            raise  # an object over several lines: its error names the right one
        return None
    return value if _skip_space(text, end) == len(text) else None


def _find_data_array(text: str, start: int) -> int | None:
    """Position of the array under the key "data", if the whole text is one object that has it."""
    value = _single_object(text, start)
    if not isinstance(value, dict) or not isinstance(value.get("data"), list):
        return None
    position = _skip_space(text, start + 1)
    while True:
        key, position = _DECODER.raw_decode(text, position)
        position = _skip_space(text, _skip_space(text, position) + 1)  # over the colon
        if key == "data" and text[position] == "[":
            return position
        _, position = _DECODER.raw_decode(text, position)
        position = _skip_space(text, _skip_space(text, position) + 1)  # over the comma


def _array(text: str, start: int, *, must_end: bool) -> Iterator[tuple[int, Any]]:
    """Elements of the array that opens at `start`, each with its line."""
    position, line, counted = _skip_space(text, start + 1), 1, 0
    while position < len(text) and text[position] != "]":
        line += text.count("\n", counted, position)
        counted = position
        value, position = _DECODER.raw_decode(text, position)
        yield line, value
        position = _skip_space(text, position)
        if text[position : position + 1] == ",":
            position = _skip_space(text, position + 1)
        elif text[position : position + 1] != "]":
            raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
    if position >= len(text):
        raise json.JSONDecodeError("The array is not closed", text, len(text))
    if must_end and (end := _skip_space(text, position + 1)) != len(text):
        raise json.JSONDecodeError("Extra data after the array", text, end)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position
