"""Read bandwidth of the memory that weights live in: the floor of every decode round."""

from __future__ import annotations

import time

import torch

_LEAST_BYTES = 64 * 1024 * 1024
_REPEATS = 15


def read_bandwidth_bytes_per_s(device: torch.device, num_bytes: int) -> float:
    """Best of fifteen sums over a buffer of the size of the weights, with torch's own threads.

    The same size, so that a cache which holds the weights holds the buffer too.
    """
    num_values = max(num_bytes, _LEAST_BYTES) // 4
    buffer = torch.ones(num_values, dtype=torch.float32, device=device)
    best_s = float("inf")
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        buffer.sum().item()  # item() waits for the device
        best_s = min(best_s, time.perf_counter() - start_s)
    return num_values * 4 / best_s
