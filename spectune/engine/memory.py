"""Peak memory of one block of work: the device's allocator, or this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch


def reset_peak_memory(device: torch.device) -> None:
    """Start a new high-water mark, so that a peak belongs to one block."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # Linux only; elsewhere no peak is told
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak since the last reset: of the device's allocator, or resident memory of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) * 1024
