"""The shapes of a row that spectune reads, and how each becomes the user's turns.

Replies of an assistant in a recorded conversation are not asked, for the target writes its own; they
are kept for those who look at a file. Knows nothing of files; whoever reads one adds the file and line
to what is raised here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from spectune.errors import WorkloadError

SHAPES = (
    '{"turns": [...], "category": ...} (Spec-Bench, MT-Bench), '
    '{"messages": [{"role": ..., "content": ...}]}, '
    '{"conversations": [{"from"|"role": ..., "value"|"content": ...}]} (ShareGPT), '
    '{"prompt": ..., "output_tokens": N}, '
    '{"task_id": ..., "prompt": ...} (HumanEval), '
    '{"question": ..., "answer": ...} (GSM8K)'
)

_NUMBER = re.compile(r"\b(message|turn) \d+")
_USER = {"user", "human"}
_ASSISTANT = {"assistant", "gpt", "bot", "model", "chatgpt", "bing", "bard"}
_SYSTEM = {"system", "developer"}
_TOOL = {"tool", "function", "observation", "function_call", "ipython"}

LIMIT_KEYS = ("output_tokens", "max_tokens", "max_completion_tokens")
_ID_KEYS = ("prompt_id", "question_id", "task_id", "id")
_COMMON_KEYS = {*_ID_KEYS, *LIMIT_KEYS, "category", "system"}


class Row(NamedTuple):
    """What a row asks. `category` and `row_id` are None where the row has none."""

    turns: tuple[str, ...]
    category: str | None
    row_id: str | None
    system: str | None
    max_tokens: int | None
    ignored_keys: frozenset[str]
    replies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """A row of a known shape that cannot be asked, and why; the reason without its numbers is the kind."""

    reason: str

    @property
    def kind(self) -> str:
        """The reason for counting: `message 3 is empty` and `message 5 is empty` are one kind."""
        return _NUMBER.sub(r"a \1", self.reason)


class Said(NamedTuple):
    """What a row says: the system's text, the user's turns, and the answers that were recorded."""

    turns: tuple[str, ...]
    system: str | None = None
    replies: tuple[str, ...] = ()


class _CannotAsk(Exception):
    """Leaves the depth of a conversation with the reason why its row is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    key: str
    read: Callable[[Any], Said]
    companions: frozenset[str] = frozenset()  # keys of the same shape that carry no question
    category: str | None = None


def parse_row(value: Any, shape_name: str | None = None) -> Row | Unusable:
    """One row in any accepted shape, or in the named one. WorkloadError for a row that is in none."""
    if isinstance(value, list):
        value = {"conversations": value}  # a row that is the conversation itself
    if not isinstance(value, dict):
        raise WorkloadError(f"a row is a JSON object, not {_kind(value)}", hint=f"accepted: {SHAPES}")
    shape = _shape_of(value) if shape_name is None else _named_shape(value, shape_name)
    category, row_id = _text_or_none(value, "category"), _row_id(value)
    max_tokens = _output_tokens(value)
    try:
        said = shape.read(value[shape.key])
    except _CannotAsk as reason:
        return Unusable(reason=str(reason))
    system = said.system or _text_or_none(value, "system")
    if not _is_text("".join((*said.turns, system or "", category or "", row_id or ""))):
        return Unusable(reason="holds half of a surrogate pair, which is no text")
    return Row(
        turns=said.turns,
        category=category or shape.category,
        row_id=row_id,
        system=system,
        max_tokens=max_tokens,
        ignored_keys=_ignored_keys(tuple(value), shape.key, shape.companions),
        replies=said.replies or _companion_replies(value, shape),
    )


@functools.lru_cache(maxsize=256)  # the rows of a file share their keys
def _ignored_keys(keys: tuple[str, ...], key: str, companions: frozenset[str]) -> frozenset[str]:
    return frozenset(map(str, keys)) - _COMMON_KEYS - companions - {key}


