"""`spectune report RUN`: the page of a stored run, drawn again from its raw counts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    from spectune.cli.results import read_summary, read_tuning, say_head, summary_document
    from spectune.report.html import render_report, write_page

    path = output or (output_dir or run) / REPORT_FILE
    imported = _imported(run)
    summary = None if imported else read_summary(run)
    text = imported[0] if imported else render_report(summary, read_tuning(run))  # type: ignore[arg-type]  # one of the two
    try:
        write_page(text, path)
    except OSError as error:
        if output or output_dir:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error
        # A run that may only be read is told beside it.
        path = Path(f"{run.resolve().name}-{REPORT_FILE}")
        say(f"note: {run} cannot be written to ({error.strerror})")
        write_page(text, path)
    if as_json:
        print_json(imported[1] if imported else summary_document(summary))  # type: ignore[arg-type]
    if summary is not None:
        say_head(summary)
    say(f"report: {path}")


def _imported(run: Path) -> tuple[str, dict[str, Any]] | None:
    """Page and summary of an import; None for any other directory."""
    from spectune.cli.import_gpu import page_and_summary
    from spectune.policy.imported import imported_rows
    from spectune.report.imported import render_import
    from spectune.store import MANIFEST, RunStore
    from spectune.store.gpu_run import KIND as GPU_KIND
    from spectune.store.imports import KIND, read_imports

    if not (run / MANIFEST).is_file():
        return None
    store = RunStore.open(run)
    if store.manifest.get("kind") == GPU_KIND:
        return page_and_summary(store)
    if store.manifest.get("kind") != KIND:
        return None
    rows = imported_rows(read_imports(store))
    return render_import(run.resolve().name, rows, store.manifest), store.read_json("summary.json")
