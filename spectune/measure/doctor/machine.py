"""The machine under the engine: cores, instruction sets, memory, read bandwidth, GPUs, clocks, engines.

`collect` looks, the checks judge. Nothing is changed and nothing but a short read of memory is run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spectune import provenance
from spectune.measure.doctor.findings import Finding, error, fine, note, warning

GIB = 1 << 30
_BUFFER_BYTES = 256 << 20
_REPEATS = 5
_GPU_FIELDS = "name,memory.total,memory.used,clocks.sm,clocks.max.sm,driver_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device as its driver tells it; bytes and MHz."""

    name: str
    memory_bytes: int
    used_bytes: int
    clock_mhz: float
    max_clock_mhz: float
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What was seen; None where the system does not tell."""

    cores: int
    cpu_model: str | None
    architecture: str
    cpu_flags: tuple[str, ...]
    memory_bytes: int | None
    available_bytes: int | None
    load_average: float | None
    governor: str | None
    read_bandwidth_bytes_per_s: float | None
    gpus: tuple[Gpu, ...] = ()


def collect() -> MachineFacts:
    """Look at this machine; takes about a second."""
    machine: dict[str, Any] = provenance.collect(())["machine"]
    load = machine.get("load_average")
    return MachineFacts(
        cores=machine["cores"],
        cpu_model=machine.get("cpu_model"),
        architecture=machine["architecture"],
        cpu_flags=tuple(machine.get("cpu_flags") or ()),
        memory_bytes=machine.get("memory_bytes"),
        available_bytes=_available_bytes(),
        load_average=load[0] if load else None,
        governor=_read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        read_bandwidth_bytes_per_s=read_bandwidth_bytes_per_s(),
        gpus=tuple(gpus()),
    )


def read_bandwidth_bytes_per_s() -> float:
    """Best of five sums over 256 MiB with one thread: a lower bound of what the cores read together."""
    buffer = np.ones(_BUFFER_BYTES // 8)
    best_s = float("inf")
    for _ in range(_REPEATS):
        start_s = time.perf_counter()
        buffer.sum()
        best_s = min(best_s, time.perf_counter() - start_s)
    return _BUFFER_BYTES / best_s


def gpus(smi: str | None = None) -> Iterator[Gpu]:
    """NVIDIA devices; none where there is no driver."""
    tool = smi or shutil.which("nvidia-smi")
    if tool is None:
        return
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return
    yield from parse_gpus(done.stdout)


def parse_gpus(text: str) -> Iterator[Gpu]:
    """Lines of nvidia-smi's CSV; MiB become bytes, a clock that is not told becomes 0."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_GPU_FIELDS.split(",")):
            continue
        numbers = [float(cell) if cell.replace(".", "", 1).isdigit() else 0.0 for cell in cells[1:5]]
        yield Gpu(
            name=cells[0],
            memory_bytes=int(numbers[0]) << 20,
            used_bytes=int(numbers[1]) << 20,
            clock_mhz=numbers[2],
            max_clock_mhz=numbers[3],
            driver=cells[5],
        )


def check_machine(facts: MachineFacts, *, weight_bytes: int | None = None) -> Iterator[Finding]:
    """Findings about the machine; `weight_bytes` is the size of target and head on disk."""
    cpu = facts.cpu_model or facts.architecture
    yield note("cores", f"{facts.cores} usable cores, {cpu}")
    yield from _check_isa(facts)
    yield from _check_memory(facts, weight_bytes)
    if facts.read_bandwidth_bytes_per_s:
        yield note(
            "bandwidth", f"one thread reads {facts.read_bandwidth_bytes_per_s / 1e9:.1f} GB/s from memory"
        )
    for gpu in facts.gpus:
        used = f", {gpu.used_bytes / GIB:.1f} GiB of it in use" if gpu.used_bytes > GIB else ""
        yield note(
            "gpu",
            f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB{used}, {gpu.clock_mhz:.0f} of {gpu.max_clock_mhz:.0f} MHz, "
            f"driver {gpu.driver}",
        )
    if not facts.gpus:
        yield note("gpu", "no NVIDIA device: engines run on the CPU")
    if facts.governor == "powersave":
        yield warning(
            "clocks",
            "the CPU governor is powersave",
            signature="times that change with the load and from run to run",
            fix="cpupower frequency-set -g performance",
        )
    if facts.load_average is not None and facts.load_average > 0.5 * facts.cores:
        yield warning(
            "load",
            f"{facts.load_average:.1f} threads were runnable on {facts.cores} cores in the last minute",
            signature="longer and unsteady times, wide intervals",
            fix="measure on a quiet machine",
        )


def _check_isa(facts: MachineFacts) -> Iterator[Finding]:
    flags = set(facts.cpu_flags)
    shown = ", ".join(facts.cpu_flags) or "none of those that matter"
    is_x86 = facts.architecture.lower() in ("x86_64", "amd64")
    if is_x86 and not flags & {"avx512_bf16", "amx_bf16"} and not facts.gpus:
        yield warning(
            "isa",
            f"instruction sets: {shown}; none multiplies bf16",
            signature="bf16 is converted in every matrix product: several times slower than fp32 kernels could be "
            "in torch's operators and in vLLM; spectune's own kernels widen it in registers where there is AVX512",
            fix="--dtype float32 where it is slow, or a CPU with AVX512_BF16 or AMX",
        )
    else:
        yield fine("isa", f"instruction sets: {shown}")


def _check_memory(facts: MachineFacts, weight_bytes: int | None) -> Iterator[Finding]:
    """The larger of main memory and one device against the weights."""
    free = max([facts.available_bytes or 0, *(gpu.memory_bytes - gpu.used_bytes for gpu in facts.gpus)])
    total = "" if facts.memory_bytes is None else f" of {facts.memory_bytes / GIB:.1f}"
    if free == 0:
        return
    if weight_bytes is not None and weight_bytes > free:
        yield error(
            "memory",
            f"the weights take {weight_bytes / GIB:.1f} GiB, {free / GIB:.1f} GiB are free",
            signature="killed or out of memory while loading",
            fix="free memory, use more devices, or a smaller or quantised target",
        )
        return
    weights = "" if weight_bytes is None else f", the weights take {weight_bytes / GIB:.2f} GiB"
    yield fine(
        "memory", f"{(facts.available_bytes or free) / GIB:.1f}{total} GiB of main memory free{weights}"
    )


def check_engines(engines: Sequence[tuple[str, str, str]]) -> Iterator[Finding]:
    """Serving engines that were found, as (engine, version, interpreter)."""
    for engine, version, python in engines:
        yield note("engines", f"{engine} {version} in {python}")
    if not engines:
        yield note(
            "engines",
            "no serving engine was found; the reference engine is built in",
            fix="spectune engines install vllm, or --engine-python PATH where one is",
        )


def _available_bytes() -> int | None:
    text = _read(Path("/proc/meminfo"))
    line = next((line for line in (text or "").splitlines() if line.startswith("MemAvailable:")), None)
    if line is not None:
        return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
