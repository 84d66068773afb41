"""From a run to a gate: A/A starts of equal engines give the noise, and the noise gives the tolerances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from spectune import stats
from spectune.errors import Inconclusive, MetricMissing, UsageError
from spectune.gate.acceptance import NOISE_FACTOR, pair_of
from spectune.gate.design import MAX_STARTS, detectable_slowdown, refuse_noise, starts_needed
from spectune.gate.file import AcceptanceGate, GateFile, Origin, SpeedGate, Statistics, Subject
from spectune.gate.pairs import (
    BASE,
    HEAD,
    TPOT,
    Blocks,
    StartPair,
    block_tpot,
    failure,
    measure_start,
    pair_start,
    requests_of,
)
from spectune.metrics.acceptance import acceptance_length, pooled_steps, survival
from spectune.metrics.throughput import output_throughput
from spectune.records import BlockResult, MeasureSides, Point, SideArm, SpecConfig

MIN_RUNS = 5
"""A baseline is the median of at least so many: one slow run must not hide a loss."""

LEAST_TOLERANCE = 0.01
AA_LEVEL = 0.001
WIDE = 1.5
"""Absolute limits stand this factor away: absolute speed of shared machines varies by 13% and more."""

SPEEDUP_SHARE = 0.9
NOISE_CONFIDENCE = 0.9
"""Of the bound on the noise. Ten starts show too small a spread often enough that plans made at 80% caught
94.7% of the slowdowns they promised to catch in 95%."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A/A: what equal engines gave in each start, with plain decoding beside them."""

    pairs: tuple[StartPair, ...]
    speedups: tuple[float, ...]
    tpots_s: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    blocks: Mapping[int, BlockResult]

    def noise(self) -> float:
        """Upper bound of the spread of one start's log ratio, over the metrics of speed."""
        rows = [[pair.slowdowns[metric] for pair in self.pairs] for metric in self.pairs[0].slowdowns]
        return max(stats.upper_deviation(row, confidence=NOISE_CONFIDENCE) for row in rows)


def calibrate(measure: MeasureSides, point: Point, *, num_starts: int) -> Calibration:
    """Start two equal engines `num_starts` times; refuses a machine on which equal engines differ."""
    if num_starts < MIN_RUNS:
        raise UsageError(f"--calibration-starts {num_starts} is below {MIN_RUNS}")
    off = replace(point, config=SpecConfig.off())
    arms = [SideArm(side=BASE, point=point), SideArm(side=HEAD, point=point), SideArm(side=BASE, point=off)]
    pairs, speedups, rates = [], [], []
    first: Mapping[int, BlockResult] = {}
    for start in range(num_starts):
        base, head, plain = measure_start(measure, arms, start=start)
        pair = pair_start(base, head, point.cell.batch_size, point.config.max_accepted)
        if isinstance(pair, str):
            raise MetricMissing(f"calibration: {pair}")
        pairs.append(pair)
        speedups.append(speedup_of(plain, base, point.cell.batch_size))
        rates.append(output_throughput(requests_of(base), sum(block.duration_s for block in base.values())))
        first = first or base
    found = Calibration(
        pairs=tuple(pairs),
        speedups=tuple(value for value in speedups if value is not None),
        tpots_s=tuple(pair.base_tpot_s for pair in pairs),
        tokens_per_s=tuple(value for value in rates if value is not None),
        blocks=first,
    )
    slowdowns = [pair.slowdowns[TPOT] for pair in pairs]
    p = stats.two_sided_p_value(slowdowns)
    if p is not None and p < AA_LEVEL and abs(math.fsum(slowdowns) / len(slowdowns)) > LEAST_TOLERANCE:
        ratio = stats.ratio_interval(slowdowns)
        raise Inconclusive(
            f"equal engines differ by {ratio.value - 1:+.1%} in {len(slowdowns)} starts: nothing can be "
            "guarded on this machine as it is",
            hint="give both sides the same cores and memory, and look for what else runs",
        )
    return found


def speedup_of(plain: Blocks, spec: Blocks, batch_size: int) -> float | None:
    """Geometric mean over shared blocks of plain time / speculative time per token."""
    if failure(requests_of(plain)) or failure(requests_of(spec)):
        return None
    logs = []
    for index in sorted(plain.keys() & spec.keys()):
        slow, fast = block_tpot(plain[index], batch_size), block_tpot(spec[index], batch_size)
        if slow is not None and fast is not None:
            logs.append(math.log(slow / fast))
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def acceptance_gate(
    config: SpecConfig, blocks: Blocks, *, tolerance: float | None, noise: float = 0.0
) -> AcceptanceGate:
    """The acceptance of the baseline; refuses a tolerance inside the noise."""
    requests = requests_of(blocks)
    steps = pooled_steps(requests)
    length = acceptance_length(steps)
    if length is None:
        raise MetricMissing(
            "the baseline has no acceptance: nothing was drafted", hint="choose an arm that speculates"
        )
    least = NOISE_FACTOR * noise
    if tolerance is not None and tolerance < least:
        raise Inconclusive(
            f"an acceptance tolerance of {tolerance:.2%} lies inside the noise: equal engines vary by {noise:.2%}",
            hint=f"--acceptance-tolerance {least:.4f}, or {math.ceil((least / tolerance) ** 2)} times the prompts",
        )
    depth = max(config.max_accepted, max(step.num_accepted for step in steps))
    return AcceptanceGate(
        acceptance_length=length,
        per_position=survival(steps, depth),
        tolerance=max(LEAST_TOLERANCE, least) if tolerance is None else tolerance,
        noise=noise,
        num_steps=len(steps),
        output_tokens=sum(request.num_output_tokens for request in requests),
    )


