"""The charts of a report, each from the cells of a run summary; None where there is nothing to draw."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from spectune.policy.comparison import CellComparison
from spectune.records import Interval
from spectune.report.svg import (
    GOOD,
    INK,
    LABEL_LIMIT,
    MUTED,
    ArmStyle,
    Styles,
    chart_html,
    chart_style,
    new_figure,
    spread,
)
from spectune.report.text import TIMES, Html, is_number, one_line


def speedup_charts(cells: Sequence[CellComparison], styles: Styles, *, is_simulated: bool) -> list[Html]:
    """Speedup against batch size with intervals and the line of plain decoding, one chart a context."""

    def key(item: CellComparison) -> tuple[int, float]:
        return (item.cell.context_tokens, item.cell.temperature)

    charts = []
    for index, ((context, temperature), group) in enumerate(groupby(sorted(cells, key=key), key)):
        series = _speedup_series(list(group))
        if series:
            figure = _draw_speedup(series, styles)
            caption = (
                f"Speedup over plain decoding against batch size (context {context} tokens, "
                f"temperature {temperature:g}). Bars: confidence interval. Above 1.0 is faster."
            )
            charts.append(chart_html(figure, f"speedup-{index}", caption, is_simulated=is_simulated))
    return charts


def _speedup_series(cells: Sequence[CellComparison]) -> dict[str, list[tuple[int, Interval]]]:
    series: dict[str, list[tuple[int, Interval]]] = {}
    for item in sorted(cells, key=lambda item: item.cell.batch_size):
        for arm in item.arms:
            if not arm.config.is_off and arm.speedup is not None:
                series.setdefault(arm.config.label, []).append((item.cell.batch_size, arm.speedup))
    return series


def _draw_speedup(series: dict[str, list[tuple[int, Interval]]], styles: Styles) -> Any:
    batches = sorted({batch for points in series.values() for batch, _ in points})
    bounds = [
        number
        for points in series.values()
        for _, interval in points
        for number in (interval.value, interval.low, interval.high)
        if number is not None
    ] + [1.0]
    pad = max(0.08 * (max(bounds) - min(bounds)), 0.04)
    low, high = min(bounds) - pad, max(bounds) + pad
    figure = new_figure(4.3)
    with chart_style():
        axes = figure.add_subplot()
        axes.set_ylim(low, high)
        axes.set_xlim(-0.5, len(batches) - 0.5 + 0.9)
        axes.axhspan(1.0, high, color=GOOD, alpha=0.05, linewidth=0)
        axes.axhline(1.0, color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
        axes.text(
            1.0, 1.0, "plain decoding", transform=axes.get_yaxis_transform(), ha="right", va="bottom",
            fontsize=8.5, color=MUTED,
        )  # fmt: skip
        axes.grid(axis="y")
        ends = []
        for index, (label, points) in enumerate(series.items()):
            shift = (index - (len(series) - 1) / 2) * min(0.07, 0.5 / len(series))
            at = [batches.index(batch) + shift for batch, _ in points]
            _error_bars(axes, at, [interval for _, interval in points], styles[label])
            ends.append((label, at[-1], points[-1][1].value))
        heights = spread([value for _, _, value in ends], (high - low) * 0.06)
        for (label, x, value), height in zip(ends, heights, strict=True):
            axes.annotate(
                f"{one_line(label, LABEL_LIMIT)}  {value:.2f}{TIMES}",
                xy=(x, value),
                xytext=(batches.index(batches[-1]) + 0.32, height),
                va="center",
                fontsize=9,
                color=styles[label].text_colour,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
                arrowprops={"arrowstyle": "-", "color": styles[label].colour, "alpha": 0.45, "lw": 0.8},
            )
        axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axes.set_xlabel("batch size (sequences decoded together)")
        axes.set_ylabel(f"speedup, {TIMES} plain")
    return figure


def _error_bars(axes: Any, at: list[float], intervals: list[Interval], style: ArmStyle) -> None:
    """A line through the values with interval bars; a single value is one marker without a line."""
    values = [interval.value for interval in intervals]
    below = [0.0 if item.low is None else item.value - item.low for item in intervals]
    above = [0.0 if item.high is None else item.high - item.value for item in intervals]
    axes.errorbar(
        at,
        values,
        yerr=[[max(0.0, part) for part in below], [max(0.0, part) for part in above]],
        color=style.colour,
        marker=style.marker,
        linestyle=style.dash if len(values) > 1 else "none",
        markeredgecolor="white",
        markeredgewidth=0.7,
        elinewidth=1.4,
        capsize=3,
    )


def acceptance_chart(item: CellComparison, styles: Styles, name: str, *, is_simulated: bool) -> Html | None:
    """Survival and conditional acceptance by position in the draft, for the arms of one cell."""
    arms = [
        (arm.config.label, arm.acceptance)
        for arm in item.arms
        if not arm.config.is_off and arm.acceptance is not None and arm.acceptance.survival
    ]
    if not arms:
        return None
    depth = max(len(acceptance.survival) for _, acceptance in arms)
    figure = new_figure(3.5)
    with chart_style():
        survival, conditional = figure.subplots(1, 2, sharey=True)
        for axes, title in ((survival, "accepted this far"), (conditional, "accepted, given the one before")):
            axes.set_title(title)
            axes.set_ylim(-0.03, 1.05)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])
            axes.set_xlim(0.6, depth + 0.4)
            axes.set_xticks(range(1, depth + 1))
            axes.set_xlabel("position in the draft")
            axes.grid(axis="y")
        for label, acceptance in arms:
            _positions(survival, acceptance.survival, styles[label], one_line(label, LABEL_LIMIT))
            _positions(conditional, acceptance.conditional_acceptance, styles[label], None)
        figure.legend(loc="outside lower center", ncols=min(4, len(arms)), fontsize=9)
    caption = f"Acceptance by position in the draft at {item.cell.label}."
    return chart_html(figure, name, caption, is_simulated=is_simulated)


def _positions(axes: Any, shares: Sequence[float | None], style: ArmStyle, label: str | None) -> None:
    points = [(index + 1, share) for index, share in enumerate(shares) if is_number(share)]
    if points:
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=style.colour,
            marker=style.marker,
            linestyle=style.dash if len(points) > 1 else "none",
            markeredgecolor="white",
            markeredgewidth=0.7,
            label=label,
        )


def prediction_chart(cells: Sequence[CellComparison], styles: Styles, *, is_simulated: bool) -> Html | None:
    """Predicted against measured time per output token with the line of equality, a panel a cell."""
    panels = [(item.cell.label, points) for item in cells if (points := _predicted_points(item))]
    if not panels:
        return None
    across = min(3, len(panels))
    down = -(-len(panels) // across)
    figure = new_figure(0.5 + 3.15 * down, width_in=max(3.15 * across, 4.4))
    handles: dict[str, Any] = {}
    with chart_style():
        grid = figure.subplots(down, across, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, (title, points) in zip(grid.flat, panels, strict=False):
            axes.set_title(title, fontsize=9)
            handles |= _draw_prediction(axes, points, styles)
        figure.legend(handles.values(), [one_line(label, LABEL_LIMIT) for label in handles],
                      loc="outside lower center", ncols=min(5, across + 2), fontsize=9)  # fmt: skip
    caption = (
        "Predicted against measured time per output token in decode rounds. On the dashed line the model is right; "
        "above it the engine is slower than predicted. The band is 5% to either side."
    )
    return chart_html(figure, "prediction", caption, is_simulated=is_simulated)


def _predicted_points(item: CellComparison) -> list[tuple[str, float, float]]:
    """(label, predicted ms, measured ms) of the arms that have both."""
    points = []
    for arm in item.arms:
        if arm.prediction is not None:
            x, y = arm.prediction.predicted_tpot_s, arm.prediction.measured_tpot_s
            if x is not None and y is not None and is_number(x) and is_number(y):
                points.append(("plain" if arm.config.is_off else arm.config.label, x * 1e3, y * 1e3))
    return points


def _draw_prediction(axes: Any, points: list[tuple[str, float, float]], styles: Styles) -> dict[str, Any]:
    plain = ArmStyle(colour=INK, marker="o", dash="-")
    values = [number for _, x, y in points for number in (x, y)]
    pad = max(0.15 * (max(values) - min(values)), 0.06 * max(values))
    low, high = max(0.0, min(values) - pad), max(values) + pad
    ends = [low, high]
    axes.fill_between(
        ends, [end * 0.95 for end in ends], [end * 1.05 for end in ends], color=MUTED, alpha=0.1, linewidth=0
    )
    axes.plot(ends, ends, color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
    handles = {}
    for label, x, y in points:
        style = plain if label == "plain" else styles[label]
        (handles[label],) = axes.plot([x], [y], color=style.colour, marker=style.marker, linestyle="none",
                                      markersize=8, markeredgecolor="white", markeredgewidth=0.7)  # fmt: skip
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_box_aspect(1)
    axes.locator_params(nbins=5)
    axes.grid()
    axes.set_xlabel("predicted, ms")
    axes.set_ylabel("measured, ms")
    return handles
