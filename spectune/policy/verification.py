"""Samples of a policy and its rivals in, a verdict out: kept, withdrawn with advice, or inconclusive.

Arms of one repeat decoded the same requests, so they are compared pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spectune import stats
from spectune.records import Interval
from spectune.records.policy_load import OFF, POLICY, LoadSample

MAX_LOSS = 0.05
"""A policy that is slower than the best static configuration by more than this is withdrawn."""

MIN_OF_OFF = 0.98
"""And one that falls below this share of an engine that cannot speculate."""

KEPT, WITHDRAWN, INCONCLUSIVE = "kept", "withdrawn", "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadVerdict:
    """One load: speed of the policy over off and over the best static arm (off is one), and of each
    static arm over off. Above 1 is faster."""

    load: str
    num_runs: int
    over_off: Interval | None
    best_static: str | None
    over_best: Interval | None
    statics: tuple[tuple[str, Interval], ...]
    verdict: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All loads, and what follows from them."""

    verdict: str
    loads: tuple[LoadVerdict, ...]
    reasons: tuple[str, ...]
    advice: str | None
    switch_cost_rounds: float | None
    """Plain rounds that a switch to more speculation took; None where none was seen."""
    behind_router: tuple[int, ...] = ()
    """Batch sizes at which a withdrawn policy still gains behind a router in front of two servers."""


def verify(samples: Sequence[LoadSample], *, parts_up_to: int | None = None) -> Verification:
    """The verdict over all loads.

    Args:
        parts_up_to: also judge rounds of at most so many sequences of each changing load by themselves.
    """
    loads = [_judge(name, times) for name, times in times_by_load(samples, parts_up_to).items()]
    lost = [load for load in loads if load.verdict == WITHDRAWN]
    open_loads = [load for load in loads if load.verdict == INCONCLUSIVE]
    verdict = WITHDRAWN if lost else INCONCLUSIVE if open_loads or not loads else KEPT
    reasons = [load.reason for load in (lost or open_loads) if load.reason is not None]
    return Verification(
        verdict=verdict,
        loads=tuple(loads),
        reasons=tuple(reasons or (["nothing was measured"] if not loads else [])),
        advice=static_advice(loads) if verdict == WITHDRAWN else None,
        switch_cost_rounds=switch_cost(samples),
    )


Times = dict[str, dict[int, float]]
"""Seconds (per token or in all) by arm and repeat."""


def times_by_load(samples: Sequence[LoadSample], parts_up_to: int | None = None) -> dict[str, Times]:
    """Time per token under each load, and in the rounds of at most `parts_up_to` sequences of changing ones.

    Where an arm was started several times, the geometric mean of its starts: a steady drift between plain
    decoding before and after the others cancels.
    """
    logs: dict[str, dict[str, dict[int, list[float]]]] = {}

    def add(load: str, sample: LoadSample, value: float) -> None:
        logs.setdefault(load, {}).setdefault(sample.arm, {}).setdefault(sample.repeat, []).append(
            math.log(value)
        )

    for sample in samples:
        value = sample.tpot_s if sample.tpot_s is not None else sample.seconds / sample.num_tokens
        add(sample.load, sample, value)
    if parts_up_to is not None:
        for sample, value in _low_times(samples, parts_up_to):
            add(f"{sample.load}, rounds of at most {parts_up_to}", sample, value)
    return {
        load: {
            arm: {repeat: math.exp(math.fsum(own) / len(own)) for repeat, own in by_repeat.items()}
            for arm, by_repeat in by_arm.items()
        }
        for load, by_arm in logs.items()
    }


def _low_times(samples: Sequence[LoadSample], most: int) -> Iterator[tuple[LoadSample, float]]:
    """Seconds per token of a sequence in rounds of at most `most` sequences of changing loads.

    An arm that is quick in large batches spends other shares of its tokens in small ones, so each batch
    size counts by the tokens that plain decoding emits there; sizes that an arm lacks count for none.
    """
    runs: dict[tuple[str, int], list[tuple[LoadSample, dict[int, tuple[float, float]]]]] = {}
    for sample in samples:
        if sample.tpot_s is None:
            runs.setdefault((sample.load, sample.repeat), []).append((sample, sample.by_batch_size(most)))
    for run in runs.values():
        plain = next((sizes for sample, sizes in run if sample.arm == OFF), {})
        common = set(plain).intersection(*(sizes for _, sizes in run))
        if not common:
            continue
        weights = {size: plain[size][0] for size in common}
        for sample, sizes in run:
            paces = (weights[size] * sizes[size][1] / sizes[size][0] for size in sorted(common))
            yield sample, math.fsum(paces) / sum(weights.values())


