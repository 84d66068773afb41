"""The run directory: what is appended comes back, what is damaged is named, nothing is half-written."""

from __future__ import annotations

import errno
import os

import pytest

from spectune.errors import StoreError, UsageError
from spectune.records import (
    BlockResult,
    Cell,
    Point,
    PointOutcome,
    RequestRecord,
    RoundRecord,
    RoundTimes,
    Sampling,
    SpecConfig,
    Status,
    StepRecord,
)
from spectune.store import RunStore

CELL = Cell(batch_size=2, context_tokens=0, temperature=0.5)
POINT = Point(
    config=SpecConfig.chain("eagle3", 2, draft_model="head", options=(("a", 1), ("b", True))),
    cell=CELL,
    workload_hash="w",
    sampling=Sampling(temperature=0.5, stop=("END",)),
)


@pytest.fixture
def store(tmp_path):
    return RunStore.create(tmp_path / "run", {"backend": "simulated"})


def block(request_id="r", error=None):
    request = RequestRecord(
        request_id=request_id,
        category="chat",
        num_prompt_tokens=3,
        output_ids=(5, 6, 7, 8),
        arrival_s=0.25,
        first_token_s=None if error else 0.5,
        finish_s=None if error else 1.5,
        finish_reason=None if error else "stop",
        chunk_s=(0.5, 1.0, 1.5),
        steps=(
            StepRecord(num_proposed=2, num_verified=2, num_accepted=1, num_emitted=2),
            StepRecord(num_proposed=2, num_verified=2, num_accepted=1, num_emitted=1, cut="eos"),
        ),
        error=error,
    )
    turn = RoundRecord(
        kind="decode",
        batch_size=1,
        kv_tokens=9,
        config="eagle3 K=2",
        start_s=0.5,
        draft_s=0.1,
        verify_s=0.2,
        other_s=0.01,
        num_emitted=2,
    )
    return BlockResult(requests=(request,), rounds=(turn, turn), duration_s=1.5, peak_memory_bytes=77)


def test_blocks_appended_come_back_equal(store):
    """Two blocks in one file, one with a failed request, are read back to the last field."""
    first, second = block("a"), block("b", error="refused: “x”\n")
    store.append_block("p", 0, first)
    store.append_block("p", 1, second)

    assert {0: first, 1: second} == store.blocks("p")


def test_blocks_of_an_unknown_point_are_none(store):
    """Nothing stored is an empty answer, not an error."""
    assert store.blocks("nobody") == {}


@pytest.mark.parametrize("kept", [1, 10, 30, -9, -1], ids=lambda kept: f"{kept}-bytes")
def test_blocks_half_written_member_is_damaged_and_names_the_file(kept, store):
    """A gzip member cut anywhere spoils the file, it is never read as fewer requests."""
    store.append_block("p", 0, block())
    whole = store.block_file("p").read_bytes()
    store.append_block("p", 1, block())
    second = store.block_file("p").read_bytes()[len(whole) :]
    store.block_file("p").write_bytes(whole + second[:kept])

    with pytest.raises(StoreError, match=r"p\.jsonl\.gz is damaged"):
        store.blocks("p")


def test_append_block_broken_off_leaves_the_earlier_blocks(store, monkeypatch):
    """An interrupt inside the write undoes the write."""
    store.append_block("p", 0, block())

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.append_block("p", 1, block())

    assert set(store.blocks("p")) == {0}


def test_append_block_on_a_full_disk_says_so(store, monkeypatch):
    """The error names the file and what to do."""

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(StoreError, match=r"no space left on the disk of .*p\.jsonl\.gz") as caught:
        store.append_block("p", 0, block())
    assert caught.value.hint == "free some space, then --resume the run"


def test_set_aside_never_replaces_an_older_damaged_file(store):
    """Each damaged file keeps its own name."""
    names = []
    for _ in range(2):
        store.append_block("p", 0, block())
        names.append(store.set_aside("p").name)

    assert names == ["p.jsonl.gz.broken-1", "p.jsonl.gz.broken-2"]
    assert store.set_aside("p") is None


def test_outcomes_last_line_of_a_point_wins(store):
    """A point that was run again counts once, as it ended last."""
    store.append_outcome(PointOutcome(point=POINT, status=Status.FAILED, reason="died"))
    last = PointOutcome(
        point=POINT,
        status=Status.OK,
        num_requests=4,
        reached_batch=1.75,
        peak_memory_bytes=9,
        duration_s=2.5,
    )
    store.append_outcome(last)

    assert {POINT.point_id: last} == store.outcomes()


