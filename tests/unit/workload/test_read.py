"""Files become workloads: encodings, containers, drops, sampling and the digest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from spectune.errors import WorkloadError
from spectune.workload import load_workload

Write = Callable[..., Path]

ROWS = [
    {"category": "a", "turns": ["one"]},
    {"category": "b", "turns": ["two"]},
    {"category": "a", "turns": ["three"]},
]


def _asked(path: Path) -> set[tuple[str, ...]]:
    return {prompt.turns for prompt in load_workload(path).prompts}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("\n".join(map(json.dumps, ROWS)), id="json-lines"),
        pytest.param("\n\n".join(map(json.dumps, ROWS)) + "\n\n", id="json-lines-with-blank-lines"),
        pytest.param("\r\n".join(map(json.dumps, ROWS)) + "\r\n", id="crlf"),
        pytest.param("\ufeff" + "\n".join(map(json.dumps, ROWS)), id="byte-order-mark"),
        pytest.param(json.dumps(ROWS), id="array"),
        pytest.param(json.dumps(ROWS, indent=2), id="indented-array"),
        pytest.param(json.dumps({"data": ROWS}), id="data"),
        pytest.param(
            json.dumps({"version": {"data": []}, "data": ROWS, "n": 3}, indent=2), id="data-in-the-middle"
        ),
    ],
)
def test_load_workload_container_does_not_change_the_prompts(write: Write, text: str) -> None:
    """Every container and line ending yields the same prompts and the same digest."""
    plain = load_workload(write(ROWS, name="plain.jsonl"))

    workload = load_workload(write(text.encode(), name="other.json"))

    assert (workload.digest, workload.num_rows) == (plain.digest, 3)


def test_load_workload_single_object_over_several_lines_is_one_row(write: Write) -> None:
    """A file that is one indented object holds one prompt."""
    assert _asked(write(json.dumps({"prompt": "alone"}, indent=2).encode())) == {("alone",)}


def test_load_workload_line_separator_inside_a_string_does_not_split_the_row(write: Write) -> None:
    """U+2028 and U+0085 are part of the text, not ends of lines."""
    path = write('{"prompt": "a\u2028b\u0085c"}\n{"prompt": "d"}'.encode())

    assert _asked(path) == {("a\u2028b\u0085c",), ("d",)}


@pytest.mark.parametrize(
    ("content", "line", "offset", "byte"),
    [
        # {"prompt": "a"}\n is 16 bytes, {"prompt": " another 12
        pytest.param(b'{"prompt": "a"}\n{"prompt": "\x81"}\n', 2, 28, "0x81", id="cp1252"),
        pytest.param(b'{"prompt": "a"}\r\n{"prompt": "\xa4"}\r\n', 2, 29, "0xa4", id="gbk-crlf"),
        pytest.param(b'\xef\xbb\xbf{"prompt": "\xff"}', 1, 15, "0xff", id="after-byte-order-mark"),
    ],
)
def test_load_workload_bad_bytes_names_file_line_and_offset(
    write: Write, content: bytes, line: int, offset: int, byte: str
) -> None:
    """A byte that is not UTF-8 is reported where it lies in the file."""
    path = write(content)

    with pytest.raises(WorkloadError) as raised:
        load_workload(path)

    assert raised.value.message == f"{path}, line {line}: byte {byte} at byte offset {offset} is not UTF-8"


def test_load_workload_reads_utf8_under_an_ascii_locale(write: Write) -> None:
    """The platform's locale does not decide how a prompt file is decoded."""
    path = write('{"prompt": "žluťoučký"}'.encode())
    code = "import sys; from spectune.workload import load_workload as l; "
    code += "print(ascii(l(sys.argv[1]).prompts[0].turns[0]))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, **locale, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == ascii("žluťoučký")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "the file is empty", id="empty"),
        pytest.param(b"\xef\xbb\xbf \r\n\n", "the file is empty", id="only-blank-lines"),
        pytest.param(b"[]", "the file holds no rows", id="empty-array"),
        pytest.param(b'{"data": []}', "the file holds no rows", id="empty-data"),
    ],
)
def test_load_workload_without_rows_is_an_error(write: Write, content: bytes, message: str) -> None:
    """A file without any row is refused instead of measuring nothing."""
    path = write(content)

    with pytest.raises(WorkloadError) as raised:
        load_workload(path)

    assert raised.value.message == f"{path}: {message}"


