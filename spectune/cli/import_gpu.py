"""gpu.json of tests/gpu/run.sh as a run directory: the file, a summary, the page."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from spectune.cli.console import print_json, say
from spectune.cli.report import REPORT_FILE
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.store import RunStore
    from spectune.store.gpu_run import GpuDocument

CHECK_FAILED = 3


def import_gpu(file: Path, path: Path, *, argv: Sequence[str], as_json: bool) -> None:
    """Read, save, show. Exit code 3 where results differ that must not, 1 where nothing was measured."""
    from spectune.store.gpu_run import read_gpu

    if not file.is_file():
        raise UsageError(f"FILE {file} does not exist")
    document = read_gpu(file)
    summary = save(document, file, path, argv=argv)
    if as_json:
        print_json(summary)
    else:
        print_rows(document)
    if document.is_rehearsal:
        say("REHEARSAL: toy models on a CPU; none of these numbers says anything about a GPU")
    say(f"run directory: {path}")
    say(f"report: {path / REPORT_FILE}")
    if any(not row.is_sound for row in document.checks.values()):
        raise typer.Exit(CHECK_FAILED)
    if not any(row.status == "ok" for row in document.rounds.values()):
        raise typer.Exit(1)


def save(document: GpuDocument, file: Path, path: Path, *, argv: Sequence[str]) -> dict[str, Any]:
    """manifest.json, gpu.json, summary.json, summary.csv and report.html; returns the summary."""
    from spectune.provenance import collect
    from spectune.records import SCHEMA_VERSION
    from spectune.report.gpu_page import render_gpu
    from spectune.report.gpu_rows import DEFINITIONS, summary_rows, to_csv
    from spectune.report.html import write_page
    from spectune.store import RunStore
    from spectune.store.gpu_run import GPU_FILE, KIND

    manifest = {
        "kind": KIND,
        "is_rehearsal": document.is_rehearsal,
        "provenance": collect(argv),
        "sources": [{"path": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}],
        "points": [],
    }
    store = RunStore.create(path, manifest)
    document.write(store.path / GPU_FILE)
    rows = summary_rows(document)
    summary = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "is_rehearsal": document.is_rehearsal,
        "device": document.device,
        "checks": [{"is_sound": row.is_sound, "row": row} for row in document.checks.values()],
        "results": rows,
        "definitions": DEFINITIONS,
        "provenance": dict(document.provenance),
    }
    store.write_json("summary.json", summary)
    store.write_text("summary.csv", to_csv(rows))
    write_page(render_gpu(document, path.resolve().name), store.path / REPORT_FILE)
    read: dict[str, Any] = store.read_json("summary.json")
    return read


def page_and_summary(store: RunStore) -> tuple[str, dict[str, Any]]:
    """The page of such a run, drawn again from its gpu.json, and its summary."""
    from spectune.report.gpu_page import render_gpu
    from spectune.store.gpu_run import GPU_FILE, read_gpu

    page = render_gpu(read_gpu(store.path / GPU_FILE), store.path.resolve().name)
    return page, store.read_json("summary.json")


def print_rows(document: GpuDocument) -> None:
    """Checks, bandwidth and round costs, for people."""
    from spectune.report.gpu_rows import break_even, facts_of

    mark = "REHEARSAL " if document.is_rehearsal else ""
    print(f"{mark}{document.device.name}, torch {document.device.torch}")
    for check in document.checks.values():
        if not check.is_sound:
            print(f"NOT EQUAL  {check.model} {check.dtype} {check.what}")
    sound = sum(check.is_sound for check in document.checks.values())
    print(f"checks that hold: {sound} of {len(document.checks)}")
    print(f"{'model':<14}{'batch':>6}{'context':>8}  {'configuration':<28}{'round ms':>9}{'other':>7}{'MBU':>6}  speedup")  # fmt: skip
    facts = facts_of(document)
    for one in facts:
        row = one.row
        if row.part not in ("mbu", "rounds") or row.is_pass_alone:
            continue
        if row.round_s is None or one.impossible is not None:
            print(f"{row.model:<14}{row.batch_size:>6}{row.context_tokens:>8}  {one.label:<28}{one.impossible or row.reason}")  # fmt: skip
            continue
        share = one.mbu if one.mbu is not None else one.read_share
        other = "" if one.other_share is None else f"{one.other_share:.1%}"
        print(
            f"{row.model:<14}{row.batch_size:>6}{row.context_tokens:>8}  {one.label:<28}{row.round_s * 1e3:>9.3f}"
            f"{other:>7}{'' if share is None else f'{share:.0%}':>6}  "
            f"{'' if one.speedup is None else f'{one.speedup:.2f}'}"
        )
    for model, label, context, last, loses in break_even(facts):
        pays = "at no batch" if last is None else f"up to batch {last}" + ("" if loses else " and beyond")
        print(f"{model}, context {context}, {label}: pays {pays}")
