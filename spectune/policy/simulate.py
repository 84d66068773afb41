"""A policy, measured speeds and traffic in; time, money and regret out.

Between two events (an arrival, an end) the batch is fixed, so each sequence runs on at its measured
speed: nothing is decoded, and what is not measured (prefill, admission, memory) is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectune.errors import UsageError
from spectune.policy.speed_table import SpeedTable
from spectune.policy.table import choose
from spectune.records import SpecConfig
from spectune.records.traffic import TrafficRequest
from spectune.theory import cost

ORACLE, POLICY = "oracle", "policy"
DONE = 1e-9

Pick = Callable[[Sequence[str]], SpecConfig]
"""From the categories that run together to the configuration of the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Traffic under one way to choose. `busy_s` are seconds with at least one request running; `wait_s`
    and `latency_s` are means over requests; `share_by_config` are shares of the busy time."""

    name: str
    busy_s: float
    span_s: float
    latency_s: float
    wait_s: float
    mean_batch: float
    num_tokens: int
    share_by_config: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """What the traffic costs plainly and with the policy; the saving is of busy time, idle time is the
    user's either way."""

    usd_per_mtok_plain: float
    usd_per_mtok_policy: float
    usd_saved: float
    training_breakeven_gpu_hours: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """All ways to choose on the same traffic, off first, the oracle last."""

    served: tuple[Served, ...]
    speedup: float  # busy time of off / of the policy
    regret: float  # busy time of the policy / of the oracle - 1
    best_static: str
    money: Money | None

    def of(self, name: str) -> Served:
        return next(one for one in self.served if one.name == name)


def simulate(
    policy: Mapping[str, Any],
    table: SpeedTable,
    traffic: Sequence[TrafficRequest],
    *,
    max_batch_size: int | None = None,
    usd_per_gpu_hour: float | None = None,
    num_gpus: int = 1,
    training_gpu_hours: float = 0.0,
) -> Simulation:
    """Every measured configuration throughout, the policy, and an oracle that picks the fastest of the
    moment, all on the same traffic.

    Where the policy says what being ready to speculate costs, its plain decoding takes that much longer.

    Raises UsageError for a batch size beyond what was measured: what happens there is not known.
    """
    top = max_batch_size or table.largest
    if top > table.largest:
        raise UsageError(
            f"--max-batch-size {top}: plain decoding was measured up to batch {table.largest}",
            hint=f"sweep --batch-size {top} as well",
        )
    jobs = _jobs(traffic, table)
    statics = {config.label: _always(config) for config in table.configs}
    picks: dict[str, Pick] = {**statics, POLICY: _of_policy(policy, table), ORACLE: _oracle(table)}
    standby = {entry["batch"]: float(entry["cost"]) for entry in policy.get("standby") or ()}
    served = {
        name: _serve(name, pick, table, jobs, top, standby=standby if name == POLICY else {})
        for name, pick in picks.items()
    }
    off, own, best = served["off"], served[POLICY], served[ORACLE]
    speedup = off.busy_s / own.busy_s
    money = None
    if usd_per_gpu_hour is not None:
        money = _money(off, own, usd_per_gpu_hour, num_gpus, training_gpu_hours)
    return Simulation(
        served=tuple(served.values()),
        speedup=speedup,
        regret=own.busy_s / best.busy_s - 1,
        best_static=min(statics, key=lambda name: served[name].busy_s),
        money=money,
    )


def _money(
    off: Served, own: Served, usd_per_gpu_hour: float, num_gpus: int, training_gpu_hours: float
) -> Money:
    plain, with_policy = (
        cost.usd_per_mtok(usd_per_gpu_hour, one.num_tokens / one.busy_s, num_gpus) for one in (off, own)
    )
    hours = None
    if training_gpu_hours > 0:
        hours = cost.breakeven_gpu_hours(training_gpu_hours, off.busy_s / own.busy_s)
    return Money(
        usd_per_mtok_plain=plain,
        usd_per_mtok_policy=with_policy,
        usd_saved=(off.busy_s - own.busy_s) / 3600 * num_gpus * usd_per_gpu_hour,
        training_breakeven_gpu_hours=hours,
    )


