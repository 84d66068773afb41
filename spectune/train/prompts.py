"""Prompt generators for self-distillation: one pure function of (seed, index).

Categories take turns; form, fillers, opening and closing words are drawn. All of it is this project's
own and kept apart from the prompts that measure; `ngram_overlap` says how far apart.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from spectune.backend.prompts import chat_messages
from spectune.train.forms import CLOSERS, FORMS, OPENERS
from spectune.train.passages import MANUAL, MEETING, PASSAGES, SNIPPETS

if TYPE_CHECKING:
    from spectune.records import Prompt

_NUMBERS = {
    "n": (2, 12), "m": (3, 9), "a": (12, 95), "b": (10, 80), "c": (2, 11), "p": (15, 90), "q": (120, 900),
    "n2": (11, 40), "day": (1, 28), "year": (1995, 2031), "oldyear": (1200, 1990), "price": (20, 980),
    "age": (5, 90), "small_number": (0, 3),
}  # fmt: skip
_PLAIN = ("coding", "extraction", "translation", "rag", "summarisation")
_SLOT = re.compile(r"\{(\w+)(?::(\w))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPrompt:
    """What is asked: `text` is all that the user says, `messages` the chat where it is more than that."""

    category: str
    text: str
    messages: tuple[dict[str, str], ...] = ()

    @property
    def chat(self) -> list[dict[str, str]]:
        return list(self.messages) or [{"role": "user", "content": self.text}]


def own_prompts(prompts: Iterable[Prompt], seed: int) -> tuple[TrainingPrompt, ...]:
    """The user's prompts in shuffled order, so that a part of them is like the whole.

    Asked is what a sweep asks of a row: its system message and its first turn.
    """
    asked = [
        TrainingPrompt(
            category=prompt.category,
            text="\n".join(prompt.turns[: len(prompt.answers) + 1]),
            messages=tuple(chat_messages(prompt)),
        )
        for prompt in prompts
    ]
    random.Random(f"{seed}:own").shuffle(asked)
    return tuple(asked)


@cache
def slots() -> dict[str, tuple[str, ...]]:
    """The word lists, by name."""
    text = files("spectune.train").joinpath("slots.json").read_text(encoding="utf-8")
    return {name: tuple(words) for name, words in json.loads(text).items()}


def template_prompt(seed: int, index: int) -> TrainingPrompt:
    """The index-th generated prompt."""
    rng = random.Random(f"{seed}:{index}")
    category = tuple(FORMS)[index % len(FORMS)]
    text = _Filler(rng).fill(rng.choice(FORMS[category]))
    if category not in _PLAIN:
        text = f"{rng.choice(OPENERS)}{text}{_Filler(rng).fill(rng.choice(CLOSERS))}"
    style = rng.random()
    if style < 0.06 and category not in ("coding", "translation"):
        text = text.lower()
    elif style < 0.1:
        text = text.rstrip(".?! ")
    return TrainingPrompt(category=category, text=_sentence_case(text) if style >= 0.06 else text)


def fill(form: str, seed: int) -> str:
    """One form with its slots filled."""
    return _Filler(random.Random(seed)).fill(form)


class _Filler:
    """Fills the slots of one prompt; remembers what {name:x} stood for."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._kept: dict[str, str] = {}

    def fill(self, form: str) -> str:
        text = form.replace("{{", "\0").replace("}}", "\1")
        text = _SLOT.sub(lambda match: self._filler(match[1], match[2]), text)
        return text.replace("\0", "{").replace("\1", "}")

    def _filler(self, name: str, mark: str | None) -> str:
        if mark is None:
            return self._draw(name)
        key = f"{name}:{mark}"
        if key not in self._kept:
            taken = {value for other, value in self._kept.items() if other.startswith(f"{name}:")}
            drawn = self._draw(name)
            while drawn in taken:
                drawn = self._draw(name)
            self._kept[key] = drawn
        return self._kept[key]

    def _draw(self, name: str) -> str:
        rng = self.rng
        if name in _NUMBERS:
            return str(rng.randint(*_NUMBERS[name]))
        if name == "bill":
            return str(rng.choice((100, 120, 150, 200)))
        if name == "passage":
            return self._joined(rng.choice(PASSAGES), " ")
        if name in ("meeting", "manual"):
            parts = MEETING if name == "meeting" else MANUAL
            return self._joined([(part,) if isinstance(part, str) else part for part in parts], "")
        if name == "snippet":
            return _Filler(rng).fill(rng.choice(SNIPPETS))
        if name.endswith("_cap"):
            word = self._draw(name.removesuffix("_cap"))
            return word[:1].upper() + word[1:]
        return rng.choice(slots()[name])

    def _joined(self, parts: Sequence[Sequence[str]], between: str) -> str:
        """One choice of every part, with names of its own."""
        inner = _Filler(self.rng)
        chosen = [inner.fill(self.rng.choice(part)) for part in parts]
        return between.join(sentence for sentence in chosen if sentence).strip()


def _sentence_case(text: str) -> str:
    """Capital letter for an article or a word that opens a sentence."""
    return re.sub(r"(^|[.!?]\s)([a-z])", lambda match: match[1] + match[2].upper(), text, count=3)


def ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    """Word n-grams of a text, lower case, punctuation dropped; a shorter text is one as a whole."""
    words = re.findall(r"\w+", text.lower())
    if len(words) < n:
        return {tuple(words)} if words else set()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def overlapping(texts: Iterable[str], reference: Sequence[str], *, n: int = 8) -> list[bool]:
    """Which texts have at least one word n-gram in common with the reference texts."""
    known: set[tuple[str, ...]] = set().union(*(ngrams(text, n) for text in reference))
    return [bool(ngrams(text, n) & known) for text in texts]


def ngram_overlap(texts: Iterable[str], reference: Sequence[str], *, n: int = 8) -> float:
    """Share of `texts` that have at least one word n-gram in common with the reference texts."""
    hits = overlapping(texts, reference, n=n)
    return sum(hits) / len(hits) if hits else 0.0
