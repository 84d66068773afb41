"""A gate's report for machines and pages: JSON, JUnit XML, Markdown. The console is cli/'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from spectune.gate.verdicts import Check, GateReport, Outcome

SIMULATED = "SIMULATED: declared costs and acceptance, nothing was measured"

_MARKS = {
    Outcome.PASSED: "✅",
    Outcome.REGRESSION: "❌",
    Outcome.SUSPICIOUS: "❌",
    Outcome.SKIPPED: "➖",
}


def report_document(report: GateReport) -> dict[str, Any]:
    """Everything as plain JSON values."""
    return {
        "schema_version": 1,
        "kind": "spectune-gate-report",
        **{name: value for name, value in asdict(report).items() if name not in ("checks", "change")},
        "outcome": str(report.outcome),
        "exit_code": report.exit_code,
        "checks": [{**asdict(check), "outcome": str(check.outcome)} for check in report.checks],
        "change": dict(report.change),
    }


def junit_text(report: GateReport) -> str:
    """JUnit XML: a test case a check. Worse is a failure, undecided an error, not asked is skipped."""
    counts = {"failures": 0, "errors": 0, "skipped": 0}
    suite = ElementTree.Element("testsuite", name=f"spectune gate {report.gate}")
    for check in report.checks:
        case = ElementTree.SubElement(suite, "testcase", classname=f"spectune.{report.gate}", name=check.name)
        tag = _junit_tag(check)
        if tag is not None:
            counts[{"failure": "failures", "error": "errors", "skipped": "skipped"}[tag]] += 1
            node = ElementTree.SubElement(case, tag, message=_clean(check.text))
            if tag != "skipped":
                node.set("type", str(check.outcome))
                node.text = _clean("\n".join(filter(None, (check.text, check.hint))))
        ElementTree.SubElement(case, "system-out").text = _clean(check.text)
    suite.set("tests", str(len(report.checks)))
    for name, count in counts.items():
        suite.set(name, str(count))
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


def markdown_text(report: GateReport) -> str:
    """The summary of a CI step."""
    lines = [f"### Gate `{report.gate}`: {report.outcome}", ""]
    if report.is_simulated:
        lines += [f"**{SIMULATED}**", ""]
    lines += ["| | check | outcome | what was found |", "| --- | --- | --- | --- |"]
    for check in report.checks:
        mark = _MARKS.get(check.outcome, "⚠️")
        lines.append(f"| {mark} | {check.name} | {check.outcome} | {_cell(check.text)} |")
    lines.append("")
    lines += [f"- {line}" for line in summary_lines(report)]
    lines += [f"- hint: {check.hint}" for check in report.checks if check.hint]
    return "\n".join(lines).rstrip() + "\n"


def summary_lines(report: GateReport) -> list[str]:
    """What the checks together say: how it was measured, what could be seen, where a change comes from."""
    lines = []
    if report.num_starts:
        again = ", measured again before failing" if report.was_repeated else ""
        lines.append(f"{report.mode}, {report.num_starts} starts{again}")
    if report.detectable_slowdown is not None:
        lines.append(f"smallest slowdown that this check would have caught: {report.detectable_slowdown:.1%}")
    if report.culprit is not None:
        shares = ", ".join(f"{part} {gain:+.2%}" for part, gain in report.change)
        lines.append(f"the change comes from {report.culprit} (log gain by part: {shares})")
    return [*lines, *report.notes]


def rows(report: GateReport) -> Sequence[tuple[str, str, str]]:
    """(check, outcome, text) for a table."""
    return [(check.name, str(check.outcome), check.text) for check in report.checks]


def _junit_tag(check: Check) -> str | None:
    if check.outcome is Outcome.PASSED:
        return None
    if check.is_bad:
        return "failure"
    return "skipped" if check.outcome is Outcome.SKIPPED else "error"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _clean(text: str) -> str:
    """XML 1.0 holds no control characters but tab and line ends."""
    return "".join(c if c in "\t\n" or ord(c) >= 0x20 else "\N{REPLACEMENT CHARACTER}" for c in text)
