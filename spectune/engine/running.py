"""A request in a slot: what grows while it decodes, and the record it leaves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from spectune.records import Cut, Request, RequestRecord, StepRecord


class RowView(NamedTuple):
    """A running row as an observer of rounds sees it."""

    request_id: str
    slot: int
    num_outputs: int


@dataclass(slots=True)
class Running:
    """A request in a slot: what grows while it decodes."""

    request: Request
    slot: int
    arrival_s: float
    length: int = 0
    output_ids: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    chunk_s: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def view(self) -> RowView:
        return RowView(self.request.request_id, self.slot, len(self.output_ids))

    def record(self, reason: Cut) -> RequestRecord:
        """What happened to the finished request."""
        return RequestRecord(
            request_id=self.request.request_id,
            category=self.request.category,
            num_prompt_tokens=len(self.request.prompt_ids),
            output_ids=tuple(self.output_ids),
            arrival_s=self.arrival_s,
            first_token_s=self.chunk_s[0],
            finish_s=self.chunk_s[-1],
            finish_reason=str(reason),
            chunk_s=tuple(self.chunk_s),
            steps=tuple(self.steps),
        )
