"""Decode what the losslessness check compares: plain, plain again, every arm; greedy, keyed and sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from spectune.errors import EngineFailure
from spectune.measure.door import Door
from spectune.measure.lossless import (
    Agreement,
    Frequencies,
    Verdict,
    compare_samples,
    compare_texts,
    judge_samples,
    judge_texts,
)
from spectune.measure.requests import Block
from spectune.metrics.latency import is_success
from spectune.records import Backend, Cell, Gap, Launch, Point, Request, RequestRecord, Sampling, SpecConfig

CONTROL = 1
"""The repeat of the point that decodes plainly a second time."""

SAMPLES = 2
ARM_SEED = 1_000_003
"""Added to the seeds of an arm's samples: both arms draw, independently, from what they claim is one
distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One arm in one cell under one test."""

    config: SpecConfig
    cell: Cell
    test: str  # "texts" or "frequencies"
    verdict: Verdict
    reason: str
    agreement: Agreement | None = None
    frequencies: Frequencies | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What to decode in a cell: blocks for texts, and one sample block of each prompt.

    `compares_texts` is False at T > 0 on engines whose sampling differs with speculation.
    """

    cell: Cell
    sampling: Sampling
    blocks: tuple[Block, ...]
    samples: tuple[Block, ...] = ()
    compares_texts: bool = True


def check_lossless(
    backend: Backend, configs: Sequence[SpecConfig], checks: Sequence[Check], *, say: Callable[[str], None]
) -> list[Finding]:
    """Every configuration in every cell. Raises EngineFailure where plain decoding gives nothing."""
    decoded: dict[Point, list[RequestRecord]] = {}
    points = [point for check in checks for point in _points(check, configs)]
    work = {point: check for check in checks for point in _points(check, configs)}
    launches = backend.plan(points)
    for launch in launches:
        with Door(backend, launch) as door:
            for point in launch.points:
                say(f"decoding {point.label}{' again' if point.repeat == CONTROL else ''}")
                decoded[point] = _decode(door, point, work[point])
            if len(launches) == 1:
                return _judge(configs, checks, decoded, door)
    # servers hold one arm at a time: plain decoding is started once more to tell its gaps
    plain = [point for point in points if point.config.is_off and point.repeat == 0]
    with Door(backend, Launch(points=tuple(plain))) as door:
        return _judge(configs, checks, decoded, door)


def sample_blocks(requests: Sequence[Request], *, num_samples: int, num_tokens: int) -> tuple[Block, ...]:
    """Each prompt asked `num_samples` times with seeds of its own."""
    return tuple(
        tuple(
            replace(
                request,
                request_id=f"{request.request_id.rsplit('-', 1)[0]}-{sample}",
                sampling=replace(
                    request.sampling, seed=request.sampling.seed + sample, max_tokens=num_tokens
                ),
            )
            for sample in range(num_samples)
        )
        for request in requests
    )


def _points(check: Check, configs: Sequence[SpecConfig]) -> list[Point]:
    off = Point(config=SpecConfig.off(), cell=check.cell, workload_hash="verify", sampling=check.sampling)
    arms = [replace(off, config=config) for config in configs]
    texts = [off, replace(off, repeat=CONTROL), *arms] if check.compares_texts else []
    samples = [replace(point, repeat=SAMPLES) for point in (off, *arms)] if check.samples else []
    return texts + samples


def _decode(door: Door, point: Point, check: Check) -> list[RequestRecord]:
    """All requests of a point; the control meets them in other company, as a busy server would."""
    blocks = check.blocks
    if point.repeat == SAMPLES:
        shift = 0 if point.config.is_off else ARM_SEED
        blocks = tuple(tuple(_reseeded(request, shift) for request in block) for block in check.samples)
    elif point.repeat == CONTROL:
        everything = [request for block in blocks for request in block]
        size = max(len(block) for block in blocks)
        everything.reverse()
        blocks = tuple(tuple(everything[i : i + size]) for i in range(0, len(everything), size))
    records = [record for block in blocks for record in door.run(point, block).requests]
    if not any(map(is_success, records)):
        error = next((record.error for record in records if record.error), "no answer")
        raise EngineFailure(f"{point.label}: no request succeeded: {error}")
    return records


def _reseeded(request: Request, shift: int) -> Request:
    return replace(request, sampling=replace(request.sampling, seed=request.sampling.seed + shift))


def _judge(
    configs: Sequence[SpecConfig],
    checks: Sequence[Check],
    decoded: dict[Point, list[RequestRecord]],
    door: Door,
) -> list[Finding]:
    known: dict[tuple[str, tuple[int, ...], Sampling], Gap | None] = {}

    def ask_gap(request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        key = (request.request_id, tuple(output_ids[: index + 1]), request.sampling)
        if key not in known:
            door.open()
            known[key] = door.gap(request, output_ids, index)
        return known[key]

    findings = []
    for check in checks:
        requests = {request.request_id: request for block in check.blocks for request in block}
        off = Point(config=SpecConfig.off(), cell=check.cell, workload_hash="verify", sampling=check.sampling)
        for config in configs:
            arm = replace(off, config=config)
            if check.compares_texts and config.option("draft_sampling", "greedy") == "greedy":
                found = compare_texts(
                    decoded[off], decoded[replace(off, repeat=CONTROL)], decoded[arm], requests, ask_gap
                )
                verdict, reason = judge_texts(found)
                findings.append(
                    Finding(
                        config=config,
                        cell=check.cell,
                        test="texts",
                        verdict=verdict,
                        reason=reason,
                        agreement=found,
                    )
                )
            if check.samples:
                drawn = [decoded[replace(point, repeat=SAMPLES)] for point in (off, arm)]
                frequencies = compare_samples(*drawn)
                verdict, reason = judge_samples(frequencies)
                findings.append(
                    Finding(
                        config=config,
                        cell=check.cell,
                        test="frequencies",
                        verdict=verdict,
                        reason=reason,
                        frequencies=frequencies,
                    )
                )
    return findings