def _shape_of(row: Mapping[str, Any]) -> _Shape:
    for shape in _SHAPES:
        if shape.key in row and (shape.key != "question" or "answer" in row):
            if shape.key == "prompt" and "task_id" in row:
                return _HUMANEVAL
            return shape
    raise WorkloadError(f"no known shape: the keys are {_keys(row)}", hint=f"accepted: {SHAPES}")


def _named_shape(row: Mapping[str, Any], name: str) -> _Shape:
    for shape in SHAPES_BY_NAME[name]:
        if shape.key in row:
            return shape
    wanted = " or ".join(shape.key for shape in SHAPES_BY_NAME[name])
    raise WorkloadError(
        f"--dataset-format {name} needs the key {wanted}: the keys are {_keys(row)}",
        hint=f"accepted: {SHAPES}",
    )


def _keys(row: Mapping[str, Any]) -> str:
    """Names of the keys, shortened: a broken file may have thousands."""
    return ", ".join(map(str, row))[:300] if row else "none"


def _companion_replies(row: Mapping[str, Any], shape: _Shape) -> tuple[str, ...]:
    """The recorded answer beside a question: GSM8K's answer, Spec-Bench's reference, HumanEval's solution."""
    for key in ("answer", "reference", "canonical_solution"):
        if key in shape.companions and (found := row.get(key)):
            values = found if isinstance(found, list) else [found]
            return tuple(value for value in values if isinstance(value, str))
    return ()


def _read_prompt(value: Any) -> Said:
    if value is None:
        raise _CannotAsk("the prompt is null")
    if isinstance(value, list) and value and all(isinstance(turn, str) for turn in value):
        return _read_turns(value)  # MT-Bench as the hub has it
    if not isinstance(value, str):
        raise WorkloadError(f"a prompt is a string, not {_kind(value)}")
    if not value.strip():
        raise _CannotAsk("the prompt is empty")
    return Said(turns=(value,))


def _read_turns(value: Any) -> Said:
    if isinstance(value, str):
        return _read_prompt(value)
    if not isinstance(value, list):
        raise WorkloadError(f"turns is a list of strings, not {_kind(value)}")
    if not value:
        raise _CannotAsk("turns is empty")
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, str):
            raise WorkloadError(f"turn {number} is a string, not {_kind(turn)}")
        if not turn.strip():
            raise _CannotAsk(f"turn {number} is empty")
    return Said(turns=tuple(value))


def _read_messages(value: Any) -> Said:
    """System text and user turns; user messages in a row become one turn."""
    if not isinstance(value, list):
        raise WorkloadError(f"a conversation is a list of messages, not {_kind(value)}")
    system: list[str] = []
    turns: list[str] = []
    replies: list[str] = []
    previous = ""
    for number, message in enumerate(_as_messages(value), start=1):
        role = _role(message, number)
        if role == "system":
            if turns:
                raise _CannotAsk(f"message {number} is a system message after the first question")
            system.append(_content(message, number))
        elif role == "user":
            text = _content(message, number)
            if previous == "user":
                turns[-1] += "\n\n" + text
            else:
                turns.append(text)
        elif role == "tool":
            raise _CannotAsk(f"message {number} is the result of a tool, which cannot be replayed")
        elif isinstance(text := message.get("content", message.get("value")), str):
            replies.append(text)
        previous = role
    if not turns:
        raise _CannotAsk("the conversation holds no message of a user")
    return Said(turns=tuple(turns), system="\n\n".join(system) or None, replies=tuple(replies))


