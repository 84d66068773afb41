"""A number with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A point estimate with a confidence interval; `low`/`high` are None when n is too small."""

    value: float
    low: float | None
    high: float | None
    n: int
    level: float = 0.95

    def __post_init__(self) -> None:
        for name in ("value", "low", "high"):
            number = getattr(self, name)
            if number is not None and not math.isfinite(number):
                raise ValueError(f"{name} of an interval is {number}")
