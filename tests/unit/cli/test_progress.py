"""Progress: time left from the pace so far, plain lines where no terminal is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from spectune.cli.progress import LiveProgress, PlainProgress, Tally, sweep_progress
from spectune.records import Cell, Point, PointOutcome, Sampling, SpecConfig, Status


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def a_point(repeat: int = 0) -> Point:
    """Some point; points of other repeats are other points."""
    return Point(
        config=SpecConfig.chain("eagle3", 3),
        cell=Cell(batch_size=4, context_tokens=0, temperature=0.0),
        workload_hash="w",
        sampling=Sampling(),
        repeat=repeat,
    )


def test_tally_nothing_done_leaves_the_estimate() -> None:
    """Before the first block the time left is the estimate of the plan."""
    tally = Tally(100.0, Clock())
    tally.start(total=4, done=0)

    assert 100.0 == tally.time_left_s


def test_tally_time_left_follows_the_pace() -> None:
    """One of four points and half of the next took 30 s, so the other five halves take 50 s."""
    clock = Clock()
    tally = Tally(1000.0, clock)
    tally.start(total=4, done=0)

    tally.begin(a_point(0), 2)
    tally.finish(PointOutcome(point=a_point(0), status=Status.OK))
    tally.begin(a_point(1), 2)
    tally.block(a_point(1), 0)
    clock.now_s = 30.0

    assert pytest.approx(50.0) == tally.time_left_s


def test_tally_resumed_points_do_not_count_as_pace() -> None:
    """Two of four points were done before, one took 10 s here, so the last takes 10 s."""
    clock = Clock()
    tally = Tally(1000.0, clock)
    tally.start(total=4, done=2)

    tally.finish(PointOutcome(point=a_point(0), status=Status.OK))
    clock.now_s = 10.0

    assert pytest.approx(10.0) == tally.time_left_s


def test_plain_progress_says_each_outcome_and_each_new_best(capsys: pytest.CaptureFixture[str]) -> None:
    """Plain lines carry the counts, the reason of a failure and the best so far, on stderr."""
    progress = PlainProgress(Tally(60.0, Clock()))

    progress.started(2, 0)
    progress.point_started(a_point(), 4)
    progress.block_done(a_point(), 0)
    progress.best("eagle3 K=3 @ batch 4", 1.25)
    progress.best("eagle3 K=3 @ batch 4", 1.25)
    progress.point_done(PointOutcome(point=a_point(), status=Status.OOM, reason="no memory"))
    progress.finished()

    out, err = capsys.readouterr()
    assert "" == out
    assert [
        "2 points to do",
        "best so far: eagle3 K=3 @ batch 4 1.25x",
        "[1/2] eagle3 K=3 @ batch 4, context 0, T=0: oom: no memory (about 0 s left)",
        "1 points done",
    ] == err.splitlines()


def test_plain_progress_speaks_now_and_then_between_points(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks are silent for 15 s, then one line tells the share done, the time left and what runs."""
    clock = Clock()
    progress = PlainProgress(Tally(90.0, clock), clock)

    progress.started(1, 0)
    progress.point_started(a_point(), 4)
    for index, now_s in enumerate((10.0, 20.0, 30.0)):
        clock.now_s = now_s
        progress.block_done(a_point(), index)

    assert capsys.readouterr().err.splitlines() == [
        "1 points to do",
        "50% done, about 20 s left: eagle3 K=3 @ batch 4, context 0, T=0, block 2 of 4",
    ]


def test_live_progress_table_shows_count_current_and_best() -> None:
    """The live table shows done of total, time left, the current point and the best so far."""
    console = Console(file=io.StringIO(), width=100)
    progress = LiveProgress(Tally(90.0, Clock()), console)

    progress.started(3, 0)
    progress.point_started(a_point(), 4)
    progress.block_done(a_point(), 0)
    progress.best("eagle3 K=3 @ batch 4", 1.25)
    console.print(progress.table())

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0 of 3" in text
    assert "eagle3 K=3 @ batch 4, context 0, T=0, block 1 of 4" in text
    assert "eagle3 K=3 @ batch 4 1.25x" in text


def test_sweep_progress_without_a_terminal_is_plain() -> None:
    """Where stderr is no terminal, lines are printed instead of a live table."""
    with sweep_progress(1.0) as progress:
        assert isinstance(progress, PlainProgress)
