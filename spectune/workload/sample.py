"""Which prompts are asked, and in which order: seeded, and spread evenly over the categories."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import NamedTuple

from spectune.records import Prompt

SPARE_PER_CATEGORY = 2
_LEAST_BUFFER = 4096


class Candidate(NamedTuple):
    """A prompt that may be drawn, its lot, and where it stands: (number of the file, line)."""

    lot: str
    prompt: Prompt
    place: tuple[int, int]


def stratified(prompts: Iterable[Prompt], *, seed: int) -> list[Prompt]:
    """All prompts, one of each category in turn; a prefix of any length is a balanced sample.

    The order inside a category is that of sha256(seed, prompt), so it depends neither on the order
    of rows nor on the Python version, and a longer sample contains the shorter one.
    """
    candidates = (Candidate(lot(prompt.digest, seed), prompt, (0, i)) for i, prompt in enumerate(prompts))
    return [candidate.prompt for candidate in in_turn_by_lot(candidates)]


def lot(digest: str, seed: int) -> str:
    """The lot that decides the place of a prompt inside its category."""
    return hashlib.sha256(f"{seed}:{digest}".encode()).hexdigest()


def in_turn_by_lot(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates of each category by lot, the categories in turn by name."""
    by_category: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_category.setdefault(candidate.prompt.category, []).append(candidate)
    groups = [
        sorted(by_category[category], key=lambda candidate: (candidate.lot, candidate.place))
        for category in sorted(by_category)
    ]
    return [candidate for candidate in chain.from_iterable(zip_longest(*groups)) if candidate is not None]


class Sampler:
    """Draws `size` prompts, and a few spare ones of each category, from a stream of any length.

    Holds a few times what it draws: a candidate that is not among the first `size` of those seen so
    far, nor among the first spare ones of its category, cannot come back when more are seen, because
    its rank only grows and the share of its category only shrinks. `size` None keeps everything.
    """

    def __init__(self, size: int | None, *, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._held: list[Candidate] = []
        self._worst: dict[str, str] = {}  # lot beyond which a category has enough, from the last pruning
        self._limit = _LEAST_BUFFER if size is None else max(_LEAST_BUFFER, 4 * size)

    def add(self, prompt: Prompt, digest: str, place: tuple[int, int]) -> None:
        """Take part in the draw; `digest` is that of the prompt."""
        own = lot(digest, self._seed)
        if own > self._worst.get(prompt.category, "g"):  # no hexadecimal digest is above "g"
            return
        self._held.append(Candidate(own, prompt, place))
        if self._size is not None and len(self._held) >= self._limit:
            self._held = [*self._split()[0], *self._split()[1]]
            self._limit = max(self._limit, 2 * len(self._held))
            self._worst = self._enough()

    def draw(self) -> tuple[list[Candidate], list[Candidate]]:
        """The sample in the order in which it is asked, and the spare candidates."""
        return self._split()

    def _split(self) -> tuple[list[Candidate], list[Candidate]]:
        ordered = in_turn_by_lot(self._held)
        if self._size is None:
            return ordered, []
        spare: list[Candidate] = []
        taken: dict[str, int] = {}
        for candidate in ordered[self._size :]:
            category = candidate.prompt.category
            taken[category] = taken.get(category, 0) + 1
            if taken[category] <= SPARE_PER_CATEGORY:
                spare.append(candidate)
        return ordered[: self._size], spare

    def _enough(self) -> dict[str, str]:
        """By category the largest lot still of use, for those that lost candidates to the others."""
        _, spare = self._split()
        last: dict[str, list[str]] = {}
        for candidate in spare:
            last.setdefault(candidate.prompt.category, []).append(candidate.lot)
        return {category: lots[-1] for category, lots in last.items() if len(lots) == SPARE_PER_CATEGORY}
