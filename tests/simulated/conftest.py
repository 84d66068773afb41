"""Workloads and runs that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.records import Prompt, Sampling, SpecConfig
from spectune.store import RunStore
from spectune.tune.plan import SweepPlan, plan_sweep
from spectune.tune.sweep import run_sweep, start_run
from spectune.workload.workload import Workload


def make_workload(categories: Sequence[str] = ("chat", "code"), each: int = 4) -> Workload:
    """`each` prompts a category, and two for calibration."""
    prompts = tuple(
        Prompt(prompt_id=f"{category}-{i}", category=category, turns=(f"{category} question {i}",))
        for category in categories
        for i in range(each)
    )
    calibration = tuple(
        Prompt(prompt_id=f"cal-{i}", category=categories[0], turns=(f"calibration {i}",)) for i in range(2)
    )
    return Workload(name="made", prompts=prompts, digest="d" * 64, calibration=calibration)


def make_plan(
    backend: SimulatedBackend,
    configs: Sequence[SpecConfig] | None = None,
    *,
    workload: Workload | None = None,
    batch_sizes: Sequence[int] = (1,),
    max_tokens: int = 24,
    **kwargs: object,
) -> SweepPlan:
    if configs is None:
        configs = (SpecConfig.off(), SpecConfig.chain("eagle3", 3), SpecConfig.chain("ngram", 2))
    return plan_sweep(
        backend,
        workload or make_workload(),
        configs,
        batch_sizes=batch_sizes,
        sampling=Sampling(max_tokens=max_tokens),
        **kwargs,  # type: ignore[arg-type]
    )


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., RunStore]:
    """Run a plan in a new directory and return its store."""

    def run(plan: SweepPlan, backend: SimulatedBackend, name: str = "run") -> RunStore:
        store = start_run(tmp_path / name, plan, backend, argv=["spectune", "sweep"])
        run_sweep(plan, backend, store)
        return store

    return run
