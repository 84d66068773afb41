"""Other work on the machine is seen in the kernel's counters, and said where it disturbs decoding."""

from __future__ import annotations

import os

import pytest

from spectune.measure.contention import (
    CpuClock,
    contention_caution,
    cores_of_others,
    read_cpu_clock,
    watch_others,
)


def clock(wall_s, busy_s, own_s=0.0):
    return CpuClock(wall_s=wall_s, busy_s=busy_s, own_s=own_s)


def test_cores_of_others_leave_our_own_work_out():
    """Of 15 busy seconds in 10 our own threads took 12: others keep 0.3 cores busy."""
    assert cores_of_others(clock(100, 50, 20), clock(110, 65, 32)) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(None, clock(1, 1), id="no-first-reading"),
        pytest.param(clock(1, 1), None, id="no-second-reading"),
        pytest.param(clock(1, 1), clock(1, 1), id="no-time-between"),
    ],
)
def test_cores_of_others_without_two_readings_are_unknown(before, after):
    """What was not observed is None, not 0."""
    assert cores_of_others(before, after) is None


def test_cores_of_others_are_never_negative():
    """Counters of different resolution may say that we used more than there was."""
    assert cores_of_others(clock(0, 0, 0), clock(1, 0.98, 1.0)) == 0.0


def test_watch_others_reads_before_and_after_the_window():
    """Half a second with one busy core is one core."""
    slept = []
    readings = iter([clock(0, 0), clock(0.5, 0.5)])

    busy = watch_others(0.5, read=lambda: next(readings), sleep=slept.append)

    assert (busy, slept) == (1.0, [0.5])


def test_watch_others_on_a_system_without_counters_does_not_wait():
    """Nothing to read, nothing to wait for."""
    assert watch_others(0.5, read=lambda: None, sleep=pytest.fail) is None


def test_read_cpu_clock_sums_busy_ticks_of_our_cores(tmp_path, monkeypatch):
    """User, nice, system, interrupts and stolen time are busy, idle and waiting for disks are not,
    guests are counted in user; a core that we may not use is left out."""
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  99 99 99 99 99 99 99 99 99 99\n"
        "cpu0 100 20 30 1000 50 5 5 40 60 0\n"
        "cpu1 100 0 0 1000 0 0 0 0 0 0\n"
        "cpu2 777 0 0 0 0 0 0 0 0 0\n"
        "intr 12345\n",
        encoding="ascii",
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(os, "sysconf", {"SC_CLK_TCK": 100}.__getitem__)

    reading = read_cpu_clock(stat=stat, now=lambda: 7.0)

    assert reading is not None
    assert (reading.wall_s, reading.busy_s) == (7.0, 3.0)


def test_read_cpu_clock_without_counters_is_none(tmp_path):
    """A system without the file is no error."""
    assert read_cpu_clock(stat=tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("busy_cores", "threads", "cores", "is_doubted"),
    [
        pytest.param(1.0, 2, 2, True, id="one-of-two-cores-taken"),
        pytest.param(0.2, 2, 2, False, id="a-little-noise"),
        pytest.param(8.0, 16, 64, False, id="room-enough-for-both"),
        pytest.param(50.0, 16, 64, True, id="room-for-one-of-them"),
        pytest.param(None, 2, 2, False, id="unknown"),
    ],
)
def test_contention_is_doubted_where_cores_are_short(busy_cores, threads, cores, is_doubted):
    """Work of others matters only where it and the decoding threads do not fit together."""
    caution = contention_caution(busy_cores, threads=threads, cores=cores, when="before measuring")

    assert (caution is not None) == is_doubted


def test_contention_caution_names_cores_and_threads():
    """The sentence has the numbers behind it."""
    caution = contention_caution(1.26, threads=2, cores=2, when="while measuring")

    assert caution is not None
    assert caution.text.startswith(
        "other processes and virtual machines keep 1.3 of 2 cores busy while measuring"
    )
