"""What happened to a request at a server, seen from the client: counts of tokens, times of events."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from spectune.records.request import RequestRecord, StepRecord


class FailureKind(enum.StrEnum):
    """How a request at a server can fail; none of them is ever booked as a result."""

    CONNECTION = "connection"  # nobody listens, or the name is unknown
    RESET = "reset"  # the server closed before the answer was complete
    TIMEOUT = "timeout"  # no byte, or no end, within the limit
    HTTP = "http"  # a status other than 200
    NOT_FOUND = "not_found"  # 404: no such model or no such route
    ERROR_IN_STREAM = "error_in_stream"  # an error object inside a 200 answer
    EMPTY = "empty"  # a complete answer without output
    TRUNCATED = "truncated"  # output without a finish
    MALFORMED = "malformed"  # not the protocol


class TokenSource(enum.StrEnum):
    """Who counted the output tokens: the engine, always. Neither stream events nor a text encoded again are."""

    USAGE = "usage"
    TOKEN_IDS = "token_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecCounts:
    """What a server's counters say of speculation in a window.

    A draft is one verification of one sequence that had at least one drafted token (vLLM's meaning).
    `accepted_per_position[j]` counts those that accepted at least j+1 tokens.
    """

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """One request at a server. A failed one has `failure` and `error`, and enters no latency.

    Times are seconds on one clock per run. `scheduled_s` is when the load asked for the request,
    `sent_s` when it left: their difference is the client's own waiting, which a user feels too.
    A whole body instead of a stream has no first token. `chunk_s` are the arrivals of stream events that carried output; an event may hold several tokens,
    `chunk_tokens` says how many where the server sends token ids. `steps` are None where the server
    told nothing about speculation.
    """

    request_id: str
    category: str
    scheduled_s: float
    sent_s: float
    ended_s: float  # when the client was done with it, failed or not
    first_token_s: float | None = None
    finish_s: float | None = None  # last event with output
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    token_source: TokenSource | None = None
    text: str = ""
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] | None = None
    is_streamed: bool = True
    steps: tuple[StepRecord, ...] | None = None
    steps_reason: str | None = None  # why reported steps could not be used
    num_cached_tokens: int | None = None
    failure: FailureKind | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        if (self.failure is None) != (self.error is None):
            raise ValueError("a failure has a reason, a success has none")
        if self.first_token_s is not None and not self.first_token_s > self.sent_s:
            raise ValueError(f"request {self.request_id}: first token at or before it was sent")
        has_start = self.first_token_s is not None or not self.is_streamed
        if self.failure is None and (not has_start or self.finish_s is None or self.finish_reason is None):
            raise ValueError(f"request {self.request_id}: a success has output and a finish")

    @property
    def is_success(self) -> bool:
        return self.failure is None

    @property
    def dispatch_delay_s(self) -> float:
        """How long the request waited in this client after the load asked for it."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """First output - sent: what the server took."""
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def scheduled_ttft_s(self) -> float | None:
        """First output - scheduled: what a user of that load waits."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def e2e_s(self) -> float | None:
        """Last output - sent."""
        return None if self.finish_s is None else self.finish_s - self.sent_s

    @property
    def scheduled_e2e_s(self) -> float | None:
        """Last output - scheduled."""
        return None if self.finish_s is None else self.finish_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e - ttft) / (output tokens - 1); None for fewer than two tokens or an unknown count.

        Also None where the whole answer came in one event: that says nothing of a token's time.
        """
        if self.first_token_s is None or self.finish_s is None or self.finish_s == self.first_token_s:
            return None
        if self.num_output_tokens is None or self.num_output_tokens < 2:
            return None
        return (self.finish_s - self.first_token_s) / (self.num_output_tokens - 1)

    def to_record(self, *, is_plain: bool = False, keeps_schedule: bool = False) -> RequestRecord:
        """The record that every backend returns; `arrival_s` is when the request was sent, `scheduled_s`
        when an open loop asked for it (`keeps_schedule`).

        `is_plain` says that the server does not speculate: each token after the first is one step.
        A success without token ids becomes a failed record, because its output cannot be compared.
        """
        error = self.error if self.error is None else f"{self.failure}: {self.error}"
        steps = self.steps or ()
        if error is None and self.output_ids is None:
            error = "the server sent no token ids"
        if error is None and is_plain and any(step.num_verified for step in steps):
            error = "the server drafted, although it was taken for one without speculation"
        if error is None and is_plain and self.output_ids is not None:
            plain = StepRecord(num_proposed=0, num_verified=0, num_accepted=0, num_emitted=1)
            steps = (plain,) * (len(self.output_ids) - 1)
        failed = error is not None
        return RequestRecord(
            request_id=self.request_id,
            category=self.category,
            num_prompt_tokens=self.num_prompt_tokens or 0,
            output_ids=() if failed else self.output_ids or (),
            arrival_s=self.sent_s,
            first_token_s=None if failed else self.first_token_s,
            finish_s=None if failed else self.finish_s,
            finish_reason=None if failed else self.finish_reason,
            chunk_s=() if failed else self.chunk_s,
            steps=() if failed else steps,
            error=error,
            scheduled_s=self.scheduled_s if keeps_schedule else None,
        )