def test_outcomes_broken_last_line_is_dropped_and_noted(store):
    """A line cut by a crash is left out; the next line does not glue to it."""
    store.append_outcome(PointOutcome(point=POINT, status=Status.OK))
    file = store.path / "points.jsonl"
    file.write_text(file.read_text() + '{"point_id": "ab')

    assert list(store.outcomes()) == [POINT.point_id]
    assert "line 2 was half-written" in store.notes[0]

    store.append_outcome(PointOutcome(point=POINT, status=Status.OOM))
    assert [outcome.status for outcome in store.outcomes().values()] == [Status.OOM]
    assert len(file.read_text().splitlines()) == 2


def test_outcomes_whole_last_line_without_newline_is_kept(store):
    """Only the newline was lost: the line counts and stays."""
    store.append_outcome(PointOutcome(point=POINT, status=Status.OK))
    file = store.path / "points.jsonl"
    file.write_text(file.read_text().rstrip("\n"))

    store.append_outcome(PointOutcome(point=POINT, status=Status.OOM))

    assert len(file.read_text().splitlines()) == 2
    assert store.outcomes()[POINT.point_id].status is Status.OOM


def test_outcomes_broken_line_in_the_middle_is_an_error(store):
    """Damage that no crash explains is named by file and line."""
    store.append_outcome(PointOutcome(point=POINT, status=Status.OK))
    file = store.path / "points.jsonl"
    file.write_text("garbage\n" + file.read_text())

    with pytest.raises(StoreError, match=r"points\.jsonl line 1"):
        store.outcomes()


def test_surface_written_comes_back_by_label_and_cell(store):
    """Round times are found under the arm and the cell that they belong to."""
    surface = {
        ("off", CELL): RoundTimes(draft_s=0.0, verify_s=0.02, other_s=0.001, num_rounds=9),
        ("eagle3 K=2", CELL): RoundTimes(draft_s=0.006, verify_s=0.03, other_s=0.001, num_rounds=7),
    }
    assert store.surface() == {}

    store.write_surface(surface)

    assert surface == RunStore.open(store.path).surface()


def test_cautions_written_come_back_as_sentences(store):
    """Doubts are kept by point."""
    store.write_cautions({"p": ["a", "b"]})

    assert store.cautions() == {"p": ("a", "b")}


def test_open_manifest_comes_back(store):
    """What was passed to create is in the manifest, with the schema version."""
    assert RunStore.open(store.path).manifest == {"schema_version": 1, "backend": "simulated"}


def test_open_other_schema_version_is_refused(store):
    """A run of another version is not guessed at."""
    store.write_json("manifest.json", {"schema_version": 99})

    with pytest.raises(StoreError, match="schema_version 99"):
        RunStore.open(store.path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param('{"schema_version": 1', "is damaged", id="half-written"),
        pytest.param("[]", "no schema_version", id="not-a-manifest"),
    ],
)
def test_open_damaged_manifest_names_the_file(text, words, store):
    """A broken manifest is said to be broken, not a traceback."""
    (store.path / "manifest.json").write_text(text)

    with pytest.raises(StoreError, match=words):
        RunStore.open(store.path)


def test_open_directory_without_a_run_is_named(tmp_path):
    """A wrong path is named."""
    with pytest.raises(StoreError, match="is not a run directory"):
        RunStore.open(tmp_path)


def test_create_under_a_file_is_a_usage_error(tmp_path):
    """An output directory that cannot exist is the user's flag."""
    (tmp_path / "file").write_text("x")

    with pytest.raises(UsageError, match="--output-dir"):
        RunStore.create(tmp_path / "file" / "run", {})


def test_write_json_failing_leaves_the_old_file(store):
    """A value that cannot be written never costs the file that was there."""
    store.write_json("summary.json", {"a": 1})

    with pytest.raises(StoreError):
        store.write_json("summary.json", {"a": float("nan")})

    assert store.read_json("summary.json") == {"a": 1}
    assert sorted(file.name for file in store.path.iterdir() if file.is_file()) == [
        "manifest.json",
        "summary.json",
    ]


def test_blocks_with_line_breaks_of_unicode_come_back(store):
    """An engine's error with U+2028, U+2029 and U+0085 in it is one line of the file."""
    whole = block(error="one\u2028two\u2029three\u0085four")

    store.append_block("p", 0, whole)

    assert {0: whole} == store.blocks("p")
