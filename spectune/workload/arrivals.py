"""When requests are asked for: a closed loop of users, or arrivals that wait for nobody.

Arrival times are drawn before the run and do not depend on the server, so a slow answer delays no
later request on paper (no coordinated omission): what waits in the client is counted.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from spectune.errors import UsageError, WorkloadError

TIMESTAMP_KEYS = ("timestamp_s", "timestamp", "arrival_s", "timestamp_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """`concurrency` users, each asking again as soon as it has its answer."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UsageError(f"max-concurrency {self.concurrency} is below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """One arrival for each request, seconds after the start, ascending.

    `max_concurrency` caps the requests in flight; what waits for the cap keeps its arrival.
    `request_rate` and `burstiness` say what the arrivals were drawn from; None for a trace.
    """

    arrivals_s: tuple[float, ...]
    max_concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float | None = None

    def __post_init__(self) -> None:
        if any(not math.isfinite(at) or at < 0 for at in self.arrivals_s):
            raise UsageError("arrivals must be seconds from 0 on")
        if list(self.arrivals_s) != sorted(self.arrivals_s):
            raise UsageError("arrivals must ascend")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UsageError(f"max-concurrency {self.max_concurrency} is below 1")


Load = ClosedLoop | OpenLoop


def gamma_arrivals(
    num_requests: int, *, request_rate: float, burstiness: float = 1.0, seed: int = 0
) -> tuple[float, ...]:
    """Arrivals with gamma distributed gaps of mean 1/rate and shape `burstiness`.

    1 is a Poisson process, below 1 burstier, above 1 more even (vLLM's burstiness). The first
    request comes after the first gap. vLLM stretches its draw to end exactly at n/rate; here the draw
    stays as it is, because stretching makes the gaps depend on each other.
    """
    _check_rate(request_rate)
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise UsageError(f"burstiness {burstiness} is not above 0")
    chance = random.Random(f"arrivals|{seed}")
    scale = 1 / (request_rate * burstiness)
    return tuple(accumulate(chance.gammavariate(burstiness, scale) for _ in range(num_requests)))


def constant_arrivals(num_requests: int, *, request_rate: float) -> tuple[float, ...]:
    """One request every 1/rate seconds, the first at 0."""
    _check_rate(request_rate)
    return tuple(i / request_rate for i in range(num_requests))


def read_arrivals(path: Path | str, *, speed: float = 1.0) -> tuple[float, ...]:
    """Arrivals of a trace: JSON lines with a timestamp each, moved to start at 0, `speed` times faster.

    Keys: timestamp_s, timestamp or arrival_s in seconds, timestamp_ms in milliseconds. The trace may
    be out of order. WorkloadError names file, line and value.
    """
    path = Path(path)
    if not (math.isfinite(speed) and speed > 0):
        raise UsageError(f"trace speed {speed} is not above 0")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
    times = sorted(_timestamp(path, i, line) for i, line in enumerate(lines, start=1) if line.strip())
    if not times:
        raise WorkloadError(f"{path} holds no timestamp")
    return tuple((at - times[0]) / speed for at in times)


def trace_rate(times_s: Sequence[float]) -> float:
    """Mean requests/s of a trace from its first arrival to its last; UsageError where that is no rate."""
    if len(times_s) < 2 or not times_s[-1] > times_s[0]:
        raise UsageError(
            f"a trace of {len(times_s)} arrivals has no rate", hint="it needs two arrivals at different times"
        )
    return (len(times_s) - 1) / (times_s[-1] - times_s[0])


def open_loop(
    num_requests: int,
    *,
    request_rate: float,
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    seed: int = 0,
) -> OpenLoop:
    """The load of a request rate and a burstiness; a burstiness of infinity is a constant rate."""
    if burstiness == math.inf:
        arrivals = constant_arrivals(num_requests, request_rate=request_rate)
    else:
        arrivals = gamma_arrivals(num_requests, request_rate=request_rate, burstiness=burstiness, seed=seed)
    return OpenLoop(
        arrivals_s=arrivals,
        max_concurrency=max_concurrency,
        request_rate=request_rate,
        burstiness=None if burstiness == math.inf else burstiness,
    )


def trace_loop(times_s: Sequence[float], *, max_concurrency: int | None = None) -> OpenLoop:
    """The load of a replayed trace."""
    return OpenLoop(arrivals_s=tuple(times_s), max_concurrency=max_concurrency)


def _check_rate(request_rate: float) -> None:
    if not (math.isfinite(request_rate) and request_rate > 0):
        raise UsageError(f"request-rate {request_rate} is not above 0")


def _timestamp(path: Path, number: int, line: str) -> float:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{path} line {number} is not JSON: {error}") from error
    keys = [key for key in TIMESTAMP_KEYS if isinstance(row, dict) and key in row]
    if not keys:
        raise WorkloadError(
            f"{path} line {number} has no timestamp", hint=f"give one of {', '.join(TIMESTAMP_KEYS)}"
        )
    value = row[keys[0]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WorkloadError(f"{path} line {number}: {keys[0]} is {value!r}, not a number")
    return value / 1e3 if keys[0].endswith("_ms") else float(value)
