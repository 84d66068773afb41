"""The prompts that spectune ships, the prose it prefixes, and public sets where they are at hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from spectune.workload import context_text, load_workload
from spectune.workload.folder import workloads_folder

Write = Callable[..., Path]

CATEGORIES = ["chat", "code", "creative", "json_extraction", "math", "rag", "summarization", "translation"]


def test_built_in_default_has_enough_prompts_of_every_category() -> None:
    """The default workload covers its eight categories with at least fourteen prompts each."""
    workload = load_workload(None)

    assert list(workload.categories) == CATEGORIES
    assert min(workload.categories.values()) >= 14
    assert (workload.dropped, workload.ignored_keys) == ((), ())


def test_built_in_calibration_is_two_prompts_a_category_and_never_measured() -> None:
    """Warm-up prompts exist for each category and share no text with the measured ones."""
    workload = load_workload(None)

    assert Counter(prompt.category for prompt in workload.calibration) == dict.fromkeys(CATEGORIES, 2)
    assert not {p.turns for p in workload.calibration} & {p.turns for p in workload.prompts}


@pytest.mark.parametrize("path", sorted(workloads_folder().glob("*.jsonl")), ids=lambda path: path.name)
def test_built_in_file_rows_have_the_documented_shape(path: Path) -> None:
    """Each line has exactly the documented keys, a unique id and the category of its file."""
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]

    assert {tuple(row) for row in rows} == {("prompt_id", "category", "turns")}
    assert len({row["prompt_id"] for row in rows}) == len(rows)
    if path.stem != "calibration":
        assert {row["category"] for row in rows} == {path.stem}


@pytest.mark.parametrize("category", ["json_extraction", "rag", "summarization", "translation"])
def test_built_in_passages_are_of_the_documented_length(category: str) -> None:
    """Prompts about a passage carry 60 to 200 words, so that contexts are alike inside a category."""
    lengths = [len(prompt.turns[0].split()) for prompt in load_workload(category).prompts]

    assert [length for length in lengths if not 60 <= length <= 200] == []


def test_built_in_chat_has_some_second_turns() -> None:
    """A few chat prompts go on after the first answer."""
    turns = Counter(len(prompt.turns) for prompt in load_workload("chat").prompts)

    assert (set(turns), turns[2] >= 3) == ({1, 2}, True)


def test_built_in_name_is_one_category_and_a_path_is_the_file(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`chat` is the built-in category even beside a file of that name, which `./chat` reads."""
    monkeypatch.chdir(write([{"prompt": "mine"}], name="chat").parent)

    assert list(load_workload("chat").categories) == ["chat"]
    assert load_workload("chat").num_rows >= 14
    assert load_workload("./chat").prompts[0].turns == ("mine",)


def test_context_text_is_long_prose_without_repetition() -> None:
    """The built-in prose has 3,000 words and no sentence twice, which an n-gram drafter would exploit."""
    text = context_text(load_workload("chat", num_prompts=1))
    sentences = [sentence.strip() for sentence in text.replace("\n", " ").split(". ") if len(sentence) > 40]

    assert len(text.split()) >= 3000
    assert len(set(sentences)) == len(sentences)


def test_context_text_of_a_folder_is_its_own_prose(write: Write) -> None:
    """A workload folder may bring its own context prose."""
    folder = write([{"prompt": "a"}]).parent
    write(b"\xef\xbb\xbfOur own text.\r\nSecond line.", name="long_context.txt")

    assert context_text(load_workload(folder)) == "Our own text.\nSecond line."


@pytest.mark.parametrize(
    ("file", "num_prompts", "categories"),
    [
        pytest.param(
            "spec_bench.jsonl",
            480,
            {"qa": 80, "math_reasoning": 80, "rag": 80, "summarization": 80, "translation": 80}
            | dict.fromkeys(
                ["coding", "extraction", "humanities", "math", "reasoning", "roleplay", "stem", "writing"], 10
            ),
            id="spec-bench",
        ),
        pytest.param("humaneval.jsonl", 164, {"code": 164}, id="humaneval"),
        pytest.param("gsm8k_train_3000.jsonl", 3000, {"math": 3000}, id="gsm8k"),
    ],
)
def test_public_set_is_read_as_it_is(
    shared_data: Path, file: str, num_prompts: int, categories: dict[str, int]
) -> None:
    """Every row of a public evaluation file is read with its category and nothing is dropped."""
    workload = load_workload(shared_data / file)

    assert (len(workload.prompts), workload.categories) == (num_prompts, categories)
    assert (workload.dropped, workload.ignored_keys) == ((), ())


def test_public_spec_bench_keeps_both_turns(shared_data: Path) -> None:
    """The eighty MT-Bench questions of Spec-Bench keep their second turn."""
    turns = Counter(len(prompt.turns) for prompt in load_workload(shared_data / "spec_bench.jsonl").prompts)

    assert turns == {1: 400, 2: 80}
