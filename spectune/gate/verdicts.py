"""What a check found: one outcome a check, one exit code a gate."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Outcome(enum.StrEnum):
    """How one check ended. Only `regression` and `suspicious` say that something is worse."""

    PASSED = "passed"
    REGRESSION = "regression"
    SUSPICIOUS = "suspicious"  # better than it can be: loops, or a broken verification
    DRIFT = "drift"  # the run was not steady from its first to its last third
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not comparable"
    MISSING = "metric missing"
    SKIPPED = "not asked"


_CODES = (
    (Outcome.REGRESSION, 3),
    (Outcome.SUSPICIOUS, 3),
    (Outcome.NOT_COMPARABLE, 5),
    (Outcome.MISSING, 6),
    (Outcome.DRIFT, 4),
    (Outcome.INCONCLUSIVE, 4),
)
"""The first that some check has gives the exit code; 0 if none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question of a gate and its answer.

    `value`, `reference` and `limit` are in `unit`; `value` passes on the limit itself (>= or <=, as
    `limit_is` says). `text` is the answer in one sentence with value, limit, tolerance and n in it.
    """

    name: str
    outcome: Outcome
    text: str
    value: float | None = None
    reference: float | None = None
    limit: float | None = None
    limit_is: str | None = None  # "at least", "at most", "within"
    tolerance: float | None = None
    interval: tuple[float, float] | None = None
    p_value: float | None = None
    n: int = 0
    unit: str = ""
    hint: str | None = None

    @property
    def is_bad(self) -> bool:
        return self.outcome in (Outcome.REGRESSION, Outcome.SUSPICIOUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """Everything that a check of a gate says.

    `change` is (part, log gain) of head against base, the part that lost most is `culprit`;
    `detectable_slowdown` is the smallest slowdown that this check would have caught.
    """

    gate: str
    mode: str
    checks: tuple[Check, ...]
    is_simulated: bool = False
    num_starts: int = 0
    was_repeated: bool = False
    detectable_slowdown: float | None = None
    change: tuple[tuple[str, float], ...] = ()
    culprit: str | None = None
    notes: tuple[str, ...] = ()
    subject: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        return worst([check.outcome for check in self.checks])

    @property
    def exit_code(self) -> int:
        return exit_code(self.outcome)


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome that decides the exit code; a gate of nothing has nothing to say."""
    for outcome, _ in _CODES:
        if outcome in outcomes:
            return outcome
    return Outcome.PASSED if Outcome.PASSED in outcomes else Outcome.MISSING


def exit_code(outcome: Outcome) -> int:
    """0 passed, 3 worse, 4 inconclusive or drift, 5 not comparable, 6 metric missing."""
    return dict(_CODES).get(outcome, 0)
