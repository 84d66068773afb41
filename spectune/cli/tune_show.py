"""What a tuning found, on the terminal: predicted and measured side by side, and what was not tried."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectune.cli.console import duration, ms, print_json, say
from spectune.cli.results import say_head, summary_document
from spectune.cli.tables import print_table, print_verdict, print_wrapped

if TYPE_CHECKING:
    from spectune.policy.comparison import RunSummary

ROWS = 5


def show_tuning(told: dict[str, Any], summary: RunSummary, page: Path, *, as_json: bool) -> None:
    """Predictions, races, what was left out, the verdict and the commands to copy."""
    if as_json:
        print_json({"tuning": told, "summary": summary_document(summary)})
    else:
        for cell in told["cells"]:
            _print_cell(cell)
        _print_traces(told)
        _print_costs(told)
        print_verdict(summary)
        for engine, text in summary.commands.items():
            print(f"\n{engine}:\n{text}")
    say_head(summary)
    say(f"report: {page}")


def _print_cell(cell: dict[str, Any]) -> None:
    name = cell["cell"]
    measured = {row["label"]: row for row in cell.get("measured", [])}
    print(f"batch {name['batch_size']}, context {name['context_tokens']}, T={name['temperature']:g}")
    shown = cell["predicted"][:ROWS]
    shown += [row for row in cell["predicted"][ROWS:] if row["label"] in measured]
    rows = []
    for row in shown:
        check = measured.get(row["label"])
        rows.append(
            (
                row["label"],
                interval(row["speedup"]),
                ms(row["tpot_s"]["value"]),
                "not measured" if check is None else ms(check["measured_tpot_s"]),
                "-" if check is None else f"{check['residual']:+.1%}",
                number(row["acceptance_length"]),
                number(row["break_even_acceptance_length"]),
                "-" if row["zero_accept_share"] is None else f"{row['zero_accept_share']:.0%}",
            )
        )
    header = (
        "configuration",
        "predicted speedup",
        "ms/token",
        "measured",
        "off by",
        "AL",
        "AL to break even",
        "kept none",
    )
    print_table(header, rows)
    for row in cell["predicted"][:ROWS]:
        if row["limit"]:
            print_wrapped(f"{row['label']}: {row['limit']}")
    race = cell.get("race")
    if race:
        print_wrapped(f"run {race['winner_label']}: {race['reason']} ({race['end']})")
        left = cell["not_tried"]
        if left["num"]:
            bound = left["could_be_better_by"]
            best = "" if bound is None else f"; the best of them could be faster by {bound:.1%} at most"
            print_wrapped(f"not measured: {left['num']} configurations{best}")
        for label, reason in race["failed"]:
            print_wrapped(f"failed: {label}: {reason}")
    _print_categories(cell)
    print()


def _print_categories(cell: dict[str, Any]) -> None:
    """The mean hides that one kind of text gains and another loses."""
    told = [entry for entry in cell["categories"] if entry]
    if len(told) < 2:
        return
    parts = [
        f"{entry['category']} {entry['label']}"
        + ("" if entry["speedup"] is None else f" {entry['speedup']['value']:.2f}x")
        + f" ({entry['num_steps']} steps)"
        for entry in told
    ]
    gains = {entry["is_gain"] for entry in told}
    mark = "depends on the workload: " if len(gains) > 1 else ""
    print_wrapped(f"best by category (predicted): {mark}{', '.join(parts)}")


def _print_traces(told: dict[str, Any]) -> None:
    for trace in told["traces"]:
        for row in trace["acceptance"]:
            if row["acceptance_length"] is None:
                continue
            groups = [
                f"{name} {number(group['acceptance_length'])} ({group['num_steps']} steps)"
                for name, group in (row["by_category"] | row["by_context_tokens"]).items()
            ]
            print_wrapped(f"acceptance length of {row['label']}: {', '.join(groups)}")
    print()


def _print_costs(told: dict[str, Any]) -> None:
    seconds = ", ".join(f"{name} {duration(value)}" for name, value in told["seconds"].items())
    surface = told["surface"]
    error = surface["held_out"]["median"]
    text = "" if error is None else f", held-out error {error:.1%} (median)"
    print_wrapped(f"time: {seconds}; time surface of {surface['num_points']} points{text}")
    point = told["operating_point"]
    if point:
        cell = point["cell"]
        print_wrapped(
            f"objective {told['objective']['kind']}: batch {cell['batch_size']}, context "
            f"{cell['context_tokens']} with {point['label']}: {point['tokens_per_s']:.0f} tokens/s at "
            f"{ms(point['tpot_s'])} a token"
        )
    space = told["space"]
    for name in ("refused", "excluded"):
        if space[name]:
            print_wrapped(f"{name}: {len(space[name])} configurations, first {': '.join(space[name][0])}")
    if told["knobs"] and told["knobs"]["best"]:
        best = told["knobs"]["best"]
        values = ", ".join(f"{name}={value}" for name, value in best["values"].items())
        print_wrapped(f"engine settings: {values} runs at {best['score']:.3f}x of the base engine")


def interval(value: dict[str, Any] | None) -> str:
    """`1.42x (1.35 to 1.50)`."""
    if value is None:
        return "1"
    text = f"{value['value']:.2f}x"
    return text if value["low"] is None else f"{text} ({value['low']:.2f} to {value['high']:.2f})"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
