"""One request inside the simulated engine: its slot, its steps, its record."""

from __future__ import annotations

from dataclasses import dataclass, field

from spectune.backend.chance import coin
from spectune.records import Cut, Request, RequestRecord, StepRecord


@dataclass(slots=True, kw_only=True)
class SimulatedSequence:
    """One request in a slot."""

    request: Request
    output_ids: tuple[int, ...]  # everything it will say, known to the simulator only
    last_cut: str  # why it ends there
    hazards: tuple[float, ...]
    proposal_rate: float
    key: int
    flip: int | None  # output index from which this start writes another text
    noise: float
    arrival_s: float
    chunk_s: list[float] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    num_emitted: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_emitted == len(self.output_ids)

    @property
    def kv_tokens(self) -> int:
        return len(self.request.prompt_ids) + self.num_emitted

    def step(self, num_proposed: int, num_verified: int) -> StepRecord:
        """One verification; a cut step keeps only the drafts that stay in the output."""
        accepted, position = 0, self.num_emitted
        key = self.key if self.flip is None or position < self.flip else self.key + 1
        if num_verified == 0 or coin(key, position, 0) >= self.proposal_rate:
            num_proposed = num_verified = 0
        else:
            while accepted < len(self.hazards) and coin(key, position, accepted + 1) < self.hazards[accepted]:
                accepted += 1
        left = len(self.output_ids) - self.num_emitted
        emitted = min(accepted + 1, left)
        return StepRecord(
            num_proposed=num_proposed,
            num_verified=num_verified,
            num_accepted=min(accepted, emitted),
            num_emitted=emitted,
            cut=self.last_cut if accepted + 1 > left else None,
        )

    def record(self) -> RequestRecord:
        return RequestRecord(
            request_id=self.request.request_id,
            category=self.request.category,
            num_prompt_tokens=len(self.request.prompt_ids),
            output_ids=self.output_ids,
            arrival_s=self.arrival_s,
            first_token_s=self.chunk_s[0],
            finish_s=self.chunk_s[-1],
            finish_reason="length" if self.last_cut == Cut.LENGTH else "stop",
            chunk_s=tuple(self.chunk_s),
            steps=tuple(self.steps),
        )


def refused(request: Request, now_s: float) -> RequestRecord:
    """The record of a request that the engine did not take."""
    return RequestRecord(
        request_id=request.request_id,
        category=request.category,
        num_prompt_tokens=len(request.prompt_ids),
        output_ids=(),
        arrival_s=now_s,
        first_token_s=None,
        finish_s=None,
        finish_reason=None,
        error="simulated engine refused the request",
    )
