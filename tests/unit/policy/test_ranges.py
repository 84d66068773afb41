"""Ranges between measured values."""

from __future__ import annotations

import pytest

from spectune.policy.ranges import Choice, at, batch_segments, context_bands
from spectune.records import SpecConfig

OFF = SpecConfig.off()


def k(num_tokens: int) -> SpecConfig:
    return SpecConfig.chain("eagle3", num_tokens) if num_tokens else OFF


def spans(depths: dict[int, int]) -> list[tuple[int, int | None, int]]:
    measured = {size: Choice(config=k(depth), source="run") for size, depth in depths.items()}
    return [(s.low, s.high, s.choice.config.num_steps) for s in batch_segments(measured)]


@pytest.mark.parametrize(
    ("depths", "expected"),
    [
        ({1: 5, 4: 5}, [(1, 3, 5), (4, 4, 5), (5, None, 0)]),
        ({1: 5, 4: 3}, [(1, 1, 5), (2, 3, 3), (4, 4, 3), (5, None, 0)]),
        ({1: 5, 16: 0}, [(1, 1, 5), (2, 15, 0), (16, None, 0)]),
        ({1: 0, 8: 3, 9: 0}, [(1, 1, 0), (2, 7, 0), (8, 8, 3), (9, None, 0)]),
        ({4: 2}, [(1, 3, 0), (4, 4, 2), (5, None, 0)]),
        ({1: 0}, [(1, None, 0)]),
    ],
    ids=[
        "neighbours agree",
        "smaller of two in the gap",
        "off in the gap",
        "non-monotone kept",
        "below measured",
        "off",
    ],
)
def test_batch_segments_hold_only_what_both_neighbours_support(depths, expected):
    """A gap takes the smaller speculation, and above the largest batch only off holds."""
    assert spans(depths) == expected


def test_batch_segments_say_what_was_not_measured():
    """The source of a gap names both neighbours; no speedup is claimed for it."""
    measured = {1: Choice(config=k(5), source="run"), 16: Choice(config=k(0), source="run")}

    gap = batch_segments(measured)[1].choice

    assert gap.speedup is None
    assert gap.source == (
        "not measured: batch sizes 1 (eagle3 K=5) and 16 (off) disagree, so the smaller speculation"
    )


def test_context_bands_take_the_smaller_between_measured_contexts():
    """Seen 30..200 with K=3 and 540..700 with off: the gap is off, beyond 700 nothing is said."""
    short = batch_segments({1: Choice(config=k(3), source="run")})
    long = batch_segments({1: Choice(config=OFF, source="run")})

    bands = context_bands({0: ((30, 200), short), 512: ((540, 700), long)})

    assert [(band, at(row, 1).config.num_steps) for band, row in bands] == [
        ((0, 200), 3),
        ((201, 539), 0),
        ((540, 700), 0),
    ]


def test_context_bands_that_overlap_take_the_smaller_in_the_overlap():
    """Where both contexts were seen and disagree, the smaller speculation holds."""
    short = batch_segments({1: Choice(config=k(2), source="run")})
    long = batch_segments({1: Choice(config=k(5), source="run")})

    bands = context_bands({0: ((30, 600), short), 512: ((540, 700), long)})

    assert [(band, at(row, 1).config.num_steps) for band, row in bands] == [
        ((0, 539), 2),
        ((540, 600), 2),
        ((601, 700), 5),
    ]
