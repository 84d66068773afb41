"""What is run, saved and resumed: cell, point, block, and what became of it."""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from spectune.records.config import SpecConfig
from spectune.records.request import RequestRecord, RoundRecord, Sampling


class Status(enum.StrEnum):
    """What became of a point (design rule: every outcome has one)."""

    OK = "ok"
    FAILED = "failed"
    INFEASIBLE = "infeasible"
    OOM = "oom"
    CAPPED = "capped"
    SUSPECT = "suspect"
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not_comparable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The conditions that all arms of a comparison share.

    `request_rate` (requests/s) is set where requests arrive by the clock instead of in a closed loop;
    `arrivals` says how: poisson, gamma (with its `burstiness`), constant or trace.
    """

    batch_size: int
    context_tokens: int
    temperature: float
    request_rate: float | None = None
    arrivals: str | None = None
    burstiness: float | None = None

    @property
    def is_open_loop(self) -> bool:
        """Requests arrive when they arrive; `batch_size` then is the load that warms the engine up."""
        return self.request_rate is not None

    @property
    def label(self) -> str:
        rest = f"context {self.context_tokens}, T={self.temperature:g}"
        if self.request_rate is None:
            return f"batch {self.batch_size}, {rest}"
        how = f"burstiness {self.burstiness:g}" if self.burstiness is not None else self.arrivals
        return f"{self.request_rate:g} requests/s ({how}), {rest}"

    @property
    def canonical(self) -> dict[str, Any]:
        """Plain values; how requests arrive only where they do not wait for each other."""
        values = asdict(self)
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One arm in one cell in one repeat: the unit that is run, saved and resumed."""

    config: SpecConfig
    cell: Cell
    workload_hash: str
    sampling: Sampling
    repeat: int = 0

    @property
    def canonical(self) -> dict[str, Any]:
        return {
            "config": self.config.to_dict(),
            "cell": self.cell.canonical,
            "workload_hash": self.workload_hash,
            "sampling": asdict(self.sampling),
            "repeat": self.repeat,
        }

    @property
    def point_id(self) -> str:
        """Hash of the canonical point, 16 hex digits."""
        text = json.dumps(self.canonical, sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        return f"{self.config.label} @ {self.cell.label}"

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Point:
        sampling = {**data["sampling"], "stop": tuple(data["sampling"]["stop"])}
        return cls(
            config=SpecConfig.from_dict(data["config"]),
            cell=Cell(**data["cell"]),
            workload_hash=data["workload_hash"],
            sampling=Sampling(**sampling),
            repeat=data["repeat"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointOutcome:
    """The line of points.jsonl: what became of a point and why."""

    point: Point
    status: Status
    reason: str | None = None
    num_requests: int = 0
    num_failed: int = 0
    reached_batch: float | None = None
    peak_memory_bytes: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """What a server and its client say about a stretch of load; counters are after minus before.

    `concurrency` is what was asked for, `reached` the mean number of requests that the server ran:
    concurrency · (1 - queueing time / request time). The server's own counters of speculation, of the
    prefix cache and of preemptions are None where it keeps none. `notes` are doubts in sentences.
    `client_requests_per_s` and `client_events_per_s` are the most that this client can take, `client_share`
    the part of it that the load needed. At a request rate `concurrency` is what warmed the server up and
    `reached` the mean in flight. `max_in_flight` is the most that were sent and not yet answered.
    `tells_steps` is False where a server that speculates tells no request's acceptance: speed counts there,
    acceptance is what the counters say.
    """

    concurrency: int
    reached: float | None = None
    num_drafts: int | None = None
    num_draft_tokens: int | None = None
    num_accepted: int | None = None
    prefix_hit_rate: float | None = None
    num_preemptions: int | None = None
    kv_capacity_tokens: int | None = None
    client_requests_per_s: float | None = None
    client_events_per_s: float | None = None
    client_share: float | None = None
    max_in_flight: int | None = None
    tells_steps: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """What a backend returns for one block of requests of one arm.

    Servers tell no rounds: there `load` is set, and `duration_s` is the time that the block's requests
    held their slots over the number of slots, which adds up to the wall time at full load.
    """

    requests: tuple[RequestRecord, ...]
    rounds: tuple[RoundRecord, ...]
    duration_s: float
    peak_memory_bytes: int | None = None
    load: LoadRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimes:
    """Calibrated seconds of one decode round of an arm in a cell (means, other prompts)."""

    draft_s: float
    verify_s: float
    other_s: float
    num_rounds: int

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s
