"""A JSON prompt file as (line, value) pairs: JSON Lines, an array, or an object with a "data" array.

JSON Lines are read line by line, so a file may be larger than the memory; a line that is no JSON is
handed on as a BadRow, because the others may be fine. Bytes are always UTF-8, whatever the platform's
locale; a byte-order mark and CRLF are tolerated. Knows nothing of what a row means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from spectune.errors import WorkloadError

BOM = b"\xef\xbb\xbf"
EXPECTED = 'expected is one JSON object a line, a JSON array of objects or {"data": [...]}'
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()
_GOES_ON = ("{", "[", ",", ":")  # a first line that ends so is a part of something longer


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be read, what is wrong with it, and where in its line."""

    message: str
    hint: str | None = None
    column: int | None = None


Rows = Iterator[tuple[int, Any]]


def read_json_rows(path: Path) -> Rows:
    """Every row of a JSON file with the line on which it starts, counted from 1."""
    with open_regular(path) as file:
        first, blank = _first_line(file)
        if not first:
            raise WorkloadError(f"{path}: the file is empty", hint="one JSON object a line is expected")
        if _is_document(first, file):
            yield from _document(path)
            return
    yield from _json_lines(path, skip=blank)


def open_regular(path: Path) -> IO[bytes]:
    """The file opened for reading; a pipe or a device could block for ever and is refused."""
    try:
        if not path.is_file():
            raise WorkloadError(f"{path}: not a regular file", hint="write the prompts to a file first")
        return path.open("rb", buffering=1 << 20)
    except OSError as error:
        raise WorkloadError(f"{path}: {(error.strerror or str(error)).lower()}") from error


def decode_utf8(data: bytes, path: Path, *, offset: int = 0, line: int = 1) -> str:
    """Text of bytes that start at `offset` on `line`; WorkloadError at the first byte that is no UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise WorkloadError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} at byte offset {offset + error.start} "
            "is not UTF-8",
            hint=_encoding_hint(data, offset),
        ) from error


def _encoding_hint(data: bytes, offset: int) -> str:
    if offset == 0 and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "this is UTF-16; save the file as UTF-8"
    if offset == 0 and data[:2] == b"\x1f\x8b":
        return "this is a gzip archive; unpack it first"
    return "save the file as UTF-8"


def decode_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of a text file with their numbers; only LF and CRLF end a line, U+2028 and the like do not."""
    with open_regular(path) as file:
        offset = 0
        for number, raw in enumerate(file, start=1):
            start = len(BOM) if offset == 0 and raw.startswith(BOM) else 0
            yield number, decode_utf8(raw[start:], path, offset=offset + start, line=number)
            offset += len(raw)


def read_text(path: Path) -> str:
    """The whole file as text."""
    with open_regular(path) as file:
        data = file.read()
    start = len(BOM) if data.startswith(BOM) else 0
    return decode_utf8(data[start:], path, offset=start)


def _first_line(file: IO[bytes]) -> tuple[bytes, int]:
    """The first line that is not blank, and how many blank ones stand before it."""
    for number, raw in enumerate(file):
        line = raw.removeprefix(BOM) if number == 0 else raw
        if stripped := line.strip():
            return stripped, number
    return b"", 0


def _is_document(first: bytes, rest: IO[bytes]) -> bool:
    """Whether the file is one JSON value: it starts one that goes on, or the first line is all there is."""
    if first[:1] not in (b"{", b"["):
        return False
    try:
        json.loads(first)
    except RecursionError:
        return False
    except ValueError as error:
        text = first.decode("utf-8", "replace")
        is_open = text.startswith("[") and getattr(error, "pos", 0) >= len(text)
        return is_open or text.endswith(_GOES_ON)
    following = next((stripped for line in rest if (stripped := line.strip())), None)
    return following is None or (first[:1] == b"[" and following[:1] != b"[")


def _json_lines(path: Path, *, skip: int) -> Rows:
    for number, line in decode_lines(path):
        if number <= skip or not line or line.isspace():
            continue
        try:
            yield number, json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            yield number, _not_json(error)
        except (RecursionError, ValueError) as error:  # nested too deeply, a number of too many digits
            yield number, BadRow(message=f"cannot be read as JSON: {error}")


def _not_json(error: json.JSONDecodeError) -> BadRow:
    return BadRow(message=f"not JSON: {error.msg.lower()}", hint=EXPECTED, column=error.colno)


def _document(path: Path) -> Rows:
    text = read_text(path)
    start = _skip_space(text, 0)
    try:
        if text[start] == "[":
            yield from _array(text, start, must_end=True)
            return
        value, end = _DECODER.raw_decode(text, start)
        if (rest := _skip_space(text, end)) != len(text):
            raise json.JSONDecodeError("Extra data", text, rest)
        if isinstance(value.get("data"), list):
            yield from _array(text, _find_data_array(text, start), must_end=False)
        else:
            yield 1 + text.count("\n", 0, start), value
    except json.JSONDecodeError as error:
        raise WorkloadError(
            f"{path}, line {error.lineno}, column {error.colno}: not JSON: {error.msg.lower()}", hint=EXPECTED
        ) from error
    except (RecursionError, ValueError) as error:
        raise WorkloadError(f"{path}: cannot be read as JSON: {error}") from error


def _find_data_array(text: str, start: int) -> int:
    """Position of the array under the key "data" of the object that opens at `start`; the last one wins."""
    position, found = _skip_space(text, start + 1), -1
    while text[position] != "}":
        key, position = _DECODER.raw_decode(text, position)
        position = _skip_space(text, _skip_space(text, position) + 1)  # over the colon
        if key == "data":
            found = position
        _, position = _DECODER.raw_decode(text, position)
        position = _skip_space(text, position)
        if text[position] == ",":
            position = _skip_space(text, position + 1)
    return found


def _array(text: str, start: int, *, must_end: bool) -> Rows:
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
