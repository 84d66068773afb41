"""What was measured on: the device by name and data sheet, its driver, and what it really reads a second."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spectune.engine.bandwidth import read_bandwidth_bytes_per_s
from spectune.measure.doctor.machine import gpus
from spectune.provenance import collect
from spectune.store.gpu_run import Device

ROOT = Path(__file__).parents[2]
PROBE_BYTES = 4 << 30
# peak memory bandwidth of the makers' data sheets, by a part of the device's name; the longest match wins
SHEET_BYTES_PER_S = {
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H100 80GB HBM3": 3.35e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "A100-SXM4-80GB": 2.039e12,
    "A100-SXM4-40GB": 1.555e12,
    "A100 80GB PCIe": 1.935e12,
    "L40S": 0.864e12,
    "L4": 0.3e12,
    "A10": 0.6e12,
    "RTX 4090": 1.008e12,
}


def sheet_bandwidth(name: str) -> float | None:
    """Bytes/s of the data sheet; None for a device that is not listed."""
    words = name.replace("-", " ").split()
    for part in sorted(SHEET_BYTES_PER_S, key=len, reverse=True):
        wanted = part.replace("-", " ").split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return SHEET_BYTES_PER_S[part]
    return None


def describe(device: torch.device, *, probe_bytes: int = PROBE_BYTES) -> Device:
    """The device as it is; measures its read bandwidth."""
    if device.type != "cuda":
        return Device(
            name=str(collect([])["machine"]["cpu_model"] or "cpu"),
            kind="cpu",
            driver=None,
            cuda=None,
            torch=torch.__version__,
            compute_capability=None,
            memory_bytes=collect([])["machine"]["memory_bytes"],
            sheet_bandwidth_bytes_per_s=None,
            read_bandwidth_bytes_per_s=read_bandwidth_bytes_per_s(device, probe_bytes),
        )
    facts = torch.cuda.get_device_properties(device)
    major, minor = torch.cuda.get_device_capability(device)
    return Device(
        name=facts.name,
        kind="cuda",
        driver=next((gpu.driver for gpu in gpus()), None),
        cuda=torch.version.cuda,
        torch=torch.__version__,
        compute_capability=f"{major}.{minor}",
        memory_bytes=facts.total_memory,
        sheet_bandwidth_bytes_per_s=sheet_bandwidth(facts.name),
        read_bandwidth_bytes_per_s=read_bandwidth_bytes_per_s(device, probe_bytes),
    )


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """Surroundings, and a digest of the sources that ran: a copy of a checkout may have no git."""
    digest = hashlib.sha256()
    for folder in ("spectune/engine", "spectune/draft", "tests/gpu"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return {**collect(argv), "source_digest": digest.hexdigest()[:16]}
