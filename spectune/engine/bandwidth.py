"""Read bandwidth of the memory that weights live in: the floor of every decode round."""

from __future__ import annotations

import time

import torch

_BUFFER_BYTES = 512 * 1024 * 1024
_REPEATS = 5


def read_bandwidth_bytes_per_s(device: torch.device) -> float:
    """Best of five sums over a buffer far larger than any cache, with torch's own threads."""
    buffer = torch.ones(_BUFFER_BYTES // 4, dtype=torch.float32, device=device)
    best_s = float("inf")
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        buffer.sum().item()  # item() waits for the device
        best_s = min(best_s, time.perf_counter() - start_s)
    return _BUFFER_BYTES / best_s
