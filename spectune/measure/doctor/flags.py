"""Words of a command line as flags and values; nothing is known here of what they mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

REFUSED_AT_START = "the engine refuses to start, after minutes if weights are loaded first"


def parse_flags(words: Sequence[str]) -> dict[str, str | None]:
    """Flags of a command line with their values (None for a bare one), spelled with hyphens.

    Underscores of a dotted tail stay: `--speculative-config.num_speculative_tokens`.
    """
    flags: dict[str, str | None] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("-") or word.lstrip("-")[:1].isdigit():
            continue
        name, equals, value = word.lstrip("-").partition("=")
        head, dot, tail = name.partition(".")
        found: str | None = value if equals else None
        if not equals and index < len(words) and not words[index].startswith("--"):
            found = words[index]
            index += 1
        flags[f"{_long(head)}{dot}{tail}"] = found
    return flags


def _long(name: str) -> str:
    name = name.replace("_", "-")
    return {"sc": "speculative-config", "tp": "tensor-parallel-size"}.get(name, name)


def as_whole(value: Any) -> int | None:
    """The whole number that a flag holds, None for anything else."""
    try:
        return None if value is None or isinstance(value, bool) else int(value)
    except (TypeError, ValueError):
        return None


def as_value(text: str | None) -> Any:
    """A dotted or short value as vLLM reads it: JSON where it is JSON, else text."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
