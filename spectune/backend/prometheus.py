"""Counters of a server: the text exposition in, what grew between two readings out.

Absolute values mean nothing (they hold warm-up and everybody's traffic); only differences are used,
summed over engines. A counter that fell or was created anew means another server: no difference.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from spectune.backend.server_words import VLLM_WORDS, ServerWords
from spectune.errors import EngineFailure
from spectune.records import SpecCounts

SPEC = "vllm:spec_decode_num_"
DRAFTS = f"{SPEC}drafts_total"
DRAFT_TOKENS = f"{SPEC}draft_tokens_total"
ACCEPTED = f"{SPEC}accepted_tokens_total"
ACCEPTED_PER_POSITION = f"{SPEC}accepted_tokens_per_pos_total"
RUNNING = "vllm:num_requests_running"
MODEL = "model_name"

Labels = tuple[tuple[str, str], ...]

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\S+)?$")
_LABEL = re.compile(r'\s*(?P<name>[a-zA-Z_]\w*)="(?P<value>(?:[^"\\]|\\.)*)"\s*,?')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One reading: value by name and labels."""

    values: Mapping[tuple[str, Labels], float]

    def series(self, name: str, labels: Mapping[str, str] | None = None) -> dict[Labels, float]:
        """Every series of a name that carries these labels."""
        wanted = (labels or {}).items()
        return {
            own: value
            for (found, own), value in self.values.items()
            if found == name and all(pair in own for pair in wanted)
        }

    def total(self, name: str, labels: Mapping[str, str] | None = None) -> float | None:
        """Sum over engines and all other labels; None where there is no such series."""
        found = self.series(name, labels)
        return math.fsum(found.values()) if found else None


def parse_exposition(text: str) -> Scrape:
    """Text exposition as one reading; comments, exemplars and time stamps are dropped.

    Raises EngineFailure naming the line that is not the format.
    """
    values: dict[tuple[str, Labels], float] = {}
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line.partition(" # ")[0].rstrip()) or _LINE.match(line)
        if match is None:
            raise EngineFailure(f"metrics line {number} cannot be read: {line[:120]}")
        try:
            value = float(match["value"])
        except ValueError as error:
            raise EngineFailure(
                f"metrics line {number} cannot be read: {match['value']!r} is no number"
            ) from error
        values[match["name"], _labels(match["labels"] or "")] = value
    return Scrape(values=values)


def spec_counts(before: Scrape, after: Scrape, *, model: str | None = None) -> SpecCounts | None:
    """What speculation did between two readings, summed over engines; None where nothing is counted.

    All zero where the server speculates but nothing was drafted: acceptance is unknown then, not 1.
    Raises EngineFailure if the server was restarted in between.
    """
    if after.total(DRAFTS, _of(model)) is None:
        return None
    by_position: dict[int, int] = {}
    for labels, value in _growth(before, after, ACCEPTED_PER_POSITION, model).items():
        position = int(dict(labels)["position"])
        by_position[position] = by_position.get(position, 0) + round(value)
    return SpecCounts(
        num_drafts=_grown(before, after, DRAFTS, model),
        num_draft_tokens=_grown(before, after, DRAFT_TOKENS, model),
        num_accepted_tokens=_grown(before, after, ACCEPTED, model),
        accepted_per_position=tuple(
            by_position.get(position, 0) for position in range(max(by_position, default=-1) + 1)
        ),
    )


def cache_hit_rate(
    before: Scrape, after: Scrape, *, model: str | None = None, words: ServerWords = VLLM_WORDS
) -> float | None:
    """Share of the prompt tokens asked between two readings that the prefix cache held; None if unknown."""
    if after.total(words.cache_queries, _of(model)) is None:
        return None
    queries = _grown(before, after, words.cache_queries, model)
    return _grown(before, after, words.cache_hits, model) / queries if queries else None


def grown(before: Scrape, after: Scrape, name: str, *, model: str | None = None) -> float | None:
    """How much a counter grew, summed over engines; None where it is not counted."""
    if after.total(name, _of(model)) is None:
        return None
    return math.fsum(_growth(before, after, name, model).values())


def _grown(before: Scrape, after: Scrape, name: str, model: str | None) -> int:
    return round(math.fsum(_growth(before, after, name, model).values()))


def _growth(before: Scrape, after: Scrape, name: str, model: str | None) -> dict[Labels, float]:
    """After - before of each series; a series that is new started at 0."""
    old, new = before.series(name, _of(model)), after.series(name, _of(model))
    for labels, value in old.items():
        if labels not in new or new[labels] < value or _was_recreated(before, after, name, labels):
            raise EngineFailure(
                f"{name} was reset between two readings: the server was restarted",
                hint="counts of two server starts cannot be joined",
            )
    return {labels: value - old.get(labels, 0.0) for labels, value in new.items()}


def _was_recreated(before: Scrape, after: Scrape, name: str, labels: Labels) -> bool:
    """Whether the series' own creation time moved: it fell, and has grown past its old value since."""
    created = f"{name.removesuffix('_total')}_created"
    old, new = before.values.get((created, labels)), after.values.get((created, labels))
    return old is not None and new is not None and old != new


def _of(model: str | None) -> dict[str, str]:
    return {} if model is None else {MODEL: model}


def _labels(text: str) -> Labels:
    pairs = [
        (match["name"], re.sub(r'\\\\|\\"|\\n', lambda found: _ESCAPES[found[0]], match["value"]))
        for match in _LABEL.finditer(text)
    ]
    return tuple(sorted(pairs))
