"""Workloads, plans and runs that the end-to-end tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.measure.progress import SilentProgress
from spectune.records import Point, PointOutcome, Prompt, Sampling, SpecConfig
from spectune.store import RunStore
from spectune.tune.plan import SweepPlan, plan_sweep
from spectune.tune.sweep import run_sweep, start_run
from spectune.workload.workload import Workload
from tests.support.served_sweep import sweep_words, write_model

OFF = SpecConfig.off()
EAGLE = SpecConfig.chain("eagle3", 3)
NGRAM = SpecConfig.chain("ngram", 2)


class Recorder(SilentProgress):
    """Remembers what it was told; raises `error` at the `stop_at`-th block or point."""

    def __init__(
        self, *, stop_at: tuple[str, int] | None = None, error: type[BaseException] = KeyboardInterrupt
    ):
        self.blocks: list[tuple[Point, int]] = []
        self.outcomes: list[PointOutcome] = []
        self.notes: list[str] = []
        self.counts: tuple[int, int] | None = None
        self.is_finished = False
        self._stop_at = stop_at
        self._error = error

    def started(self, total: int, done: int) -> None:
        self.counts = (total, done)

    def block_done(self, point: Point, index: int) -> None:
        self.blocks.append((point, index))
        self._maybe_stop("block", len(self.blocks))

    def point_done(self, outcome: PointOutcome) -> None:
        self.outcomes.append(outcome)
        self._maybe_stop("point", len(self.outcomes))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finished(self) -> None:
        self.is_finished = True

    def _maybe_stop(self, kind: str, count: int) -> None:
        if self._stop_at == (kind, count):
            raise self._error


def _workload(categories: Sequence[str] = ("chat", "code"), each: int = 4) -> Workload:
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


def _plan(
    backend: SimulatedBackend,
    configs: Sequence[SpecConfig] = (OFF, EAGLE, NGRAM),
    *,
    workload: Workload | None = None,
    batch_sizes: Sequence[int] = (1,),
    sampling: Sampling | None = None,
    **kwargs: Any,
) -> SweepPlan:
    return plan_sweep(
        backend,
        workload or _workload(),
        configs,
        batch_sizes=batch_sizes,
        sampling=sampling or Sampling(max_tokens=16),
        **kwargs,
    )


@pytest.fixture
def workload_of() -> Callable[..., Workload]:
    """Makes a workload from categories and a count."""
    return _workload


@pytest.fixture
def plan_of() -> Callable[..., SweepPlan]:
    """Makes a small plan for a backend: off, eagle3 K=3, ngram K=2 at batch 1."""
    return _plan


@pytest.fixture
def recorder() -> type[Recorder]:
    """The class of a progress that remembers."""
    return Recorder


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., RunStore]:
    """Runs a plan in a new directory and returns its store."""

    def run(plan: SweepPlan, backend: SimulatedBackend, progress: Any = None, name: str = "run") -> RunStore:
        store = start_run(tmp_path / name, plan, backend, argv=["spectune", "sweep"])
        run_sweep(plan, backend, store, progress)
        return store

    return run


@pytest.fixture(scope="session")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the config and the tokenizer of a model, and no weights."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def arguments(bare_model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The words of a small sweep over a stand-in for vLLM."""

    def build(*more: str, **declared: Any) -> list[str]:
        return sweep_words(bare_model, tmp_path, *more, **declared)

    return build
