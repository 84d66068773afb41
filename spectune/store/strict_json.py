"""Values of a run as JSON that every reader accepts: no NaN, no infinity, no surprise types."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime
from enum import Enum
from pathlib import PurePath
from typing import Any

from spectune.errors import StoreError


def dump_strict(value: Any, *, indent: int | None = None, where: str = "value") -> str:
    """`value` as JSON text. Refuses NaN, infinity and unknown types by the key they stand under."""
    separators = (",", ":") if indent is None else (",", ": ")
    encoder = json.JSONEncoder(
        indent=indent, separators=separators, ensure_ascii=False, allow_nan=False, check_circular=False
    )
    if type(value) in (dict, list) and _is_flat(value):
        return encoder.encode(value)
    return encoder.encode(_plain(value, where))


def _is_flat(value: Any) -> bool:
    """Whether json needs no help: plain keys, scalars and lists of scalars, all floats finite."""
    items = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict) and not all(type(key) is str for key in value):
        return False
    return all(_is_scalar(item) or (type(item) in (list, tuple) and _is_flat(item)) for item in items)


def _is_scalar(value: Any) -> bool:
    kind = type(value)
    return kind is int or kind is str or value is None or (kind is float and math.isfinite(value))


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value, where)
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise StoreError(f"{where} is {value}, which JSON cannot hold", hint="absent values are null")
        return float(value)
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(sorted(value, key=repr))]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), f"{where}.{f.name}") for f in fields(value)}
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (date, datetime)):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy
        return _plain(value.tolist(), where)
    raise StoreError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def _key(key: Any, where: str) -> str:
    plain = _plain(key, f"a key of {where}")
    if isinstance(plain, str):
        return plain
    if isinstance(plain, (int, float)) and not isinstance(plain, bool):
        return str(plain)
    raise StoreError(f"a key of {where} is {key!r}, which JSON cannot hold")
