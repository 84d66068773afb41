"""Calibration: the means of an arm's full-batch decode rounds on prompts that are not measured."""

from __future__ import annotations

from collections.abc import Sequence

from spectune.metrics.throughput import mean_times
from spectune.records import RoundRecord, RoundTimes

NUM_COLD_ROUNDS = 2


def round_times(rounds: Sequence[RoundRecord], batch_size: int) -> RoundTimes | None:
    """Mean draft, verify and other seconds after the first two full-batch rounds; None if none is left.

    Means, because time per token is a ratio of sums: n-gram rounds with and without a draft differ,
    and a median would tell one kind for both.
    """
    full = [turn for turn in rounds if turn.kind == "decode" and turn.batch_size >= batch_size]
    warm = full[NUM_COLD_ROUNDS:]
    if not warm:
        return None
    return mean_times(warm)