def acceptance_noise(gate: GateFile, calibration: Calibration) -> float:
    """Spread of the acceptance ratio of equal engines over their common range."""
    ratios = []
    for pair in calibration.pairs:
        found = pair_of(pair.common.base_steps, pair.common.head_steps, gate, pair.common.num_requests)
        if found is not None:
            ratios.append(found.log_ratio)
    return stats.upper_deviation(ratios, confidence=NOISE_CONFIDENCE) if len(ratios) > 1 else 0.0


def speed_gate(calibration: Calibration, *, max_slowdown: float) -> SpeedGate:
    """Baseline runs and limits that follow from them."""
    speedup, tpot = stats.median(calibration.speedups), stats.median(calibration.tpots_s)
    rate = stats.median(calibration.tokens_per_s)
    return SpeedGate(
        max_slowdown=max_slowdown,
        min_speedup=None if speedup is None else SPEEDUP_SHARE * speedup,
        speedup_runs=calibration.speedups,
        tpot_s_runs=calibration.tpots_s,
        max_tpot_s=None if tpot is None else WIDE * tpot,
        min_tokens_per_s=None if rate is None else rate / WIDE,
    )


def statistics_of(
    calibration: Calibration, wanted: Statistics, *, max_slowdown: float, num_starts: int | None
) -> Statistics:
    """The noise and the starts that it takes; Inconclusive where the slowdown lies inside the noise."""
    noise = calibration.noise()
    needed = starts_needed(noise, max_slowdown, wanted)
    if num_starts is not None:
        refuse_noise(noise, max_slowdown, num_starts, wanted)
    elif needed is None or needed > MAX_STARTS:
        seen = detectable_slowdown(noise, MAX_STARTS, wanted)
        raise Inconclusive(
            f"a slowdown of {max_slowdown:.1%} lies inside the noise: one start's ratio of equal engines varies "
            f"by {noise:.2%}, which takes {needed or 'too many'} starts (more than {MAX_STARTS})",
            hint=f"--num-starts {needed} if that is worth it, --max-slowdown {seen:.3f}, more prompts, "
            "or --only acceptance",
        )
    chosen = num_starts if num_starts is not None else needed
    assert chosen is not None
    return replace(
        wanted,
        num_starts=chosen,
        pair_noise=noise,
        aa_log_ratios=tuple(pair.slowdowns[TPOT] for pair in calibration.pairs),
    )


def subject_of(point: Point, workload: Mapping[str, Any]) -> Subject:
    """What the gate decodes; `workload` is the manifest's."""
    sampling = asdict(point.sampling)
    return Subject(
        config=point.config.to_dict(),
        batch_size=point.cell.batch_size,
        context_tokens=point.cell.context_tokens,
        sampling={**sampling, "stop": list(point.sampling.stop)},
        workload=str(workload.get("name", "")),
        workload_digest=point.workload_hash,
        template_digest=workload.get("template_digest"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked of a new gate; None is "from the noise"."""

    max_slowdown: float = 0.03
    acceptance_tolerance: float | None = None
    num_starts: int | None = None
    statistics: Statistics = field(default_factory=Statistics)


def make_gate(
    name: str,
    origin: Origin,
    point: Point,
    manifest: Mapping[str, Any],
    blocks: Blocks,
    calibration: Calibration | None,
    wishes: Wishes,
) -> tuple[GateFile, Blocks]:
    """The gate and the blocks it compares acceptance with; without calibration it guards acceptance alone."""
    source = blocks if calibration is None else calibration.blocks
    gate = GateFile(
        name=name,
        origin=origin,
        subject=subject_of(point, manifest.get("workload", {})),
        acceptance=acceptance_gate(point.config, source, tolerance=wishes.acceptance_tolerance),
        speed=SpeedGate(is_enabled=False, max_slowdown=wishes.max_slowdown),
        statistics=wishes.statistics,
        fingerprint=_plain(manifest.get("fingerprint", {})),
        settings=_settings(manifest),
    )
    if calibration is None:
        return gate, source
    noise = acceptance_noise(gate, calibration)
    return replace(
        gate,
        acceptance=acceptance_gate(point.config, source, tolerance=wishes.acceptance_tolerance, noise=noise),
        speed=speed_gate(calibration, max_slowdown=wishes.max_slowdown),
        statistics=statistics_of(
            calibration,
            wishes.statistics,
            max_slowdown=wishes.max_slowdown,
            num_starts=wishes.num_starts,
        ),
    ), source


def pooled_blocks(blocks: Sequence[Blocks]) -> dict[int, BlockResult]:
    """Blocks of several repeats under one numbering."""
    return dict(enumerate(block for repeat in blocks for _, block in sorted(repeat.items())))


def _plain(mark: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mark.items() if value is not None}


def _settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The run's settings without where it was written."""
    return {name: value for name, value in manifest.get("config", {}).items() if name != "output_dir"}
