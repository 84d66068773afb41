"""A whole sweep on the simulated backend: outcomes, order of arms, failures that become outcomes."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from dataclasses import replace

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.errors import InfeasibleConfig, RunError, StoreError, UsageError, WorkloadError
from spectune.measure.contention import CpuClock
from spectune.records import SpecConfig, Status
from spectune.store import RunStore
from spectune.tune.sweep import run_sweep, start_run

OFF = SpecConfig.off()
EAGLE = SpecConfig.chain("eagle3", 3)
NGRAM = SpecConfig.chain("ngram", 2)


def by_label(store):
    return {outcome.point.config.label: outcome for outcome in store.outcomes().values()}


def test_sweep_complete_gives_one_ok_outcome_for_every_point(plan_of, sweep, recorder):
    """Every point of the plan ends ok with all of its requests, and the progress hears of it."""
    backend, progress = SimulatedBackend(), recorder()
    plan = plan_of(backend, batch_sizes=(1, 2), repeats=2)

    store = sweep(plan, backend, progress)

    outcomes = store.outcomes()
    assert set(outcomes) == {point.point_id for point in plan.points}
    assert {(o.status, o.num_requests, o.num_failed) for o in outcomes.values()} == {(Status.OK, 8, 0)}
    assert progress.counts == (12, 0)
    assert len(progress.outcomes) == 12
    assert progress.is_finished


def test_sweep_blocks_alternate_the_order_of_the_arms(plan_of, sweep, recorder):
    """Off runs first or last in turn, and each category meets both orders: drift cancels in both."""
    backend, progress = SimulatedBackend(), recorder()

    sweep(plan_of(backend, num_prompts=4), backend, progress)

    order = [(index, point.config.label) for point, index in progress.blocks]
    forward = ["off", "eagle3 K=3", "ngram K=2"]
    backward = forward[::-1]
    expected = [
        (index, label)
        for index, labels in enumerate((forward, backward, backward, forward))
        for label in labels
    ]
    assert expected == order


def test_sweep_arms_of_a_cell_decode_the_same_requests_to_the_same_text(plan_of, sweep):
    """Speculation never changes the output, so every arm says what plain decoding says."""
    backend = SimulatedBackend()
    plan = plan_of(backend)

    store = sweep(plan, backend)

    texts = [
        {r.request_id: r.output_ids for block in store.blocks(p.point_id).values() for r in block.requests}
        for p in plan.points
    ]
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 8


def test_sweep_repeats_use_request_ids_of_their_own(plan_of, sweep):
    """A repeat goes on through the workload instead of asking the same samples again."""
    backend = SimulatedBackend()
    plan = plan_of(backend, repeats=2)

    store = sweep(plan, backend)

    ids = Counter(
        request.request_id
        for point in plan.points
        if point.config.is_off
        for block in store.blocks(point.point_id).values()
        for request in block.requests
    )
    assert len(ids) == 16
    assert set(ids.values()) == {1}


def test_sweep_calibrates_every_arm_of_every_cell(plan_of, sweep):
    """The surface holds round times of each arm in each cell, taken on calibration prompts."""
    backend = SimulatedBackend()
    plan = plan_of(backend, batch_sizes=(1, 2))

    surface = sweep(plan, backend).surface()

    assert set(surface) == {(config.label, cell) for config in plan.configs for cell in plan.cells}
    assert all(times.num_rounds >= 1 for times in surface.values())


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        pytest.param("oom", Status.OOM, "no memory", id="out-of-memory"),
        pytest.param("engine", Status.FAILED, "died", id="engine-death"),
        pytest.param("requests", Status.FAILED, "8 of 8 requests failed: simulated", id="all-refused"),
        pytest.param("identity", Status.SUSPECT, "do not add up", id="token-counts-broken"),
    ],
)
def test_sweep_failing_arm_gets_its_status_and_the_others_go_on(kind, status, words, plan_of, sweep):
    """One arm that goes wrong is an outcome with a reason; the sweep finishes the others."""
    backend = SimulatedBackend(failing={"eagle3 K=3": kind})

    outcomes = by_label(sweep(plan_of(backend), backend))

    assert outcomes["eagle3 K=3"].status is status
    assert words in outcomes["eagle3 K=3"].reason
    assert outcomes["off"].status is outcomes["ngram K=2"].status is Status.OK


def test_sweep_batch_not_reached_is_capped(plan_of, sweep):
    """An engine that decodes two of four sequences together gives no batch-4 result."""
    backend = SimulatedBackend(failing={"eagle3 K=3": "capped"})

    outcomes = by_label(sweep(plan_of(backend, batch_sizes=(4,)), backend))

    assert outcomes["eagle3 K=3"].status is Status.CAPPED
    assert outcomes["eagle3 K=3"].reason == "decoded at most 2 sequences together, 4 requested"
    assert outcomes["off"].status is Status.OK


def test_sweep_everything_refused_still_finishes_with_valid_json(plan_of, sweep):
    """Zero successes give failed points with nulls, never NaN and never a division by zero."""
    backend = SimulatedBackend(failing=dict.fromkeys(("off", "eagle3 K=3", "ngram K=2"), "requests"))

    store = sweep(plan_of(backend), backend)

    rows = [json.loads(line) for line in (store.path / "points.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["failed"] * 3
    assert [row["reached_batch"] for row in rows] == [None] * 3
    assert "NaN" not in (store.path / "points.jsonl").read_text()


def test_sweep_failed_arm_keeps_its_traceback_beside_the_run(plan_of, sweep):
    """The reason is one line; the whole traceback is in the run directory."""
    backend = SimulatedBackend(failing={"eagle3 K=3": "engine"})

    store = sweep(plan_of(backend), backend)

    point = by_label(store)["eagle3 K=3"].point
    assert "EngineFailure" in (store.path / "failures" / f"{point.point_id}.txt").read_text()


def test_sweep_engine_that_does_not_start_fails_every_point_once(plan_of, sweep):
    """A start that fails is not repeated for every arm."""

    class Dead(SimulatedBackend):
        starts = 0

        def open(self, launch):
            Dead.starts += 1
            raise RunError("no device")

    backend = Dead()

    outcomes = by_label(sweep(plan_of(backend), backend))

    assert {outcome.status for outcome in outcomes.values()} == {Status.FAILED}
    assert "no device" in outcomes["off"].reason
    assert Dead.starts == 1


def test_sweep_flags_that_cannot_start_an_engine_end_it(plan_of, sweep):
    """A usage error on the way to the first start is the user's to fix, not a row of failed points."""

    class Misused(SimulatedBackend):
        def open(self, launch):
            raise UsageError("--model nowhere does not exist")

    backend = Misused()

    with pytest.raises(UsageError, match="nowhere"):
        sweep(plan_of(backend), backend)


