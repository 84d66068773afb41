"""One cell: warm and calibrate every arm, then decode block by block, arms in turn, A B B A.

Every block is on disk before the next one starts; a failed arm leaves the cell, the others go on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spectune.errors import StoreError, UsageError
from spectune.measure.calibrate import round_times
from spectune.measure.cautions import point_cautions
from spectune.measure.divergence import find_divergence
from spectune.measure.door import Door, Failed, explain_failure, is_out_of_memory
from spectune.measure.judge import judge_point
from spectune.measure.progress import SweepProgress
from spectune.measure.requests import Block
from spectune.measure.stream import split_by_block
from spectune.metrics.throughput import request_totals, round_tpot
from spectune.records import BlockResult, Cell, Gap, Point, PointOutcome, Request, SpecConfig, Status
from spectune.store import RunStore

Blocks = dict[int, BlockResult]

LATE_TEXT = (
    "measured in a later start than the plain decoding it is compared with: the difference between "
    "the starts is not in the interval"
)


OOM_RETRIES = 1
"""Further tries of a load whose server ran out of memory, each with a smaller share of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellWork:
    """What is to be done in a cell: unfinished points, and the requests of each repeat.

    `points` are in the order of the arms within a repeat; `off` are the points of plain decoding by
    repeat, finished ones included, for comparisons.
    """

    cell: Cell
    points: tuple[Point, ...]
    off: Mapping[int, Point]
    blocks: Mapping[int, tuple[Block, ...]]
    calibration: Block
    is_load: bool = False  # a server under load: each arm is a start of its own, a block is one request


@dataclass(slots=True)
class Best:
    """The fastest candidate told so far; what is never chosen and loads that decide nothing are none."""

    speedup: float = 0.0

    def tell(self, point: Point, speedup: float, progress: SweepProgress) -> None:
        is_candidate = not (point.config.is_probe or point.cell.is_open_loop)
        if is_candidate and speedup > self.speedup:
            self.speedup = speedup
            progress.best(point.label, speedup)


