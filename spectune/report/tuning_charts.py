"""Predicted against measured time per token, one mark a finalist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectune.report.svg import INK, MUTED, chart_html, chart_style, new_figure
from spectune.report.text import Html

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#332288")
BAND = 0.05


def scatter(cells: Sequence[Mapping[str, Any]], *, is_simulated: bool) -> Html | None:
    """None where nothing was measured."""
    known = [(cell["cell"], cell["measured"]) for cell in cells if cell.get("measured")]
    if not known:
        return None
    figure = new_figure(4.2, width_in=6.4)
    values = [
        value * 1e3
        for _, rows in known
        for row in rows
        for value in (row["measured_tpot_s"], row["predicted_tpot_s"]["value"])
    ]
    low, high = min(values) * 0.9, max(values) * 1.1
    with chart_style():
        axes = figure.add_subplot()
        axes.fill_between(
            [low, high],
            [low * (1 - BAND), high * (1 - BAND)],
            [low * (1 + BAND), high * (1 + BAND)],
            color=INK,
            alpha=0.07,
            linewidth=0,
        )
        axes.plot([low, high], [low, high], color=MUTED, linewidth=1.0, linestyle=(0, (5, 3)))
        for index, (cell, rows) in enumerate(known):
            axes.errorbar(
                [row["predicted_tpot_s"]["value"] * 1e3 for row in rows],
                [row["measured_tpot_s"] * 1e3 for row in rows],
                xerr=_bars(rows),
                linestyle="none",
                marker=_MARKERS[index % len(_MARKERS)],
                color=_COLOURS[index % len(_COLOURS)],
                elinewidth=0.9,
                label=f"batch {cell['batch_size']}, context {cell['context_tokens']}, T={cell['temperature']:g}",
            )
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_xlabel("predicted, ms a token")
        axes.set_ylabel("measured, ms a token")
        axes.grid(alpha=0.6)
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    caption = (
        f"Predicted against measured time per token of every arm that ran. Band: {BAND:.0%} around "
        "equality; bars: interval of the prediction, which also covers other prompts."
    )
    return chart_html(figure, "tuning-scatter", caption, is_simulated=is_simulated)


def _bars(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Distances of the ends of the predicted intervals, in ms."""
    below, above = [], []
    for row in rows:
        told = row["predicted_tpot_s"]
        below.append(0.0 if told["low"] is None else (told["value"] - told["low"]) * 1e3)
        above.append(0.0 if told["high"] is None else (told["high"] - told["value"]) * 1e3)
    return [below, above]
