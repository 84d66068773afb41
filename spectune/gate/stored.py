"""Check a gate against its stored baseline: acceptance anywhere, speed on an equal machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spectune import stats
from spectune.gate import comparable
from spectune.gate.acceptance import (
    ACCEPTANCE,
    AGREEMENT,
    AcceptancePair,
    acceptance_checks,
    length_check,
    missing_acceptance,
    positions_check,
    too_few,
)
from spectune.gate.calibrate import speedup_of
from spectune.gate.common import by_request, common_range
from spectune.gate.file import GateFile
from spectune.gate.pairs import Blocks, block_tpot, failure, requests_of, thirds_apart
from spectune.gate.verdicts import Check, Outcome
from spectune.metrics.acceptance import acceptance_length, pooled_steps, survival
from spectune.metrics.throughput import output_throughput
from spectune.records import RequestRecord, Sampling

SPEEDUP, TPOT_LIMIT, THROUGHPUT_LIMIT = "speedup", "time per token limit", "throughput limit"
SPEEDUP_FLOOR, STEADINESS, COMPARABLE = "speedup floor", "steadiness", "comparable"
LENGTH_CHANGE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is checked: the guarded arm and plain decoding, one mapping of blocks a start or repeat."""

    spec: tuple[Blocks, ...]
    off: tuple[Blocks, ...] = ()
    sampling: Sampling
    workload_digest: str
    template_digest: str | None = None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        return tuple(request for blocks in self.spec for request in requests_of(blocks))


def refusal(gate: GateFile, now: Measured, *, needs_machine: bool) -> Check | None:
    """Not comparable, with every field that differs; None where the comparison is fair."""
    found = comparable.sampling_differences(gate.sampling, now.sampling)
    if gate.subject.workload_digest != now.workload_digest:
        found += (("workload", gate.subject.workload_digest[:12], now.workload_digest[:12]),)
    templates = gate.subject.template_digest, now.template_digest
    if None not in templates and templates[0] != templates[1]:
        found += (("chat template", *templates),)
    found += comparable.fingerprint_differences(
        gate.fingerprint, now.fingerprint, needs_machine=needs_machine
    )
    if not found:
        return None
    return Check(
        name=COMPARABLE,
        outcome=Outcome.NOT_COMPARABLE,
        text=comparable.describe(found),
        hint="run under the baseline's conditions, or --update-baseline with the reason",
    )


def check_measured(
    gate: GateFile, baseline: Blocks | None, now: Measured, *, only: str | None = None
) -> tuple[Check, ...]:
    """Acceptance and speed of `now` against the baseline; `only` is acceptance or speed.

    A difference that forbids the comparison of speed alone leaves acceptance to be judged.
    """
    checks: list[Check] = []
    if (refused := refusal(gate, now, needs_machine=False)) is not None:
        return (refused,)
    if (why := failure(now.requests)) is not None:
        return (Check(name=ACCEPTANCE, outcome=Outcome.MISSING, text=f"no figures: {why}"),)
    if only != "speed" and gate.acceptance.is_enabled:
        checks += check_acceptance(gate, baseline, now.spec)
    if any(check.name == AGREEMENT and check.is_bad for check in checks):
        return tuple(checks)
    if only != "acceptance" and gate.speed.is_enabled:
        refused = refusal(gate, now, needs_machine=True)
        checks += [refused] if refused is not None else speed_checks(gate, now)
    return tuple(checks)