def _as_messages(value: list[Any]) -> list[Any]:
    """Messages as objects: a conversation may also be a list of [role, text] or [question, answer] pairs."""
    if not value or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in value
    ):
        return value
    roles = _USER | _ASSISTANT | _SYSTEM | _TOOL
    if all(pair[0].strip().lower() in roles for pair in value):
        return [{"role": role, "content": text} for role, text in value]
    return [
        {"role": role, "content": text}
        for pair in value
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _role(message: Any, number: int) -> str:
    if not isinstance(message, dict):
        raise WorkloadError(f"message {number} is an object, not {_kind(message)}")
    name = message.get("role", message.get("from"))
    if name is None:
        keys = ", ".join(message) if message else "none"
        raise WorkloadError(
            f"message {number} has no role: the keys are {keys}",
            hint='name the speaker with "role" or "from"',
        )
    for role, names in (("user", _USER), ("assistant", _ASSISTANT), ("system", _SYSTEM), ("tool", _TOOL)):
        if isinstance(name, str) and name.strip().lower() in names:
            return role
    known = ", ".join(sorted(_USER | _ASSISTANT | _SYSTEM | _TOOL))
    raise WorkloadError(f"message {number} has the unknown role {name!r}", hint=f"known roles: {known}")


def _content(message: Mapping[str, Any], number: int) -> str:
    """Text of a message: a string, or a list of parts that are all text."""
    if "content" not in message and "value" not in message:
        raise WorkloadError(
            f"message {number} has no text: the keys are {', '.join(message)}",
            hint='put the text under "content" or "value"',
        )
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        content = "".join(_part_text(part, number) for part in content)
    if content is None:
        raise _CannotAsk(f"message {number} is null")
    if not isinstance(content, str):
        raise WorkloadError(f"message {number} is text, not {_kind(content)}")
    if not content.strip():
        raise _CannotAsk(f"message {number} is empty")
    return content


def _part_text(part: Any, number: int) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise WorkloadError(f"message {number} holds a part without a type")
    if part["type"] not in {"text", "input_text"}:
        raise _CannotAsk(f"message {number} holds a part of type {part['type']}, only text can be asked")
    if not isinstance(part.get("text"), str):
        raise WorkloadError(f"message {number} holds a text part without text")
    return str(part["text"])


def _text_or_none(row: Mapping[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise WorkloadError(f"{key} is a string, not {_kind(value)}")
    return value if value and value.strip() else None


def _row_id(row: Mapping[str, Any]) -> str | None:
    for key in _ID_KEYS:
        if key not in row:
            continue
        value = row[key]
        if isinstance(value, bool) or not isinstance(value, str | int | None):
            raise WorkloadError(f"{key} is a string or an integer, not {_kind(value)}")
        if value is not None and value != "":
            return str(value)
    return None


def _output_tokens(row: Mapping[str, Any]) -> int | None:
    for key in LIMIT_KEYS:
        value = row.get(key)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise WorkloadError(f"{key} is a whole number of at least 1, not {repr(value)[:60]}")
            return value
    return None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"the number {value!r}"[:60]
    return kinds.get(type(value), f"a {type(value).__name__}")


# Conversations first: rows that carry both a conversation and its first prompt mean the former.
_SHAPES = (
    _Shape(key="turns", read=_read_turns, companions=frozenset({"reference"})),
    _Shape(key="messages", read=_read_messages),
    _Shape(key="conversations", read=_read_messages),
    _Shape(key="conversation", read=_read_messages),
    _Shape(key="prompt", read=_read_prompt),
    _Shape(key="question", read=_read_prompt, companions=frozenset({"answer"}), category="math"),
)
_HUMANEVAL = _Shape(
    key="prompt",
    read=_read_prompt,
    companions=frozenset({"entry_point", "canonical_solution", "test"}),
    category="code",
)
SHAPES_BY_NAME: dict[str, tuple[_Shape, ...]] = {
    "turns": (_SHAPES[0],),
    "openai": (_SHAPES[1],),
    "sharegpt": (_SHAPES[2], _SHAPES[3]),
    "prompt": (_SHAPES[4],),
    "humaneval": (_HUMANEVAL,),
    "gsm8k": (_SHAPES[5],),
}
"""Shapes that --dataset-format names."""

QUESTION_KEYS = frozenset(shape.key for shape in _SHAPES)
"""Keys or columns that hold what is asked."""
