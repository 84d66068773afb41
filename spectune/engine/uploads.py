"""Small host values on their way to the device, without a wait.

A tensor made on CUDA from a list is copied out of pageable memory, and the host waits for that copy and
for all work queued before it. Through pinned memory it waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def on_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A list (of lists) of numbers as a tensor on the device; the host goes on at once."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    # pinned memory is freed by torch after the copy that reads it
    return host.to(device, non_blocking=True)


def is_remote(tensor: Tensor) -> bool:
    """Whether reading a value of this tensor makes the host wait for a device."""
    return tensor.device.type != "cpu"
