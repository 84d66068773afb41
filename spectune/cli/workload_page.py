"""The profile of a prompt file as one self-contained HTML page."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spectune.workload.profile import Profile

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } .label { color: #a30; font-weight: bold }
"""
_ROW, _WIDTH, _LEFT = 22, 520, 110


def profile_page(found: Profile) -> str:
    """Counts, a table of categories and a histogram of lengths."""
    label = "SYNTHETIC: " if found.is_synthetic else ""
    title = escape(f"{label}{found.name}")
    dropped = "".join(
        f"<li>{count} left out: {escape(reason)}</li>"
        for reason, count in sorted(found.num_dropped_by_reason.items())
    )
    loops = (
        f"<li>{found.num_loops} of {found.num_replies} recorded answers loop</li>"
        if found.num_replies
        else ""
    )
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{len(lengths)}</td><td>{escape(found.text_of(name))}</td></tr>"
        for name, lengths in found.lengths.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>
<h1>{'<span class="label">SYNTHETIC</span> ' if found.is_synthetic else ""}{escape(found.name)}</h1>
<p>{found.num_available} of {found.num_rows} rows can be asked, {found.num_multi_turn} with several turns.</p>
<ul>{dropped}{loops}</ul>
<table><tr><th>category</th><th>prompts</th><th>{found.unit}: median, p90, largest</th></tr>{rows}</table>
<h2>Lengths in {found.unit}</h2>
{_histogram(found)}
</body></html>
"""


def _histogram(found: Profile) -> str:
    bins = found.bins()
    most = max((count for _, _, count in bins), default=1)
    bars = "".join(
        f'<text x="{_LEFT - 8}" y="{i * _ROW + 15}" text-anchor="end">{low}-{high}</text>'
        f'<rect x="{_LEFT}" y="{i * _ROW + 2}" width="{count / most * _WIDTH:.1f}" height="{_ROW - 5}" fill="#37a"/>'
        f'<text x="{_LEFT + count / most * _WIDTH + 6:.1f}" y="{i * _ROW + 15}">{count}</text>'
        for i, (low, high, count) in enumerate(bins)
    )
    height = len(bins) * _ROW
    return (
        f'<svg role="img" aria-label="histogram of lengths" width="{_LEFT + _WIDTH + 60}" height="{height}" '
        f'font-size="12">{bars}</svg>'
    )
