"""How much of this virtual machine's CPU the hypervisor gave to others: rounds that it cut into are not the
engine's time.

Linux counts it as steal (proc(5), /proc/stat), for all cores together in ticks of mostly 10 ms.
"""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")
_FIELD = 8  # of the line "cpu user nice system idle iowait irq softirq steal"


class StolenTime:
    """CPU seconds stolen since the machine started, when called.

    Always 0.0 on systems that do not tell and on machines that were never stolen from: where hundreds of
    cores are counted, reading costs a part of a round.
    """

    def __init__(self, stat: Path = STAT) -> None:
        self._file: int | None = None
        try:
            self._file = os.open(stat, os.O_RDONLY)
            self._ticks_per_s = os.sysconf("SC_CLK_TCK")
            is_shared = self() > 0.0
        except (OSError, AttributeError, ValueError, IndexError):
            is_shared = False
        if not is_shared:
            self.close()

    def __call__(self) -> float:
        if self._file is None:
            return 0.0
        return int(os.pread(self._file, 256, 0).split(maxsplit=_FIELD + 1)[_FIELD]) / self._ticks_per_s

    def close(self) -> None:
        """Give the file back; 0.0 from now on."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __del__(self) -> None:
        self.close()


def nothing_stolen() -> float:
    """Of clocks that are not the machine's."""
    return 0.0
