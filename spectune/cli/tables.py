"""Tables for the terminal, on stdout: the verdict of a run."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spectune.cli.console import ms

if TYPE_CHECKING:
    from spectune.policy.comparison import CellComparison, RunSummary
    from spectune.records import Interval


def print_verdict(summary: RunSummary) -> None:
    """Decision per cell, then the verdict in words."""
    from spectune.policy.verdict import place_names

    if summary.is_simulated:
        print("SIMULATED: declared costs and acceptance, nothing was measured")
    rows = [_decision_row(item) for item in summary.cells]
    if rows:
        header = ("batch", "context", "T", "decision", "speedup (95%)", "AL", "ms/token off", "ms/token then")
        print_table(header, rows)
        print_wrapped(
            "speedup: time per token of plain decoding (off) / of what to run; AL: acceptance length, tokens "
            "a step; ms/token: of a sequence while the batch is full"
        )
    if summary.rates:
        _print_rates(summary)
    places = place_names([item.cell for item in summary.cells])
    for item in summary.cells:
        print_wrapped(f"why at {places[item.cell]}: {item.decision.reason}")
    print()
    print_wrapped(summary.verdict)
    for caution in summary.cautions:
        print_wrapped(f"caution: {caution}")


def _print_rates(summary: RunSummary) -> None:
    """Arms under requests that arrive by the clock."""
    rows = []
    for item in summary.rates:
        for arm in item.arms:
            load, latency = arm.load, arm.latency
            first = load.scheduled_ttft_s if load else None
            tpot = latency.tpot_s if latency else None
            rows.append(
                (
                    item.cell.label.split(", context")[0],
                    arm.config.label,
                    ms(first.p50 if first else None),
                    ms(first.p99 if first else None),
                    ms(tpot.p50 if tpot else None),
                    "-" if load is None or load.goodput_per_s is None else f"{load.goodput_per_s:.2f}/s",
                    "-" if arm.reached_batch is None else f"{arm.reached_batch:.1f}",
                    arm.status.value,
                )
            )
    header = ("arrivals", "arm", "first token p50", "p99", "ms/token p50", "goodput", "in flight", "status")
    print_table(header, rows)
    print_wrapped("first token: from the arrival of the request, waiting in the client included")


def _decision_row(item: CellComparison) -> tuple[str, ...]:
    decision = item.decision
    chosen = next((arm for arm in item.arms if arm.config == decision.chosen), None)
    off = next((arm for arm in item.arms if arm.config.is_off), None)
    acceptance = chosen.acceptance.acceptance_length if chosen and chosen.acceptance else None
    return (
        str(item.cell.batch_size),
        str(item.cell.context_tokens),
        f"{item.cell.temperature:g}",
        "no data" if decision.verdict == "no data" else decision.chosen.label,
        _interval(decision.speedup),
        "-" if acceptance is None else f"{acceptance:.2f}",
        ms(off.rounds.round_tpot_s if off and off.rounds else None),
        ms(chosen.rounds.round_tpot_s if chosen and chosen.rounds else None),
    )


def _interval(speedup: Interval | None) -> str:
    return "-" if speedup is None else _ratio(speedup.value, speedup.low, speedup.high)


def _ratio(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}x" if low is None or high is None else f"{value:.2f}x [{low:.2f}, {high:.2f}]"


def print_wrapped(text: str) -> None:
    """A sentence, broken at the width of the terminal."""
    print(textwrap.fill(text, min(shutil.get_terminal_size().columns, 110), break_on_hyphens=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows under a header, whole where there is no terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in header:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # A file or a pipe has no width: rows stay whole there.
    console = Console(highlight=False, markup=False)
    console.width = shutil.get_terminal_size().columns if console.is_terminal else 200
    console.print(table)