@pytest.mark.parametrize(
    ("content", "place"),
    [
        pytest.param(b'{"prompt": "a"}\n\n{"prompt": }\n', "line 3, column 12", id="json-lines"),
        pytest.param(b'[{"prompt": "a"},\n {"prompt": "b"}', "line 2, column 17", id="open-array"),
        pytest.param(b'[{"prompt": "a"}\n {"prompt": "b"}]', "line 2, column 2", id="missing-comma"),
        pytest.param(b'[{"prompt": "a"}]\nx', "line 2, column 1", id="after-the-array"),
        pytest.param(
            b'{"data": [\n{"prompt": "a"},\n{"prompt" "b"}]}', "line 3, column 11", id="inside-data"
        ),
        pytest.param(b"prompt,category\nhello,chat\n", "line 1, column 1", id="csv"),
    ],
)
def test_load_workload_broken_json_names_the_place(write: Write, content: bytes, place: str) -> None:
    """Broken JSON is reported with file, line and column."""
    path = write(content)

    with pytest.raises(WorkloadError) as raised:
        load_workload(path)

    assert raised.value.message.startswith(f"{path}, {place}: not JSON: ")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        pytest.param(b'{"prompt": "a"}\n\n{"text": "b", "label": 1}\n', 3, id="json-lines"),
        pytest.param(b'[\n{"prompt": "a"},\n\n{"text": "b", "label": 1}]', 4, id="array"),
        pytest.param(b'{"data":\n[{"prompt": "a"},\n{"text": "b", "label": 1}]}', 3, id="data"),
    ],
)
def test_load_workload_unknown_columns_names_file_line_and_keys(
    write: Write, content: bytes, line: int
) -> None:
    """Unknown columns stop at once with the place, the keys found and the shapes accepted."""
    path = write(content)

    with pytest.raises(WorkloadError) as raised:
        load_workload(path)

    assert raised.value.message == f"{path}, line {line}: no known shape: the keys are text, label"
    assert '"messages"' in (raised.value.hint or "")
    assert raised.value.exit_code == 2


def test_load_workload_unknown_role_names_the_line(write: Write) -> None:
    """A role that spectune does not know is reported with the row it stands in."""
    path = write([{"prompt": "a"}, {"conversations": [{"from": "narrator", "value": "b"}]}])

    with pytest.raises(
        WorkloadError, match=r"traffic\.jsonl, line 2: message 1 has the unknown role 'narrator'"
    ):
        load_workload(path)


def test_load_workload_counts_every_dropped_row_with_its_reason(write: Write) -> None:
    """Rows that cannot be asked are listed one by one, and the accounting finds every row again."""
    path = write(
        [
            {"prompt": "a", "category": "x"},
            {"prompt": ""},
            {"turns": ["a"], "category": "y"},
            {"prompt": "b", "category": "y"},
            {"prompt": "c", "category": "x"},
            {"conversations": []},
        ]
    )

    workload = load_workload(path, categories=["x"], num_prompts=100)

    assert workload.dropped == (
        "traffic.jsonl, line 2: the prompt is empty",
        "traffic.jsonl, line 3: the same prompt as traffic.jsonl, line 1",
        "traffic.jsonl, line 6: the conversation holds no message of a user",
    )
    assert workload.num_rows == workload.num_dropped + workload.num_filtered + workload.num_available
    assert workload.accounting == (
        "traffic.jsonl: 2 of 6 prompts used (1 left out: the conversation holds no message of a user, "
        "1 left out: the prompt is empty, 1 left out: the same prompt as an earlier row, "
        "1 of other categories, 100 would be needed)"
    )


