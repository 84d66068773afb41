"""Imported points in a run directory come back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectune.errors import StoreError, UsageError
from spectune.records import ImportedPoint, Status
from spectune.store import RunStore
from spectune.store.imports import create_import, read_imports
from spectune.store.vllm_bench import read_vllm_bench

FOLDER = Path(__file__).parent / "vllm_bench_0.32.0"
FAILED = ImportedPoint(
    measurement=None, engine="vllm", source="x", status=Status.FAILED, reason="died", settings=(("a", None),)
)


def test_points_come_back_from_disk(tmp_path: Path) -> None:
    """Every figure, setting and caution survives, sources included."""
    points = [*read_vllm_bench(FOLDER / "detailed.json"), *read_vllm_bench(FOLDER / "sweep"), FAILED]

    create_import(tmp_path / "run", points, provenance={"argv": []})
    back = read_imports(RunStore.open(tmp_path / "run"))

    assert points == back
    assert [point.source for point in points] == [point.source for point in back]


def test_raw_files_are_named_by_content(tmp_path: Path) -> None:
    """Whoever reads the run can tell whether a file is still the one that was imported."""
    store = create_import(
        tmp_path / "run", [*read_vllm_bench(FOLDER / "detailed.json"), FAILED], provenance={}
    )

    first, absent = store.manifest["sources"]
    assert 64 == len(first["sha256"])
    assert {"path": "x", "sha256": None} == absent


def test_damaged_line_is_named(tmp_path: Path) -> None:
    """A half-written file is an error of the store, not a shorter run."""
    store = create_import(tmp_path / "run", [FAILED], provenance={})
    store.write_text("served.jsonl", '{"measurement": null')

    with pytest.raises(StoreError, match=r"served\.jsonl is damaged"):
        read_imports(store)


def test_directory_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    """Importing twice needs two directories."""
    create_import(tmp_path / "run", [FAILED], provenance={})

    with pytest.raises(UsageError, match="already holds a run"):
        create_import(tmp_path / "run", [FAILED], provenance={})
