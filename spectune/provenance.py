"""Where a run came from: machine, versions, git state, argv. Reads, never guesses."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "spectune",
    "torch",
    "numpy",
    "scipy",
    "safetensors",
    "tokenizers",
    "gguf",
    "httpx",
    "vllm",
    "sglang",
)

# The instruction sets that decide which kernels a CPU engine can take.
FLAGS_OF_INTEREST = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "bf16", "asimddp", "sve")

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def collect(argv: Sequence[str], *, now: datetime | None = None) -> dict[str, Any]:
    """Everything about the surroundings of a run, as plain JSON values; unknown parts are None."""
    return {
        "date": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
        "argv": list(argv),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()}",
        "machine": _machine(),
        "packages": _versions(),
        "environment": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "git": _git_state(Path(__file__).resolve().parent.parent),
    }


def _machine() -> dict[str, Any]:
    model, flags = _cpu(Path("/proc/cpuinfo"))
    return {
        "architecture": platform.machine(),
        "cpu_model": model or platform.processor() or None,
        "cpu_flags": [flag for flag in FLAGS_OF_INTEREST if flag in flags],
        "cores": usable_cores(),
        "memory_bytes": _memory_bytes(),
        "load_average": _load_average(),
    }


def _load_average() -> list[float] | None:
    """Runnable threads over the last 1, 5 and 15 minutes."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (OSError, AttributeError):
        return None


def usable_cores() -> int:
    """Cores that this process may use, which is less than the machine has inside a container."""
    return len(usable_core_ids())


def usable_core_ids() -> tuple[int, ...]:
    """Numbers of the cores that this process may use."""
    if sys.platform != "darwin" and hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _cpu(path: Path) -> tuple[str | None, frozenset[str]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None, frozenset()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = fields.get("flags") or fields.get("Features") or ""
    return fields.get("model name"), frozenset(flags.split())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_state(root: Path) -> dict[str, Any] | None:
    """Commit and whether files differ from it; None outside a checkout of spectune or without git."""
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "is_dirty": bool(_git(root, "status", "--porcelain", "-uno"))}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
