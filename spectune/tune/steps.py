"""A time surface without timed rounds: the step time of requests at a load, from a stored run.

For servers, which tell no rounds: seconds of a step = Σ(e2e - TTFT) / Σ steps at fixed concurrency. Draft,
verification and the rest are one number there, so each method has its own line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spectune.errors import MetricMissing
from spectune.metrics.throughput import request_totals
from spectune.records import PointOutcome, RequestRecord, SpecConfig, Status
from spectune.stats import ratio_interval
from spectune.store import RunStore
from spectune.store.surface import HeldOut, Line, SurfacePoint, TimeSurface
from spectune.tune.surface import bucket_of, draft_family, other_family

LEAST_REQUESTS = 4
"""Requests of a point from which on its step time says something."""


def step_surface(run: RunStore) -> TimeSurface:
    """Step times of every point that ran at a closed load. MetricMissing where none did."""
    points = []
    for outcome in run.outcomes().values():
        if (point := _point(run, outcome)) is not None:
            points.append(point)
    if not points:
        raise MetricMissing(
            f"{run.path} holds no point with step times", hint="a sweep whose requests tell their steps"
        )
    return TimeSurface(
        fingerprint=run.manifest.get("fingerprint") or {},
        provenance=run.manifest.get("provenance") or {},
        source="steps",
        points=tuple(points),
        lines=_lines(points),
        held_out=HeldOut(num_points=0, median=None, p95=None, rms=None),
        drift=None,
        duration_s=math.fsum(outcome.duration_s or 0.0 for outcome in run.outcomes().values()),
    )


def _point(run: RunStore, outcome: PointOutcome) -> SurfacePoint | None:
    point = outcome.point
    if outcome.status is not Status.OK or point.cell.is_open_loop or point.config.is_standby:
        return None
    requests = [r for block in run.blocks(point.point_id).values() for r in block.requests]
    totals = request_totals(requests)
    if totals is None or totals.num_requests < LEAST_REQUESTS:
        return None
    own = [one for request in requests if (one := request_totals([request])) is not None]
    interval = ratio_interval([math.log(one.step_s) for one in own])
    return SurfacePoint(
        batch_size=point.cell.batch_size,
        config=point.config,
        kv_tokens=point.cell.batch_size * _context(requests),
        commit_tokens=totals.tokens_per_step,
        num_rounds=totals.num_steps,
        draft_s=0.0,
        verify_s=totals.step_s,
        other_s=0.0,
        half_width=None if interval.high is None else interval.high / interval.value - 1,
    )


def _context(requests: Sequence[RequestRecord]) -> float:
    """Mean tokens that a sequence holds while it decodes."""
    whole = [r.num_prompt_tokens + r.num_output_tokens / 2 for r in requests if r.error is None]
    return math.fsum(whole) / len(whole)


def _lines(points: Sequence[SurfacePoint]) -> tuple[Line, ...]:
    """One line a method and batch size; nothing is known of how a step divides."""
    lines: list[Line] = []
    by_kind: dict[tuple[str, int], list[SurfacePoint]] = {}
    for point in points:
        by_kind.setdefault((point.config.method, point.batch_size), []).append(point)
    for (method, batch_size), own in by_kind.items():
        widths = {point.config.num_draft_tokens: point.verify_s for point in own}
        kv = [point.kv_tokens for point in own]
        lines.append(
            Line(
                part="verify",
                family=method,
                batch_size=batch_size,
                base_s=dict(sorted(widths.items())),
                buckets={width: bucket_of(width * batch_size) for width in sorted(widths)},
                kv_range=(min(kv), max(kv)),
            )
        )
        for part, family in _free(own):
            depths = sorted({point.config.num_steps for point in own})
            tokens = depths if part == "draft" else sorted(widths)
            lines.append(
                Line(
                    part=part,
                    family=family,
                    batch_size=batch_size,
                    base_s=dict.fromkeys(tokens, 0.0),
                    buckets=dict.fromkeys(tokens, 0),
                )
            )
    return tuple(lines)


def _free(points: Sequence[SurfacePoint]) -> list[tuple[str, str]]:
    """Parts that are contained in the step."""
    configs: list[SpecConfig] = [point.config for point in points]
    pairs = [("draft", draft_family(config)) for config in configs]
    pairs += [("other", other_family(config)) for config in configs]
    return list(dict.fromkeys(pairs))
