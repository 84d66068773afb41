"""surface.json of a profile: what a round costs over batch, tokens per sequence and context.

A surface is measured with forced acceptance, so it knows nothing of what a draft is worth. For a batch
size and a part of the round it holds lines `T = a[bucket] + g·tokens + k·kv_tokens`; what they are fitted
to, and how far they are off on what they have not seen, stands beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectune.errors import StoreError
from spectune.records import SpecConfig
from spectune.store.files import naming_errors, replacing
from spectune.store.strict_json import dump_strict

SURFACE_VERSION = 1
SURFACE_FILE = "time-surface.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SurfacePoint:
    """One shape that was timed: medians of its rounds, all at the full batch.

    `kv_tokens` is the mean number of cached tokens of the whole batch, `commit_tokens` the mean number
    of tokens that a sequence keeps of a round (what the draft head reads after it). `half_width` is the
    95% half width of the mean round over the mean; None for a single round.
    """

    batch_size: int
    config: SpecConfig
    kv_tokens: float
    commit_tokens: float
    num_rounds: int
    draft_s: float
    verify_s: float
    other_s: float
    half_width: float | None = None

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`T = base_s[tokens] + kv_s · kv_tokens + commit_s · commit_tokens` of one part at one batch size.

    `family` says for whom: "verify" for the target's pass of any method, "eagle3 k=4" for a draft of that
    breadth. `base_s` holds the seconds at the token counts that were timed; between two of them the line
    is straight (that is g), but never across a bucket edge. Tokens are those of one sequence: verified
    ones for verify and other, draft depth for draft.
    """

    part: str  # draft, verify, other
    family: str
    batch_size: int
    base_s: Mapping[int, float]
    buckets: Mapping[int, int]  # token count -> number of its bucket
    kv_s: Mapping[int, float] = field(default_factory=dict)  # bucket -> seconds per cached token
    commit_s: float = 0.0
    kv_range: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Relative errors of whole rounds of shapes that were left out of the fit."""

    num_points: int
    median: float | None
    p95: float | None
    rms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSurface:
    """Everything that a profile learned. `drift` is plain rounds late over early - 1, at worst."""

    fingerprint: Mapping[str, Any]
    provenance: Mapping[str, Any]
    source: str  # "rounds" (timed one by one) or "steps" (step time at a load)
    points: tuple[SurfacePoint, ...]
    lines: tuple[Line, ...]
    held_out: HeldOut
    drift: float | None
    duration_s: float

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({point.batch_size for point in self.points}))

    @property
    def time_error(self) -> float:
        """Standard error of the logarithm of a predicted round."""
        return 0.03 if self.held_out.rms is None else max(self.held_out.rms, 0.005)


def surface_document(surface: TimeSurface) -> dict[str, Any]:
    """What the file holds."""
    return {
        "surface_version": SURFACE_VERSION,
        "fingerprint": dict(surface.fingerprint),
        "provenance": dict(surface.provenance),
        "source": surface.source,
        "points": [_point_dict(point) for point in surface.points],
        "lines": [_line_dict(line) for line in surface.lines],
        "held_out": surface.held_out,
        "drift": surface.drift,
        "duration_s": surface.duration_s,
    }


def write_surface(file: Path, surface: TimeSurface) -> None:
    """Write to a temporary file, then rename. Raises StoreError."""
    text = dump_strict(surface_document(surface), indent=1, where=str(file)) + "\n"
    with naming_errors(file), replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_surface(path: Path) -> TimeSurface:
    """Read a surface file, or the one in a directory; StoreError if missing, damaged or of another version."""
    file = path / SURFACE_FILE if path.is_dir() else path
    if not file.is_file():
        raise StoreError(
            f"{file}: no time surface is there", hint="make one: spectune profile --output-dir DIR"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["surface_version"] != SURFACE_VERSION:
            raise StoreError(
                f"{file} is of surface version {data['surface_version']}, this spectune reads "
                f"{SURFACE_VERSION}",
                hint="profile again",
            )
        return TimeSurface(
            fingerprint=data["fingerprint"],
            provenance=data["provenance"],
            source=data["source"],
            points=tuple(_point(row) for row in data["points"]),
            lines=tuple(_line(row) for row in data["lines"]),
            held_out=HeldOut(**data["held_out"]),
            drift=data["drift"],
            duration_s=data["duration_s"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{file} is damaged: {error}", hint="profile again") from error


def _point_dict(point: SurfacePoint) -> dict[str, Any]:
    names = SurfacePoint.__dataclass_fields__
    return {name: getattr(point, name) for name in names if name != "config"} | {
        "config": point.config.to_dict()
    }


def _point(row: dict[str, Any]) -> SurfacePoint:
    return SurfacePoint(**{**row, "config": SpecConfig.from_dict(row["config"])})


def _line_dict(line: Line) -> dict[str, Any]:
    """JSON has neither integer keys nor infinity."""
    low, high = line.kv_range
    return {name: getattr(line, name) for name in Line.__dataclass_fields__} | {
        "kv_range": [low, None if math.isinf(high) else high]
    }


def _line(row: dict[str, Any]) -> Line:
    low, high = row["kv_range"]
    numbered = {name: {int(k): v for k, v in row[name].items()} for name in ("base_s", "buckets", "kv_s")}
    return Line(**{**row, **numbered, "kv_range": (low, math.inf if high is None else high)})
