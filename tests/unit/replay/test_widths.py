"""What a batch makes of its rows: the largest of independent draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spectune.records import SpecConfig
from spectune.replay.widths import largest_of, mean_largest, verified_widths
from tests.support.traces import chain_drafter, toy_trace


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_largest_of_draws_equals_enumeration(batch_size: int) -> None:
    """P(largest) of every combination of rows, counted one by one."""
    histogram = np.array([5, 2, 1])
    draws = [value for value, count in enumerate(histogram) for _ in range(count)]
    combinations = list(itertools.product(draws, repeat=batch_size))

    expected = [sum(max(c) == value for c in combinations) / len(combinations) for value in range(3)]

    assert pytest.approx(expected) == largest_of(histogram, batch_size).tolist()
    assert pytest.approx(sum(map(max, combinations)) / len(combinations)) == mean_largest(
        histogram, batch_size
    )


def test_a_head_always_verifies_its_whole_draft() -> None:
    """Four tokens for a chain of three, whatever the batch; one for plain decoding."""
    trace = toy_trace([4], chain_drafter([1, 0, 1]))

    assert {4: 1.0} == verified_widths(trace, SpecConfig.chain("eagle3", 3), 8)
    assert {1: 1.0} == verified_widths(trace, SpecConfig.off(), 8)


def test_a_look_up_verifies_what_it_finds_at_the_steps_it_makes() -> None:
    """Found at positions 0 and 2 only; a chain of 2 stands at 0, 1 and 2 (nothing is accepted)."""
    drafter = chain_drafter(
        [0, 0, 0], method="ngram", draft_model=None, drafted=np.array([3, 0, 1], np.uint8)
    )
    trace = toy_trace([4], drafter)

    widths = verified_widths(trace, SpecConfig.chain("ngram", 2), 1)

    assert pytest.approx({1: 1 / 3, 2: 1 / 3, 3: 1 / 3}) == widths
