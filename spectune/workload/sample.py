"""Which prompts are asked, and in which order: seeded, and spread evenly over the categories."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import chain, zip_longest

from spectune.records import Prompt


def stratified(prompts: Iterable[Prompt], *, seed: int) -> list[Prompt]:
    """All prompts, one of each category in turn; a prefix of any length is a balanced sample.

    The order inside a category is that of sha256(seed, prompt), so it depends neither on the order
    of rows nor on the Python version, and a longer sample contains the shorter one.
    """
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    groups = [
        sorted(by_category[category], key=lambda prompt: _lot(prompt, seed))
        for category in sorted(by_category)
    ]
    turns = chain.from_iterable(zip_longest(*groups))
    return [prompt for prompt in turns if prompt is not None]


def _lot(prompt: Prompt, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{prompt.digest}".encode()).hexdigest()
