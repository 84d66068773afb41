"""Every file ends in prompts or in one clear error of the file, whatever its bytes are."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from spectune.errors import UsageError, WorkloadError
from spectune.workload import load_workload

_spec = util.spec_from_file_location("odd_files", Path(__file__).with_name("odd_files.py"))
assert _spec is not None
assert _spec.loader is not None
_module = util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
ODD: list[tuple[str, str, bytes]] = list(_module.odd_files())

Write = Callable[..., Path]

READABLE = {  # name: prompts that can be asked
    "bom": 1, "crlf": 2, "no-last-newline": 2, "long-line": 1, "nul-in-a-string": 1, "two-arrays": None,
    "nan": 1, "data-twice": 1, "key-twice": 1, "turns-is-text": 1, "list-of-pairs": 1,
    "list-of-role-pairs": 1, "list-of-lists": 1, "all-the-same": 1, "one-bad-of-many": 200,
    "mixed-shapes": 2, "csv": 2, "csv-in-lines": 2, "csv-semicolons": 1, "csv-tabs": 1, "csv-bom": 1,
    "csv-long-cell": 1, "csv-messages": 1, "text": 2,
}  # fmt: skip


def test_there_are_at_least_sixty_odd_files() -> None:
    """The corpus is as large as promised, and no name is used twice."""
    assert len(ODD) >= 60
    assert len({name for name, _, _ in ODD}) == len(ODD)


@pytest.mark.parametrize(("name", "file", "content"), ODD, ids=[name for name, _, _ in ODD])
def test_odd_file_gives_prompts_or_one_clear_error(
    write: Write, name: str, file: str, content: bytes
) -> None:
    """The error is of the user's file: it names it, is one short text, and has exit code 2."""
    path = write(content, name=file)
    count, error = _read(path)

    if error is None:
        assert READABLE.get(name, count) in (count, None)
        assert count > 0
        return
    assert READABLE.get(name) is None, error.message
    assert str(path) in error.message
    assert error.exit_code == 2
    assert len(error.message) < 1000
    assert "\n" not in error.message


def _read(path: Path) -> tuple[int, UsageError | None]:
    try:
        return len(load_workload(path).prompts), None
    except UsageError as error:
        return 0, error


@pytest.mark.parametrize(
    ("content", "place"),
    [
        pytest.param(b"prompt\na\n\xe9\n", "line 3: byte 0xe9 at byte offset 9", id="csv"),
        pytest.param(b"one\r\ntw\xa4\n", "line 2: byte 0xa4 at byte offset 7", id="text"),
    ],
)
def test_bad_bytes_in_tables_name_line_and_offset(write: Write, content: bytes, place: str) -> None:
    """CSV and text report a bad byte as JSON Lines do."""
    path = write(content, name="f.csv" if content.startswith(b"prompt") else "f.txt")

    with pytest.raises(WorkloadError, match=place):
        load_workload(path)


def test_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    """Reading a named pipe without a writer would block for ever."""
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)

    with pytest.raises(WorkloadError, match="not a regular file"):
        load_workload(pipe)


def test_device_is_refused(tmp_path: Path) -> None:
    """A device has no end."""
    link = tmp_path / "zero.jsonl"
    link.symlink_to("/dev/zero")

    with pytest.raises(WorkloadError, match="not a regular file"):
        load_workload(link)


def test_few_torn_lines_are_left_out_and_counted(write: Write) -> None:
    """One torn line in two hundred rows is told with its place, and does not stop the reading."""
    rows: list[Any] = [{"prompt": str(i)} for i in range(199)]
    path = write(rows)
    path.write_bytes(path.read_bytes() + b'{"prompt": "torn\n')

    workload = load_workload(path)

    assert workload.num_dropped_by_reason == {"the row cannot be read": 1}
    assert "line 200, column 12: not JSON" in workload.dropped[0]


def test_more_torn_lines_than_one_in_a_hundred_stop(write: Write) -> None:
    """Three torn lines of two hundred are a wrong file; the first one is named."""
    path = write([{"prompt": str(i)} for i in range(197)])
    path.write_bytes(b"{torn\n{torn\n{torn\n" + path.read_bytes())

    with pytest.raises(WorkloadError, match="line 1, column 2: not JSON"):
        load_workload(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b'{"prompt": "a"}\n{"prompt": ""}\n', "line 2: the prompt is empty", id="empty"),
        pytest.param(b'{"prompt": "a"}\n{"prompt": "a"}\n', "line 2: the same prompt as", id="twice"),
        pytest.param(b'{"prompt": "a"}\n' * 1 + b"{torn\n", "line 2, column 2: not JSON", id="torn"),
    ],
)
def test_strict_stops_at_the_first_row_that_cannot_be_asked(
    write: Write, content: bytes, message: str
) -> None:
    """With --strict nothing is left out silently."""
    with pytest.raises(WorkloadError, match=message):
        load_workload(write(content), strict=True)


