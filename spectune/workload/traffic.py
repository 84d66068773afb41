"""Traffic to simulate a policy on: a mix of categories at a rate, or a recorded trace."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spectune.errors import UsageError, WorkloadError
from spectune.records.traffic import TrafficRequest
from spectune.workload.arrivals import TIMESTAMP_KEYS, gamma_arrivals

OUTPUT_KEYS = ("output_tokens", "num_output_tokens", "output_length")
PROMPT_KEYS = ("input_tokens", "num_prompt_tokens", "input_length", "prompt_tokens")


def parse_mix(text: str) -> dict[str, float]:
    """`chat=.6,code=.4` as shares that add up to 1; UsageError naming the part that is wrong."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            share = float(value)
        except ValueError:
            share = math.nan
        if not name or not equals or not (math.isfinite(share) and share > 0):
            raise UsageError(
                f"--mix {text}: {part.strip()!r} is not NAME=SHARE", hint="--mix chat=.6,code=.4"
            )
        if name in shares:
            raise UsageError(f"--mix {text}: {name} is given twice")
        shares[name] = share
    total = math.fsum(shares.values())
    if abs(total - 1) > 0.01:
        raise UsageError(f"--mix {text}: the shares add up to {total:g}, not to 1")
    return {name: share / total for name, share in shares.items()}


def mixed_traffic(
    mix: Mapping[str, float],
    num_requests: int,
    *,
    request_rate: float,
    burstiness: float = 1.0,
    seed: int = 0,
) -> tuple[TrafficRequest, ...]:
    """Requests of a mix with gamma distributed gaps; lengths are left to whoever knows the categories."""
    arrivals = gamma_arrivals(num_requests, request_rate=request_rate, burstiness=burstiness, seed=seed)
    chance = random.Random(f"traffic|{seed}")
    names, weights = zip(*sorted(mix.items()), strict=True)
    kinds = chance.choices(names, weights=weights, k=num_requests)
    return tuple(
        TrafficRequest(arrival_s=at, category=kind) for at, kind in zip(arrivals, kinds, strict=True)
    )


def read_traffic(path: Path | str, *, category: str = "default") -> tuple[TrafficRequest, ...]:
    """A trace of JSON lines: a timestamp each, and where known category, output and prompt tokens.

    Moved to start at 0 and put in order. WorkloadError names file, line and value.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise WorkloadError(f"{path} holds no request")
    times = [_seconds(path, number, row) for number, row in rows]
    first = min(times)
    found = [
        TrafficRequest(
            arrival_s=at - first,
            category=str(row.get("category", category)),
            num_output_tokens=_tokens(path, number, row, OUTPUT_KEYS),
            num_prompt_tokens=_tokens(path, number, row, PROMPT_KEYS),
        )
        for at, (number, row) in zip(times, rows, strict=True)
    ]
    return tuple(sorted(found, key=lambda request: request.arrival_s))


def _row(path: Path, number: int, line: str) -> tuple[int, dict[str, Any]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{path} line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise WorkloadError(f"{path} line {number} is not an object")
    return number, row


def _seconds(path: Path, number: int, row: Mapping[str, Any]) -> float:
    key = next((key for key in TIMESTAMP_KEYS if key in row), None)
    if key is None:
        raise WorkloadError(
            f"{path} line {number} has no timestamp", hint=f"give one of {', '.join(TIMESTAMP_KEYS)}"
        )
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WorkloadError(f"{path} line {number}: {key} is {value!r}, not a number")
    return value / 1e3 if key.endswith("_ms") else float(value)


def _tokens(path: Path, number: int, row: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    key = next((key for key in keys if row.get(key) is not None), None)
    if key is None:
        return None
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WorkloadError(f"{path} line {number}: {key} is {value!r}, not a number of tokens")
    return value
