"""Two arms of a cell in, how much faster one is out; knows nothing of what is decided from it.

Speedup is plain time over speculative time per output token of decode rounds, paired on the blocks
that both arms decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from spectune import stats
from spectune.metrics import acceptance as accept
from spectune.metrics import throughput
from spectune.policy.arms import ALL, ArmData, BlockKey
from spectune.policy.comparison import ArmSummary, Rounds
from spectune.policy.decide import POOLED_BASIS
from spectune.records import BlockResult, Interval, Status

BLOCKS_BASIS = "paired blocks"
REQUESTS_BASIS = "paired requests"
MIN_CATEGORY_BLOCKS = 3
MIN_STARTS = 3
"""Starts of an engine from which on their spread can be estimated."""


def block_tpots(data: ArmData) -> dict[BlockKey, float]:
    """Seconds per token and sequence of each block; blocks that never filled the batch are absent.

    Where arms are starts of their own, plain decoding of repeat r is the geometric mean of the starts
    r and r+1, between which the candidates of r ran: a steady drift cancels.
    """
    found = {key: _block_tpot(block, data.cell.batch_size) for key, block in data.blocks.items()}
    known = {key: tpot for key, tpot in found.items() if tpot is not None}
    if not (data.has_boots and data.config.is_off):
        return known
    return {
        (repeat, index): math.sqrt(tpot * known.get((repeat + 1, index), tpot))
        for (repeat, index), tpot in known.items()
    }


def _block_tpot(block: BlockResult, batch_size: int) -> float | None:
    if block.load is not None:
        served = throughput.request_totals(block.requests)
        return None if served is None else served.tpot_s
    totals = throughput.round_tpot(block.rounds, batch_size)
    return None if totals is None else totals.round_tpot_s


def paired_log_ratios(slow: ArmData, fast: ArmData) -> list[tuple[str, float]]:
    """(cluster, log(time of `slow` / time of `fast`)) of every block that both decoded.

    Blocks that hold the same prompts, in whatever repeat, are one cluster: they are not independent.
    """
    slow_tpots, fast_tpots = block_tpots(slow), block_tpots(fast)
    return [
        (_prompts(slow.blocks[key]), math.log(slow_tpots[key] / fast_tpots[key]))
        for key in sorted(slow_tpots.keys() & fast_tpots.keys())
    ]


def round_log_ratios(slow: ArmData, fast: ArmData) -> list[float]:
    """log(round time of `slow` / of `fast`) of every common block, whatever the rounds emitted; for engines
    that tell their rounds, and arms whose rounds all have one size.

    The time of a block is the interquartile mean of its full rounds: rounds that others on the machine
    stretched would otherwise decide between arms that are 2% apart.
    """
    return [
        math.log(slow_s / fast_s)
        for key in sorted(slow.blocks.keys() & fast.blocks.keys())
        if (slow_s := _round_s(slow.blocks[key], slow.cell.batch_size)) is not None
        and (fast_s := _round_s(fast.blocks[key], fast.cell.batch_size)) is not None
    ]


def _round_s(block: BlockResult, batch_size: int) -> float | None:
    totals = throughput.round_tpot(block.rounds, batch_size, is_steady=True)
    return None if totals is None else totals.total_s


def _prompts(block: BlockResult) -> str:
    """The prompts of a block; a request_id is the prompt's digest and a sample number."""
    return " ".join(sorted(request.request_id.rsplit("-", 1)[0] for request in block.requests))


def paired_speedup(slow: ArmData, fast: ArmData, *, level: float = 0.95) -> Interval | None:
    """How much faster `fast` is than `slow`; None without a common block.

    From three starts on the spread between starts is in the interval. With fewer the interval is made
    longer by what plain decoding changed between the starts around the candidate's: the plain decoding
    of that moment lay somewhere between them.
    """
    pairs = paired_log_ratios(slow, fast)
    if not pairs:
        return None
    over_prompts = stats.clustered_log_ratio_interval(pairs, level=level)
    by_start = start_log_ratios(slow, fast)
    if len(by_start) < MIN_STARTS:
        return _stretch(over_prompts, 0.5 * max(_start_changes(slow), default=0.0))
    return widen(over_prompts, stats.ratio_interval(by_start, level=level))


def start_log_ratios(slow: ArmData, fast: ArmData) -> list[float]:
    """Mean log ratio of each start; empty where arms share one start."""
    if not slow.has_boots:
        return []
    slow_tpots, fast_tpots = block_tpots(slow), block_tpots(fast)
    by_start: dict[int, list[float]] = {}
    for key in slow_tpots.keys() & fast_tpots.keys():
        by_start.setdefault(key[0], []).append(math.log(slow_tpots[key] / fast_tpots[key]))
    return [math.fsum(ratios) / len(ratios) for _, ratios in sorted(by_start.items())]


