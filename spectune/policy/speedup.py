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


def block_tpots(data: ArmData) -> dict[BlockKey, float]:
    """Seconds per token and sequence of each block; blocks that never filled the batch are absent."""
    found = {
        key: throughput.round_tpot(block.rounds, data.cell.batch_size) for key, block in data.blocks.items()
    }
    return {key: totals.round_tpot_s for key, totals in found.items() if totals is not None}


def paired_log_ratios(slow: ArmData, fast: ArmData) -> list[tuple[str, float]]:
    """(cluster, log(time of `slow` / time of `fast`)) of every block that both decoded.

    Blocks that hold the same prompts, in whatever repeat, are one cluster: they are not independent.
    """
    slow_tpots, fast_tpots = block_tpots(slow), block_tpots(fast)
    return [
        (_prompts(slow.blocks[key]), math.log(slow_tpots[key] / fast_tpots[key]))
        for key in sorted(slow_tpots.keys() & fast_tpots.keys())
    ]


def _prompts(block: BlockResult) -> str:
    """The prompts of a block; a request_id is the prompt's digest and a sample number."""
    return " ".join(sorted(request.request_id.rsplit("-", 1)[0] for request in block.requests))


def paired_speedup(slow: ArmData, fast: ArmData, *, level: float = 0.95) -> Interval | None:
    """How much faster `fast` is than `slow`; None without a common block."""
    pairs = paired_log_ratios(slow, fast)
    return stats.clustered_log_ratio_interval(pairs, level=level) if pairs else None


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
        basis = BLOCKS_BASIS if scope == ALL else REQUESTS_BASIS
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