def test_load_workload_all_rows_dropped_is_an_error_with_the_reasons(write: Write) -> None:
    """When nothing remains to ask, the reasons are counted in the error."""
    path = write([{"prompt": ""}, {"prompt": ""}, {"turns": []}])

    with pytest.raises(WorkloadError) as raised:
        load_workload(path)

    assert raised.value.message == (
        f"{path}: none of 3 rows can be asked: the prompt is empty (2); turns is empty (1)"
    )


def test_load_workload_keeps_categories_and_names_the_rest_after_the_file(write: Write) -> None:
    """A row without a category, or with a blank one, gets the name of its file."""
    workload = load_workload(
        write([{"prompt": "a", "category": "x"}, {"prompt": "b", "category": " "}, {"prompt": "c"}])
    )

    assert workload.categories == {"traffic": 2, "x": 1}


def test_load_workload_tells_ignored_columns(write: Write) -> None:
    """Columns beyond the shape are not silently skipped; a misspelt limit is seen there."""
    workload = load_workload(write([{"prompt": "a", "output_token": 9, "model": "m"}]))

    assert workload.ignored_keys == ("model", "output_token")


def test_load_workload_same_id_twice_stays_apart(write: Write) -> None:
    """Two different prompts under one id keep distinguishable ids."""
    workload = load_workload(write([{"id": 5, "prompt": "a"}, {"id": 5, "prompt": "b"}]))

    assert {prompt.prompt_id for prompt in workload.prompts} == {"5", "5 (traffic.jsonl, line 2)"}


def test_load_workload_sample_is_spread_over_categories(write: Write) -> None:
    """A sample takes the categories in turn, and a small one is passed over once it is used up."""
    rows = [{"prompt": f"a{i}", "category": "a"} for i in range(10)]
    rows += [
        {"prompt": "b0", "category": "b"},
        {"prompt": "c0", "category": "c"},
        {"prompt": "c1", "category": "c"},
    ]

    workload = load_workload(write(rows), num_prompts=7)

    assert [prompt.category for prompt in workload.prompts] == ["a", "b", "c", "a", "c", "a", "a"]


def test_load_workload_longer_sample_contains_the_shorter(write: Write) -> None:
    """Asking for more prompts keeps those of the smaller sample, in their order."""
    path = write([{"prompt": str(i), "category": "ab"[i % 2]} for i in range(20)])

    short = load_workload(path, num_prompts=5)
    long = load_workload(path, num_prompts=12)

    assert long.prompts[:5] == short.prompts


def test_load_workload_seed_decides_the_sample_and_row_order_does_not(write: Write) -> None:
    """The same seed gives the same digest for shuffled rows; another seed gives another sample."""
    rows = [{"prompt": str(i), "id": i, "category": "x"} for i in range(40)]
    path, reversed_path = write(rows), write(rows[::-1], name="reversed.jsonl")

    digest = load_workload(path, num_prompts=8, seed=1).digest

    assert load_workload(reversed_path, num_prompts=8, seed=1).digest == digest
    assert load_workload(path, num_prompts=8, seed=2).digest != digest


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"category": "x", "turns": ["b"]}, id="text"),
        pytest.param({"category": "y", "turns": ["a"]}, id="category"),
        pytest.param({"category": "x", "turns": ["a"], "system": "s"}, id="system"),
        pytest.param({"category": "x", "turns": ["a"], "output_tokens": 4}, id="output-limit"),
        pytest.param({"category": "x", "turns": ["a", "a"]}, id="second-turn"),
    ],
)
def test_load_workload_digest_follows_whatever_is_asked(write: Write, row: dict[str, object]) -> None:
    """Each part of a prompt that changes the measurement changes the digest."""
    plain = load_workload(write([{"category": "x", "turns": ["a"]}], name="plain.jsonl"))

    assert load_workload(write([row], name="other.jsonl")).digest != plain.digest