def _start_changes(off: ArmData) -> list[float]:
    """|log| change of plain decoding from each start to the next, mean over prompts; empty for others."""
    if not (off.has_boots and off.config.is_off):
        return []
    tpots = {key: _block_tpot(block, off.cell.batch_size) for key, block in off.blocks.items()}
    changes: dict[int, list[float]] = {}
    for (repeat, index), first in tpots.items():
        after = tpots.get((repeat + 1, index))
        if first is not None and after is not None:
            changes.setdefault(repeat, []).append(math.log(after / first))
    return [abs(math.fsum(own)) / len(own) for own in changes.values()]


def _stretch(interval: Interval, log_bound: float) -> Interval:
    """Both ends moved out by a bound that is not random."""
    if interval.low is None or interval.high is None:
        return interval
    factor = math.exp(log_bound)
    return replace(interval, low=interval.low / factor, high=interval.high * factor)


def widen(over_prompts: Interval, over_starts: Interval) -> Interval:
    """One interval for both: squared half widths of the logarithms add up.

    Prompts and starts are crossed: each clustering alone sees its own variance and part of the rest,
    so that the sum is never too narrow.
    """
    if None in (over_prompts.low, over_prompts.high, over_starts.low, over_starts.high):
        return over_prompts
    halves = [
        math.log(one.high / one.low) / 2  # type: ignore[operator]  # checked above
        for one in (over_prompts, over_starts)
    ]
    half = math.hypot(*halves)
    value = over_prompts.value
    return replace(over_prompts, low=value * math.exp(-half), high=value * math.exp(half))


def last_start_ratio(off: ArmData) -> Interval | None:
    """Time per token of plain decoding in its last start over its first, paired by prompt."""
    starts = sorted({repeat for repeat, _ in off.blocks})
    if not off.has_boots or len(starts) < 2:
        return None
    tpots = {key: _block_tpot(block, off.cell.batch_size) for key, block in off.blocks.items()}
    pairs = []
    for (repeat, index), first in tpots.items():
        last = tpots.get((starts[-1], index))
        if repeat == starts[0] and first is not None and last is not None:
            pairs.append((_prompts(off.blocks[repeat, index]), math.log(last / first)))
    return stats.clustered_log_ratio_interval(pairs) if pairs else None


def is_direct(off: ArmData, arm: ArmData, scope: str) -> bool:
    """Whether a category can be paired: enough blocks of its own in both arms."""
    own, plain = arm.of_scope(scope), off.of_scope(scope)
    return scope == ALL or len(paired_log_ratios(plain, own)) >= MIN_CATEGORY_BLOCKS


def with_speedup(
    summary: ArmSummary, arm: ArmData, off: ArmData | None, whole: Mapping[str, ArmSummary]
) -> ArmSummary:
    """The summary with its speedup and the basis of it.

    Args:
        whole: summaries over all categories by config label, for a category that cannot be paired.
    """
    scope = summary.scope
    if off is None or summary.status is not Status.OK:
        return summary
    plain = whole.get(off.config.label)
    if plain is None or plain.status is not Status.OK:
        return summary
    if is_direct(off, arm, scope):
        if arm.config.is_off:
            return summary
        speedup = paired_speedup(off.of_scope(scope), arm.of_scope(scope))
        basis = BLOCKS_BASIS if scope == ALL and not arm.has_boots else REQUESTS_BASIS
        return replace(summary, speedup=speedup, speedup_basis=basis if speedup else None)
    own = whole.get(arm.config.label)
    rounds = _category_rounds(summary, arm, own)
    if rounds is None or plain.rounds is None:
        return replace(summary, rounds=rounds)
    if arm.config.is_off:
        return replace(summary, rounds=rounds, speedup_basis=None)
    value = plain.rounds.round_tpot_s / rounds.round_tpot_s
    speedup = Interval(value=value, low=None, high=None, n=rounds.num_rounds)
    return replace(summary, rounds=rounds, speedup=speedup, speedup_basis=POOLED_BASIS)


def _category_rounds(summary: ArmSummary, arm: ArmData, whole: ArmSummary | None) -> Rounds | None:
    """The arm's rounds over all categories with what a step of this one emits.

    None where nothing was ever proposed in this category.
    """
    if whole is None or whole.rounds is None:
        return None
    if summary.config.is_off:
        return whole.rounds
    steps = accept.pooled_steps(arm.requests_of(summary.scope))
    tokens = accept.emitted_per_step(steps)
    if tokens is None or accept.missing_reason(steps) is not None:
        return None
    return replace(whole.rounds, tokens_per_sequence=tokens, round_tpot_s=whole.rounds.total_s / tokens)
