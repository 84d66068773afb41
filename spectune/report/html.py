"""A run summary becomes one HTML page that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spectune.policy.comparison import RunSummary
from spectune.policy.synthetic import is_synthetic
from spectune.report import sections, served
from spectune.report.page import page
from spectune.report.svg import arm_styles
from spectune.report.tables import each_arm
from spectune.report.text import Html, escape
from spectune.report.tuning_section import NAV as TUNING_NAV
from spectune.report.tuning_section import tuning_section
from spectune.store.files import replacing

_NAV = (
    ("what-to-do", "What to do"),
    ("decisions", "Decision"),
    ("cautions", "Cautions"),
    ("speedup", "Speedup"),
    ("acceptance", "Acceptance"),
    ("prediction", "Prediction"),
    ("rounds", "Round time"),
    ("break-even", "Break-even"),
    ("categories", "Categories"),
    ("lengths", "Lengths"),
    ("latency", "Latency"),
    ("policy", "Policy"),
    ("failures", "Failed"),
    ("provenance", "Provenance"),
)


def render_report(summary: RunSummary, tuning: Mapping[str, Any] | None = None) -> str:
    """The whole report as text of one HTML document: inline style, script and SVG, nothing loaded.

    `tuning` is what tuning.json of a tuned run holds.
    """
    arms = [*each_arm(summary.cells), *each_arm(summary.categories)]
    styles = arm_styles(arm.config.label for _, arm in arms if not arm.config.is_off)
    failed = sections.failures(summary)
    nothing = summary.outcome == "no data"  # then the failures are what the reader came for
    parts = (
        *([failed] if nothing else []),
        sections.what_to_do(summary),
        sections.decisions(summary),
        sections.cautions(summary),
        sections.advice(summary),
        *([] if tuning is None else [tuning_section(tuning, is_simulated=summary.is_simulated)]),
        sections.speedup_section(summary, styles),
        sections.acceptance(summary, styles),
        sections.prediction(summary, styles),
        sections.rounds(summary),
        sections.break_even(summary),
        sections.floor(summary),
        sections.categories(summary, styles),
        served.lengths(summary),
        sections.latency(summary),
        *_of_servers(summary),
        sections.policy(summary),
        *([] if nothing else [failed]),
        sections.definitions(summary),
        sections.provenance(summary),
    )
    nav = _NAV if tuning is None else (*_NAV[:3], TUNING_NAV, *_NAV[3:])
    body = (
        f"{_banner(summary)}{_header(summary, nav)}<main>{sections.verdict(summary)}{''.join(parts)}"
        f"<footer>spectune report, schema version {summary.schema_version}. {DASH_NOTE}</footer></main>"
    )
    mark = "SIMULATED: " if summary.is_simulated else ""
    mark += "SYNTHETIC PROMPTS: " if is_synthetic(summary.workload) else ""
    return page(
        title=f"{mark}{summary.run_name}: {summary.outcome}", body=body, is_simulated=summary.is_simulated
    )


def _of_servers(summary: RunSummary) -> list[Html]:
    """What a run at servers tells beyond the others."""
    if not served.has_servers(summary):
        return []
    return [served.rates(summary), served.production(summary), served.client(summary)]


DASH_NOTE = "An em dash means that a value was not observed; its letter points to the reason."


def write_report(summary: RunSummary, path: Path, tuning: Mapping[str, Any] | None = None) -> None:
    """Render first, then write beside `path` and rename, so an old report is never half replaced."""
    write_page(render_report(summary, tuning), path)


def write_page(text: str, path: Path) -> None:
    """A document beside `path`, then renamed. OSError where that is impossible."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _banner(summary: RunSummary) -> Html:
    if not summary.is_simulated:
        return Html("")
    return Html(
        '<div class="sim-banner" role="alert">SIMULATED DATA: no engine and no model was run'
        "<span>All numbers come from declared costs. Do not publish them or deploy by them.</span></div>"
    )


def _header(summary: RunSummary, nav: Sequence[tuple[str, str]]) -> Html:
    facts = [str(summary.workload["name"])] if summary.workload.get("name") else []
    if summary.fingerprint:
        mark = summary.fingerprint
        facts = [mark.target, mark.backend, mark.device, mark.dtype, *facts]
    about = escape(" \N{MIDDLE DOT} ".join(dict.fromkeys(facts)))
    links = "".join(f'<a href="#{name}">{label}</a>' for name, label in nav)
    return Html(
        f'<header class="top"><h1>spectune report: {escape(summary.run_name)}</h1>'
        f'<span class="meta">{about}</span></header>'
        f'<nav aria-label="sections"><div>{links}</div></nav>'
    )
