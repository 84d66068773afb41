"""Prompts that a program drew: clearly labelled, for shapes and lengths, never for acceptance.

Every row carries the key `synthetic`, so that the label survives copying, renaming and mixing files.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from spectune.errors import WorkloadError

SYNTHETIC_KEY = "synthetic"
CATEGORY = "synthetic"
_SYLLABLES = [
    "ka",
    "to",
    "mi",
    "ren",
    "lo",
    "va",
    "su",
    "pe",
    "dra",
    "no",
    "li",
    "ger",
    "an",
    "shu",
    "bo",
    "tal",
    "eri",
    "mo",
    "cha",
    "sin",
    "ul",
    "wa",
    "fe",
    "ri",
    "zo",
    "hem",
    "ba",
    "tu",
    "qui",
    "nor",
]


def synthetic_rows(
    number: int, *, words: Sequence[int], output_tokens: int | None, seed: int
) -> Iterator[dict[str, Any]]:
    """`number` prompts of meaningless words, their lengths in words drawn from `words`.

    Raises WorkloadError for counts below 1.
    """
    if number < 1 or not words or min(words) < 1:
        raise WorkloadError(f"{number} prompts of {list(words)} words: need at least 1 of at least 1 word")
    generator = random.Random(seed)
    for index in range(number):
        length = generator.choice(list(words))
        text = " ".join(_word(generator) for _ in range(length))
        row: dict[str, Any] = {
            "prompt_id": f"synthetic-{seed}-{index}",
            "category": CATEGORY,
            "prompt": text,
            SYNTHETIC_KEY: True,
        }
        if output_tokens is not None:
            row["output_tokens"] = output_tokens
        yield row


def _word(generator: random.Random) -> str:
    return "".join(generator.choice(_SYLLABLES) for _ in range(generator.randint(1, 3)))
