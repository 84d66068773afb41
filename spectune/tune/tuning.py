"""The records of a tuning: what is asked for, and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spectune.records import Cell, SpecConfig
from spectune.store.surface import TimeSurface
from spectune.store.trace_file import Trace
from spectune.tune.objective import Objective
from spectune.tune.plan import SweepPlan
from spectune.tune.predict import Forecasts
from spectune.tune.race import RaceResult, RaceRules


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneJob:
    """What is tuned and how much it may cost. `plan` holds every configuration and cell.

    budget_s: seconds for the finalists: a stage in every cell, then wherever it is open whether anything
    beats plain decoding, then among finalists alike.
    profile_s: seconds for the time surface, where none is given.
    """

    plan: SweepPlan
    objective: Objective
    rules: RaceRules = field(default_factory=RaceRules)
    num_finalists: int = 4
    num_trace_prompts: int = 32
    budget_s: float = 600.0
    profile_s: float = 80.0
    seed: int = 0
    trace: Path | None = None
    surface: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What a job found. Seconds by step are those of this start; 0 for what was there already."""

    job: TuneJob
    surface: TimeSurface
    traces: Mapping[tuple[int, float], Trace]
    forecasts: Forecasts
    finalists: Mapping[Cell, tuple[SpecConfig, ...]]
    excluded: tuple[tuple[str, str], ...]
    races: tuple[RaceResult, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)


def settings_of(job: TuneJob) -> dict[str, Any]:
    """What a resumed run must share; budgets may differ."""
    return {
        "objective": asdict(job.objective),
        "rules": asdict(job.rules),
        "num_finalists": job.num_finalists,
        "num_trace_prompts": job.num_trace_prompts,
        "seed": job.seed,
    }
