"""Requests that kept their promises, per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spectune.errors import UsageError
from spectune.metrics.latency import is_success
from spectune.records import RequestRecord, ServedRequest

NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """Upper limits in seconds; None promises nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def are_kept_by(self, request: ServedRequest | RequestRecord) -> bool:
        """Whether a request succeeded within every limit.

        Waiting counts from when the load asked for the request, the client's own queue included. A
        request of one token has no time per token and cannot break that promise.
        """
        sound = request.is_success if isinstance(request, ServedRequest) else is_success(request)
        if not sound:
            return False
        pairs = (
            (request.scheduled_ttft_s, self.ttft_s),
            (request.tpot_s, self.tpot_s),
            (request.scheduled_e2e_s, self.e2el_s),
        )
        return all(limit is None or value is None or value <= limit for value, limit in pairs)


def parse_goodput(pairs: Sequence[str]) -> Promises:
    """`ttft:200 tpot:20 e2el:5000`, milliseconds as in vLLM; separate words or one text."""
    limits: dict[str, float] = {}
    for pair in " ".join(pairs).replace(",", " ").split():
        name, mark, value = pair.partition(":")
        if name not in NAMES or not mark:
            raise UsageError(f"--goodput {pair} is not NAME:MS", hint=f"names: {', '.join(NAMES)}")
        if name in limits:
            raise UsageError(f"--goodput names {name} twice")
        try:
            limits[name] = float(value) / 1e3
        except ValueError as error:
            raise UsageError(f"--goodput {pair}: {value!r} is not a number of milliseconds") from error
        if not (math.isfinite(limits[name]) and limits[name] > 0):
            raise UsageError(f"--goodput {pair} is not above 0 ms")
    if not limits:
        raise UsageError("--goodput is empty", hint="for example --goodput ttft:200 tpot:20")
    return Promises(**{f"{name}_s": limit for name, limit in limits.items()})


def goodput(
    requests: Sequence[ServedRequest | RequestRecord], promises: Promises, duration_s: float
) -> float | None:
    """Requests that kept every promise / duration, per second; None without requests."""
    if not requests:
        return None
    return sum(promises.are_kept_by(request) for request in requests) / duration_s