def speed_over(slow: Mapping[int, float], fast: Mapping[int, float]) -> Interval | None:
    """Time of the first over time of the second, paired by repeat: above 1, the second is faster."""
    logs = [math.log(slow[repeat] / fast[repeat]) for repeat in sorted(slow.keys() & fast.keys())]
    return stats.ratio_interval(logs) if logs else None


def _judge(name: str, times: Times) -> LoadVerdict:
    policy, off = times.get(POLICY, {}), times.get(OFF, {})
    statics = {
        arm: found
        for arm, own in times.items()
        if arm not in (POLICY, OFF) and (found := speed_over(off, own)) is not None
    }
    over_off = speed_over(off, policy)
    best = max(statics, key=lambda arm: statics[arm].value, default=None)
    if best is None or statics[best].value < 1.0:
        best = OFF if off else None
    over_best = None if best is None else speed_over(times[best], policy)
    verdict, reason = _verdict(name, over_off, best, over_best)
    return LoadVerdict(
        load=name,
        num_runs=len(policy.keys() & off.keys()),
        over_off=over_off,
        best_static=best,
        over_best=over_best,
        statics=tuple(sorted(statics.items())),
        verdict=verdict,
        reason=reason,
    )


def _verdict(
    name: str, over_off: Interval | None, best: str | None, over_best: Interval | None
) -> tuple[str, str | None]:
    """A loss counts where the value is beyond the limit and the whole interval lies on its side of 1; a
    value beyond the limit within the noise stays open."""
    if over_off is None or over_best is None:
        return INCONCLUSIVE, f"{name}: not measured for the policy and off"
    limits = (
        (over_best, 1 - MAX_LOSS, f"of {best} throughout, the best static choice"),
        (over_off, MIN_OF_OFF, "of an engine without speculation"),
    )
    for ratio, limit, what in limits:
        if ratio.value < limit and (ratio.high is not None and ratio.high < 1.0):
            return WITHDRAWN, f"{name}: {_told(ratio)} {what}, at least {limit:.2f} is asked"
    for ratio, limit, what in limits:
        if ratio.value < limit:
            return INCONCLUSIVE, f"{name}: {_told(ratio)} {what}, below {limit:.2f} within the noise"
    return KEPT, None


def static_advice(loads: Sequence[LoadVerdict]) -> str:
    """One configuration for every load: the fastest over all of them that never falls below MIN_OF_OFF of
    off; off where there is none."""
    names = {name for load in loads for name, _ in load.statics}
    found: list[tuple[float, str, float]] = []
    for name in sorted(names):
        speeds = [dict(load.statics)[name].value for load in loads if name in dict(load.statics)]
        if len(speeds) == len(loads) and min(speeds) >= MIN_OF_OFF:
            mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
            found.append((mean, name, min(speeds)))
    if found and max(found)[0] > 1.0:
        mean, name, low = max(found)
        return f"serve {name} at every load: {mean:.2f}x of off over these loads, {low:.2f}x at the worst"
    return "serve without speculation: no configuration holds up at every load that was served"


def switch_cost(samples: Sequence[LoadSample]) -> float | None:
    """Mean seconds of a switch to more speculation over the mean plain round of the loads that it was seen in."""
    seen: dict[str, list[tuple[float, int]]] = {}
    for sample in samples:
        if sample.arm == POLICY and sample.switch_s is not None and sample.num_switches:
            seen.setdefault(sample.load, []).append((sample.switch_s, sample.num_switches))
    costs: list[tuple[float, int]] = []  # plain rounds that all switches of a load took, and their number
    for load, switches in seen.items():
        plain = [part for s in samples if s.arm == OFF and s.load == load for part in s.parts]
        if rounds := sum(part.num_rounds for part in plain):
            plain_s = sum(part.seconds for part in plain) / rounds
            seconds = sum(own for own, _ in switches)
            costs.append((seconds / plain_s, sum(number for _, number in switches)))
    if not costs:
        return None
    return sum(cost for cost, _ in costs) / sum(number for _, number in costs)


