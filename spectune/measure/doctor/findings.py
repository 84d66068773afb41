"""The noun of the doctor: one finding, with what it would look like at run time and what cures it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """An error makes speculation useless or impossible; a warning costs something; a note is a fact."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found. `signature` is what a run would show, `fix` what to do; both None where all is well."""

    check: str
    severity: Severity
    text: str
    signature: str | None = None
    fix: str | None = None


NO_ACCEPTANCE = "no error at all: acceptance length stays at 1.0 and speculation is slower than none"


def error(check: str, text: str, *, signature: str, fix: str) -> Finding:
    return Finding(check=check, severity=Severity.ERROR, text=text, signature=signature, fix=fix)


def warning(check: str, text: str, *, signature: str, fix: str) -> Finding:
    return Finding(check=check, severity=Severity.WARNING, text=text, signature=signature, fix=fix)


def note(check: str, text: str, *, fix: str | None = None) -> Finding:
    return Finding(check=check, severity=Severity.NOTE, text=text, fix=fix)


def fine(check: str, text: str) -> Finding:
    return Finding(check=check, severity=Severity.OK, text=text)


def worst(findings: Iterable[Finding]) -> Severity:
    """The gravest severity among findings."""
    order = [Severity.ERROR, Severity.WARNING, Severity.NOTE, Severity.OK]
    return min((finding.severity for finding in findings), key=order.index, default=Severity.OK)
