"""`spectune report RUN`: the page of a stored run, drawn again from its raw counts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spectune.cli.console import print_json, say
from spectune.errors import UsageError

REPORT_FILE = "report.html"


def report(
    run: Annotated[Path, typer.Argument(help="Run directory.", metavar="RUN")],
    output: Annotated[
        Path | None, typer.Option("--output", help="Where to write the page [default: RUN/report.html].")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Folder to write report.html into.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Also print the summary as JSON.")] = False,
) -> None:
    """Write the self-contained HTML page of a run; needs neither an engine nor a network."""
    from spectune.cli.results import read_summary, say_head, summary_document
    from spectune.report.html import write_report

    summary = read_summary(run)
    path = output or (output_dir or run) / REPORT_FILE
    try:
        write_report(summary, path)
    except OSError as error:
        if output or output_dir:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        # A run that may only be read is told beside it.
        path = Path(f"{run.resolve().name}-{REPORT_FILE}")
        say(f"note: {run} cannot be written to ({error.strerror})")
        write_report(summary, path)
    if as_json:
        print_json(summary_document(summary))
    say_head(summary)
    say(f"report: {path}")