@dataclass(slots=True)
class _Job:
    arrival_s: float
    category: str
    left: float


def _jobs(traffic: Sequence[TrafficRequest], table: SpeedTable) -> list[tuple[float, str, float]]:
    if not traffic:
        raise UsageError("the traffic holds no request")
    jobs = []
    for request in traffic:
        tokens = request.num_output_tokens or table.mean_output_tokens(request.category)
        if tokens is None:
            raise UsageError("the length of answers is not known: --output-tokens gives it")
        jobs.append((request.arrival_s, request.category, float(tokens)))
    return sorted(jobs)


def _always(config: SpecConfig) -> Pick:
    return lambda categories: config


def _of_policy(policy: Mapping[str, Any], table: SpeedTable) -> Pick:
    """The policy over all categories together, as an engine runs it; one category alone asks for its own."""
    known: dict[tuple[int, str | None], SpecConfig] = {}

    def pick(categories: Sequence[str]) -> SpecConfig:
        alone = categories[0] if len(set(categories)) == 1 else None
        key = (len(categories), alone)
        if key not in known:
            known[key] = choose(policy, len(categories), None, alone, table.temperature)
        return known[key]

    return pick


def _oracle(table: SpeedTable) -> Pick:
    """The configuration that gives the most tokens a second for what runs at the moment."""
    known: dict[tuple[str, ...], SpecConfig] = {}

    def pick(categories: Sequence[str]) -> SpecConfig:
        key = tuple(sorted(categories))
        if key not in known:
            known[key] = max(
                table.configs,
                key=lambda config: math.fsum(1 / table.token_s(config, len(key), name) for name in key),
            )
        return known[key]

    return pick


def _serve(
    name: str,
    pick: Pick,
    table: SpeedTable,
    jobs: Sequence[tuple[float, str, float]],
    top: int,
    *,
    standby: Mapping[int, float],
) -> Served:
    """First come, first served, at most `top` together. standby: cost of off by measured batch size."""
    waiting = [_Job(*job) for job in jobs]
    running: list[_Job] = []
    now_s, busy_s, held_s, latency_s, wait_s, next_job = 0.0, 0.0, 0.0, 0.0, 0.0, 0
    shares: dict[str, float] = {}
    while next_job < len(waiting) or running:
        while next_job < len(waiting) and len(running) < top and waiting[next_job].arrival_s <= now_s:
            wait_s += now_s - waiting[next_job].arrival_s
            running.append(waiting[next_job])
            next_job += 1
        following = waiting[next_job].arrival_s if next_job < len(waiting) else math.inf
        if not running:
            now_s = following
            continue
        config = pick([job.category for job in running])
        cost = 1.0
        if config.is_off and standby:
            cost = standby[min(standby, key=lambda size: (abs(size - len(running)), size))]
        rates = [1 / (cost * table.token_s(config, len(running), job.category)) for job in running]
        end_s = min(job.left / rate for job, rate in zip(running, rates, strict=True))
        # a full batch takes nobody in before one of it ends
        step_s = min(end_s, following - now_s) if len(running) < top else end_s
        for job, rate in zip(running, rates, strict=True):
            job.left -= rate * step_s
        now_s += step_s
        busy_s += step_s
        held_s += step_s * len(running)
        shares[config.label] = shares.get(config.label, 0.0) + step_s
        latency_s += sum(now_s - job.arrival_s for job in running if job.left <= DONE)
        running = [job for job in running if job.left > DONE]
    return Served(
        name=name,
        busy_s=busy_s,
        span_s=now_s,
        latency_s=latency_s / len(waiting),
        wait_s=wait_s / len(waiting),
        mean_batch=held_s / busy_s,
        num_tokens=round(math.fsum(tokens for _, _, tokens in jobs)),
        share_by_config=tuple(sorted((label, value / busy_s) for label, value in shares.items())),
    )
