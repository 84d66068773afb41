"""What is read of a vLLM server's log, and what a log is called."""

from __future__ import annotations

import re

from spectune.records import Point

_CAPACITY = re.compile(r"KV cache size: ([\d,]+) tokens")


def cache_tokens(tail: str) -> int | None:
    """Tokens that the engine's cache holds; None if the log does not say."""
    found = _CAPACITY.findall(tail)
    return int(found[-1].replace(",", "")) if found else None


def log_name(point: Point) -> str:
    """`eagle3-K=3.start-0`: what a log is of."""
    label = re.sub(r"[^\w.=-]+", "-", point.config.label).strip("-")
    return f"{label}.start-{point.repeat}"
