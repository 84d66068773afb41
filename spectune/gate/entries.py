"""One declaration per entry of a gate file: its type, its limits and what it means.

Reading, the commented YAML and the published JSON schema are derived from it; unknown keys are errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from spectune.errors import UsageError

_TYPES: dict[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "string": str,
    "object": dict,
    "array": list,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How one entry is written and checked; `items` is the kind of an array's items."""

    kind: str
    help: str
    minimum: float | None = None
    maximum: float | None = None
    items: str | None = None
    is_nullable: bool = False

    def parse(self, value: Any, where: str) -> Any:
        if value is None and self.is_nullable:
            return None
        if not _is_of(value, self.kind):
            raise UsageError(f"{where}: {value!r} is not {_noun(self.kind)}")
        if self.kind == "array":
            assert self.items is not None
            for item in value:
                if not _is_of(item, self.items):
                    raise UsageError(f"{where}: {item!r} is not {_noun(self.items)}")
            return tuple(value)
        if self.minimum is not None and value < self.minimum:
            raise UsageError(f"{where}: {value:g} is below {self.minimum:g}")
        if self.maximum is not None and value > self.maximum:
            raise UsageError(f"{where}: {value:g} is above {self.maximum:g}")
        return float(value) if self.kind == "number" else value

    def schema(self) -> dict[str, Any]:
        node: dict[str, Any] = {"description": self.help, "type": self.kind}
        if self.items is not None:
            node["items"] = {"type": self.items}
        for name, value in (("minimum", self.minimum), ("maximum", self.maximum)):
            if value is not None:
                node[name] = value
        if self.is_nullable:
            node["type"] = [self.kind, "null"]
        return node


def entry(kind: str, help: str, default: Any = MISSING, **limits: Any) -> Any:
    """A dataclass field of a section; without a default the file must have it."""
    spec = Entry(kind=kind, help=help, **limits)
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"entry": spec})
    if default is MISSING:
        return field(metadata={"entry": spec})
    return field(default=default, metadata={"entry": spec})


def parse_section(section: type, values: Any, where: str) -> Any:
    """The section from a mapping of the file."""
    if not isinstance(values, Mapping):
        raise UsageError(f"{where}: expected entries, found {type(values).__name__}")
    known = {item.name: item for item in fields(section)}
    for name in values:
        if name not in known:
            raise UsageError(f"{where}: unknown entry {name}", hint=f"entries: {', '.join(known)}")
    for name, item in known.items():
        if name not in values and _is_required(item):
            raise UsageError(f"{where}: {name} is missing")
    parsed = {name: known[name].metadata["entry"].parse(value, f"{where}.{name}")
              for name, value in values.items()}  # fmt: skip
    return section(**parsed)


def section_lines(section: Any) -> list[str]:
    """Commented YAML of a section, each value in JSON form."""
    lines = []
    for item in fields(section):
        value = getattr(section, item.name)
        plain = list(value) if isinstance(value, tuple) else value
        lines.append(f"  # {item.metadata['entry'].help}")
        lines.append(f"  {item.name}: {json.dumps(_rounded(plain), ensure_ascii=False, allow_nan=False)}")
    return lines


def section_schema(section: type) -> dict[str, Any]:
    """JSON schema of a section."""
    required = [item.name for item in fields(section) if _is_required(item)]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {item.name: item.metadata["entry"].schema() for item in fields(section)},
        **({"required": required} if required else {}),
    }


def _rounded(value: Any) -> Any:
    """Seven digits are more than was measured; a file should be readable."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _is_of(value: Any, kind: str) -> bool:
    if kind != "boolean" and isinstance(value, bool):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, _TYPES[kind])


def _noun(kind: str) -> str:
    return {
        "boolean": "true or false",
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "object": "a mapping",
        "array": "a list",
    }[kind]