def test_sweep_disk_full_ends_with_a_clear_error_and_stays_resumable(plan_of, tmp_path, monkeypatch):
    """No space left is named with the remedy; after space is freed the run completes."""
    backend = SimulatedBackend()
    plan = plan_of(backend)
    store = start_run(tmp_path / "run", plan, backend)
    real = os.fsync
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="no space left") as caught:
        run_sweep(plan, backend, store)
    monkeypatch.setattr(os, "fsync", real)
    run_sweep(plan, backend, store)

    assert "--resume" in caught.value.hint
    assert [outcome.status for outcome in store.outcomes().values()] == [Status.OK] * 3


def test_sweep_engine_is_warmed_again_after_a_restart(plan_of, sweep):
    """An arm that kills the engine leaves a cold one: the others run their calibration block again."""
    ran = []

    class Watched(SimulatedBackend):
        def open(self, launch):
            session = super().open(launch)

            class Door:
                def __enter__(self):
                    inner = session.__enter__()

                    class Tap:
                        def run(self, point, requests):
                            ran.append((point.config.label, requests[0].sampling.ignore_eos))
                            return inner.run(point, requests)

                    return Tap()

                def __exit__(self, *details):
                    return session.__exit__(*details)

            return Door()

    backend = Watched(failing={"eagle3 K=3": "engine"})

    sweep(plan_of(backend), backend)

    assert ran.count(("off", True)) == 2
    assert ran.count(("ngram K=2", True)) == 1
    assert ran.count(("eagle3 K=3", True)) == 1


