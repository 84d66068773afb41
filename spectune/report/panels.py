"""Charts made of horizontal rows, one panel a cell: time of a round, break-even, categories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from spectune.policy.comparison import ArmSummary, CellComparison
from spectune.records import Interval
from spectune.report.svg import (
    BAD,
    DRAFT,
    GOOD,
    INK,
    LABEL_LIMIT,
    OTHER,
    VERIFY,
    ArmStyle,
    Styles,
    chart_html,
    chart_style,
    new_figure,
)
from spectune.report.text import TIMES, Html, is_number, one_line


def round_chart(cells: Sequence[CellComparison], *, is_simulated: bool) -> Html | None:
    """Time of one decode round as draft, verify and other, plain decoding first, a panel a cell."""

    def has_rounds(arm: ArmSummary) -> bool:
        got = arm.rounds
        return got is not None and is_number(got.total_s) and is_number(got.round_tpot_s)

    def draw(axes: Any, arms: list[ArmSummary]) -> None:
        totals = [arm.rounds.total_s * 1e3 for arm in arms if arm.rounds]
        for row, arm in enumerate(arms):
            assert arm.rounds is not None
            start = 0.0
            parts = arm.rounds.parts or (0.0, 0.0, arm.rounds.total_s)
            for seconds, colour in zip(parts, (DRAFT, VERIFY, OTHER), strict=True):
                axes.barh(row, seconds * 1e3, left=start, height=0.62, color=colour, edgecolor="white",
                          linewidth=0.6)  # fmt: skip
                start += seconds * 1e3
            axes.text(
                start + max(totals) * 0.012,
                row,
                f"{start:.2f} ms \N{DIVISION SIGN} {arm.rounds.tokens_per_sequence:.2f} = "
                f"{arm.rounds.round_tpot_s * 1e3:.2f} ms/token",
                va="center",
                fontsize=8.5,
            )
        plain = next((arm.rounds for arm in arms if arm.config.is_off), None)
        if plain is not None:
            axes.axvline(plain.total_s * 1e3, color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
        axes.set_xlim(0, max(totals) * 1.5)

    figure = _panels(cells, has_rounds, draw, "milliseconds in one round")
    if figure is None:
        return None
    with chart_style():
        parts: tuple[tuple[str, str], ...] = (
            ("draft", DRAFT),
            ("verify (plain: the forward pass)", VERIFY),
            ("other", OTHER),
        )
        if not any(arm.rounds and arm.rounds.parts for item in cells for arm in item.arms):
            parts = (("step, its parts are not told", OTHER),)
        handles = [Patch(color=colour, label=label) for label, colour in parts]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    caption = (
        "Time of one full-batch decode round and what it buys: round time divided by tokens per sequence "
        "gives time per token. The dashed line is the plain round."
    )
    return chart_html(figure, "rounds", caption, is_simulated=is_simulated)


def break_even_chart(cells: Sequence[CellComparison], *, is_simulated: bool) -> Html | None:
    """Tokens a step emits beside those at which speculation starts to pay, both from measured rounds."""

    measured = {
        id(arm): (need, arm.rounds.tokens_per_sequence)
        for item in cells
        for arm in item.arms
        if arm.rounds is not None and (need := item.break_even(arm)) is not None
    }

    def has_both(arm: ArmSummary) -> bool:
        return all(map(is_number, measured.get(id(arm), (None,))))

    def draw(axes: Any, arms: list[ArmSummary]) -> None:
        for row, arm in enumerate(arms):
            need, have = measured[id(arm)]
            colour = GOOD if have > need else BAD
            axes.plot([need, have], [row, row], color=colour, linewidth=3, alpha=0.45, marker="")
            axes.plot(
                [need], [row], marker="|", markersize=15, markeredgewidth=2.2, color=INK, linestyle="none"
            )
            axes.plot([have], [row], marker="o", markersize=8, color=colour, linestyle="none")
            sign = "+" if have >= need else "\N{MINUS SIGN}"
            axes.annotate(f"{sign}{abs(have - need):.2f}", (max(need, have), row), xytext=(9, 0), va="center",
                          textcoords="offset points", fontsize=9, color=colour)  # fmt: skip
        axes.set_xlim(0.9, 0.9 + 1.18 * (max(max(measured[id(arm)]) for arm in arms) - 0.9))

    figure = _panels(cells, has_both, draw, "tokens per step")
    if figure is None:
        return None
    with chart_style():
        handles = [
            Line2D([], [], marker="|", markersize=12, markeredgewidth=2.2, color=INK, linestyle="none",
                   label="break-even"),
            Line2D([], [], marker="o", color=GOOD, linestyle="none", label="emitted, above"),
            Line2D([], [], marker="o", color=BAD, linestyle="none", label="emitted, below"),
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    caption = "Tokens that a step of each arm has to emit (bar) and emits (dot). The number is the margin."
    return chart_html(figure, "break-even", caption, is_simulated=is_simulated)


def category_chart(cells: Sequence[CellComparison], styles: Styles, *, is_simulated: bool) -> Html | None:
    """Speedup by category, arms side by side, one panel a cell; cells come with scope = category."""

    def key(item: CellComparison) -> str:
        return item.cell.label

    panels = [(label, list(group)) for label, group in groupby(sorted(cells, key=key), key)]
    panels.sort(key=lambda panel: panel[1][0].cell.batch_size)
    rows = [
        (label, [(item.scope, arm) for item in group for arm in item.arms if arm.speedup is not None])
        for label, group in panels
    ]
    rows = [(label, entries) for label, entries in rows if entries]
    if not rows:
        return None
    scopes = [list(dict.fromkeys(scope for scope, _ in entries)) for _, entries in rows]
    figure = new_figure(0.9 + sum(0.45 + 0.55 * len(names) for names in scopes))
    used: dict[str, Any] = {}
    with chart_style():
        grid = figure.subplots(
            len(rows), 1, squeeze=False, sharex=True, height_ratios=[len(names) for names in scopes]
        )
        for axes, (label, entries), names in zip(grid[:, 0], rows, scopes, strict=True):
            arms = list(dict.fromkeys(arm.config.label for _, arm in entries if not arm.config.is_off))
            axes.set_title(label)
            axes.axvline(1.0, color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
            for scope, arm in entries:
                if arm.config.is_off or arm.speedup is None:
                    continue
                shift = (arms.index(arm.config.label) - (len(arms) - 1) / 2) * min(0.2, 0.7 / len(arms))
                used[arm.config.label] = _forest_mark(
                    axes, names.index(scope) + shift, arm.speedup, styles[arm.config.label]
                )
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_yticks(range(len(names)), [one_line(name, LABEL_LIMIT) for name in names])
            axes.grid(axis="x")
        grid[-1, 0].set_xlabel(f"speedup, {TIMES} plain (right of 1.0 is faster)")
        figure.legend(used.values(), [one_line(label, LABEL_LIMIT) for label in used],
                      loc="outside lower center", ncols=4, fontsize=9)  # fmt: skip
    caption = "Speedup by category of prompts. One mean over all categories would hide these differences."
    return chart_html(figure, "categories", caption, is_simulated=is_simulated)


def _forest_mark(axes: Any, row: float, interval: Interval, style: ArmStyle) -> Any:
    if interval.low is not None and interval.high is not None:
        axes.plot([interval.low, interval.high], [row, row], color=style.colour, linewidth=1.4)
    (mark,) = axes.plot([interval.value], [row], color=style.colour, marker=style.marker, linestyle="none",
                        markeredgecolor="white", markeredgewidth=0.7)  # fmt: skip
    return mark


def _panels(
    cells: Sequence[CellComparison],
    has_data: Callable[[ArmSummary], bool],
    draw: Callable[[Any, list[ArmSummary]], None],
    xlabel: str,
) -> Any | None:
    """One panel of horizontal rows for each cell that has data; None when no cell has."""
    panels = [(item.cell.label, [arm for arm in item.arms if has_data(arm)]) for item in cells]
    panels = [(label, arms) for label, arms in panels if arms]
    if not panels:
        return None
    figure = new_figure(0.9 + sum(0.55 + 0.34 * len(arms) for _, arms in panels))
    with chart_style():
        grid = figure.subplots(
            len(panels), 1, squeeze=False, height_ratios=[len(arms) + 0.4 for _, arms in panels]
        )
        for axes, (label, arms) in zip(grid[:, 0], panels, strict=True):
            axes.set_title(label)
            draw(axes, arms)
            axes.set_ylim(len(arms) - 0.4, -0.6)
            names = [
                "plain" if arm.config.is_off else one_line(arm.config.label, LABEL_LIMIT) for arm in arms
            ]
            axes.set_yticks(range(len(arms)), names)
            axes.grid(axis="x")
            axes.tick_params(axis="y", length=0)
        grid[-1, 0].set_xlabel(xlabel)
    return figure
