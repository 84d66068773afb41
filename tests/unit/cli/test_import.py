"""`spectune import`: vLLM's files become a run directory with a table."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "store" / "vllm_bench_0.32.0"


def test_sweep_becomes_a_run_directory(spectune: Callable[..., Any]) -> None:
    """Manifest, raw records, summary in vLLM's names and a table are written."""
    answer = spectune("import", str(FOLDER / "sweep"), "-o", "run")

    assert 0 == answer.code
    assert "ngram K=3" in answer.out
    assert "4 users" in answer.out
    assert ["manifest.json", "requests", "served.jsonl", "summary.csv", "summary.json"] == sorted(
        path.name for path in Path("run").iterdir()
    )
    summary = json.loads(Path("run/summary.json").read_text())
    assert 8 == len(summary["results"])
    assert "mean_itl_ms" in summary["definitions"]


def test_csv_has_the_same_rows(spectune: Callable[..., Any]) -> None:
    """One line a measurement, unknown values as empty cells."""
    spectune("import", str(FOLDER / "sweep"), "-o", "run")

    with Path("run/summary.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert 8 == len(rows)
    assert "" == rows[-1]["spec_decode_acceptance_length"] == rows[0]["max_output_tokens_per_s"]
    assert float(rows[0]["mean_tpot_ms"]) < float(rows[-1]["mean_tpot_ms"])


def test_json_answers_a_program(spectune: Callable[..., Any]) -> None:
    """Standard output is the summary and nothing else."""
    answer = spectune("import", str(FOLDER / "detailed.json"), "-o", "run", "--json")

    assert 705.5378014806832 == answer.document["results"][0]["output_throughput"]
    assert "caution: the file does not say how the server speculated" in answer.err


def test_nothing_usable_is_a_failure(spectune: Callable[..., Any], tmp_path: Path) -> None:
    """A file whose requests all failed is imported, shown and answered with exit code 1."""
    row = json.loads((FOLDER / "detailed.json").read_text())
    row |= {"completed": 0, "failed": 16, "errors": ["refused"] * 16}
    file = tmp_path / "failed.json"
    file.write_text(json.dumps(row))

    answer = spectune("import", str(file), "-o", "run")

    assert 1 == answer.code
    assert "16 of 16 requests failed" in answer.out


def test_absent_file_and_unknown_format_are_usage_errors(spectune: Callable[..., Any]) -> None:
    """What was typed is quoted, and nothing is written."""
    absent = spectune("import", "nothing.json")
    unknown = spectune("import", str(FOLDER / "sweep"), "--format", "csv")

    assert (2, 2) == (absent.code, unknown.code)
    assert "FILE nothing.json does not exist" in absent.err
    assert "--format csv is not known" in unknown.err
    assert not Path("runs").exists()


def test_report_of_an_import_shows_its_measurements(spectune: Callable[..., Any]) -> None:
    """Eight measurements at two loads with their speedups, and a page that decides nothing."""
    spectune("import", str(FOLDER / "sweep"), "-o", "run")

    answer = spectune("report", "run", "--json")

    assert 0 == answer.code
    assert 8 == len(answer.document["results"])
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "8 imported measurements." in page
    assert "Nothing was measured here, so nothing is decided" in page
    for text in ("ngram K=3", "2 users", "4 users", "Acceptance length"):
        assert text in page
    assert "://" not in page  # nothing is loaded from anywhere


def test_report_of_an_import_without_a_plain_run_says_so(spectune: Callable[..., Any]) -> None:
    """One file of one arm cannot be compared with anything."""
    spectune("import", str(FOLDER / "detailed.json"), "-o", "run")

    assert 0 == spectune("report", "run").code
    assert "No arm can be compared with plain decoding" in Path("run/report.html").read_text(encoding="utf-8")
