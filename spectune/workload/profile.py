"""What a prompt file is like: categories, lengths, duplicates, several turns, looping answers."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spectune.workload.read import Reading, locate

_BAR = 40


@dataclass(slots=True, kw_only=True)
class Profile:
    """Counts of one pass over a source; `lengths` holds one number a prompt, by category."""

    name: str
    unit: str = "words"
    num_rows: int = 0
    num_available: int = 0
    num_dropped_by_reason: Mapping[str, int] = field(default_factory=dict)
    places: Sequence[str] = ()
    ignored_keys: Sequence[str] = ()
    lengths: dict[str, array[int]] = field(default_factory=dict)
    num_multi_turn: int = 0
    num_limited: int = 0
    num_replies: int = 0
    num_loops: int = 0
    is_synthetic: bool = False

    @property
    def all_lengths(self) -> list[int]:
        """Lengths of all prompts, ascending."""
        return sorted(value for lengths in self.lengths.values() for value in lengths)

    def text_of(self, category: str) -> str:
        """`median, p90, largest` of a category."""
        lengths = sorted(self.lengths[category])
        return f"{quantile(lengths, 0.5)}, {quantile(lengths, 0.9)}, {lengths[-1]}"

    def bins(self) -> list[tuple[int, int, int]]:
        """(lowest, highest, count): twelve bins at most, each twice as wide as the one before."""
        lengths = self.all_lengths
        if not lengths:
            return []
        edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 1 << 62]
        found = [
            (low, high - 1, sum(low <= length < high for length in lengths))
            for low, high in itertools.pairwise(edges)
        ]
        first = next(i for i, entry in enumerate(found) if entry[2])
        last = max(i for i, entry in enumerate(found) if entry[2])
        kept = found[first : last + 1]
        return [(low, min(high, lengths[-1]), count) for low, high, count in kept]

    def histogram_lines(self) -> Iterator[str]:
        """The lengths as a picture of text, one line a bin."""
        bins = self.bins()
        most = max((count for _, _, count in bins), default=1)
        width = max((len(f"{low}-{high}") for low, high, _ in bins), default=1)
        for low, high, count in bins:
            bar = "#" * max(int(count > 0), round(count / most * _BAR))
            yield f"{f'{low}-{high}':>{width}} {bar:<{_BAR}} {count}"

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "is_synthetic": self.is_synthetic,
            "rows": self.num_rows,
            "available": self.num_available,
            "dropped_by_reason": dict(self.num_dropped_by_reason),
            "places": list(self.places),
            "ignored_columns": list(self.ignored_keys),
            "num_multi_turn": self.num_multi_turn,
            "num_with_output_limit": self.num_limited,
            "num_recorded_answers": self.num_replies,
            "num_looping_answers": self.num_loops,
            "length_unit": self.unit,
            "categories": {
                name: {
                    "prompts": len(lengths),
                    "length_p50": quantile(sorted(lengths), 0.5),
                    "length_p90": quantile(sorted(lengths), 0.9),
                    "length_max": max(lengths),
                }
                for name, lengths in self.lengths.items()
            },
            "length_histogram": [
                {"low": low, "high": high, "count": count} for low, high, count in self.bins()
            ],
        }


def quantile(ascending: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed."""
    return ascending[max(0, -int(-share * len(ascending) // 1) - 1)]


def profile_workload(
    path_or_name: str,
    *,
    formats: Sequence[str] = (),
    strict: bool = False,
    subset: str | None = None,
    split: str | None = None,
    length: Callable[[str], int] = lambda text: len(text.split()),
    unit: str = "words",
) -> Profile:
    """Read a source once, hold numbers only. Raises what reading it for a run raises."""
    source = locate(path_or_name, subset=subset, split=split)
    reading = Reading(source, num_prompts=1, formats=formats, strict=strict)
    found = Profile(name=source.name, unit=unit)
    for row, prompt in reading.rows():
        lengths = found.lengths.setdefault(prompt.category, array("q"))
        lengths.append(length(" ".join(filter(None, (prompt.system, *prompt.turns)))))
        found.num_multi_turn += len(prompt.turns) > 1
        found.num_limited += prompt.max_tokens is not None
        found.num_replies += len(row.replies)
        found.num_loops += sum(map(is_looping, row.replies))
    found.lengths = {name: found.lengths[name] for name in sorted(found.lengths)}
    found.num_rows, found.num_available = reading.num_rows, reading.num_available
    found.num_dropped_by_reason = dict(reading.num_dropped_by_reason)
    found.places = tuple(reading.dropped)
    found.ignored_keys = tuple(sorted(reading.ignored_keys))
    found.is_synthetic = reading.is_synthetic
    return found


def is_looping(text: str, *, size: int = 8, times: int = 4) -> bool:
    """Whether a run of `size` words comes `times` times or more: a loop is guessed by every drafter."""
    words = text.split()
    if len(words) < size * times:
        return False
    seen: Counter[tuple[str, ...]] = Counter(tuple(words[i : i + size]) for i in range(len(words) - size + 1))
    return max(seen.values()) >= times
