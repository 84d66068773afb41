"""gpu.json: what one call of tests/gpu/run.sh measured on a device, rewritten whole after every part.

Checks say whether two ways to the same result agree, rounds what a shape costs. A row that could not be
measured says why; a row of a rehearsal is of a toy model on a CPU and says nothing about a device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from spectune.errors import NotComparable, UsageError
from spectune.records import SCHEMA_VERSION, SpecConfig
from spectune.store.files import naming_errors, replacing
from spectune.store.strict_json import dump_strict

KIND = "gpu"
GPU_FILE = "gpu.json"
PARTS = ("equality", "graphs", "mbu", "rounds", "surface", "crossover")
"""In the order in which they are measured."""
STATUSES = ("ok", "failed", "oom", "skipped")
WEIGHTS = ("real", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What was measured on. Bandwidths in bytes/s: of the data sheet (None if unknown), and read by sums
    over a buffer far larger than the caches."""

    name: str
    kind: str  # cuda or cpu
    driver: str | None
    cuda: str | None
    torch: str
    compute_capability: str | None
    memory_bytes: int | None
    sheet_bandwidth_bytes_per_s: float | None
    read_bandwidth_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """Two ways to one result. `num_different` things differ of `num_compared`; `num_near_ties` of those
    differ by less than rounding can turn over, the rest are wrong."""

    part: str
    model: str
    weights: str
    dtype: str
    what: str
    status: str
    num_compared: int = 0
    num_different: int = 0
    num_near_ties: int = 0
    max_difference: float | None = None
    tolerance: float | None = None
    reason: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a row the same row in a resumed run."""
        return (self.part, self.model, self.dtype, self.what)

    @property
    def is_sound(self) -> bool:
        """Nothing differs beyond rounding."""
        within = self.max_difference is None or self.max_difference <= (self.tolerance or 0.0)
        return self.status == "ok" and self.num_different == self.num_near_ties and within


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRow:
    """Rounds of one shape; all times are medians over `num_rounds`.

    `forced_length` is the acceptance length that was forced, None where the drafts were judged.
    `draft_s`, `verify_s` and `other_s` add up to a round but for the medians. `low_s` and `high_s` are
    the round's quartiles, `drift` its last third over its first. `kv_bytes` are read by one pass.
    `is_pass_alone`: target passes in a row without a wait between them, no rounds.
    """

    part: str
    model: str
    weights: str
    dtype: str
    kernels: str
    config: SpecConfig
    batch_size: int
    context_tokens: int
    status: str
    is_pass_alone: bool = False
    forced_length: float | None = None
    acceptance_length: float | None = None
    num_rounds: int = 0
    draft_s: float | None = None
    verify_s: float | None = None
    other_s: float | None = None
    round_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    drift: float | None = None
    tokens_per_s: float | None = None
    weight_bytes: int | None = None
    draft_weight_bytes: int | None = None
    kv_bytes: int | None = None
    peak_memory_bytes: int | None = None
    reason: str | None = None

    @property
    def shape(self) -> tuple[Any, ...]:
        """What plain decoding and its rivals share."""
        return (self.part, self.model, self.dtype, self.batch_size, self.context_tokens)

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a row the same row in a resumed run."""
        return (*self.shape, self.config.label, self.forced_length, self.is_pass_alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartState:
    """How far a part came; `reason` says what kept it from more."""

    num_done: int = 0
    num_planned: int = 0
    seconds: float = 0.0
    reason: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.num_planned > 0 and self.num_done >= self.num_planned


@dataclass(slots=True, kw_only=True)
class GpuDocument:
    """Everything of a call, and of the calls that it went on from."""

    is_rehearsal: bool
    device: Device
    provenance: Mapping[str, Any]
    parts: dict[str, PartState] = field(default_factory=dict)
    checks: dict[tuple[Any, ...], CheckRow] = field(default_factory=dict)
    rounds: dict[tuple[Any, ...], RoundRow] = field(default_factory=dict)

    def add(self, row: CheckRow | RoundRow) -> None:
        """Keep a row; it takes the place of an earlier one of its key."""
        if isinstance(row, CheckRow):
            self.checks[row.key] = row
        else:
            self.rounds[row.key] = row

    def has(self, key: tuple[Any, ...]) -> bool:
        """Whether a row is there that need not be measured again."""
        found = self.checks.get(key) or self.rounds.get(key)
        return found is not None and found.status != "failed"

    def go_on_from(self, earlier: GpuDocument) -> None:
        """Take over the rows of an earlier call; NotComparable if it ran on something else."""
        mine, other = _surroundings(self), _surroundings(earlier)
        for name, value in mine.items():
            if other[name] != value:
                raise NotComparable(
                    f"the earlier call has {name} {other[name]}, this one {value}",
                    hint="start over without --resume",
                )
        self.checks, self.rounds = dict(earlier.checks), dict(earlier.rounds)
        self.parts = dict(earlier.parts)

    def write(self, file: Path) -> None:
        """Write to a temporary file, then rename."""
        text = dump_strict(self.to_dict(), where=str(file)) + "\n"
        with naming_errors(file), replacing(file) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "is_rehearsal": self.is_rehearsal,
            "device": self.device,
            "provenance": self.provenance,
            "parts": self.parts,
            "checks": list(self.checks.values()),
            "rounds": [_row_dict(row) for row in self.rounds.values()],
        }


