"""A policy from several runs of one deployment."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.errors import NotComparable, UsageError
from spectune.policy.build import build_from_runs
from spectune.policy.table import choose
from spectune.records import Sampling, SpecConfig
from spectune.store import RunStore
from spectune.tune.plan import plan_sweep
from spectune.tune.sweep import run_sweep, start_run
from spectune.workload import load_workload

CONFIGS = (SpecConfig.off(), SpecConfig.chain("eagle3", 3))


def sweep(path: Path, batch_sizes: list[int], *, num_prompts: int = 16, configs=CONFIGS) -> RunStore:
    """A finished run of the simulated engine: K=3 pays at batch 1 and 4, not at 16."""
    backend = SimulatedBackend()
    plan = plan_sweep(
        backend,
        load_workload(None, num_prompts=64),
        configs,
        batch_sizes=batch_sizes,
        sampling=Sampling(max_tokens=32),
        num_prompts=num_prompts,
    )
    store = start_run(path, plan, backend)
    run_sweep(plan, backend, store)
    return store


def test_runs_of_other_loads_make_one_table(tmp_path: Path):
    """Batch 1 from one run and 16 from another; each cell names its run."""
    runs = [sweep(tmp_path / "small", [1]), sweep(tmp_path / "large", [16])]

    policy = build_from_runs(runs)

    assert policy["source_run"] == "small, large"
    assert [choose(policy, size, 100, None, 0.0).num_steps for size in (1, 16)] == [3, 0]
    first = next(cell for cell in policy["cells"] if cell["category"] is None)
    assert first["source"].startswith("small: measured at batch 1")
    assert policy["validity"]["batch"] == [1, 16]


def test_place_measured_twice_is_taken_from_the_larger_run(tmp_path: Path):
    """More requests behind it, whatever the order of the runs."""
    runs = [sweep(tmp_path / "short", [1], num_prompts=8), sweep(tmp_path / "long", [1], num_prompts=24)]

    for order in (runs, runs[::-1]):
        cells = [cell for cell in build_from_runs(order)["cells"] if cell["category"] is None]

        assert all("short" not in cell["source"] for cell in cells if cell["batch"] == [1, 1])


def test_runs_of_different_deployments_are_refused(tmp_path: Path):
    """What helps at one tensor parallel size may lose at another: one policy never holds both."""
    one, four = sweep(tmp_path / "tp1", [1]), sweep(tmp_path / "tp4", [1])
    mark = four.manifest["fingerprint"]
    four.update_manifest(
        {"fingerprint": {**mark, "settings": {**mark["settings"], "tensor_parallel_size": 4}}}
    )

    with pytest.raises(NotComparable, match="tensor_parallel_size 1 against 4"):
        build_from_runs([one, four])


def test_run_that_decides_nothing_is_refused_with_its_reason(tmp_path: Path):
    """Plain decoding alone is no decision."""
    run = sweep(tmp_path / "plain", [1], configs=CONFIGS[:1])

    with pytest.raises(UsageError, match="plain decides nothing"):
        build_from_runs([run])
