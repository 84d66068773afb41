"""Charts of a device's page: bandwidth shares, where the speedup goes, and where speculation stops paying."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spectune.report.gpu_rows import RoundFacts
from spectune.report.svg import (
    BAD,
    DRAFT,
    GOOD,
    INK,
    LABEL_LIMIT,
    MUTED,
    OTHER,
    VERIFY,
    arm_styles,
    chart_html,
    chart_style,
    new_figure,
)
from spectune.report.text import TIMES, Html, one_line

MARK = "REHEARSAL"
PART_COLOURS = {"acceptance": GOOD, "verify": VERIFY, "draft": DRAFT, "other": OTHER, "residual": BAD}


def mbu_chart(facts: Sequence[RoundFacts], *, is_rehearsal: bool) -> Html | None:
    """Share of the bandwidth that plain decoding reaches, a bar a shape: the whole round, the pass alone."""
    shares: dict[tuple[str, int, int], dict[bool, float]] = {}
    has_sheet = any(one.mbu is not None for one in facts if one.row.part == "mbu")
    for one in facts:
        value = one.mbu if has_sheet else one.read_share
        if one.row.part == "mbu" and value is not None and one.impossible is None:
            key = (one.row.model, one.row.batch_size, one.row.context_tokens)
            shares.setdefault(key, {})[one.row.is_pass_alone] = value
    if not shares:
        return None
    keys = list(shares)
    figure = new_figure(1.2 + 0.34 * len(keys))
    with chart_style():
        axes = figure.add_subplot()
        at = range(len(keys))
        for is_alone, height, colour, label in (
            (True, 0.72, MUTED, "passes alone"),
            (False, 0.42, VERIFY, "whole rounds"),
        ):
            values = [shares[key].get(is_alone, 0.0) for key in keys]
            alpha = 0.35 if is_alone else 1.0
            axes.barh(list(at), values, height=height, color=colour, alpha=alpha, label=label)
        for place, key in enumerate(keys):
            value = shares[key].get(False)
            if value is not None:
                axes.annotate(f"{value:.0%}", (value, place), (4, 0), textcoords="offset points", va="center")
        if has_sheet:
            for goal in (0.6, 0.75):
                axes.axvline(goal, color=INK, linewidth=0.9, linestyle=(0, (5, 3)))
        axes.set_yticks(list(at), [f"{model}, batch {batch}, context {context}" for model, batch, context in keys])  # fmt: skip
        axes.invert_yaxis()
        axes.xaxis.set_major_formatter(lambda value, place: f"{value:.0%}")
        axes.grid(axis="x")
        axes.legend(loc="lower right")
    of = "the data sheet's bandwidth" if has_sheet else "the read bandwidth measured here"
    goals = " Dashed: 60% and 75%." if has_sheet else ""
    caption = f"Bytes of weights, keys and values that plain decoding reads a second, over {of}.{goals}"
    return chart_html(figure, "gpu-mbu", caption, is_simulated=is_rehearsal, mark=MARK)


def waterfall_charts(facts: Sequence[RoundFacts], *, is_rehearsal: bool) -> list[Html]:
    """Log gains and losses of each configuration, stacked, a chart a model and batch."""
    groups: dict[tuple[str, int], list[RoundFacts]] = {}
    for one in facts:
        if one.row.part == "rounds" and one.waterfall and one.impossible is None:
            groups.setdefault((one.row.model, one.row.batch_size), []).append(one)
    return [
        _waterfall(index, model, batch, ones, is_rehearsal=is_rehearsal)
        for index, ((model, batch), ones) in enumerate(groups.items())
    ]


def _waterfall(index: int, model: str, batch: int, ones: Sequence[RoundFacts], *, is_rehearsal: bool) -> Html:
    figure = new_figure(3.6)
    with chart_style():
        axes = figure.add_subplot()
        for place, one in enumerate(ones):
            tops = {True: 0.0, False: 0.0}
            for part, gain in one.waterfall:
                is_gain = gain >= 0
                axes.bar(
                    place, gain, bottom=tops[is_gain], width=0.62, color=PART_COLOURS[part],
                    label=part if place == 0 else None,
                )  # fmt: skip
                tops[is_gain] += gain
            total = math.fsum(gain for _, gain in one.waterfall)
            axes.plot([place - 0.38, place + 0.38], [total, total], color=INK, linewidth=2.2)
            axes.annotate(
                f"{math.exp(total):.2f}{TIMES}", (place, max(tops[True], total)), (0, 5),
                textcoords="offset points", ha="center",
            )  # fmt: skip
        axes.axhline(0.0, color=INK, linewidth=1.0)
        axes.set_xticks(range(len(ones)), [one_line(one.label, LABEL_LIMIT) for one in ones], rotation=20, ha="right")  # fmt: skip
        axes.set_ylabel("log of the speedup")
        axes.margins(y=0.16)
        axes.grid(axis="y")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    caption = (
        f"Where the speedup of {model} at batch {batch} goes: gains above, losses below, black their sum. "
        "The residual is what acceptance and the parts of a round do not explain."
    )
    return chart_html(figure, f"gpu-waterfall-{index}", caption, is_simulated=is_rehearsal, mark=MARK)


def crossover_charts(facts: Sequence[RoundFacts], *, is_rehearsal: bool) -> list[Html]:
    """Speedup over batch size, a line a configuration and acceptance length, a panel a context."""
    models: dict[str, list[RoundFacts]] = {}
    for one in facts:
        if one.row.part == "crossover" and one.speedup is not None and one.impossible is None:
            models.setdefault(one.row.model, []).append(one)
    return [
        _crossover(index, model, ones, is_rehearsal=is_rehearsal)
        for index, (model, ones) in enumerate(models.items())
    ]


def _crossover(index: int, model: str, ones: Sequence[RoundFacts], *, is_rehearsal: bool) -> Html:
    contexts = sorted({one.row.context_tokens for one in ones})
    batches = sorted({one.row.batch_size for one in ones})
    styles = arm_styles(one.label for one in ones)
    across = min(2, len(contexts))
    down = -(-len(contexts) // across)
    figure = new_figure(0.9 + 2.7 * down)
    handles: dict[str, Any] = {}
    with chart_style():
        grid = figure.subplots(down, across, squeeze=False, sharey=True)
        for axes in grid.flat[len(contexts) :]:
            axes.set_axis_off()
        for axes, context in zip(grid.flat, contexts, strict=False):
            axes.set_title(f"context {context}")
            axes.axhline(1.0, color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
            axes.grid(axis="y")
            for label, style in styles.items():
                points = sorted(
                    (one.row.batch_size, one.speedup or 0.0)
                    for one in ones
                    if one.label == label and one.row.context_tokens == context
                )
                if points:
                    (handles[label],) = axes.plot(
                        [batches.index(batch) for batch, _ in points],
                        [value for _, value in points],
                        color=style.colour,
                        marker=style.marker,
                        linestyle=style.dash,
                    )
            axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
            axes.set_xlabel("batch size")
            axes.set_ylabel(f"speedup, {TIMES} plain")
        figure.legend(
            handles.values(), [one_line(label, LABEL_LIMIT) for label in handles],
            loc="outside lower center", ncols=4, fontsize=9,
        )  # fmt: skip
    caption = (
        f"Speedup of {model} over plain decoding at forced acceptance lengths. Above the dashed line "
        "speculation pays. A line ends where the caches no longer fit the device."
    )
    return chart_html(figure, f"gpu-crossover-{index}", caption, is_simulated=is_rehearsal, mark=MARK)