@dataclass(slots=True, kw_only=True)
class CellRun:
    """The state of a cell while it runs."""

    work: CellWork
    door: Door
    store: RunStore
    progress: SweepProgress
    best: Best = field(default_factory=Best)
    _warm: dict[SpecConfig, int] = field(default_factory=dict)
    _failed: dict[SpecConfig, Failed] = field(default_factory=dict)
    _gaps: dict[tuple[str, tuple[int, ...]], Gap | None] = field(default_factory=dict)

    def cool(self) -> None:
        """Warm every arm again before its next block."""
        self._warm.clear()

    def run(self) -> None:
        """All repeats; one outcome for every point of the work."""
        for repeat in sorted({point.repeat for point in self.work.points}):
            self._run_repeat([point for point in self.work.points if point.repeat == repeat])

    def _run_repeat(self, points: Sequence[Point]) -> None:
        requests = self.work.blocks[points[0].repeat]
        stored = {point: self.store.blocks(point.point_id) for point in points}
        missing = [point for point in points if not _is_complete(stored[point], len(requests))]
        off = self.work.off[points[0].repeat]
        # arms that run now against plain decoding that was finished in an earlier start
        is_late = off not in missing and not self.work.is_load
        late = tuple(point for point in missing if not stored[point]) if is_late else ()
        for point in missing:
            self.progress.point_started(point, len(requests))
        for point in missing:
            self._attempt(point, None)
        if self.work.is_load:
            for point in missing:
                self._stream(
                    point, {i: block for i, block in enumerate(requests) if i not in stored[point]}, stored
                )
            self._conclude(points, stored, len(requests), late)
            return
        # blocks come round-robin by category: every category meets both orders
        num_categories = len({request.category for block in requests for request in block})
        for index, block in enumerate(requests):
            is_forward = (index + index // num_categories + points[0].repeat) % 2 == 0
            for point in missing if is_forward else reversed(missing):
                if index in stored[point]:
                    continue
                result = self._attempt(point, block)
                if result is not None:
                    self.store.append_block(point.point_id, index, result)
                    stored[point][index] = result
                    self.progress.block_done(point, index)
        self._conclude(points, stored, len(requests), late)

    def _stream(self, point: Point, blocks: Mapping[int, Block], stored: Mapping[Point, Blocks]) -> None:
        """All missing blocks of a point as one load; a failure leaves those that are on disk."""
        if point.config in self._failed:
            return
        asked = [request for block in blocks.values() for request in block]
        for attempt in range(1 + OOM_RETRIES):
            try:
                self._warm_up(point)
                result = self.door.stream(point, asked, self.work.calibration)
                break
            except StoreError:
                raise
            except Exception as error:
                # its next start gets a smaller share of memory, which may be enough for the same load
                if attempt < OOM_RETRIES and is_out_of_memory(error):
                    continue
                self._fail(point, error)
                return
        for index, part in split_by_block(blocks, result).items():
            self.store.append_block(point.point_id, index, part)
            stored[point][index] = part
            self.progress.block_done(point, index)

    def _fail(self, point: Point, error: Exception) -> None:
        if isinstance(error, UsageError) and self.door.generation == 0:
            raise error  # the user's flags cannot start an engine: no point can run
        self._failed[point.config] = explain_failure(error)

    def _attempt(self, point: Point, block: Block | None) -> BlockResult | None:
        """Warm the arm if the engine is cold, then run the block if there is one; None after a failure."""
        if point.config in self._failed:
            return None
        try:
            self._warm_up(point)
            return None if block is None else self.door.run(point, block)
        except StoreError:
            raise
        except Exception as error:
            self._fail(point, error)
            return None

    def _warm_up(self, point: Point) -> None:
        """The calibration block: it meets every shape first, and its later rounds give the times."""
        if self.door.is_open and self._warm.get(point.config) == self.door.generation:
            return
        result = self.door.run(point, self.work.calibration)
        self._warm[point.config] = self.door.generation
        surface = self.store.surface()
        key = (point.config.label, self.work.cell)
        times = round_times(result.rounds, self.work.cell.batch_size)
        if key not in surface and times is not None:
            self.store.write_surface({**surface, key: times})

    def _gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        key = (request.request_id, tuple(output_ids[: index + 1]))
        if key not in self._gaps:
            self._gaps[key] = self.door.gap(request, output_ids, index)
        return self._gaps[key]

    def _conclude(
        self, points: Sequence[Point], stored: Mapping[Point, Blocks], count: int, late: Collection[Point]
    ) -> None:
        requests = {
            request.request_id: request for block in self.work.blocks[points[0].repeat] for request in block
        }
        off_point = self.work.off[points[0].repeat]
        off = stored[off_point] if off_point in stored else self.store.blocks(off_point.point_id)
        cautions = self.store.cautions()
        for point in points:
            outcome = self._outcome(point, stored[point], count)
            texts: tuple[str, ...] = ()
            if outcome.status is Status.OK:
                found = find_divergence(point, stored[point], off, requests, self._gap)
                texts = tuple(caution.text for caution in point_cautions(point, stored[point], found))
                if found is not None and found.mismatch is not None:
                    outcome = replace(outcome, status=Status.SUSPECT, reason=found.mismatch)
                if point in late:
                    texts += (LATE_TEXT,)
            # Cautions first: a point with an outcome is never visited again.
            if texts != cautions.get(point.point_id, ()):
                cautions[point.point_id] = texts
                self.store.write_cautions(cautions)
            self.store.append_outcome(outcome)
            self.progress.point_done(outcome)
            speedup = _speedup(point, stored[point], off)
            if outcome.status is Status.OK and speedup is not None:
                self.best.tell(point, speedup, self.progress)

    def _outcome(self, point: Point, blocks: Blocks, count: int) -> PointOutcome:
        if _is_complete(blocks, count):
            return judge_point(point, blocks)
        failed = self._failed[point.config]
        return fail_point(self.store, point, failed, num_requests=_num_requests(blocks))


def fail_point(store: RunStore, point: Point, failed: Failed, *, num_requests: int = 0) -> PointOutcome:
    """The outcome of a point that broke off; the traceback is kept beside the run."""
    store.write_text(f"failures/{point.point_id}.txt", f"{point.label}\n\n{failed.details}")
    return PointOutcome(point=point, status=failed.status, reason=failed.reason, num_requests=num_requests)


def _is_complete(blocks: Mapping[int, BlockResult], count: int) -> bool:
    return all(index in blocks for index in range(count))


def _num_requests(blocks: Mapping[int, BlockResult]) -> int:
    return sum(len(block.requests) for block in blocks.values())


def _speedup(point: Point, blocks: Blocks, off: Blocks) -> float | None:
    """Pooled time per token of off / of the arm, for the display only."""
    if point.config.is_off:
        return None
    asked = [[request for block in arm.values() for request in block.requests] for arm in (blocks, off)]
    if not any(block.rounds for block in blocks.values()):
        served, baseline = request_totals(asked[0]), request_totals(asked[1])
        return None if served is None or baseline is None else baseline.tpot_s / served.tpot_s
    size = point.cell.batch_size
    ours = round_tpot([turn for block in blocks.values() for turn in block.rounds], size)
    plain = round_tpot([turn for block in off.values() for turn in block.rounds], size)
    return None if ours is None or plain is None else plain.round_tpot_s / ours.round_tpot_s