@pytest.mark.parametrize(
    ("formats", "content", "count"),
    [
        pytest.param(("csv",), b"prompt\na\n", 1, id="container"),
        pytest.param(("csv", "gsm8k"), b"question,answer,prompt\na,b,\n", 1, id="both"),
        pytest.param(("text",), b'{"prompt": "a"}\nb\n', 2, id="text"),
        pytest.param(("prompt",), b'{"prompt": "a", "messages": []}\n', 1, id="shape"),
    ],
)
def test_named_formats_override_detection(
    write: Write, formats: tuple[str, ...], content: bytes, count: int
) -> None:
    """--dataset-format names the kind of file, the shape of its rows, or both."""
    assert len(load_workload(write(content, name="f.dat"), formats=formats).prompts) == count


@pytest.mark.parametrize(
    ("formats", "message"),
    [
        pytest.param(("xml",), "--dataset-format xml is not known", id="unknown"),
        pytest.param(("csv", "json"), "give at most one kind of file", id="two-kinds"),
        pytest.param(("gsm8k",), "needs the key question: the keys are prompt", id="other-shape"),
    ],
)
def test_wrong_formats_are_errors(write: Write, formats: tuple[str, ...], message: str) -> None:
    """A format that does not exist or does not fit is told."""
    with pytest.raises(WorkloadError, match=message):
        load_workload(write(b'{"prompt": "a"}\n'), formats=formats)


def test_parquet_rows_are_those_of_json_lines(write: Write, tmp_path: Path) -> None:
    """The same rows in a parquet file are the same workload."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": f"p{i}", "output_tokens": 5 if i % 2 else None} for i in range(600)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "traffic.parquet")

    assert load_workload(tmp_path / "traffic.parquet").digest == load_workload(write(rows)).digest


def test_hub_ids_go_through_the_datasets_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the chosen split become the workload; the split is test before train."""
    asked: list[Any] = []

    class Library:
        @staticmethod
        def get_dataset_split_names(name: str, subset: str | None) -> list[str]:
            return ["train", "test"]

        @staticmethod
        def load_dataset(name: str, subset: str | None, *, split: str, streaming: bool) -> Any:
            asked.append((name, subset, split, streaming))
            return iter([{"question": "1+1?", "answer": "2", "note": None}])

    monkeypatch.setitem(__import__("sys").modules, "datasets", Library)

    workload = load_workload("openai/gsm8k", subset="main")

    assert asked == [("openai/gsm8k", "main", "test", True)]
    assert [prompt.turns for prompt in workload.prompts] == [("1+1?",)]


def test_hub_id_without_the_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)

    with pytest.raises(UsageError) as raised:
        load_workload("owner/name")

    assert "pip install 'spectune[hub]'" in (raised.value.hint or "")


def test_misspelt_file_is_not_taken_for_a_hub_id() -> None:
    """A path with a suffix of a prompt file is a missing file, not a name on the hub."""
    with pytest.raises(WorkloadError, match=r"no workload data/prompts\.jsonl"):
        load_workload("data/prompts.jsonl")


def test_prompts_that_do_not_fit_are_counted_and_replaced(write: Write) -> None:
    """Of 30 prompts 10 are too long after encoding: 15 that fit are still found."""
    path = write([{"prompt": "x" * (100 if i % 3 == 0 else 10) + str(i)} for i in range(30)])

    workload = load_workload(
        path, num_prompts=15, fits=lambda prompt: "too long" if len(prompt.turns[0]) > 50 else None
    )

    assert len(workload.prompts) == 15
    assert workload.num_dropped_by_reason == {"too long": 10}
    assert workload.num_rows == workload.num_dropped + workload.num_available


def test_no_prompt_that_fits_is_an_error(write: Write) -> None:
    """Zero usable rows never become a run."""
    with pytest.raises(WorkloadError, match="none of 1 prompts can run: too long"):
        load_workload(write([{"prompt": "a"}]), fits=lambda _: "too long")
