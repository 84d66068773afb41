"""The sweep: every point of a plan is run, saved and judged; what is on disk already is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spectune.measure.progress import SweepProgress
from spectune.records import Backend
from spectune.store import RunStore
from spectune.tune.plan import SweepPlan


def start_run(
    path: Path, plan: SweepPlan, backend: Backend, *, argv: Sequence[str], config: Mapping[str, Any]
) -> RunStore:
    """A new run directory with its manifest. `config` holds the resolved flags."""
    raise NotImplementedError


def resume_run(path: Path, plan: SweepPlan, backend: Backend) -> RunStore:
    """An existing run directory, if `plan` is the plan it was started with."""
    raise NotImplementedError


def run_sweep(
    plan: SweepPlan,
    backend: Backend,
    store: RunStore,
    progress: SweepProgress | None = None,
    *,
    retry_failed: bool = False,
) -> None:
    """Run what is missing or broken of `plan`. Failures of points become outcomes in `store`."""
    raise NotImplementedError