def test_load_workload_digest_is_sha256_of_the_canonical_rows(write: Write) -> None:
    """The digest can be recomputed with any sha256 tool from the documented lines."""
    workload = load_workload(write([{"prompt_id": "p", "category": "x", "turns": ["ä"], "output_tokens": 4}]))

    # printf '["x", null, ["ä"], 4]\n' | sha256sum
    assert workload.digest == "8855b42c38fe8a56182b78319e352bd5b21ec25acc49778f9e724bbb2f2a5fef"


@pytest.mark.parametrize("number", [0, -3])
def test_load_workload_without_prompts_requested_is_an_error(number: int) -> None:
    """Fewer than one prompt is refused and names the flag."""
    with pytest.raises(WorkloadError, match=f"--num-prompts {number} asks for no prompt"):
        load_workload(None, num_prompts=number)


def test_load_workload_absent_category_lists_those_there(write: Write) -> None:
    """A category that no prompt has is an error with the categories that exist."""
    with pytest.raises(WorkloadError) as raised:
        load_workload(write(ROWS), categories=["a", "z"])

    assert raised.value.message.endswith("no prompt of category z")
    assert raised.value.hint == "categories there: a, b"


def test_load_workload_absent_file_lists_the_built_in_names() -> None:
    """A path that does not exist is an error that offers the built-in names."""
    with pytest.raises(WorkloadError, match="no workload nowhere") as raised:
        load_workload("nowhere.jsonl")

    assert "default, chat, code" in (raised.value.hint or "")


def test_load_workload_folder_reads_its_files_and_its_calibration(write: Write) -> None:
    """A folder is all of its prompt files, and its calibration file is kept apart."""
    folder = write([{"prompt": "a"}], name="first.jsonl").parent
    write([{"prompt": "b"}], name="second.json")
    write([{"prompt": "warm"}], name="calibration.jsonl")
    write(b"not a prompt file", name="notes.txt")

    workload = load_workload(folder)

    assert workload.categories == {"first": 1, "second": 1}
    assert [prompt.turns for prompt in workload.calibration] == [("warm",)]


def test_load_workload_folder_without_prompt_files_is_an_error(tmp_path: Path) -> None:
    """A folder without prompts is refused by name."""
    with pytest.raises(WorkloadError, match=r"the folder holds no \.jsonl or \.json file"):
        load_workload(tmp_path)


def test_load_workload_calibrates_on_the_prompts_not_sampled(write: Write) -> None:
    """A user's file warms up on its own remaining prompts, at most two a category, never a measured one."""
    path = write([{"prompt": f"{c}{i}", "category": c} for c in "ab" for i in range(6)])

    workload = load_workload(path, num_prompts=4)

    assert Counter(prompt.category for prompt in workload.calibration) == {"a": 2, "b": 2}
    assert not set(workload.calibration) & set(workload.prompts)


def test_load_workload_without_spare_prompts_calibrates_on_the_built_in(write: Write) -> None:
    """When all prompts of a file are measured, the built-in calibration prompts warm the engine."""
    workload = load_workload(write(ROWS))

    assert {prompt.prompt_id.split("-")[0] for prompt in workload.calibration} == {"calibration"}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"prompt": ' + b"[" * 100_000 + b"}", id="nested-too-deeply"),
        pytest.param(b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", id="number-too-long"),
    ],
)
def test_load_workload_json_beyond_the_parser_is_an_error_of_the_file(write: Write, content: bytes) -> None:
    """What the JSON parser gives up on is a named error and not a traceback."""
    with pytest.raises(WorkloadError, match=r"traffic\.jsonl, line 1: cannot be read as JSON"):
        load_workload(write(content))
