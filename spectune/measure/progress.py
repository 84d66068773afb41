"""What a long run tells whoever watches it; the running stack never prints."""

from __future__ import annotations

from typing import Protocol

from spectune.records import Point, PointOutcome


class SweepProgress(Protocol):
    """Told as things happen. An exception from a method (KeyboardInterrupt included) ends the sweep
    and leaves the run directory resumable."""

    def started(self, total: int, done: int) -> None:
        """`total` points are planned, `done` of them are already finished on disk."""

    def point_started(self, point: Point, num_blocks: int) -> None:
        """The first block of a point (or its calibration) is about to run."""

    def block_done(self, point: Point, index: int) -> None:
        """Block `index` of the point is on disk."""

    def point_done(self, outcome: PointOutcome) -> None:
        """The outcome of a point is on disk."""

    def best(self, label: str, speedup: float) -> None:
        """The fastest candidate so far: "eagle3 K=3 @ batch 1, ..." and its plain speedup over off."""

    def note(self, text: str) -> None:
        """Something a person should know, one sentence: a damaged file set aside, a broken line."""

    def finished(self) -> None:
        """Every point has an outcome."""


class SilentProgress:
    """Tells nobody."""

    def started(self, total: int, done: int) -> None:
        return None

    def point_started(self, point: Point, num_blocks: int) -> None:
        return None

    def block_done(self, point: Point, index: int) -> None:
        return None

    def point_done(self, outcome: PointOutcome) -> None:
        return None

    def best(self, label: str, speedup: float) -> None:
        return None

    def note(self, text: str) -> None:
        return None

    def finished(self) -> None:
        return None
