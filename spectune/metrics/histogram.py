"""Per-request acceptance histograms of servers, turned into the step records that metrics read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spectune.errors import UsageError
from spectune.records import StepRecord


def steps_from_histogram(
    histogram: Sequence[int] | Mapping[str, int], num_tokens: int
) -> tuple[StepRecord, ...]:
    """Steps of a chain of `num_tokens` from "how many steps accepted j drafts".

    Two shapes exist: a dense list indexed by j, and a map from j as a string with empty buckets left
    out. A bucket above `num_tokens` or a negative count is an error.
    """
    buckets = histogram.items() if isinstance(histogram, Mapping) else enumerate(histogram)
    steps: list[StepRecord] = []
    for name, count in buckets:
        accepted = _bucket(name, num_tokens)
        if count < 0:
            raise UsageError(f"acceptance histogram has {count} steps in bucket {name}")
        step = StepRecord(
            num_proposed=num_tokens,
            num_verified=num_tokens,
            num_accepted=accepted,
            num_emitted=accepted + 1,
        )
        steps.extend([step] * count)
    return tuple(steps)


def _bucket(name: str | int, num_tokens: int) -> int:
    text = str(name)
    if not text.isdecimal() or int(text) > num_tokens:
        raise UsageError(f"acceptance histogram bucket {name!r} is not in 0..{num_tokens}")
    return int(text)
