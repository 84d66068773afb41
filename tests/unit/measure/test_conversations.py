"""Prompts of several turns become one prompt a turn, each after answers that are fixed beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from spectune.measure.conversations import as_turns, collect_answers
from spectune.records import Prompt


def prompt(name: str, *turns: str) -> Prompt:
    return Prompt(prompt_id=name, category="chat", turns=turns)


class Parrot:
    """Answers a turn by naming it and how many answers stand before it."""

    def __init__(self, silent_on: str = "") -> None:
        self.asked: list[list[str]] = []
        self.silent_on = silent_on

    def __call__(self, prompts: Sequence[Prompt]) -> list[str]:
        self.asked.append([one.asked for one in prompts])
        return [
            "" if one.asked == self.silent_on else f"re {one.asked} {len(one.answers)}" for one in prompts
        ]


def test_answers_are_asked_turn_by_turn_with_those_before() -> None:
    """Three turns need two answers; the second is asked after the first, and the last turn never."""
    ask = Parrot()
    long, short, single = prompt("l", "a", "b", "c"), prompt("s", "d", "e"), prompt("x", "f")

    answers = collect_answers([long, short, single], ask, {})

    assert ask.asked == [["a", "d"], ["b"]]
    assert answers == {long.digest: ["re a 0", "re b 1"], short.digest: ["re d 0"]}


def test_known_answers_are_not_asked_again() -> None:
    """A resumed run asks what is missing only."""
    ask = Parrot()
    long = prompt("l", "a", "b", "c")

    answers = collect_answers([long], ask, {long.digest: ["kept"]})

    assert (ask.asked, answers) == ([["b"]], {long.digest: ["kept", "re b 1"]})


def test_conversation_ends_at_an_empty_answer() -> None:
    """Nothing is asked after a turn that the target did not answer."""
    long = prompt("l", "a", "b", "c")

    answers = collect_answers([long], Parrot(silent_on="b"), {})

    assert [one.asked for one in as_turns([long], answers)] == ["a", "b"]


def test_turns_carry_their_history_and_stay_in_order() -> None:
    """Each turn is a prompt of its own with the answers so far; the first equals a prompt without more turns."""
    long, single = prompt("l", "a", "b"), prompt("x", "f")

    turns = as_turns([long, single], {long.digest: ["A"]})

    assert [(one.prompt_id, one.turns, one.answers) for one in turns] == [
        ("l", ("a",), ()),
        ("l#2", ("a", "b"), ("A",)),
        ("x", ("f",), ()),
    ]
    assert turns[0].digest == prompt("other", "a").digest
    assert turns[1].digest != long.digest
