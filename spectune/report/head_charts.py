"""Charts of judged draft heads: acceptance draft by draft, by category, and what confidence is worth."""

from __future__ import annotations

from collections.abc import Sequence

from spectune.records import HeadReport
from spectune.report.svg import (
    INK,
    LABEL_LIMIT,
    Styles,
    arm_styles,
    chart_html,
    chart_style,
    new_figure,
)
from spectune.report.text import Html, one_line

_DASHED = (0, (5, 3))


def head_styles(reports: Sequence[HeadReport]) -> Styles:
    """One style a head, the same in every chart of the page."""
    return arm_styles(report.name for report in reports)


def position_chart(reports: Sequence[HeadReport], styles: Styles) -> Html | None:
    """Share of drafts that are right given that those before were, over the place in the chain."""
    lines = {
        report.name: [
            (place, value)
            for place, value in enumerate(report.overall.conditional, start=1)
            if value is not None
        ]
        for report in reports
    }
    if not any(lines.values()):
        return None
    figure = new_figure(3.0)
    with chart_style():
        axes = figure.add_subplot()
        for name, points in lines.items():
            style = styles[name]
            axes.plot(
                [place for place, _ in points], [value for _, value in points], color=style.colour,
                marker=style.marker, linestyle=style.dash, label=one_line(name, LABEL_LIMIT),
            )  # fmt: skip
        last = max(place for points in lines.values() for place, _ in points)
        axes.set_xticks(range(1, last + 1))
        axes.set_xlabel("draft")
        axes.set_ylim(0.0, 1.0)
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:.0%}")
        axes.set_ylabel("accepted given the one before")
        axes.grid(axis="y")
        axes.legend(loc="upper right")
    caption = (
        "A head trained to read its own states loses little from draft to draft; one that was not falls off "
        "after the first."
    )
    return chart_html(figure, "head-positions", caption, is_simulated=False)


def category_chart(reports: Sequence[HeadReport], styles: Styles) -> Html | None:
    """Acceptance length of every head in every category, with intervals over texts."""
    names = list(dict.fromkeys(name for report in reports for name in report.by_category))
    if not names:
        return None
    figure = new_figure(1.0 + (0.22 + 0.16 * len(reports)) * len(names))
    with chart_style():
        axes = figure.add_subplot()
        for index, report in enumerate(reports):
            style = styles[report.name]
            shift = (index - (len(reports) - 1) / 2) * 0.7 / len(reports)
            for place, name in enumerate(names):
                found = report.by_category.get(name)
                length = None if found is None else found.acceptance_length
                if length is None:
                    continue
                if length.low is not None and length.high is not None:
                    axes.plot([length.low, length.high], [place + shift] * 2, color=style.colour)
                axes.plot([length.value], [place + shift], color=style.colour, marker=style.marker)
            axes.plot(
                [], [], color=style.colour, marker=style.marker, label=one_line(report.name, LABEL_LIMIT)
            )
        axes.axvline(1.0, color=INK, linewidth=0.9, linestyle=_DASHED)
        axes.set_yticks(range(len(names)), [one_line(name, LABEL_LIMIT) for name in names])
        axes.invert_yaxis()
        axes.set_xlabel("acceptance length, 95% interval over texts")
        axes.grid(axis="x")
        axes.legend(loc="best")
    caption = "Tokens a round and sequence by category. Dashed: no draft is ever right."
    return chart_html(figure, "head-categories", caption, is_simulated=False)


def reliability_chart(reports: Sequence[HeadReport], styles: Styles) -> Html | None:
    """Share of right drafts over the head's own confidence, a point a tenth, its area the drafts in it."""
    if not any(report.calibration for report in reports):
        return None
    figure = new_figure(4.2, width_in=6.2)
    with chart_style():
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.9, linestyle=_DASHED)
        for report in reports:
            style = styles[report.name]
            cells = report.calibration
            total = sum(cell.num_drafts for cell in cells)
            axes.plot(
                [cell.confidence for cell in cells], [cell.accepted for cell in cells], color=style.colour,
                linestyle=style.dash, linewidth=1.2,
            )  # fmt: skip
            axes.scatter(
                [cell.confidence for cell in cells], [cell.accepted for cell in cells],
                s=[14 + 260 * cell.num_drafts / total for cell in cells], color=style.colour,
                marker=style.marker, label=one_line(report.name, LABEL_LIMIT), alpha=0.75,
            )  # fmt: skip
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, place: f"{value:.0%}")
        axes.set_xlim(0.0, 1.0)
        axes.set_ylim(0.0, 1.0)
        axes.set_xlabel("the head's probability of its draft")
        axes.set_ylabel("drafts that were right")
        axes.grid()
        axes.legend(loc="upper left")
    caption = (
        "On the dashed line confidence is what it says. A dynamic tree ranks its branches by confidence, so a "
        "head far from the line spends its nodes badly."
    )
    return chart_html(figure, "head-reliability", caption, is_simulated=False)
