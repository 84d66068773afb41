"""Measured points on an axis in, gap-free inclusive ranges out; knows nothing of arms or engines.

A decision holds where it was measured. Between two measured values it holds only if both agree,
else the smaller speculation of the two; above the largest it holds only if it is off.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spectune.records import Interval, SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was decided at a measured place; `num_steps` is the number of steps behind it, `break_even` the
    drafts that a round has to accept to be worth its time."""

    config: SpecConfig
    source: str
    speedup: Interval | None = None
    num_steps: int = 0
    break_even: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A choice on an inclusive range; `high` None has no upper end."""

    low: int
    high: int | None
    choice: Choice


def smaller(first: Choice, second: Choice, source: str) -> Choice:
    """The smaller speculation of two, off before anything else; unmeasured, so without a speedup."""
    config = min(first.config, second.config, key=lambda config: (config.size, config.label))
    return Choice(config=config, source=source)


def batch_segments(measured: Mapping[int, Choice]) -> tuple[Segment, ...]:
    """Ranges from batch 1 upwards without gap or overlap, the last one open."""
    sizes = sorted(measured)
    segments: list[Segment] = []
    if not sizes:
        return ()
    if sizes[0] > 1:
        below = Choice(
            config=SpecConfig.off(), source=f"below the smallest measured batch size {sizes[0]}: fallback off"
        )
        segments.append(Segment(low=1, high=sizes[0] - 1, choice=below))
    for size, following in itertools.pairwise(sizes):
        segments += _until_next(size, measured[size], following, measured[following])
    segments += _beyond(sizes[-1], measured[sizes[-1]])
    return tuple(segments)


def _until_next(size: int, here: Choice, following: int, there: Choice) -> list[Segment]:
    if here.config == there.config:
        source = here.source
        if following - size > 1:
            source += f"; up to {following - 1} because batch size {following} agrees"
        choice = replace(here, source=source)
        return [Segment(low=size, high=following - 1, choice=choice)]
    segments = [Segment(low=size, high=size, choice=here)]
    if following - size > 1:
        source = (
            f"not measured: batch sizes {size} ({here.config.label}) and {following} "
            f"({there.config.label}) disagree, so the smaller speculation"
        )
        segments.append(Segment(low=size + 1, high=following - 1, choice=smaller(here, there, source)))
    return segments


def _beyond(size: int, last: Choice) -> list[Segment]:
    if last.config.is_off:
        choice = Choice(
            config=last.config,
            source=f"{last.source}; off holds above the largest measured batch size",
            speedup=last.speedup,
            num_steps=last.num_steps,
        )
        return [Segment(low=size, high=None, choice=choice)]
    above = Choice(
        config=SpecConfig.off(), source=f"above the largest measured batch size {size}: fallback off"
    )
    return [Segment(low=size, high=size, choice=last), Segment(low=size + 1, high=None, choice=above)]


def merge_rows(first: Sequence[Segment], second: Sequence[Segment], source: str) -> tuple[Segment, ...]:
    """The smaller speculation of two rows at every batch size, neighbours with one answer joined."""
    starts = sorted({segment.low for segment in (*first, *second)})
    merged: list[Segment] = []
    for index, low in enumerate(starts):
        here, there = at(first, low), at(second, low)
        choice = smaller(here, there, source)
        high = starts[index + 1] - 1 if index + 1 < len(starts) else None
        if merged and merged[-1].choice == choice:
            low = merged.pop().low
        merged.append(Segment(low=low, high=high, choice=choice))
    return tuple(merged)


def at(row: Sequence[Segment], value: int) -> Choice:
    """The choice of a gap-free row at a value."""
    for segment in row:
        if segment.low <= value and (segment.high is None or value <= segment.high):
            return segment.choice
    raise ValueError(f"no segment holds {value}")


def context_bands(
    rows: Mapping[int, tuple[tuple[int, int], tuple[Segment, ...]]],
) -> list[tuple[tuple[int, int | None], tuple[Segment, ...]]]:
    """Bands of the context axis, from 0, with the batch row that holds in each.

    Args:
        rows: requested context -> ((smallest, largest) tokens per sequence that were seen, its row).

    Between two measured bands, and where they overlap, the smaller speculation of both; above the
    largest seen context there is no band, so the fallback (off) holds.
    """
    contexts = sorted(rows)
    bands: list[tuple[tuple[int, int | None], tuple[Segment, ...]]] = []
    start = 0
    for context, following in itertools.pairwise(contexts):
        (_, high), row = rows[context]
        (next_low, next_high), next_row = rows[following]
        own_end = min(high, next_low - 1)
        if own_end >= start:
            bands.append(((start, own_end), row))
            start = own_end + 1
        between_end = min(max(high, next_low - 1), next_high)
        if between_end >= start:
            source = (
                f"between the measured contexts {context} and {following}: the smaller speculation of both"
            )
            bands.append(((start, between_end), merge_rows(row, next_row, source)))
            start = between_end + 1
    (_, high), row = rows[contexts[-1]]
    if high >= start:
        bands.append(((start, high), row))
    return bands
