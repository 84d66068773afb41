"""One measurement of a server under a load, summed up: what a benchmark file holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from spectune.records.config import OPTION, SpecConfig
from spectune.records.point import Status
from spectune.records.served import SpecCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """A duration over the successful requests, seconds. `percentiles` are (percent, seconds) pairs."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...] = ()

    def percentile(self, percent: float) -> float | None:
        """The value at `percent`, None if it was not kept."""
        return dict(self.percentiles).get(percent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedMeasurement:
    """Counts, durations and rates of one load on one server.

    Durations are None where nothing succeeded or the file left them out, token counts where somebody's
    were unknown. `request_rate` None is a
    closed loop, `max_concurrency` None has no cap. `peak_output_tokens_per_s` is None unless every
    chunk's tokens are known. `spec` is None where the server counted no drafts.
    """

    num_requests: int
    completed: int
    failed: int
    duration_s: float
    total_input_tokens: int | None
    total_output_tokens: int | None
    request_rate: float | None = None
    burstiness: float | None = None
    max_concurrency: int | None = None
    ttft_s: Durations | None = None
    tpot_s: Durations | None = None
    inter_chunk_s: Durations | None = None
    e2e_s: Durations | None = None
    scheduled_e2e_s: Durations | None = None
    dispatch_delay_s: Durations | None = None
    goodput_per_s: float | None = None
    peak_output_tokens_per_s: float | None = None
    max_in_flight: int | None = None
    spec: SpecCounts | None = None

    def __post_init__(self) -> None:
        if self.completed + self.failed > self.num_requests:
            raise ValueError(
                f"{self.completed} completed and {self.failed} failed of {self.num_requests} requests"
            )
        if not self.duration_s > 0:
            raise ValueError(f"duration of {self.duration_s} s is not positive")
        peak, mean = self.peak_output_tokens_per_s, self.output_throughput
        if peak is not None and mean is not None and peak < mean * (1 - 1e-9):
            raise ValueError(f"peak of {peak:g} tokens/s is below the mean of {mean:g}")

    @property
    def request_throughput(self) -> float | None:
        """Completed requests / duration; None if none completed."""
        return self.completed / self.duration_s if self.completed else None

    @property
    def output_throughput(self) -> float | None:
        """Output tokens of completed requests / duration; None if none completed."""
        if not self.completed or self.total_output_tokens is None:
            return None
        return self.total_output_tokens / self.duration_s

    @property
    def total_token_throughput(self) -> float | None:
        """Input and output tokens of completed requests / duration; None if none completed."""
        if not self.completed or self.total_input_tokens is None or self.total_output_tokens is None:
            return None
        return (self.total_input_tokens + self.total_output_tokens) / self.duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPoint:
    """A measurement that another tool made, with what its file tells about the server.

    `measurement` is None where the run failed, `config` where the file does not say how the server
    speculated. `cautions` say what could not be taken over and why. Where a point lies (`source`) makes
    it no other point.
    """

    measurement: ServedMeasurement | None
    engine: str
    model: str | None = None
    label: str | None = None
    date: str | None = None
    config: SpecConfig | None = None
    settings: tuple[tuple[str, OPTION | None], ...] = ()
    run_number: int | None = None
    source: str = field(default="", compare=False)
    status: Status = Status.OK
    reason: str | None = None
    cautions: tuple[str, ...] = ()
