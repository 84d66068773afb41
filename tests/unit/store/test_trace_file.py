"""trace.npz: what is written is read, parts join in order, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spectune.errors import StoreError
from spectune.records import SpecConfig
from spectune.replay.rounds import by_request
from spectune.store import trace_file
from spectune.store.trace_file import TiedCut, Trace, join_traces, read_trace, write_trace
from tests.support.traces import chain_drafter, random_trace, toy_trace

CONFIGS = [
    SpecConfig.chain("eagle3", 3),
    SpecConfig(method="eagle3", num_steps=4, topk=2, num_draft_tokens=7),
    SpecConfig(method="eagle3", num_steps=5, topk=4, num_draft_tokens=16),
]


def assert_same(one: Trace, other: Trace) -> None:
    assert one.request_ids == other.request_ids
    assert one.categories == other.categories
    assert one.fingerprint == other.fingerprint
    assert (one.output_ids == other.output_ids).all()
    for mine, theirs in zip(one.drafters, other.drafters, strict=True):
        assert (mine.path == theirs.path).all()
        assert [r.tolist() for r in mine.ranks] == [r.tolist() for r in theirs.ranks]
        assert mine.ties.position.tolist() == theirs.ties.position.tolist()
        assert mine.options == theirs.options
        assert mine.topks == theirs.topks


def test_a_trace_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """Every array, number and name survives the file; a folder is read like the file in it."""
    trace = random_trace(1, [12, 1, 40])

    write_trace(tmp_path / "trace.npz", trace)

    assert_same(trace, read_trace(tmp_path / "trace.npz"))
    assert_same(trace, read_trace(tmp_path))


def test_joined_parts_replay_like_their_requests_alone() -> None:
    """Three parts in order: each request's counts are those of its own part, ties move with it."""
    tie = TiedCut(
        position=np.array([1], np.int32),
        topk=np.array([1], np.uint8),
        steps=np.array([1], np.uint8),
        nodes=np.array([0], np.uint16),
        margin=np.array([1e-6], np.float32),
    )
    parts = [random_trace(seed, lengths) for seed, lengths in enumerate([[7, 9], [1], [30]])]

    whole = by_request(join_traces(parts), CONFIGS)

    alone = [by_request(part, CONFIGS) for part in parts]
    assert (whole.num_steps == np.concatenate([part.num_steps for part in alone], 1)).all()
    assert (whole.num_accepted == np.concatenate([part.num_accepted for part in alone], 1)).all()
    tied = [toy_trace([4], chain_drafter([0, 1, 0], ties=tie)) for _ in range(2)]
    assert [1, 4] == join_traces(tied).drafters[0].ties.position.tolist()


def test_parts_of_different_drafters_do_not_join() -> None:
    """Two depths are two traces."""
    with pytest.raises(StoreError, match="differ"):
        join_traces(
            [toy_trace([3], chain_drafter([0, 1])), toy_trace([3], chain_drafter([0, 1], max_steps=4))]
        )


def test_a_missing_trace_says_how_to_make_one(tmp_path: Path) -> None:
    """No file: the message names it and the command."""
    with pytest.raises(StoreError, match="no trace is there") as caught:
        read_trace(tmp_path)

    assert "spectune trace" in str(caught.value.hint)


@pytest.mark.parametrize("damage", [b"", b"not a zip", None])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes | None) -> None:
    """Empty, foreign and half-written files end in one sentence, not in a traceback."""
    file = tmp_path / "trace.npz"
    write_trace(file, random_trace(1, [12]))
    file.write_bytes(file.read_bytes()[:-200] if damage is None else damage)

    with pytest.raises(StoreError, match=r"trace\.npz is damaged"):
        read_trace(file)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of version 99 names both versions."""
    with monkeypatch.context() as patch:
        patch.setattr(trace_file, "TRACE_VERSION", 99)
        write_trace(tmp_path / "trace.npz", random_trace(1, [12]))

    with pytest.raises(StoreError, match="version 99"):
        read_trace(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """What cannot be written does not replace what is there, and leaves no temporary file."""
    file = tmp_path / "trace.npz"
    write_trace(file, random_trace(1, [12]))
    before = file.read_bytes()

    with pytest.raises(StoreError):
        write_trace(file, toy_trace([3], chain_drafter([0, 1]), fingerprint={"speed": float("nan")}))

    assert before == file.read_bytes()
    assert [file] == list(tmp_path.iterdir())
