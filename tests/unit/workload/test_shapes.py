"""Every shape of a row becomes the same turns, and what cannot be asked says why."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.errors import WorkloadError
from spectune.workload.shapes import Row, Unusable, parse_row


def _row(value: Any) -> Row:
    row = parse_row(value)
    assert isinstance(row, Row)
    return row


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({"turns": ["Why?", "And then?"]}, id="spec-bench"),
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": "Why?"},
                    {"role": "assistant", "content": "Because."},
                    {"role": "user", "content": "And then?"},
                ]
            },
            id="openai",
        ),
        pytest.param(
            {
                "conversations": [
                    {"from": "human", "value": "Why?"},
                    {"from": "gpt", "value": "Because."},
                    {"from": "human", "value": "And then?"},
                    {"from": "gpt", "value": "Nothing."},
                ]
            },
            id="sharegpt",
        ),
        pytest.param(
            {
                "conversations": [
                    {"from": "user", "value": "Why?"},
                    {"from": "assistant", "value": "Because."},
                    {"from": "user", "value": "And then?"},
                ]
            },
            id="sharegpt-user-assistant",
        ),
        pytest.param(
            {
                "conversations": [
                    {"role": "Human", "content": "Why?"},
                    {"role": "bot", "content": "Because."},
                    {"role": "USER", "content": [{"type": "text", "text": "And then?"}]},
                ]
            },
            id="role-content-mixed-case",
        ),
    ],
)
def test_parse_row_conversation_shapes_give_the_user_turns(value: dict[str, Any]) -> None:
    """Each conversation shape and role synonym yields the user's turns without the replies."""
    row = _row(value)

    assert row.turns == ("Why?", "And then?")


@pytest.mark.parametrize(
    ("value", "turns", "category", "max_tokens", "row_id"),
    [
        pytest.param({"prompt": "Hi", "output_tokens": 7}, ("Hi",), None, 7, None, id="vllm-custom"),
        pytest.param(
            {"question_id": 81, "category": "writing", "turns": ["Hi"], "reference": ["x"]},
            ("Hi",),
            "writing",
            None,
            "81",
            id="spec-bench",
        ),
        pytest.param(
            {
                "task_id": "T/0",
                "prompt": "def f():",
                "entry_point": "f",
                "test": "",
                "canonical_solution": "",
            },
            ("def f():",),
            "code",
            None,
            "T/0",
            id="humaneval",
        ),
        pytest.param({"question": "1+1?", "answer": "2"}, ("1+1?",), "math", None, None, id="gsm8k"),
        pytest.param(
            {"question": "1+1?", "answer": "2", "category": "sums"},
            ("1+1?",),
            "sums",
            None,
            None,
            id="own-category-wins",
        ),
    ],
)
def test_parse_row_keeps_category_limit_and_id(
    value: dict[str, Any],
    turns: tuple[str, ...],
    category: str | None,
    max_tokens: int | None,
    row_id: str | None,
) -> None:
    """Category, output limit and id survive, and the columns of a known shape are not called ignored."""
    row = _row(value)

    expected = Row(
        turns=turns,
        category=category,
        row_id=row_id,
        system=None,
        max_tokens=max_tokens,
        ignored_keys=frozenset(),
    )
    assert row._replace(replies=()) == expected


def test_parse_row_system_messages_become_the_system_prompt() -> None:
    """System and developer messages before the first question are joined into one system prompt."""
    row = _row(
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "Hi"},
            ]
        }
    )

    assert (row.system, row.turns) == ("Be brief.\n\nBe kind.", ("Hi",))


def test_parse_row_user_messages_in_a_row_become_one_turn() -> None:
    """Two user messages without a reply between them are one turn, as the recorded model saw them."""
    row = _row({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]})

    assert row.turns == ("a\n\nb",)


def test_parse_row_conversation_beside_its_first_prompt_reads_the_conversation() -> None:
    """A row with both a prompt and messages is read as the conversation and tells what it ignored."""
    row = _row({"prompt": "Hi", "messages": [{"role": "user", "content": "Hi there"}], "model": "m"})

    assert (row.turns, row.ignored_keys) == (("Hi there",), {"prompt", "model"})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        pytest.param({"prompt": " \n"}, "the prompt is empty", id="blank-prompt"),
        pytest.param({"prompt": None}, "the prompt is null", id="null-prompt"),
        pytest.param({"turns": []}, "turns is empty", id="no-turns"),
        pytest.param({"turns": ["a", ""]}, "turn 2 is empty", id="blank-second-turn"),
        pytest.param(
            {"conversations": [{"from": "gpt", "value": "Hello"}]},
            "the conversation holds no message of a user",
            id="assistant-only",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "message 1 holds a part of type image_url, only text can be asked",
            id="image",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "42"}]},
            "message 2 is the result of a tool, which cannot be replayed",
            id="tool-result",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "message 2 is a system message after the first question",
            id="late-system",
        ),
        pytest.param(
            {"prompt": "a\ud83d"}, "holds half of a surrogate pair, which is no text", id="half-emoji"
        ),
    ],
)
def test_parse_row_that_cannot_be_asked_says_why(value: dict[str, Any], reason: str) -> None:
    """A row of a known shape without a question to ask is unusable, with the reason."""
    assert parse_row(value) == Unusable(reason=reason)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param({"text": "a", "id": 1}, "no known shape: the keys are text, id", id="unknown-columns"),
        pytest.param({}, "no known shape: the keys are none", id="no-columns"),
        pytest.param({"question": "a"}, "no known shape: the keys are question", id="question-alone"),
        pytest.param(["a"], "message 1 is an object, not a string", id="list"),
        pytest.param(3, "a row is a JSON object, not the number 3", id="number"),
        pytest.param({"prompt": [1, 2]}, "a prompt is a string, not a list", id="token-ids"),
        pytest.param({"turns": ["a", 5]}, "turn 2 is a string, not the number 5", id="turn-number"),
        pytest.param(
            {"prompt": "a", "output_tokens": 0},
            "output_tokens is a whole number of at least 1, not 0",
            id="zero-output",
        ),
        pytest.param(
            {"prompt": "a", "output_tokens": True},
            "output_tokens is a whole number of at least 1, not True",
            id="boolean-output",
        ),
        pytest.param(
            {"conversations": [{"from": "narrator", "value": "a"}]},
            "message 1 has the unknown role 'narrator'",
            id="unknown-role",
        ),
        pytest.param(
            {"conversations": [{"speaker": "x", "value": "a"}]},
            "message 1 has no role: the keys are speaker, value",
            id="no-role",
        ),
        pytest.param(
            {"messages": [{"role": "user", "text": "a"}]},
            "message 1 has no text: the keys are role, text",
            id="no-content",
        ),
        pytest.param({"prompt": "a", "category": 4}, "category is a string, not the number 4", id="category"),
    ],
)
def test_parse_row_of_no_shape_is_an_error_that_names_the_value(value: Any, message: str) -> None:
    """A row that nobody meant as a prompt stops the reading and names what was found."""
    with pytest.raises(WorkloadError) as raised:
        parse_row(value)

    assert raised.value.message == message


def test_parse_row_unknown_columns_hint_lists_every_shape() -> None:
    """The hint for unknown columns names the key of each accepted shape."""
    with pytest.raises(WorkloadError) as raised:
        parse_row({"text": "a"})

    hint = raised.value.hint or ""
    keys = ("turns", "messages", "conversations", "prompt", "task_id", "question")
    assert [key for key in keys if f'"{key}"' not in hint] == []
