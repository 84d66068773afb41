"""The frozen results of a comparison: arm, cell, decision, run. Filled by policy/, told by report/.

Every number is derived from raw counts in the run directory; None means "not observed" and a reason
stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spectune.records import Cell, Fingerprint, Interval, SpecConfig, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Acceptance of one arm, pooled over steps. `reason` says why a value is None."""

    num_steps: int
    num_proposed: int
    num_verified: int
    num_accepted: int
    acceptance_length: float | None
    reason: str | None
    acceptance_length_per_request: float | None
    survival: tuple[float, ...]
    conditional_acceptance: tuple[float | None, ...]
    depth_acceptance_rate: float | None  # accepted / (steps * D): named apart for trees
    draft_acceptance_rate: float | None  # accepted / verified; for trees this is node utilisation
    zero_accept_share: float | None
    proposed_per_step: float | None
    alpha: float | None  # right-censored MLE: accepted / (accepted + rejections)
    num_drafting_steps: int = 0  # steps that verified at least one draft: vLLM's num_drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean, percentiles and standard deviation (of these values, as vLLM has it) over `n` durations in seconds."""

    n: int
    mean: float
    p50: float
    p90: float
    p99: float
    std: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    tpot_s: Spread | None
    ttft_s: Spread | None
    inter_chunk_s: Spread | None
    e2e_s: Spread | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLoad:
    """What requests met at a server: waiting from when the load asked for them, promises kept, what server
    and client had to take. `share_kept` and `goodput_per_s` are None where nothing was promised."""

    scheduled_ttft_s: Spread | None
    scheduled_e2e_s: Spread | None
    dispatch_delay_s: float | None  # mean seconds that requests waited in the client
    requests_per_s: float | None
    goodput_per_s: float | None
    share_kept: float | None
    max_in_flight: int | None
    prefix_hit_rate: float | None
    num_preemptions: int | None
    client_requests_per_s: float | None  # most that the client can take
    client_events_per_s: float | None
    client_share: float | None  # of that, what the load needed


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBucket:
    """Acceptance of one arm over requests whose prompts have `low` to `high` tokens."""

    config: SpecConfig
    low: int
    high: int
    num_requests: int
    num_steps: int
    acceptance_length: Interval | None
    is_beyond_head: bool = False  # some reach beyond the context that the head was made for


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Decode rounds of an arm: mean seconds of a full-batch round by part, and what a sequence gets from one.

    A server tells no parts: they are None there, `whole_s` is the mean time between two steps of a
    sequence at full load, and `num_rounds` counts those steps.
    """

    num_rounds: int
    draft_s: float | None
    verify_s: float | None
    other_s: float | None
    tokens_per_sequence: float  # Σ emitted / Σ batch size over all decode rounds
    round_tpot_s: float  # round time / tokens per sequence
    whole_s: float | None = None

    @property
    def parts(self) -> tuple[float, float, float] | None:
        """Draft, verify and other; None where only the whole is known."""
        if self.draft_s is None or self.verify_s is None or self.other_s is None:
            return None
        return self.draft_s, self.verify_s, self.other_s

    @property
    def total_s(self) -> float:
        return self.whole_s if self.parts is None and self.whole_s is not None else sum(self.parts or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Theory beside measurement. Times from the calibration prompts, acceptance from one half of
    the blocks, measurement from the other half: never circular."""

    predicted_tpot_s: float | None
    measured_tpot_s: float | None
    residual_fraction: float | None  # measured / predicted - 1
    predicted_speedup: float | None
    ideal_speedup: float | None  # Leviathan Thm 3.8 from alpha and c
    draft_cost_ratio: float | None  # c: one draft step / one plain step
    break_even_acceptance_length: float | None  # calibrated round time / plain round time
    floor_tpot_s: float | None  # bytes / measured read bandwidth / acceptance length
    floor_share: float | None  # floor / measured, 0..1
    # log-speedup by part: acceptance, verify, draft, other, residual
    waterfall: tuple[tuple[str, float], ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSummary:
    """One configuration in one cell, over one scope ("all" or a category)."""

    config: SpecConfig
    scope: str
    status: Status
    reason: str | None = None
    num_requests: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_per_s: float | None = None
    reached_batch: float | None = None
    peak_memory_bytes: int | None = None
    acceptance: Acceptance | None = None
    latency: Latency | None = None
    rounds: Rounds | None = None
    speedup: Interval | None = None
    speedup_basis: str | None = None  # "paired blocks", "paired requests", "pooled round time"
    prediction: Prediction | None = None
    point_ids: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    output_lengths: Spread | None = None  # tokens of successful answers
    load: ServedLoad | None = None  # servers only
    kv_capacity_tokens: int | None = None  # tokens that a server's cache holds; a draft takes from it


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to run in a cell. `verdict` is "on", "off" or "no data"."""

    verdict: str
    chosen: SpecConfig
    reason: str
    speedup: Interval | None = None
    runner_up: SpecConfig | None = None
    runner_up_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellComparison:
    """All arms of one cell over one scope, off first, with the decision."""

    cell: Cell
    scope: str
    arms: tuple[ArmSummary, ...]
    decision: Decision
    standby: tuple[ArmSummary, ...] = ()
    """Started with speculation, drafting nothing: what being able to speculate costs. Never chosen."""
    production: tuple[ArmSummary, ...] = ()
    """Served with a warm prefix cache and chunked prefill: what these change. Never chosen."""
    lengths: tuple[LengthBucket, ...] = ()
    """Acceptance by prompt length, arm by arm."""
    last_start: Interval | None = None
    """Time per token of plain decoding in its last start over its first one."""

    def arm(self, config: SpecConfig) -> ArmSummary:
        return next(arm for arm in self.arms if arm.config == config)

    def break_even(self, arm: ArmSummary) -> float | None:
        """Tokens a step has to emit for `arm` to be as fast as plain decoding, from both measured rounds."""
        plain = next((other.rounds for other in self.arms if other.config.is_off), None)
        if arm.config.is_off or arm.rounds is None or plain is None or plain.total_s <= 0:
            return None
        return arm.rounds.total_s / (plain.total_s / plain.tokens_per_sequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A point that gave no result, with the end of what it said."""

    label: str
    status: Status
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Everything that report, CSV, policy and gate read from a run."""

    schema_version: int
    run_name: str
    outcome: str  # "speculate", "do not speculate", "depends on load", "depends on workload", "no data"
    verdict: str  # one or two sentences for people, with the numbers
    is_simulated: bool
    fingerprint: Fingerprint | None
    cells: tuple[CellComparison, ...]  # scope "all"
    categories: tuple[CellComparison, ...]  # scope = category
    failures: tuple[Failure, ...]
    pruned: tuple[tuple[str, str], ...]  # (point label, reason) never launched
    policy: dict[str, Any] | None
    commands: dict[str, str]  # engine -> text to paste
    advice: tuple[str, ...]
    cautions: tuple[str, ...]
    workload: dict[str, Any]
    provenance: dict[str, Any]
    definitions: dict[str, str] = field(default_factory=dict)
    rates: tuple[CellComparison, ...] = ()
    """Cells in which requests arrive by the clock: they decide nothing."""
