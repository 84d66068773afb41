"""`spectune compare A B`: what differs between two stored runs, and what could have been seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import ms, print_json, say

if TYPE_CHECKING:
    from spectune.gate.compare import Comparison, Row


def compare(
    a: Annotated[Path, typer.Argument(help="Run directory to compare with.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="Run directory that is compared.", metavar="B")],
    force: Annotated[
        bool, typer.Option("--force", help="Compare unlike runs all the same; the output says so.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON on stdout.")] = False,
) -> None:
    """Compare two stored runs, prompt by prompt and by category; needs no engine.

    Exit code 5 if they differ in engine settings, machine, prompts or sampling.
    """
    from spectune.gate.compare import compare_runs
    from spectune.store import RunStore

    found = compare_runs(RunStore.open(a), RunStore.open(b), force=force)
    if as_json:
        print_json(document(found, a, b))
    else:
        _show(found)


def document(found: Comparison, a: Path, b: Path) -> dict[str, Any]:
    """The comparison as plain JSON values."""
    from dataclasses import asdict

    return {
        "schema_version": 1,
        "a": str(a),
        "b": str(b),
        "was_forced": found.was_forced,
        "differences": [list(difference) for difference in found.differences],
        "under_test": [list(difference) for difference in found.under_test],
        "notes": list(found.notes),
        "rows": [
            {
                **asdict(row),
                "config": row.config.to_dict(),
                "label": row.config.label,
                "is_significant": row.is_significant,
                "text": row.text,
            }
            for row in found.rows
        ],
    }


def _show(found: Comparison) -> None:
    from spectune.cli.tables import print_table, print_wrapped
    from spectune.gate.comparable import describe

    if found.was_forced:
        print_wrapped(f"NOT COMPARABLE, forced: {describe(found.differences)}")
    for name, one, other in found.under_test:
        print_wrapped(f"under test: {name} is {one} in A and {other} in B")
    header = ("arm", "cell", "scope", "metric", "A", "B", "B against A")
    print_table(
        header,
        [
            (
                row.config.label,
                row.cell.label,
                row.scope,
                row.metric,
                _value(row, row.a),
                _value(row, row.b),
                row.text,
            )
            for row in found.rows
        ],
    )
    for note in found.notes:
        say(f"note: {note}")


def _value(row: Row, value: float | None) -> str:
    if row.metric == "acceptance length":
        return "-" if value is None else f"{value:.3f}"
    return ms(value)
