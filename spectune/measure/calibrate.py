"""Calibration: the means of an arm's full-batch decode rounds on prompts that are not measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

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
    return RoundTimes(
        draft_s=fmean(turn.draft_s for turn in warm),
        verify_s=fmean(turn.verify_s for turn in warm),
        other_s=fmean(turn.other_s for turn in warm),
        num_rounds=len(warm),
    )
