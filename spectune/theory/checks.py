"""Refusals shared by the formulas: values outside a formula's domain are usage errors, not numbers."""

from __future__ import annotations

import math

from spectune.errors import UsageError


def check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UsageError(f"{name} {value:g} is outside 0..1")


def check_not_negative(name: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise UsageError(f"{name} {value:g} is negative or not finite")


def check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{name} {value:g} is not positive and finite")


def check_tau(tau: float) -> None:
    if not (tau >= 1 and math.isfinite(tau)):
        raise UsageError(
            f"acceptance length {tau:g} is below 1",
            hint="acceptance length is 1 + accepted / steps, the target's own token included",
        )


def check_count(name: str, value: int) -> None:
    if value < 0:
        raise UsageError(f"{name} {value} is negative")
