"""What a tuning predicted, measured and left out: why the winner won, and what nobody tried."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from spectune.report.grid import Row, numbers, table, words
from spectune.report.page import bullets, details, section
from spectune.report.text import TIMES, Html, Missing, Value, escape
from spectune.report.tuning_charts import scatter

NAV = ("tuning", "Tuning")
TOP = 6
_PARTS = {
    "acceptance": "acceptance",
    "verify": "verifying more tokens",
    "draft": "drafting",
    "other": "the rest of a round",
    "residual": "not explained",
}


def tuning_section(told: Mapping[str, Any], *, is_simulated: bool) -> Html:
    """Predicted against measured, the races, and the limits of both."""
    parts: list[str] = [_costs(told)]
    chart = scatter(told["cells"], is_simulated=is_simulated)
    if chart is not None:
        parts.append(chart)
    for cell in told["cells"]:
        parts.append(_cell(cell))
    parts.append(_left_out(told))
    return section(
        NAV[0],
        "How it was tuned",
        "Every configuration was predicted from one traced plain run and a profile of rounds; only the finalists "
        "were measured, in turn with plain decoding: their round times; what rounds yield is the trace's.",
        *parts,
    )


def _costs(told: Mapping[str, Any]) -> Html:
    surface, space = told["surface"], told["space"]
    error = surface["held_out"]["median"]
    rows = [
        f"{space['num_configs']} configurations x {space['num_cells']} loads: {space['num_predicted']} predicted, "
        f"{sum(len(cell.get('measured', ())) for cell in told['cells'])} measured.",
        f"Time surface: {surface['num_points']} points in {surface['duration_s']:.0f} s"
        + ("." if error is None else f", off by {error:.1%} (median) on shapes that were held out."),
        "Seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in told["seconds"].items()) + ".",
    ]
    rows += [
        f"Trace at context {trace['context_tokens']}, T={trace['temperature']:g}: {trace['num_requests']} "
        f"requests, {trace['num_positions']} positions."
        for trace in told["traces"]
    ]
    return bullets(rows, "")


def _cell(cell: Mapping[str, Any]) -> Html:
    name = cell["cell"]
    title = f"batch {name['batch_size']}, context {name['context_tokens']}, T={name['temperature']:g}"
    race = cell.get("race")
    if race is None:
        return Html(f"<h3>{escape(title)}</h3>{_predictions(cell)}")
    why = bullets(_reasons(cell), "")
    stages = details("Stages of the race", _stages(race))
    return Html(f"<h3>{escape(title)}: {escape(race['winner_label'])}</h3>{why}{_predictions(cell)}{stages}")


def _reasons(cell: Mapping[str, Any]) -> list[str]:
    """Why the winner won, by how much the prediction was off, and what could still be better."""
    race, left = cell["race"], cell["not_tried"]
    reason = race["reason"]
    if not any(reason.startswith(row["label"]) for row in cell["predicted"]):  # a name keeps its spelling
        reason = reason[:1].upper() + reason[1:]
    told = [f"{reason} ({_end(race['end'])})."]
    if cell.get("waterfall"):
        gains = [
            f"{_PARTS[name]} {math.exp(gain):.2f}{TIMES}"
            for name, gain in cell["waterfall"].items()
            if abs(gain) > 5e-4
        ]
        told.append("Factors of the speedup: " + ", ".join(gains) + ".")
    if left["num"]:
        bound = left["could_be_better_by"]
        best = (
            ""
            if bound is None
            else f"; the best of them, {left['best_label']}, could be faster by {bound:.1%} at most"
        )
        told.append(f"{left['num']} configurations were not measured{best} (upper end of the prediction).")
    told += [f"{label} failed: {reason}." for label, reason in race["failed"]]
    return told


def _end(end: str) -> str:
    return {
        "settled": "no other finalist can be better by more than epsilon",
        "budget": "the budget ended the race",
        "stages": "the last stage ended the race",
    }.get(end, end)


def _predictions(cell: Mapping[str, Any]) -> Html:
    measured = {row["label"]: row for row in cell.get("measured", ())}
    rows = cell["predicted"]
    shown = [*rows[:TOP], *(row for row in rows[TOP:] if row["label"] in measured)]
    winner = cell["race"]["winner_label"] if "race" in cell else None
    columns = (
        words("Configuration"),
        numbers("Predicted speedup", TIMES),
        numbers("Predicted", "ms a token"),
        numbers("Measured", "ms a token"),
        numbers("Measured over predicted"),
        numbers("Acceptance length"),
        numbers("to break even"),
        numbers("Steps that keep none"),
    )
    return table(
        columns,
        [
            Row(cells=_row(row, measured.get(row["label"])), kind="chosen" if row["label"] == winner else "")
            for row in shown
        ],
    )


def _row(row: Mapping[str, Any], check: Mapping[str, Any] | None) -> Sequence[Value]:
    plain = Missing(reason="plain decoding has no drafts")
    unmeasured = Missing(reason="not measured: predicted to be slower than the finalists")
    gain = row["speedup"]
    return (
        row["label"],
        "1" if gain is None else f"{gain['value']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})",
        f"{row['tpot_s']['value'] * 1e3:.2f}",
        unmeasured if check is None else f"{check['measured_tpot_s'] * 1e3:.2f}",
        unmeasured if check is None else f"{check['residual']:+.1%}",
        plain if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}",
        plain
        if row["break_even_acceptance_length"] is None
        else f"{row['break_even_acceptance_length']:.2f}",
        plain if row["zero_accept_share"] is None else f"{row['zero_accept_share']:.0%}",
    )


def _stages(race: Mapping[str, Any]) -> Html:
    columns = (
        words("Stage"),
        words("Configuration"),
        numbers("Speedup", TIMES),
        numbers("Upper end over the leader"),
        words("What became of it"),
    )
    none = Missing(reason="no interval")
    rows = []
    for stage in race["stages"]:
        for one in stage["challengers"]:
            gain, against = one["speedup"], one["against"]
            status = one["status"] if one["reason"] is None else f"{one['status']}: {one['reason']}"
            rows.append(
                Row(
                    cells=(
                        f"{stage['number'] + 1} ({stage['num_blocks']} blocks)",
                        one["label"],
                        none if gain is None else f"{gain['value']:.3f}",
                        none if against is None or against["high"] is None else f"{against['high']:.3f}",
                        status,
                    ),
                    group=str(stage["number"]),
                )
            )
    return table(columns, rows)


def _left_out(told: Mapping[str, Any]) -> Html:
    """Everything that was never run, with the reason."""
    space = told["space"]
    lines = [f"{label}: {reason}" for label, reason in (*space["refused"], *space["excluded"])]
    lines += [f"{label}: {reason}" for label, reason in space["pruned"]]
    for cell in told["cells"]:
        left = cell.get("not_tried")
        if left and left["num"]:
            lines.append(f"batch {cell['cell']['batch_size']}, not measured: {', '.join(left['labels'])}")
    return details(f"What was not tried ({len(lines)})", bullets(lines, "Everything was tried."))
