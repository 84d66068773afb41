"""The threads that run one kernel together: the caller and its workers, kept between calls."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any

import numpy as np

from spectune.engine.cpu.scalar import wait_while

_WORD = 8  # int64 of a cache line


_SPINS = 300_000  # some hundred microseconds: the calls of a round follow each other within that


class Team:
    """Runs `kernel(thread, num_threads, kind, sync, ...)` on all of its threads at once.

    Each kernel ends in a barrier, so the caller returns when all work is done. Between calls a worker
    spins for a moment before it sleeps: waking it costs as much as a small pass.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        # Two counters in turn: a worker may still be leaving the last barrier of the call before.
        self._counters = np.zeros((2, _WORD), dtype=np.int64)
        self._calls = np.zeros(_WORD, dtype=np.int64)
        self._job: tuple[Any, ...] = ()
        self._turn = 0
        self._asleep = [False] * num_threads
        self._bells: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(num_threads)]
        for thread in range(1, num_threads):
            threading.Thread(
                target=self._serve, args=(thread,), daemon=True, name=f"spectune-{thread}"
            ).start()

    def run(self, kernel: Any, kind: np.ndarray[Any, Any], *args: Any) -> None:
        """Run the kernel once, every thread with the same arguments."""
        self._turn ^= 1
        sync = self._counters[self._turn]
        sync[0] = 0
        self._job = (kernel, kind, sync, args)
        self._calls[0] += 1
        for thread in range(1, self.num_threads):
            if self._asleep[thread]:
                self._asleep[thread] = False
                self._bells[thread].put(None)
        kernel(0, self.num_threads, kind, sync, *args)

    def _serve(self, thread: int) -> None:
        seen = 0
        while True:
            wait_while(self._calls.ctypes.data, seen, _SPINS)
            if self._calls[0] == seen:  # under the interpreter's lock: no call can come between
                self._asleep[thread] = True
                self._bells[thread].get()
            seen += 1
            kernel, kind, sync, args = self._job
            kernel(thread, self.num_threads, kind, sync, *args)
