"""One decorator for compiled loops: no GIL, numbers as the hardware adds them, kept on disk.

The folder of compiled code is named after the sources and numba's version, so an upgrade never runs
the loops of an older one.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from spectune.engine.default_target import default_cache_dir

# No NaN or infinity flags: a broken weight must still show as NaN.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


@functools.cache
def _compiled_dir() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return default_cache_dir() / "kernels" / digest.hexdigest()[:12]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile at first call with its argument types, or load what an earlier process compiled."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_compiled_dir())  # read once, while the decorator runs
    try:
        return numba.njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before
