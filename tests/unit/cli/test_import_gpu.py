"""`spectune import` and `report` of what was measured on a GPU."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.gpu_document import check_row, made_document


def test_import_makes_a_run_directory_that_report_reads(
    spectune: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """File, summary, table and page are written without a format being named, and drawn again later."""
    document, file = made_document(), tmp_path / "gpu.json"
    document.write(file)

    answer = spectune("import", str(file), "-o", "run")

    assert 0 == answer.code
    assert "checks that hold: 1 of 1" in answer.out
    assert "pays up to batch 64" in answer.out
    assert ["gpu.json", "manifest.json", "report.html", "requests", "summary.csv", "summary.json"] == sorted(
        path.name for path in Path("run").iterdir()
    )
    with Path("run/summary.csv").open(newline="") as stream:
        assert len(document.rounds) == len(list(csv.DictReader(stream)))
    summary = json.loads(Path("run/summary.json").read_text())
    assert {"random"} == {row["weights"] for row in summary["results"]}
    Path("run/report.html").unlink()
    assert 0 == spectune("report", "run").code
    assert "NVIDIA TEST" in Path("run/report.html").read_text()


def test_import_of_a_failed_check_is_exit_code_3(
    spectune: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """A lossy engine is a failed check, in JSON too."""
    document = made_document()
    document.add(check_row(num_different=1))
    document.write(tmp_path / "gpu.json")

    answer = spectune("import", str(tmp_path / "gpu.json"), "-o", "run", "--json")

    assert 3 == answer.code
    assert [False] == [check["is_sound"] for check in answer.document["checks"]]


def test_import_of_a_rehearsal_says_so(
    spectune: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """The mark is in the table, on stderr and in every row."""
    replace(made_document(), is_rehearsal=True).write(tmp_path / "gpu.json")

    answer = spectune("import", str(tmp_path / "gpu.json"), "--format", "gpu", "-o", "run")

    assert answer.out.startswith("REHEARSAL NVIDIA TEST")
    assert "none of these numbers says anything about a GPU" in answer.err
    rows = json.loads(Path("run/summary.json").read_text())["results"]
    assert all(row["is_rehearsal"] for row in rows)


def test_import_of_another_file_as_gpu_is_bad_input(spectune: Callable[..., Any], tmp_path: Path) -> None:
    """--format gpu reads nothing but gpu.json, and a missing file is named."""
    (tmp_path / "other.json").write_text("{}")

    assert 2 == spectune("import", str(tmp_path / "other.json"), "--format", "gpu").code
    assert 2 == spectune("import", str(tmp_path / "none.json"), "--format", "gpu").code