def check_acceptance(gate: GateFile, baseline: Blocks | None, spec: Sequence[Blocks]) -> tuple[Check, ...]:
    """Over the common range where the baseline's text is known, else over texts of equal length."""
    requests = by_request([request for blocks in spec for request in requests_of(blocks)])
    if baseline is not None:
        return acceptance_checks(
            gate, common_range(by_request(requests_of(baseline)), requests, gate.config.max_accepted)
        )
    records = list(requests.values())
    steps = pooled_steps(records)
    length = acceptance_length(steps)
    if length is None:
        return (missing_acceptance(),)
    tokens = sum(record.num_output_tokens for record in records)
    if abs(tokens / gate.acceptance.output_tokens - 1) > LENGTH_CHANGE:
        return (
            Check(
                name=ACCEPTANCE,
                outcome=Outcome.INCONCLUSIVE,
                value=length,
                reference=gate.acceptance.acceptance_length,
                n=len(steps),
                text=f"{tokens} output tokens against {gate.acceptance.output_tokens} of the baseline: the "
                "answers end elsewhere, and without the baseline's text there is no common range",
                hint="keep the file of the baseline's text beside the gate",
            ),
        )
    everything = common_range(requests, requests, gate.config.max_accepted)
    if (few := too_few(gate, everything)) is not None:
        return (few,)
    depth = max(gate.config.max_accepted, max(step.num_accepted for step in steps))
    own = gate.acceptance.per_position
    pair = AcceptancePair(
        base=gate.acceptance.acceptance_length,
        head=length,
        base_positions=own + (0.0,) * (depth - len(own)),
        head_positions=survival(steps, depth),
        num_steps=len(steps),
        num_prompts=len(records),
    )
    return (length_check(gate, pair), positions_check(gate, pair))


def speed_checks(gate: GateFile, now: Measured) -> list[Check]:
    """Speedup against the baseline's runs and its floor, absolute limits, steadiness."""
    size = gate.subject.batch_size
    pairs = list(zip(now.off, now.spec, strict=False))
    speedups = [value for off, spec in pairs if (value := speedup_of(off, spec, size)) is not None]
    if not speedups:
        return [
            Check(
                name=SPEEDUP,
                outcome=Outcome.MISSING,
                text="no speedup: plain decoding was not measured beside the guarded arm",
                hint="a run of spectune sweep has both",
            ),
            *_limits(gate, now),
        ]
    return [
        _against_baseline(gate, speedups),
        *_floor(gate, speedups, pairs),
        *_limits(gate, now),
        *_steadiness(gate, pairs),
    ]


def _against_baseline(gate: GateFile, speedups: Sequence[float]) -> Check:
    baseline = [math.log(value) for value in gate.speed.speedup_runs]
    logs = [math.log(value) for value in speedups]
    if len(baseline) < 2:
        return Check(
            name=SPEEDUP, outcome=Outcome.SKIPPED, text="the gate holds no baseline runs of the speedup"
        )
    ratio = math.exp(math.fsum(logs) / len(logs) - math.fsum(baseline) / len(baseline))
    p = stats.welch_p_value(baseline, logs) if len(logs) > 1 else stats.prediction_p_value(baseline, logs[0])
    tolerance, level = gate.speed.max_slowdown, gate.statistics.false_alarm_rate
    value, reference = stats.median(speedups), stats.median(gate.speed.speedup_runs)
    assert p is not None, speedups
    assert value is not None, speedups
    assert reference is not None, baseline
    is_slower = 1 / ratio - 1 >= tolerance / 2
    outcome = Outcome.PASSED
    if is_slower and p <= level:
        outcome = Outcome.REGRESSION
    elif 1 / ratio - 1 >= tolerance - 1e-9:
        outcome = Outcome.INCONCLUSIVE
    return Check(
        name=SPEEDUP,
        outcome=outcome,
        value=value,
        reference=reference,
        limit=reference / (1 + tolerance),
        limit_is="at least",
        tolerance=tolerance,
        p_value=p,
        n=len(speedups),
        unit="plain time / speculative time",
        text=f"speedup {value:.3f}x against {reference:.3f}x of {len(baseline)} baseline runs "
        f"({1 - ratio:+.2%} lost, tolerance {tolerance:.1%}, p {p:.4f}, n {len(speedups)})",
        hint="more runs would tell: --num-runs, or check base against head"
        if outcome is Outcome.INCONCLUSIVE
        else None,
    )


