"""How far a sweep is: a live table on a terminal, plain lines elsewhere. Always on stderr."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spectune.cli.console import duration, say
from spectune.records import Clock, Point, PointOutcome, Status

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from spectune.measure.progress import SweepProgress


@contextmanager
def sweep_progress(work_s: float) -> Iterator[SweepProgress]:
    """Live if stderr is a terminal and CI is not set; `work_s` is the estimated work of the plan."""
    from rich.console import Console

    console = Console(stderr=True)
    tally = Tally(work_s)
    if not console.is_terminal or os.environ.get("CI"):
        yield PlainProgress(tally)
        return
    from rich.live import Live

    progress = LiveProgress(tally, console)
    with Live(get_renderable=progress.table, console=console, refresh_per_second=4, transient=True):
        yield progress


class Tally:
    """What is done, what runs, what is best; time left from the share of estimated work done here."""

    def __init__(self, work_s: float, clock: Clock = time.monotonic) -> None:
        self.total = 0
        self.done = 0
        self.failed = 0
        self.current = "starting"
        self.best_text = "nothing measured yet"
        self._work_s = work_s
        self._clock = clock
        self._start_s = clock()
        self._resumed_fraction = 0.0
        self._blocks_by_point: dict[str, tuple[int, int]] = {}

    def start(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        self._start_s = self._clock()
        self._resumed_fraction = done / total if total else 0.0

    def begin(self, point: Point, num_blocks: int) -> None:
        done = self._blocks_by_point.get(point.point_id, (0, 0))[0]
        self._blocks_by_point[point.point_id] = (done, num_blocks)
        self.current = point.label

    def block(self, point: Point, index: int) -> None:
        done, total = self._blocks_by_point.get(point.point_id, (0, index + 1))
        self._blocks_by_point[point.point_id] = (done + 1, max(total, done + 1))
        self.current = f"{point.label}, block {index + 1} of {max(total, done + 1)}"

    def finish(self, outcome: PointOutcome) -> None:
        self.done += 1
        self.failed += outcome.status not in (Status.OK, Status.CAPPED, Status.INCONCLUSIVE)
        self._blocks_by_point[outcome.point.point_id] = (1, 1)

    @property
    def fraction(self) -> float:
        """Share of the points done, a started point counted by its blocks."""
        if not self.total:
            return 0.0
        begun = sum(done / total for done, total in self._blocks_by_point.values() if total)
        return min(1.0, self._resumed_fraction + begun / self.total)

    @property
    def time_left_s(self) -> float:
        """From the pace so far; from the estimate until a twentieth is done (calibration comes first)."""
        here = self.fraction - self._resumed_fraction
        if here < 0.05:
            return self._work_s * (1 - self.fraction)
        return (self._clock() - self._start_s) * (1 - self.fraction) / here


HEARTBEAT_S = 15.0


class PlainProgress:
    """One line a point, one for a new best, and one now and then in between: arms of a cell take turns,
    so that their points end together."""

    def __init__(self, tally: Tally, clock: Clock = time.monotonic) -> None:
        self._tally = tally
        self._clock = clock
        self._said_s = clock()

    def started(self, total: int, done: int) -> None:
        self._tally.start(total, done)
        self._say(f"{total} points to do" if not done else f"{total} points, {done} of them done before")

    def point_started(self, point: Point, num_blocks: int) -> None:
        self._tally.begin(point, num_blocks)

    def block_done(self, point: Point, index: int) -> None:
        self._tally.block(point, index)
        if self._clock() - self._said_s >= HEARTBEAT_S:
            left = duration(self._tally.time_left_s)
            self._say(f"{self._tally.fraction:.0%} done, about {left} left: {self._tally.current}")

    def point_done(self, outcome: PointOutcome) -> None:
        self._tally.finish(outcome)
        reason = f": {outcome.reason}" if outcome.reason else ""
        self._say(
            f"[{self._tally.done}/{self._tally.total}] {outcome.point.label}: {outcome.status.value}{reason}"
            f" (about {duration(self._tally.time_left_s)} left)"
        )

    def best(self, label: str, speedup: float) -> None:
        text = f"{label} {speedup:.2f}x"
        if text != self._tally.best_text:
            self._tally.best_text = text
            self._say(f"best so far: {text}")

    def note(self, text: str) -> None:
        self._say(f"note: {text}")

    def finished(self) -> None:
        self._say(f"{self._tally.done} points done")

    def _say(self, text: str) -> None:
        self._said_s = self._clock()
        say(text)


class LiveProgress:
    """A table that is drawn four times a second."""

    def __init__(self, tally: Tally, console: Console) -> None:
        self._tally = tally
        self._console = console

    def started(self, total: int, done: int) -> None:
        self._tally.start(total, done)

    def point_started(self, point: Point, num_blocks: int) -> None:
        self._tally.begin(point, num_blocks)

    def block_done(self, point: Point, index: int) -> None:
        self._tally.block(point, index)

    def point_done(self, outcome: PointOutcome) -> None:
        self._tally.finish(outcome)
        if outcome.reason:
            self._say(f"{outcome.point.label}: {outcome.status.value}: {outcome.reason}")

    def best(self, label: str, speedup: float) -> None:
        self._tally.best_text = f"{label} {speedup:.2f}x"

    def note(self, text: str) -> None:
        self._say(f"note: {text}")

    def finished(self) -> None:
        self._tally.current = "all points done"

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def table(self) -> Table:
        """What the terminal shows."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        tally = self._tally
        failed = f", {tally.failed} failed" if tally.failed else ""
        grid = Table.grid(padding=(0, 2))
        grid.add_row("points", Text(f"{tally.done} of {tally.total}{failed}"))
        grid.add_row("", ProgressBar(total=1.0, completed=tally.fraction, width=40))
        grid.add_row("time left", Text(f"about {duration(tally.time_left_s)}" if tally.total else "-"))
        grid.add_row("current", Text(tally.current))
        grid.add_row("best so far", Text(tally.best_text))
        return grid
