"""Read bandwidth of the memory that weights live in: the floor of every decode round."""

from __future__ import annotations

import time

import torch

_LEAST_BYTES = 64 * 1024 * 1024
_REPEATS = 15
_QUEUED_BYTES = 16 << 30


def read_bandwidth_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Best of fifteen sums over a buffer of the size of the weights, with torch's own threads.

    The same size, so that a cache which holds the weights holds the buffer too. On a GPU a sum of
    hundreds of megabytes is over before the host knows it: there each of the fifteen is a queue of sums
    with one wait at its end.
    """
    num_values = max(num_bytes, _LEAST_BYTES) // 4
    buffer = torch.ones(num_values, dtype=torch.float32, device=device)
    count = queue_length(device.type, num_values * 4)
    best_s = float("inf")
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        for _ in range(count):
            total = buffer.sum()
        total.item()  # waits for the device
        best_s = min(best_s, (time.perf_counter() - start_s) / count)
    return num_values * 4 / best_s


def queue_length(device_type: str, num_bytes: int) -> int:
    """Sums in a row between two waits: one on a CPU, enough to dwarf the wait on a device."""
    return 1 if device_type == "cpu" else max(1, -(-_QUEUED_BYTES // num_bytes))
