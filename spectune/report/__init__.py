"""TELL: a run summary becomes one self-contained HTML page; reads policy/ records, measures nothing."""

from __future__ import annotations

from spectune.report.html import render_report, write_report

__all__ = ["render_report", "write_report"]