def test_sweep_context_that_cannot_be_filled_ends_before_any_launch(plan_of, sweep):
    """A workload that is too short for the last cell is found before the first one runs."""

    class Short(SimulatedBackend):
        starts = 0

        def open(self, launch):
            Short.starts += 1
            return super().open(launch)

        def encode(self, prompt, context_text, context_tokens):
            if context_tokens > 100:
                raise WorkloadError(f"--context-tokens {context_tokens} needs more text")
            return super().encode(prompt, context_text, context_tokens)

    backend = Short()

    with pytest.raises(WorkloadError, match="500"):
        sweep(plan_of(backend, context_tokens=(0, 500), context_text="prose"), backend)
    assert Short.starts == 0


def test_sweep_cell_that_cannot_be_encoded_is_infeasible_and_the_others_go_on(plan_of, sweep):
    """A context beyond the model is a reason for the points of that cell only."""

    class Small(SimulatedBackend):
        def encode(self, prompt, context_text, context_tokens):
            if context_tokens > 100:
                raise InfeasibleConfig(f"context {context_tokens} does not fit")
            return super().encode(prompt, context_text, context_tokens)

    backend = Small()
    plan = plan_of(backend, context_tokens=(500, 0), context_text="prose")

    outcomes = sweep(plan, backend).outcomes()

    assert [outcomes[point.point_id].status for point in plan.points] == [
        *[Status.INFEASIBLE] * 3,
        *[Status.OK] * 3,
    ]


class RealCpu(SimulatedBackend):
    """Says that it measures on this machine's CPU, with more threads than there are cores."""

    def capabilities(self):
        return replace(super().capabilities(), is_simulated=False)

    def fingerprint(self):
        return replace(super().fingerprint(), device="cpu", threads=1024)


def test_sweep_on_a_busy_machine_says_so_at_once_and_in_the_run(plan_of, recorder, tmp_path):
    """Others' work is told before the first point and again for the whole run; both stay with the run."""
    backend, progress = RealCpu(), recorder()
    plan = plan_of(backend, (OFF, NGRAM))
    store = start_run(tmp_path / "run", plan, backend)
    readings = iter([CpuClock(wall_s=0, busy_s=0, own_s=0), CpuClock(wall_s=10, busy_s=17, own_s=12)])

    run_sweep(plan, backend, store, progress, watch=lambda: 1.0, read_clock=lambda: next(readings))

    early, late = progress.notes
    assert early.startswith("other processes and virtual machines keep 1.0 of")
    assert "busy before measuring" in early
    assert late.startswith("other processes and virtual machines keep 0.5 of")
    assert RunStore.open(store.path).manifest["cautions"][-2:] == [early, late]


def test_sweep_on_a_gpu_does_not_mind_a_busy_host(plan_of, recorder, tmp_path):
    """The check is about CPU decoding."""

    class Gpu(RealCpu):
        def fingerprint(self):
            return replace(super().fingerprint(), device="some GPU")

    backend, progress = Gpu(), recorder()
    plan = plan_of(backend, (OFF, NGRAM))
    store = start_run(tmp_path / "run", plan, backend)

    run_sweep(plan, backend, store, progress, watch=lambda: 1.0, read_clock=lambda: None)

    assert progress.notes == []