def unfinished(found: Verification) -> Verification:
    """The verification of a part of the runs: it may withdraw a policy, it cannot keep one."""
    if found.verdict != KEPT:
        return found
    return replace(
        found, verdict=INCONCLUSIVE, reasons=(*found.reasons, "not all runs are done"), advice=found.advice
    )


def _told(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}x"
    return f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"


def unmeasured_places(policy: Mapping[str, Any], found: Verification) -> tuple[int, ...]:
    """Batch sizes whose loads were not kept and that the policy was never measured at."""
    sizes = []
    for load in found.loads:
        size = _size_of(load)
        if load.verdict == KEPT or size is None:
            continue
        cell = _cell_at(policy, size)
        if cell is None or f"measured at batch {size}," not in cell["source"]:
            sizes.append(size)
    return tuple(sizes)


def sizes_behind_router(policy: Mapping[str, Any], found: Verification) -> tuple[int, ...]:
    """Batch sizes whose gain is left where a policy lost only by its plain decoding.

    An engine that can speculate pays for it while it does not; a server that cannot pays nothing, so two
    servers behind a router keep the gain. Empty where the policy also lost while it speculated.
    """
    gains = []
    for load in found.loads:
        size = _size_of(load)
        if size is None:
            continue
        cell = _cell_at(policy, size)
        is_off = cell is None or cell["config"] == OFF
        if load.verdict == WITHDRAWN and not is_off:
            return ()
        if (
            load.verdict == KEPT
            and not is_off
            and load.over_off is not None
            and (load.over_off.low or 0.0) > 1
        ):
            gains.append(size)
    return tuple(gains)


def _size_of(load: LoadVerdict) -> int | None:
    """The batch size of a steady load."""
    name, _, number = load.load.partition(" ")
    return int(number) if name == "batch" and number.isdigit() else None


def _cell_at(policy: Mapping[str, Any], size: int) -> Mapping[str, Any] | None:
    """The cell of a batch size that holds for all categories."""
    for cell in policy["cells"]:
        low, high = cell["batch"]
        if cell["category"] is None and low <= size and (high is None or size <= high):
            found: Mapping[str, Any] = cell
            return found
    return None


def with_router_advice(policy: Mapping[str, Any], found: Verification) -> Verification:
    """The verification, whose advice names the router where two servers keep what one loses."""
    sizes = sizes_behind_router(policy, found) if found.verdict == WITHDRAWN else ()
    if not sizes or found.advice is None:
        return found
    kept = ", ".join(map(str, sizes))
    return replace(
        found,
        advice=f"{found.advice}; or two deployments, one of which cannot speculate: the gain at batch {kept} stays "
        "(spectune policy emit --engine router)",
        behind_router=sizes,
    )


def with_verification(policy: Mapping[str, Any], found: Verification, engine: str) -> dict[str, Any]:
    """The policy with what serving it showed."""
    told = {
        "verdict": found.verdict,
        "engine": engine,
        "reasons": list(found.reasons),
        "advice": found.advice,
        **({"behind_router": list(found.behind_router)} if found.behind_router else {}),
    }
    return {**policy, "verification": told}


def document(found: Verification) -> dict[str, Any]:
    """The verification as plain JSON values."""

    def pair(ratio: Interval | None) -> dict[str, Any] | None:
        if ratio is None:
            return None
        return {"value": ratio.value, "low": ratio.low, "high": ratio.high, "num_runs": ratio.n}

    return {
        "verdict": found.verdict,
        "reasons": list(found.reasons),
        "advice": found.advice,
        "switch_cost_rounds": found.switch_cost_rounds,
        "loads": [
            {
                "load": load.load,
                "verdict": load.verdict,
                "over_off": pair(load.over_off),
                "best_static": load.best_static,
                "over_best_static": pair(load.over_best),
                "statics_over_off": {name: pair(ratio) for name, ratio in load.statics},
                "reason": load.reason,
            }
            for load in found.loads
        ],
    }
