"""Calibration: the medians of an arm's full-batch decode rounds on prompts that are not measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from spectune.records import RoundRecord, RoundTimes

NUM_COLD_ROUNDS = 2


def round_times(rounds: Sequence[RoundRecord], batch_size: int) -> RoundTimes | None:
    """Median draft, verify and other seconds after the first two full-batch rounds; None if none is left.

    The parts are medians of their own, so their sum need not be the median of the sums.
    """
    full = [turn for turn in rounds if turn.kind == "decode" and turn.batch_size >= batch_size]
    warm = full[NUM_COLD_ROUNDS:]
    if not warm:
        return None
    return RoundTimes(
        draft_s=median(turn.draft_s for turn in warm),
        verify_s=median(turn.verify_s for turn in warm),
        other_s=median(turn.other_s for turn in warm),
        num_rounds=len(warm),
    )
