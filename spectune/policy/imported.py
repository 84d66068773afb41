"""Imported measurements in, flat rows out: vLLM's names beside ours, speedups where both arms are there.

Runs of another tool are not interleaved: what changed between them is in no interval, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from spectune import stats
from spectune.metrics.counters import counts_doubt, drafting_acceptance_length, drafting_conditional
from spectune.metrics.served import vllm_fields
from spectune.records import ImportedPoint, Interval, Status

BASIS = "imported runs, made one after the other"
_ABOUT_SPECULATION = ("spec", "sc.", "_benchmark_name")

LoadKey = tuple[object, ...]


def imported_rows(points: Sequence[ImportedPoint]) -> list[dict[str, Any]]:
    """One row a point, in their order."""
    return [_row(point, _speedup(point, points)) for point in points]


def load_key(point: ImportedPoint) -> LoadKey:
    """What must be equal for two points to be arms of one comparison: load, model and other settings."""
    told = point.measurement
    settings = tuple(pair for pair in point.settings if not pair[0].startswith(_ABOUT_SPECULATION))
    load = None if told is None else (told.max_concurrency, told.request_rate, told.burstiness)
    return (point.engine, point.model, load, settings)


def _speedup(point: ImportedPoint, points: Sequence[ImportedPoint]) -> Interval | None:
    """Plain time per token / the arm's, over the runs of both, paired by run number."""
    if point.config is None or point.config.is_off or point.status is not Status.OK:
        return None
    key = load_key(point)
    same = [other for other in points if load_key(other) == key and other.config is not None]
    plain = _tpots([other for other in same if other.config is not None and other.config.is_off])
    arm = _tpots([other for other in same if other.config == point.config])
    ratios = [math.log(plain[run] / arm[run]) for run in plain.keys() & arm.keys()]
    return stats.ratio_interval(ratios) if ratios else None


def _tpots(points: Sequence[ImportedPoint]) -> dict[int | None, float]:
    return {
        point.run_number: point.measurement.tpot_s.mean
        for point in points
        if point.status is Status.OK
        and point.measurement is not None
        and point.measurement.tpot_s is not None
    }


def _row(point: ImportedPoint, speedup: Interval | None) -> dict[str, Any]:
    config, told = point.config, point.measurement
    spec = None if told is None else told.spec
    has_interval = speedup is not None and speedup.low is not None
    return {
        "date": point.date,
        "backend": point.engine,
        "model_id": point.model,
        "label": point.label,
        "run_number": point.run_number,
        "source": point.source,
        "config": None if config is None else config.label,
        "method": None if config is None else config.method,
        "num_steps": None if config is None else config.num_steps,
        "status": point.status.value,
        "reason": point.reason,
        "speedup": None if speedup is None else speedup.value,
        "speedup_ci": [speedup.low, speedup.high] if speedup is not None and has_interval else None,
        "speedup_n": None if speedup is None else speedup.n,
        "speedup_basis": None if speedup is None else BASIS,
        "drafting_acceptance_length": None if spec is None else drafting_acceptance_length(spec),
        "spec_decode_conditional_acceptance_rates": None
        if spec is None
        else list(drafting_conditional(spec)),
        "acceptance_doubt": None if spec is None else counts_doubt(spec),
        **({} if told is None else vllm_fields(told)),
        "cautions": list(point.cautions),
        **{f"setting:{name}": value for name, value in point.settings},
    }
