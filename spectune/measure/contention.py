"""How busy the machine is with others' work: decoding on few cores waits for its slowest thread.

Reads the kernel's counters of the cores that this process may use; where there are none (another
system than Linux) nothing is known and nothing is said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from spectune.measure.cautions import Caution, Doubt
from spectune.records import Clock

STAT = Path("/proc/stat")
FREE_SHARE = 0.25
"""Part of a core that others may use before it is worth a word."""

_IDLE_FIELDS = (3, 4)  # idle, iowait
_GUEST_FIELDS = 8  # guest time is contained in user time


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuClock:
    """Seconds so far: on the wall, of all work on our cores, of our own work and that of ended children."""

    wall_s: float
    busy_s: float
    own_s: float


def read_cpu_clock(*, stat: Path = STAT, now: Clock = time.monotonic) -> CpuClock | None:
    """The counters of this moment; None where the system does not tell."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = stat.read_text(encoding="ascii").splitlines()
        ticks_per_s = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None
    busy = 0
    for line in lines:
        name, *fields = line.split()
        if name in cores:
            ticks = [int(field) for field in fields[:_GUEST_FIELDS]]
            busy += sum(ticks) - sum(ticks[i] for i in _IDLE_FIELDS)
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    return CpuClock(wall_s=now(), busy_s=busy / ticks_per_s, own_s=own_s)


def cores_of_others(before: CpuClock | None, after: CpuClock | None) -> float | None:
    """Cores that other processes kept busy between two readings, on average."""
    if before is None or after is None or after.wall_s <= before.wall_s:
        return None
    busy_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, busy_s / (after.wall_s - before.wall_s))


def watch_others(
    window_s: float = 0.5,
    *,
    read: Callable[[], CpuClock | None] = read_cpu_clock,
    sleep: Callable[[float], None] = time.sleep,
) -> float | None:
    """Cores that others keep busy right now, seen over a short window of doing nothing."""
    before = read()
    if before is None:
        return None
    sleep(window_s)
    return cores_of_others(before, read())


def contention_caution(busy_cores: float | None, *, threads: int, cores: int, when: str) -> Caution | None:
    """A doubt if others leave fewer cores than `threads` of decoding need, or None."""
    if busy_cores is None or busy_cores <= FREE_SHARE or busy_cores + threads <= cores + FREE_SHARE:
        return None
    return Caution(
        doubt=Doubt.BUSY_MACHINE,
        text=f"other processes and virtual machines keep {busy_cores:.1f} of {cores} cores busy {when}, and decoding uses "
        f"{threads} thread{'' if threads == 1 else 's'}: times are longer and less steady than on a quiet machine, up to tens of times",
    )
