"""What is wanted: fastest token, most tokens, most kept promises, or the front of both; within limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spectune.errors import UsageError
from spectune.metrics.goodput import Promises
from spectune.records import Cell, Fingerprint, SpecConfig
from spectune.tune.predict import Forecast, Forecasts

KINDS = ("tpot", "throughput", "goodput", "pareto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """`kind` ranks; the rest excludes. Promises are limits of single requests, `max_tpot_s` of the mean."""

    kind: str = "tpot"
    promises: Promises | None = None
    max_tpot_s: float | None = None
    max_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"--objective {self.kind} is not known", hint=f"one of: {', '.join(KINDS)}")
        if self.kind == "goodput" and self.promises is None:
            raise UsageError("--objective goodput needs --goodput", hint="for example --goodput tpot:30")


def memory_bytes(
    fingerprint: Fingerprint, config: SpecConfig, cell: Cell, tokens_per_sequence: float
) -> int | None:
    """Weights of target and draft, and keys and values of the whole batch; None where sizes are unknown."""
    if fingerprint.weight_bytes is None or fingerprint.kv_bytes_per_token is None:
        return None
    draft = 0 if config.is_off or config.draft_model is None else fingerprint.draft_weight_bytes or 0
    tokens = cell.batch_size * (tokens_per_sequence + config.num_draft_tokens)
    return int(fingerprint.weight_bytes + draft + fingerprint.kv_bytes_per_token * math.ceil(tokens))


def violation(row: Forecast, objective: Objective, memory: int | None) -> str | None:
    """Why a configuration is excluded whatever it is worth, or None. A limit that may be kept is kept."""
    low = row.tpot_s.low if row.tpot_s.low is not None else row.tpot_s.value
    if objective.max_tpot_s is not None and low > objective.max_tpot_s:
        return (
            f"predicted {row.tpot_s.value * 1e3:.1f} ms a token, at least {low * 1e3:.1f}, "
            f"above {objective.max_tpot_s * 1e3:g}"
        )
    if objective.max_memory_bytes is not None and memory is not None and memory > objective.max_memory_bytes:
        return f"needs {memory / 1e9:.2f} GB, above {objective.max_memory_bytes / 1e9:g}"
    return None


def expected_goodput(row: Forecast, promises: Promises) -> float | None:
    """Requests a second whose predicted time per token keeps its promise; waiting is not predicted."""
    if not row.request_tpot_s or not row.mean_output_tokens:
        return None
    limit = math.inf if promises.tpot_s is None else promises.tpot_s
    kept = sum(tpot <= limit for tpot in row.request_tpot_s) / len(row.request_tpot_s)
    return kept * row.throughput_per_s.value / row.mean_output_tokens


def score(row: Forecast, objective: Objective) -> float:
    """Larger is better within a cell."""
    if objective.kind == "goodput" and objective.promises is not None:
        value = expected_goodput(row, objective.promises)
        # equal shares of kept promises: the faster one
        return (0.0 if value is None else value) + 1e-6 / row.tpot_s.value
    return 1.0 / row.tpot_s.value


def front(rows: Sequence[Forecast]) -> tuple[Forecast, ...]:
    """Rows that no other beats in both time per token and throughput, fastest token first."""
    kept: list[Forecast] = []
    best = 0.0
    for row in sorted(rows, key=lambda r: (r.tpot_s.value, -r.throughput_per_s.value, r.config.size)):
        if row.throughput_per_s.value > best * (1 + 1e-12):
            kept.append(row)
            best = row.throughput_per_s.value
    return tuple(kept)


def pareto(forecasts: Forecasts, cells: Sequence[Cell]) -> tuple[Forecast, ...]:
    """The front over all configurations and cells."""
    return front([row for cell in cells for row in forecasts.of(cell)])
