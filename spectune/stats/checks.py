"""Refusals shared by the statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectune.errors import UsageError


def check_finite(values: Sequence[float]) -> None:
    if bad := [value for value in values if not math.isfinite(value)]:
        raise UsageError(f"log ratio {bad[0]} is not finite")


def check_open_unit(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise UsageError(f"{name} {value} is not between 0 and 1")


def check_pairs(sd_log: float, n: int) -> None:
    if n < 2:
        raise UsageError(f"power needs at least 2 pairs, got {n}")
    if not sd_log > 0:
        raise UsageError(f"standard deviation {sd_log} of the log ratios is not positive")
