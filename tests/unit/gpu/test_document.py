"""gpu.json: what is written is read again, what is damaged is named, what is comparable goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectune.errors import NotComparable, SpectuneError, UsageError
from spectune.store.gpu_run import GpuDocument, is_gpu_file, read_gpu
from tests.support.gpu_document import check_row, round_row


def test_document_is_read_as_it_was_written(document: GpuDocument, tmp_path: Path) -> None:
    """Rows, parts, device and provenance come back, and the file says what it is."""
    file = tmp_path / "gpu.json"

    document.write(file)

    assert is_gpu_file(file)
    assert document == read_gpu(file)
    assert [file] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "import"}, "no measurement of a GPU"),
        ({"schema_version": 99}, "schema_version 99"),
        ({"device": {}}, "damaged"),
        ({"checks": [{"part": "equality"}]}, "row 1 \\(checks\\)"),
    ],
)
def test_a_foreign_or_damaged_file_is_named(
    document: GpuDocument, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """Neither another kind nor a damaged row becomes a result."""
    file = tmp_path / "gpu.json"
    document.write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))

    with pytest.raises(UsageError, match=words):
        read_gpu(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"part": "magic"}, "part 'magic' is none of"),
        ({"status": "fine"}, "status 'fine' is none of"),
        ({"weights": "dummy"}, "weights 'dummy' is none of"),
        ({"round_s": None}, "round_s None of a row that is ok"),
        ({"status": "oom"}, "status oom has no reason"),
        ({"speed": 3}, "unknown keys in RoundRow: speed"),
    ],
)
def test_a_row_that_means_nothing_is_refused(
    document: GpuDocument, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """The number of the row and the value are told."""
    file = tmp_path / "gpu.json"
    document.write(file)
    data = json.loads(file.read_text())
    data["rounds"][0] |= change
    file.write_text(json.dumps(data))

    with pytest.raises(UsageError, match=f"row 2 \\(rounds\\) cannot be used: .*{words}"):
        read_gpu(file)


def test_no_file_and_no_json_are_told(tmp_path: Path) -> None:
    """A missing file and one that is no JSON are bad input."""
    (tmp_path / "text").write_text("no json")

    assert not is_gpu_file(tmp_path / "none")
    for name in ("none", "text"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_gpu(tmp_path / name)


def test_a_row_of_the_same_shape_takes_the_place_of_the_first(document: GpuDocument) -> None:
    """Measuring again replaces; another context is another row; failed rows are to be measured again."""
    before = len(document.rounds)

    document.add(round_row(round_s=6e-3))
    document.add(round_row(context_tokens=513, status="failed", reason="a kernel refused"))

    assert before + 1 == len(document.rounds)
    assert 6e-3 == document.rounds[round_row().key].round_s
    assert document.has(round_row().key)
    assert not document.has(round_row(context_tokens=513).key)
    assert not document.has(round_row(context_tokens=514).key)


def test_a_resumed_call_takes_over_rows_of_the_same_device(document: GpuDocument) -> None:
    """Measured bandwidth may differ; device, sources and rehearsal may not."""
    fresh = GpuDocument(
        is_rehearsal=False,
        device=replace(document.device, read_bandwidth_bytes_per_s=3.3e12),
        provenance={"source_digest": "abc"},
    )
    others = [
        GpuDocument(is_rehearsal=True, device=fresh.device, provenance=fresh.provenance),
        GpuDocument(
            is_rehearsal=False, device=replace(fresh.device, name="OTHER"), provenance=fresh.provenance
        ),
        GpuDocument(is_rehearsal=False, device=fresh.device, provenance={"source_digest": "xyz"}),
    ]

    fresh.go_on_from(document)

    assert document.rounds == fresh.rounds
    assert document.parts == fresh.parts
    for other in others:
        with pytest.raises(NotComparable, match="the earlier call has"):
            other.go_on_from(document)


@pytest.mark.parametrize(
    ("changes", "is_sound"),
    [
        ({}, True),
        ({"num_different": 2, "num_near_ties": 2}, True),
        ({"num_different": 2, "num_near_ties": 1}, False),
        ({"max_difference": 1e-5, "tolerance": 1e-4}, True),
        ({"max_difference": 2e-4, "tolerance": 1e-4}, False),
        ({"max_difference": 1e-9}, False),
        ({"status": "oom", "reason": "full"}, False),
    ],
)
def test_a_check_holds_within_rounding_only(changes: dict[str, Any], is_sound: bool) -> None:
    """Near ties and differences within a stated tolerance are rounding; nothing else is."""
    assert is_sound == check_row(**changes).is_sound


def test_a_folder_that_cannot_be_written_is_told(document: GpuDocument, tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "file").write_text("")

    with pytest.raises(SpectuneError, match="cannot be written"):
        document.write(tmp_path / "file" / "gpu.json")
