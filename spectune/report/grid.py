"""One HTML table: columns, cells that may be missing, and a note under it for every reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spectune.report.text import Html, Missing, Value, dash, escape

LONG_TEXT = 36
_TAG = re.compile(r"<[^>]*>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column's header, its unit in small print, and whether it holds numbers."""

    header: str
    unit: str = ""
    is_number: bool = True


def words(header: str) -> Column:
    """A column of text."""
    return Column(header=header, is_number=False)


def numbers(header: str, unit: str = "") -> Column:
    """A column of numbers, aligned right."""
    return Column(header=header, unit=unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Cells of one row; `kind` is a CSS class: base, chosen, total. A new `group` gets a line above."""

    cells: Sequence[Value]
    kind: str = ""
    group: str = ""


def table(columns: Sequence[Column], rows: Sequence[Row], *, caption: str = "", empty: str = "") -> Html:
    """A scrolling table. A missing value is an em dash with a letter; the reasons stand below."""
    if not rows:
        return Html(f'<p class="empty">{escape(empty or "Nothing to show.")}</p>')
    reasons: list[str] = []
    starts = [index > 0 and row.group != rows[index - 1].group for index, row in enumerate(rows)]
    body = "".join(_row(columns, row, reasons, start) for row, start in zip(rows, starts, strict=True))
    head = "".join(
        f'<th scope="col"{_numeric(column)}>{escape(column.header)}'
        + (f'<span class="unit">{escape(column.unit)}</span>' if column.unit else "")
        + "</th>"
        for column in columns
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    notes = "".join(
        f"<li><sup>{_letter(index)}</sup> {escape(reason)}</li>" for index, reason in enumerate(reasons)
    )
    below = f'<ul class="notes" aria-label="why a value is absent">{notes}</ul>' if notes else ""
    return Html(
        f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{below}"
    )


def _row(columns: Sequence[Column], row: Row, reasons: list[str], starts_group: bool) -> str:
    if len(columns) != len(row.cells):
        raise ValueError(f"{len(columns)} columns but {len(row.cells)} cells: {row.cells}")
    cells = []
    for column, cell in zip(columns, row.cells, strict=True):
        if isinstance(cell, Missing):
            if cell.reason not in reasons:
                reasons.append(cell.reason)
            text = f"{dash(cell.reason)}<sup>{_letter(reasons.index(cell.reason))}</sup>"
        else:
            text = escape(cell)
        cells.append(f"<td{_numeric(column) or _long(text)}>{text}</td>")
    kinds = f"{row.kind} first".strip() if starts_group else row.kind
    mark = f' class="{escape(kinds)}"' if kinds else ""
    return f"<tr{mark}>{''.join(cells)}</tr>"


def _numeric(column: Column) -> str:
    return ' class="num"' if column.is_number else ""


def _long(markup: str) -> str:
    """A class that keeps prose from being squeezed to one word a line."""
    return ' class="long"' if len(_TAG.sub("", markup)) > LONG_TEXT else ""


def _letter(index: int) -> str:
    """a ... z, then aa, ab ..."""
    head, tail = divmod(index, 26)
    return (chr(96 + head) if head else "") + chr(97 + tail)


def chip(verdict: str) -> Html:
    """A coloured word: on, off, no data, or a status."""
    kinds = {"on": "on", "ok": "on", "off": "off", "no data": "none-yet"}
    return Html(f'<span class="chip {kinds.get(verdict, "bad")}">{escape(verdict)}</span>')


def share_bar(fraction: float, text: str) -> Html:
    """A fraction 0..1 as a small bar with its number."""
    width = min(max(fraction, 0.0), 1.0) * 100
    return Html(f'<span class="bar"><span style="width:{width:.1f}%"></span></span>{escape(text)}')