def _floor(gate: GateFile, speedups: Sequence[float], pairs: Sequence[tuple[Blocks, Blocks]]) -> list[Check]:
    floor = gate.speed.min_speedup
    if floor is None:
        return []
    logs = [math.log(value) for value in speedups]
    if len(logs) == 1:
        logs = _block_logs(pairs[0], gate.subject.batch_size)
    interval = stats.ratio_interval(logs)
    outcome = Outcome.PASSED
    if interval.value < floor - 1e-9:
        is_sure = interval.high is not None and interval.high < floor
        outcome = Outcome.REGRESSION if is_sure else Outcome.INCONCLUSIVE
    low, high = interval.low, interval.high
    shown = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return [
        Check(
            name=SPEEDUP_FLOOR,
            outcome=outcome,
            value=interval.value,
            limit=floor,
            limit_is="at least",
            interval=None if low is None or high is None else (low, high),
            n=interval.n,
            unit="plain time / speculative time",
            text=f"speedup {interval.value:.3f}x{shown}, at least {floor:.3f}x wanted (n {interval.n})",
            hint="speculation no longer pays here: spectune sweep says what does"
            if outcome is Outcome.REGRESSION
            else None,
        )
    ]


def _limits(gate: GateFile, now: Measured) -> list[Check]:
    """Absolute limits, wide; a value on the limit passes."""
    size = gate.subject.batch_size
    tpots = [t for blocks in now.spec for block in blocks.values() if (t := block_tpot(block, size))]
    rates = [
        rate
        for blocks in now.spec
        if (seconds := math.fsum(block.duration_s for block in blocks.values())) > 0
        if (rate := output_throughput(requests_of(blocks), seconds)) is not None
    ]
    found = []
    for name, value, limit, unit, is_most in (
        (TPOT_LIMIT, stats.median(tpots), gate.speed.max_tpot_s, "s", True),
        (THROUGHPUT_LIMIT, stats.median(rates), gate.speed.min_tokens_per_s, "tokens/s", False),
    ):
        if limit is None:
            continue
        if value is None:
            found.append(Check(name=name, outcome=Outcome.MISSING, text=f"{name}: nothing was timed"))
            continue
        is_bad = value > limit * (1 + 1e-9) if is_most else value < limit * (1 - 1e-9)
        word = "at most" if is_most else "at least"
        found.append(
            Check(
                name=name,
                outcome=Outcome.REGRESSION if is_bad else Outcome.PASSED,
                value=value,
                limit=limit,
                limit_is=word,
                n=len(tpots) if is_most else len(rates),
                unit=unit,
                text=f"{value:.4g} {unit}, {word} {limit:.4g} {unit} wanted",
            )
        )
    return found


def _steadiness(gate: GateFile, pairs: Sequence[tuple[Blocks, Blocks]]) -> list[Check]:
    """First third of the blocks against the last: an own verdict, since neither third is the truth."""
    moves = []
    for pair in pairs:
        logs = _block_logs(pair, gate.subject.batch_size)
        third = len(logs) // 3
        if third < 2:
            continue
        p = stats.welch_p_value(logs[:third], logs[-third:])
        moves.append((thirds_apart(logs) or 0.0, 1.0 if p is None else 2 * min(p, 1 - p)))
    if not moves:
        return []
    move, p_value = min(moves, key=lambda found: found[1])
    p_value = min(1.0, p_value * len(moves))
    is_drift = p_value <= 0.001 and abs(move) > math.log1p(gate.speed.max_slowdown)
    return [
        Check(
            name=STEADINESS,
            outcome=Outcome.DRIFT if is_drift else Outcome.PASSED,
            value=move,
            p_value=p_value,
            n=len(moves),
            unit="log ratio",
            text=f"the speedup moved by {math.expm1(move):+.1%} from the first to the last third of the run",
            hint="the machine warmed up, throttled or was shared: measure again" if is_drift else None,
        )
    ]


def _block_logs(pair: tuple[Blocks, Blocks], batch_size: int) -> list[float]:
    off, spec = pair
    logs = []
    for index in sorted(off.keys() & spec.keys()):
        slow, fast = block_tpot(off[index], batch_size), block_tpot(spec[index], batch_size)
        if slow is not None and fast is not None:
            logs.append(math.log(slow / fast))
    return logs
