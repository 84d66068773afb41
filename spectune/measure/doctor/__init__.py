"""PREFLIGHT: facts about machine, files and launch come in, findings with their cure go out.

It stands in measure/ because it is what is done before measuring and may look at everything below:
heads (`spectune.draft.inspect` reads their files and judges nothing), installed engines and target
configurations. All checks are pure functions over facts, so that each is tested without a model;
gathering the facts is `machine.py` and the command line. It launches nothing.
"""

from __future__ import annotations

from spectune.measure.doctor.findings import Finding, Severity, worst

__all__ = ["Finding", "Severity", "worst"]
