"""Degenerate repetition: a looping target flatters every drafter, so loops are cut and counted."""

from __future__ import annotations

from collections.abc import Sequence


def loop_start(
    ids: Sequence[int], *, max_period: int = 64, min_repeats: int = 3, min_tokens: int = 24
) -> int | None:
    """Index where a stretch begins that repeats a block of 1..max_period tokens, or None.

    The stretch holds the block at least `min_repeats` times and at least `min_tokens` tokens, so
    that lists and tables with changing entries, or a short "ha ha ha", do not count.
    """
    best: int | None = None
    for period in range(1, min(max_period, len(ids) // min_repeats) + 1):
        need = max(period * min_repeats, min_tokens) - period  # repeated tokens after the first block
        run = 0
        for index in range(period, len(ids)):
            run = run + 1 if ids[index] == ids[index - period] else 0
            if run == need:
                start = index - run - period + 1
                best = start if best is None else min(best, start)
                break
    return best


def cap_loop(ids: Sequence[int], *, keep: int = 24) -> tuple[list[int], bool]:
    """The ids up to a loop plus its first `keep` tokens, and whether there was one."""
    start = loop_start(ids)
    return (list(ids), False) if start is None else (list(ids[: start + keep]), True)


def ends_in_loop(
    ids: Sequence[int], *, max_period: int = 64, min_repeats: int = 3, min_tokens: int = 24
) -> bool:
    """Whether the text ends inside a loop as `loop_start` defines it: a cheap test while it grows."""
    tail = list(ids[-max_period * min_repeats :])
    for period in range(1, min(max_period, len(tail) // min_repeats) + 1):
        if tail[-1] != tail[-1 - period]:
            continue
        span = max(period * min_repeats, min_tokens)
        if span <= len(tail) and tail[-span + period :] == tail[-span:-period]:
            return True
    return False
