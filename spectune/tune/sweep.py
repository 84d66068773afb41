"""The sweep: every point of a plan is run, saved and judged; what is on disk already is kept.

It can be interrupted at any moment: a block is on disk whole or not at all, and a point without an
outcome goes on where its blocks end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spectune.errors import InfeasibleConfig, RunError, StoreError
from spectune.measure.cell import Best, CellRun, CellWork, fail_point
from spectune.measure.contention import (
    CpuClock,
    contention_caution,
    cores_of_others,
    read_cpu_clock,
    watch_others,
)
from spectune.measure.door import Door, explain_failure
from spectune.measure.progress import SilentProgress, SweepProgress
from spectune.measure.requests import Block, RequestBuilder
from spectune.provenance import usable_cores
from spectune.records import Backend, Cell, Launch, Point, SpecConfig, Status
from spectune.store import RunStore
from spectune.tune.conversations import with_conversations
from spectune.tune.manifest import build_manifest, check_same_run, merged_fingerprint
from spectune.tune.plan import SweepPlan

# Failures of encoding that leave the other cells alone.
_OF_ONE_CELL = (InfeasibleConfig, RunError, MemoryError)
_WITH_BLOCKS = frozenset({Status.OK, Status.SUSPECT, Status.CAPPED})


def start_run(
    path: Path | str,
    plan: SweepPlan,
    backend: Backend,
    *,
    argv: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
) -> RunStore:
    """A new run directory with its manifest. `config` holds the resolved flags."""
    return RunStore.create(path, build_manifest(plan, backend, argv=argv, config=config or {}))


def resume_run(path: Path | str, plan: SweepPlan, backend: Backend) -> RunStore:
    """An existing run directory, if `plan` on `backend` is what it was started with."""
    store = RunStore.open(path)
    check_same_run(store, plan, backend)
    return store


def run_sweep(
    plan: SweepPlan,
    backend: Backend,
    store: RunStore,
    progress: SweepProgress | None = None,
    *,
    retry_failed: bool = False,
    watch: Callable[[], float | None] = watch_others,
    read_clock: Callable[[], CpuClock | None] = read_cpu_clock,
) -> None:
    """Run what is missing or broken of `plan`; failures of points become outcomes in `store`.

    Points that failed before keep their outcome unless `retry_failed`. Raises what makes all points
    useless: a full disk (StoreError) or an engine that the user's flags cannot start (UsageError).

    Args:
        watch, read_clock: what tells how busy other processes keep the machine.
    """
    check_same_run(store, plan, backend)
    progress = progress or SilentProgress()
    pending = _pending(plan, store, progress, retry_failed=retry_failed)
    progress.started(len(plan.points), len(plan.points) - len(pending))
    if pending:
        plan = with_conversations(plan, backend, store, progress)
    requests = RequestBuilder(backend, plan.context_text)
    _encode_all(plan, pending, requests)
    best = Best()
    is_real = bool(pending) and not backend.capabilities().is_simulated
    if is_real and not plan.has_boots:
        doubt_busy_machine(watch(), "before measuring", store, progress)
    started = read_clock()
    for launch in backend.plan(pending) if pending else []:
        if is_real and plan.has_boots:  # a server's own work cannot be told from others' while it runs
            doubt_busy_machine(watch(), "before a start", store, progress)
        _run_launch(plan, backend, launch, store, progress, requests, best)
    if is_real and not plan.has_boots:
        doubt_busy_machine(cores_of_others(started, read_clock()), "while measuring", store, progress)
    progress.finished()


def doubt_busy_machine(busy_cores: float | None, when: str, store: RunStore, progress: SweepProgress) -> None:
    """Tell at once and keep in the manifest that others disturb a measurement on the CPU."""
    mark = store.manifest["fingerprint"]
    if mark["device"] != "cpu":
        return
    caution = contention_caution(busy_cores, threads=mark["threads"], cores=usable_cores(), when=when)
    if caution is None:
        return
    known = store.manifest.get("cautions", [])
    if any(text.startswith("other processes") and f" busy {when}," in text for text in known):
        return  # said once
    progress.note(caution.text)
    store.update_manifest({"cautions": [*known, caution.text]})


def _pending(plan: SweepPlan, store: RunStore, progress: SweepProgress, *, retry_failed: bool) -> list[Point]:
    """Points without a trustworthy outcome; damaged files are set aside on the way."""
    outcomes = store.outcomes()
    for note in store.notes:
        progress.note(note)
    store.notes.clear()
    pending = []
    for point in plan.points:
        outcome = outcomes.get(point.point_id)
        count = _stored_blocks(point, store, progress)
        if outcome is None or count is None:
            pending.append(point)
        elif outcome.status in _WITH_BLOCKS and count < plan.num_blocks(point.cell):
            progress.note(f"{point.label} lacks stored blocks: they are run again")
            pending.append(point)
        elif retry_failed and outcome.status is not Status.OK:
            _set_aside(point, store, progress, f"{point.label} was {outcome.status}")
            pending.append(point)
    return pending


def _stored_blocks(point: Point, store: RunStore, progress: SweepProgress) -> int | None:
    """Number of blocks on disk; None for a damaged file, which is set aside."""
    try:
        return len(store.blocks(point.point_id))
    except StoreError as error:
        _set_aside(point, store, progress, error.message)
        return None


def _set_aside(point: Point, store: RunStore, progress: SweepProgress, why: str) -> None:
    aside = store.set_aside(point.point_id)
    if aside is not None:
        progress.note(f"{why}: set aside as {aside.name}, the point is run again")


def _encode_all(plan: SweepPlan, points: Sequence[Point], requests: RequestBuilder) -> None:
    """Meet every prompt and context first: a workload that does not fit ends the sweep in seconds."""
    for cell, of_cell in _by_cell(points).items():
        with contextlib.suppress(*_OF_ONE_CELL):
            _cell_work(plan, cell, of_cell, requests)


def _run_launch(
    plan: SweepPlan,
    backend: Backend,
    launch: Launch,
    store: RunStore,
    progress: SweepProgress,
    requests: RequestBuilder,
    best: Best,
) -> None:
    def opened() -> None:
        store.update_manifest({"fingerprint": merged_fingerprint(store, backend)})

    with Door(backend, launch, opened=opened) as door:
        for cell, points in _by_cell(launch.points).items():
            try:
                work = _cell_work(plan, cell, points, requests)
            except _OF_ONE_CELL as error:
                failed = explain_failure(error)
                for point in points:
                    outcome = fail_point(store, point, failed)
                    store.append_outcome(outcome)
                    progress.point_done(outcome)
                continue
            CellRun(work=work, door=door, store=store, progress=progress, best=best).run()


def _by_cell(points: Sequence[Point]) -> dict[Cell, list[Point]]:
    by_cell: dict[Cell, list[Point]] = {}
    for point in points:
        by_cell.setdefault(point.cell, []).append(point)
    return by_cell


def _cell_work(plan: SweepPlan, cell: Cell, points: Sequence[Point], requests: RequestBuilder) -> CellWork:
    repeats = sorted({point.repeat for point in points})
    prompts = plan.workload.prompts
    count = plan.num_blocks(cell)

    def blocks(repeat: int) -> tuple[Block, ...]:
        if plan.has_boots:  # a start is repeated on the same prompts
            return requests.blocks(prompts, cell, plan.sampling, count=count, size=1)
        return requests.blocks(prompts, cell, plan.sampling, count=count, repeat=repeat)

    return CellWork(
        cell=cell,
        points=tuple(points),
        off={repeat: plan.point(SpecConfig.off(), cell, repeat) for repeat in repeats},
        blocks={repeat: blocks(repeat) for repeat in repeats},
        calibration=requests.calibration(plan.workload.calibration or prompts, cell, plan.sampling),
        is_load=plan.has_boots,
    )
