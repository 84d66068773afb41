"""`spectune import FILE`: what other tools measured, as a run directory of ours."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import ms, print_json, say
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.records import ImportedPoint

VLLM_BENCH = "vllm-bench"
GPU = "gpu"


def import_(
    called: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            help="Result JSON of vllm bench serve, directory of a sweep, JSONL of SGLang's benches, a file with "
            "an SGLang command line, or gpu.json of tests/gpu/run.sh.",
            metavar="FILE",
        ),
    ],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="What FILE is: vllm-bench, sglang-bench (bench_serving), sglang-speculative "
            "(bench_speculative.py), sglang-command or gpu [default: gpu where it says so, else vllm-bench].",
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Run directory [default: runs/import-DATE].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Read results of vllm bench serve, of a vllm bench sweep or of SGLang's benches into a run directory.

    Every measurement keeps its counts and gets vLLM's names and units; arms at the same load are
    compared. Runs made one after the other carry no interval for what changed between them.
    What was measured on a GPU becomes a run directory with its page.
    """
    from spectune.store.gpu_run import is_gpu_file

    path = output_dir or Path(f"runs/import-{datetime.now():%Y-%m-%d-%H%M%S}")
    if format_ == GPU or (format_ is None and is_gpu_file(file)):
        from spectune.cli.import_gpu import import_gpu

        import_gpu(file, path, argv=("spectune", *called.obj), as_json=as_json)
        return
    points = read(file, format_ or VLLM_BENCH)
    rows = save(path, points, argv=("spectune", *called.obj))
    if as_json:
        print_json(rows)
    else:
        print_table(rows["results"])
    for text in dict.fromkeys(text for point in points for text in point.cautions):
        say(f"caution: {text}")
    say(f"run directory: {path}")
    if not any(point.status in ("ok", "suspect") for point in points):
        raise typer.Exit(1)


def read(file: Path, format_: str) -> list[ImportedPoint]:
    """The measurements of a file in one of the known formats."""
    readers = _readers()
    if format_ not in readers:
        raise UsageError(f"--format {format_} is not known", hint=f"one of: {', '.join(readers)}, {GPU}")
    if not file.exists():
        raise UsageError(f"FILE {file} does not exist")
    return readers[format_](file)


def save(path: Path, points: Sequence[ImportedPoint], *, argv: Sequence[str]) -> dict[str, Any]:
    """manifest.json, served.jsonl, summary.json and summary.csv; returns the summary."""
    from spectune.policy.definitions import DEFINITIONS
    from spectune.policy.imported import imported_rows
    from spectune.provenance import collect
    from spectune.records import SCHEMA_VERSION
    from spectune.store.imports import KIND, create_import

    store = create_import(path, points, provenance=collect(argv))
    rows = imported_rows(points)
    known = {name for row in rows for name in row}
    summary = {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "results": rows,
        "definitions": {name: text for name, text in DEFINITIONS.items() if name in known},
        "provenance": store.manifest["provenance"],
    }
    store.write_json("summary.json", summary)
    store.write_text("summary.csv", _csv(rows))
    document: dict[str, Any] = store.read_json("summary.json")
    return document


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """One line a measurement, for people."""
    print(f"{'config':<20}{'load':<14}{'run':>4}{'tpot':>12}{'ttft':>12}{'tokens/s':>11}{'AL':>7}  speedup")
    for row in rows:
        if row["status"] != "ok":
            print(f"{row['config'] or '-':<20}{row['status']}: {row['reason']}")
            continue
        speedup = row["speedup"]
        length = row["drafting_acceptance_length"]
        print(
            f"{row['config'] or '-':<20}{_load(row):<14}{_or_dash(row['run_number']):>4}"
            f"{ms(_seconds(row['mean_tpot_ms'])):>12}{ms(_seconds(row['mean_ttft_ms'])):>12}"
            f"{_or_dash(row['output_throughput'], '.1f'):>11}{_or_dash(length, '.2f'):>7}"
            f"  {_or_dash(speedup, '.2f')}"
        )


def _readers() -> dict[str, Callable[[Path], list[ImportedPoint]]]:
    from spectune.store.sglang_bench import read_bench_speculative, read_command_file, read_sglang_bench
    from spectune.store.vllm_bench import read_vllm_bench

    return {
        VLLM_BENCH: read_vllm_bench,
        "sglang-bench": read_sglang_bench,
        "sglang-speculative": read_bench_speculative,
        "sglang-command": read_command_file,
    }


def _load(row: dict[str, Any]) -> str:
    rate = row["request_rate"]
    users = row["max_concurrency"]
    parts = [] if rate == "inf" else [f"{rate:g}/s"]
    parts += [] if users is None else [f"{users} users"]
    return " ".join(parts) or "unlimited"


def _or_dash(value: Any, spec: str = "") -> str:
    return "-" if value is None else format(value, spec)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n", restval="")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    return stream.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list) else value
