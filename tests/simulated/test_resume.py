"""A sweep that is interrupted, damaged or repeated ends with exactly the points of its plan."""

from __future__ import annotations

import json

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.backend.truth import SimulatedTruth
from spectune.errors import NotComparable, UsageError
from spectune.records import Sampling, SpecConfig, Status
from spectune.store import RunStore
from spectune.tune.sweep import resume_run, run_sweep, start_run


def counts(store):
    """What is compared between runs: everything but the clock."""
    return {
        point_id: {
            index: [(r.request_id, r.output_ids, r.steps) for r in block.requests]
            for index, block in store.blocks(point_id).items()
        }
        for point_id in store.outcomes()
    }


@pytest.mark.parametrize(
    "stop_at",
    [
        pytest.param(("block", 1), id="after-the-first-block"),
        pytest.param(("block", 7), id="in-the-middle"),
        pytest.param(("block", 24), id="after-the-last-block"),
        pytest.param(("point", 1), id="after-the-first-outcome"),
    ],
)
def test_resume_after_interrupt_ends_like_an_uninterrupted_run(stop_at, plan_of, sweep, recorder, tmp_path):
    """Ctrl-C at any moment: the resumed run has the same points, blocks and counts."""
    backend = SimulatedBackend()
    plan = plan_of(backend)
    whole = sweep(plan, backend, name="whole")
    store = start_run(tmp_path / "broken", plan, backend)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(plan, backend, store, recorder(stop_at=stop_at))

    resumed = resume_run(tmp_path / "broken", plan, backend)
    run_sweep(plan, backend, resumed)

    assert counts(whole) == counts(resumed)
    assert len((resumed.path / "points.jsonl").read_text().splitlines()) == 3


def test_resume_keeps_the_blocks_that_were_stored(plan_of, recorder, tmp_path):
    """Only missing blocks are decoded again: 7 before the interrupt, 17 of 24 after it."""
    backend = SimulatedBackend()
    plan = plan_of(backend)
    store = start_run(tmp_path / "run", plan, backend)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(plan, backend, store, recorder(stop_at=("block", 7)))
    progress = recorder()

    run_sweep(plan, backend, RunStore.open(tmp_path / "run"), progress)

    assert len(progress.blocks) == 17


def test_resume_of_a_finished_run_does_nothing(plan_of, sweep, recorder):
    """A second resume runs no block, starts no engine and changes no file."""

    class Counting(SimulatedBackend):
        starts = 0

        def open(self, launch):
            Counting.starts += 1
            return super().open(launch)

    backend = Counting(failing={"ngram K=2": "oom"})
    plan = plan_of(backend)
    store = sweep(plan, backend)
    before = {file: file.read_bytes() for file in store.path.rglob("*") if file.is_file()}
    starts, progress = Counting.starts, recorder()

    run_sweep(plan, backend, resume_run(store.path, plan, backend), progress)

    assert progress.counts == (3, 3)
    assert progress.blocks == []
    assert progress.is_finished
    assert Counting.starts == starts
    assert before == {file: file.read_bytes() for file in store.path.rglob("*") if file.is_file()}


def test_resume_half_written_file_is_set_aside_and_only_that_point_runs(plan_of, sweep, recorder):
    """A file cut in the middle is renamed, its point decoded again, the others reused."""
    backend = SimulatedBackend()
    plan = plan_of(backend)
    store = sweep(plan, backend)
    expected = counts(store)
    victim = plan.points[1]
    file = store.block_file(victim.point_id)
    file.write_bytes(file.read_bytes()[:-20])
    progress = recorder()

    run_sweep(plan, backend, RunStore.open(store.path), progress)

    assert {point for point, _ in progress.blocks} == {victim}
    assert expected == counts(store)
    assert file.with_name(f"{file.name}.broken-1").exists()
    assert "set aside" in progress.notes[0]


def test_resume_lost_file_of_a_finished_point_is_run_again(plan_of, sweep, recorder):
    """An outcome without its requests is not believed."""
    backend = SimulatedBackend()
    plan = plan_of(backend)
    store = sweep(plan, backend)
    store.block_file(plan.points[2].point_id).unlink()
    progress = recorder()

    run_sweep(plan, backend, store, progress)

    assert {point for point, _ in progress.blocks} == {plan.points[2]}


def test_resume_half_written_outcome_is_reported_and_written_again(plan_of, sweep, recorder):
    """A broken last line of points.jsonl costs no decoding: the blocks are whole."""
    backend = SimulatedBackend()
    plan = plan_of(backend)
    store = sweep(plan, backend)
    file = store.path / "points.jsonl"
    file.write_bytes(file.read_bytes()[:-30])
    progress = recorder()

    run_sweep(plan, backend, store, progress)

    assert progress.blocks == []
    assert "half-written" in progress.notes[0]
    assert len(store.outcomes()) == 3
    assert [json.loads(line)["status"] for line in file.read_text().splitlines()] == ["ok"] * 3


def test_resume_retry_failed_runs_failed_points_again(plan_of, sweep):
    """Failed points keep their outcome until the user asks for another try."""
    broken = SimulatedBackend(failing={"eagle3 K=3": "requests"})
    plan = plan_of(broken)
    store = sweep(plan, broken)
    mended = SimulatedBackend()

    run_sweep(plan, mended, store)
    kept = [outcome.status for outcome in store.outcomes().values()]
    run_sweep(plan, mended, store, retry_failed=True)

    assert kept == [Status.OK, Status.FAILED, Status.OK]
    assert [outcome.status for outcome in store.outcomes().values()] == [Status.OK] * 3


@pytest.mark.parametrize(
    ("change", "field"),
    [
        pytest.param({"batch_sizes": (1, 2)}, r"len\(plan.cells\)", id="batch-sizes"),
        pytest.param({"sampling": Sampling(max_tokens=99)}, "plan.sampling.max_tokens", id="max-tokens"),
        pytest.param({"num_prompts": 5}, "plan.num_prompts", id="num-prompts"),
        pytest.param(
            {"configs": (SpecConfig.chain("eagle3", 2),)}, r"plan.configs\[1\].num_steps", id="num-tokens"
        ),
    ],
)
def test_resume_with_another_plan_names_the_first_field(change, field, plan_of, sweep):
    """A run goes on only as it was started; what differs is said."""
    backend = SimulatedBackend()
    store = sweep(plan_of(backend), backend)

    with pytest.raises(UsageError, match=field):
        resume_run(store.path, plan_of(backend, **change), backend)


def test_resume_with_another_workload_names_the_digest(plan_of, workload_of, sweep):
    """Other prompts are another run."""
    from dataclasses import replace

    backend = SimulatedBackend()
    store = sweep(plan_of(backend), backend)
    other = plan_of(backend, workload=replace(workload_of(), digest="e" * 64))

    with pytest.raises(UsageError, match=r"workload\.digest"):
        resume_run(store.path, other, backend)


def test_resume_on_another_engine_is_not_comparable(plan_of, sweep):
    """Points of two engines never share a run."""
    backend = SimulatedBackend()
    plan = plan_of(backend)
    store = sweep(plan, backend)

    with pytest.raises(NotComparable, match=r"fingerprint\.settings\.truth"):
        resume_run(store.path, plan, SimulatedBackend(truth=SimulatedTruth(other_s=0.5)))


def test_start_run_twice_in_one_directory_is_refused(plan_of, sweep, tmp_path):
    """A second sweep never writes over the first."""
    backend = SimulatedBackend()
    plan = plan_of(backend)
    store = sweep(plan, backend)

    with pytest.raises(UsageError, match="already holds a run"):
        start_run(store.path, plan, backend)
