"""What one start of base and head gave: log ratios of their times, their common range, their rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from spectune import stats
from spectune.gate.common import Common, by_request, common_range
from spectune.metrics.latency import MIN_SUCCESS_RATE, is_success, success_rate
from spectune.metrics.throughput import RoundTotals, output_throughput, round_tpot, steady_duration
from spectune.records import BlockResult, MeasureSides, RequestRecord, RoundRecord, SideArm

Blocks = Mapping[int, BlockResult]

BASE, HEAD = "base", "head"
TPOT, THROUGHPUT = "time per token", "throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPair:
    """One start. Slowdowns are log(head time / base time): positive is slower, 0 is equal.

    They are interquartile means, over the rounds of a block and over blocks: on a shared machine a few
    rounds that other work stretched would otherwise drown a slowdown of 3%. `mean_slowdown` holds all
    rounds, those as well. `drift` is how much the ratio grew from the first to the last third of the
    blocks.
    """

    slowdowns: Mapping[str, float]
    mean_slowdown: float
    drift: float | None
    common: Common
    base_rounds: RoundTotals | None
    head_rounds: RoundTotals | None
    base_tpot_s: float
    head_tpot_s: float


def measure_start(
    measure: MeasureSides, arms: Sequence[SideArm], *, start: int
) -> tuple[dict[int, BlockResult], ...]:
    """Blocks by index of each arm, in the order of the arms."""
    found: tuple[dict[int, BlockResult], ...] = tuple({} for _ in arms)
    for arm, index, block in measure(arms, start=start):
        found[arms.index(arm)][index] = block
    return found


def pair_start(base: Blocks, head: Blocks, batch_size: int, reach: int) -> StartPair | str:
    """Compare the blocks that both decoded, or the reason why that is impossible."""
    shared = sorted(base.keys() & head.keys())
    for name, blocks in ((BASE, base), (HEAD, head)):
        if (why := failure(requests_of(blocks))) is not None:
            return f"{name}: {why}"
    times = [(block_tpot(base[i], batch_size), block_tpot(head[i], batch_size)) for i in shared]
    pairs = [(one, other) for one, other in times if one is not None and other is not None]
    if not pairs:
        return "no block was timed by both"
    ratios = [math.log(other / one) for one, other in pairs]
    slowdowns = {TPOT: stats.interquartile_mean(ratios)}
    rates = [(block_rate(base[i], batch_size), block_rate(head[i], batch_size)) for i in shared]
    known = [(one, other) for one, other in rates if one is not None and other is not None]
    if len(known) == len(shared):
        slowdowns[THROUGHPUT] = stats.interquartile_mean([math.log(one / other) for one, other in known])
    whole = [
        (block_tpot(base[i], batch_size, is_steady=False), block_tpot(head[i], batch_size, is_steady=False))
        for i in shared
    ]
    return StartPair(
        slowdowns=slowdowns,
        mean_slowdown=_mean([math.log(other / one) for one, other in whole if one and other]),
        drift=thirds_apart(ratios),
        common=common_range(by_request(requests_of(base)), by_request(requests_of(head)), reach),
        base_rounds=round_tpot(rounds_of(base), batch_size, is_steady=True),
        head_rounds=round_tpot(rounds_of(head), batch_size, is_steady=True),
        base_tpot_s=_geometric(one for one, _ in pairs),
        head_tpot_s=_geometric(other for _, other in pairs),
    )


def block_tpot(block: BlockResult, batch_size: int, *, is_steady: bool = True) -> float | None:
    """Seconds per token of a block: from its rounds, or from its requests where a server shows none."""
    if block.rounds:
        totals = round_tpot(block.rounds, batch_size, is_steady=is_steady)
        return None if totals is None else totals.round_tpot_s
    timed = [r for r in block.requests if is_success(r) and r.tpot_s is not None]
    tokens = sum(r.num_output_tokens - 1 for r in timed)
    seconds = math.fsum((r.tpot_s or 0.0) * (r.num_output_tokens - 1) for r in timed)
    return seconds / tokens if tokens and seconds > 0 else None


def block_rate(block: BlockResult, batch_size: int) -> float | None:
    """Output tokens per second of a block, prefill and gaps between rounds included."""
    seconds = steady_duration(block.rounds, batch_size, block.duration_s)
    return output_throughput(block.requests, seconds) if seconds > 0 else None


def failure(requests: Sequence[RequestRecord]) -> str | None:
    """Why an arm has no figures: a failed request is never a result."""
    rate = success_rate(requests)
    if rate is None:
        return "nothing was decoded"
    if rate < MIN_SUCCESS_RATE:
        first = next((r.error for r in requests if r.error), "no answer")
        failed = sum(not is_success(r) for r in requests)
        return f"{failed} of {len(requests)} requests failed: {first}"
    return None


def thirds_apart(values: Sequence[float]) -> float | None:
    """Mean of the last third minus mean of the first; None for fewer than three values."""
    third = len(values) // 3
    return None if third == 0 else _mean(values[-third:]) - _mean(values[:third])


def requests_of(blocks: Blocks) -> tuple[RequestRecord, ...]:
    return tuple(request for index in sorted(blocks) for request in blocks[index].requests)


def rounds_of(blocks: Blocks) -> tuple[RoundRecord, ...]:
    return tuple(turn for index in sorted(blocks) for turn in blocks[index].rounds)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _geometric(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(_mean(logs))