def is_gpu_file(file: Path) -> bool:
    """Whether a file says of itself that it is such a document."""
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        start = stream.read(4096)
    return b'"kind":"gpu"' in start.replace(b" ", b"")


def read_gpu(file: Path) -> GpuDocument:
    """Read and check gpu.json. Raises UsageError naming file and row."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}", hint="give the gpu.json of a call") from error
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise UsageError(f"{file} is no measurement of a GPU: its kind is not {KIND!r}")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"{file} has schema_version {data.get('schema_version')}, this spectune reads {SCHEMA_VERSION}",
            hint="read it with the spectune that wrote it",
        )
    try:
        document = GpuDocument(
            is_rehearsal=data["is_rehearsal"],
            device=_made(Device, data["device"]),
            provenance=data["provenance"],
            parts={name: _made(PartState, state) for name, state in data["parts"].items()},
        )
        rows = [("checks", row) for row in data["checks"]] + [("rounds", row) for row in data["rounds"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{file} is damaged: {error}") from error
    for number, (kind, values) in enumerate(rows, start=1):
        try:
            document.add(_row(kind, values))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{file}: row {number} ({kind}) cannot be used: {error}") from error
    return document


def _row(kind: str, values: dict[str, Any]) -> CheckRow | RoundRow:
    row: CheckRow | RoundRow
    if kind == "checks":
        row = _made(CheckRow, values)
    else:
        row = _made(RoundRow, {**values, "config": SpecConfig.from_dict(values["config"])})
    for name, known in (("part", PARTS), ("status", STATUSES), ("weights", WEIGHTS)):
        if getattr(row, name) not in known:
            raise ValueError(f"{name} {getattr(row, name)!r} is none of {', '.join(known)}")
    if row.status != "ok" and not row.reason:
        raise ValueError(f"status {row.status} has no reason")
    if isinstance(row, RoundRow) and row.status == "ok" and (row.round_s is None or row.round_s <= 0):
        raise ValueError(f"round_s {row.round_s} of a row that is ok")
    return row


def _made(cls: type[Any], values: Mapping[str, Any]) -> Any:
    known = {part.name for part in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise TypeError(f"unknown keys in {cls.__name__}: {', '.join(unknown)}")
    return cls(**values)


def _row_dict(row: RoundRow) -> dict[str, Any]:
    values = {part.name: getattr(row, part.name) for part in fields(row)}
    return {**values, "config": row.config.to_dict()}


def _surroundings(document: GpuDocument) -> dict[str, Any]:
    """What two calls must share; measured bandwidth varies from call to call."""
    device = replace(document.device, read_bandwidth_bytes_per_s=None)
    return {
        "rehearsal": document.is_rehearsal,
        "device": device,
        "source": document.provenance.get("source_digest"),
    }
