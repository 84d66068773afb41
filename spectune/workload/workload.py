"""The noun of this package: the prompts of a run, what was left out of them, and their digest."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectune.records import Prompt

NUM_PLACES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts ready to measure, in the order in which they are asked.

    `calibration` prompts are for warm-up and timing only and never equal a measured one.
    `dropped` holds a line for each of the first hundred rows that were read but cannot be asked, with
    file, line and reason; `num_dropped_by_reason` counts all of them.
    `num_rows` = num_dropped + num_filtered + num_available, and at most `num_requested` of the
    available prompts are taken. Prompts are never repeated here.
    """

    name: str
    prompts: tuple[Prompt, ...]
    digest: str
    calibration: tuple[Prompt, ...] = ()
    dropped: tuple[str, ...] = ()
    num_dropped_by_reason: Mapping[str, int] = field(default_factory=dict)
    num_rows: int = 0
    num_filtered: int = 0  # rows of categories that were not asked for
    num_available: int = 0
    num_requested: int | None = None
    ignored_keys: tuple[str, ...] = ()  # columns that spectune does not read
    source: Path | None = None
    is_synthetic: bool = False  # drawn by a program, so acceptance on it says nothing about traffic

    @property
    def categories(self) -> dict[str, int]:
        """Number of measured prompts by category, names sorted."""
        return dict(sorted(Counter(prompt.category for prompt in self.prompts).items()))

    @property
    def num_dropped(self) -> int:
        """Rows that were read but cannot be asked."""
        return sum(self.num_dropped_by_reason.values())

    @property
    def accounting(self) -> str:
        """How many rows were asked for, read and used, and what became of those that are not used."""
        left_out = [
            f"{count} left out: {reason}" for reason, count in sorted(self.num_dropped_by_reason.items())
        ]
        if self.num_filtered:
            left_out.append(f"{self.num_filtered} of other categories")
        if self.num_requested is not None and self.num_requested > self.num_available:
            left_out.append(f"{self.num_requested} would be needed")
        rest = f" ({', '.join(left_out)})" if left_out else ""
        label = " [SYNTHETIC]" if self.is_synthetic else ""
        return f"{self.name}{label}: {len(self.prompts)} of {self.num_rows} prompts used{rest}"

    def account(self) -> dict[str, Any]:
        """The same counts as plain JSON values, for the manifest."""
        return {
            "requested": self.num_requested,
            "loaded": self.num_rows,
            "dropped_by_reason": dict(self.num_dropped_by_reason),
            "of_other_categories": self.num_filtered,
            "available": self.num_available,
            "used": len(self.prompts),
            "ignored_columns": list(self.ignored_keys),
            "is_synthetic": self.is_synthetic,
        }


def workload_digest(prompts: Iterable[Prompt]) -> str:
    """sha256 over one canonical JSON line a prompt, in order: category, system, turns, max_tokens.

    Ids, file names, encodings and the shape of the file do not enter: the same questions in another
    shape are the same workload.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        row = [prompt.category, prompt.system, list(prompt.turns), prompt.max_tokens]
        digest.update(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()
