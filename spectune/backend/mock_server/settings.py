"""What a mock server declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from spectune.errors import UsageError

FAULTS = {
    "http_400": "answer 400",
    "http_500": "answer 500",
    "http_404": "answer 404",
    "error_in_stream": "some output, then an error object in the 200 stream",
    "empty": "a 200 stream with nothing but the end mark",
    "truncated": "end the stream without a finish",
    "reset": "reset the connection in mid-stream",
    "hang": "some output, then silence",
    "malformed": "a line that is not JSON",
    "die": "the server process ends in mid-stream",
}

QUIRKS = {
    "ping": "a comment before the first event",
    "crlf": "lines end with CRLF",
    "reasoning": "chat output is reasoning_content with content null",
    "usage_in_every_chunk": "usage in each chunk, zeros until the last",
    "usage_with_finish": "usage in the chunk that has the finish reason",
    "no_usage": "no usage at all",
    "no_token_ids": "return_token_ids is ignored",
    "sparse_histogram": "the acceptance histogram is a map without empty buckets",
    "models_before_health": "models are listed while the engine still starts",
}


FACES = ("vllm", "sglang")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A failure of some requests: all of them, every one from `first` on, or only the `first`-th."""

    kind: str
    first: int = 0
    is_once: bool = False

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise UsageError(f"--fail {self.kind} is not known", hint=f"one of: {', '.join(FAULTS)}")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """`KIND`, `KIND@N` (only request N, from 0) or `KIND@N+` (from request N on)."""
        kind, mark, place = text.partition("@")
        if not mark:
            return cls(kind=kind)
        number = place.removesuffix("+")
        if not number.isdecimal():
            raise UsageError(f"--fail {text}: {place!r} is not a request number", hint="for example reset@3")
        return cls(kind=kind, first=int(number), is_once=not place.endswith("+"))

    def hits(self, index: int) -> bool:
        return index == self.first if self.is_once else index >= self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class MockSettings:
    """Declared behaviour. Times are seconds; all zero is the fastest that this server can be.

    Args:
        face: whose protocol is spoken, vllm or sglang.
        num_tokens: drafts of every step; 0 is a server without speculation. The depth of a tree.
        topk, num_draft_tokens: shape of a tree as it is told (sglang); a chain of `num_tokens` if 1 and None.
        server_info: further fields of /server_info (sglang).
        acceptance: probability that draft i+1 is right if the ones before it were; the last value
            holds for deeper positions.
        schedule: (first, last, drafts) by number of running sequences, as vLLM's
            num_speculative_tokens_per_batch_size; `num_tokens` where nothing matches.
        prefill_s, prefill_s_per_token: until the first token; cached prompt tokens cost nothing.
        step_s, step_s_per_sequence, draft_s: of a decode step, for each running sequence, for each draft.
        output_tokens: where an answer ends by itself; None is at the request's limit.
        start_delay_s: how long /health answers 503.
        max_num_seqs: sequences that decode together; more wait.
        has_detailed_metrics: per-request metrics.speculative_decoding with per-step counts.
        top_gap: how far apart the log-probabilities of the two best tokens are told, everywhere.
        has_prefix_cache: keep prompts in blocks, so that known beginnings cost nothing.
    """

    model: str = "mock-model"
    face: str = "vllm"
    num_tokens: int = 0
    topk: int = 1
    num_draft_tokens: int | None = None
    server_info: Mapping[str, Any] = field(default_factory=dict)
    acceptance: tuple[float, ...] = (0.7,)
    schedule: tuple[tuple[int, int, int], ...] = ()
    prefill_s: float = 0.0
    prefill_s_per_token: float = 0.0
    step_s: float = 0.0
    step_s_per_sequence: float = 0.0
    draft_s: float = 0.0
    output_tokens: int | None = None
    start_delay_s: float = 0.0
    max_num_seqs: int = 256
    max_model_len: int = 32768
    seed: int = 0
    num_engines: int = 1
    has_detailed_metrics: bool = True
    has_prefix_cache: bool = True
    top_gap: float = 3.0
    faults: tuple[Fault, ...] = ()
    quirks: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.face not in FACES:
            raise UsageError(f"--engine {self.face} is not known", hint=f"one of: {', '.join(FACES)}")
        if self.num_tokens < 0:
            raise UsageError(f"--num-tokens {self.num_tokens} is below 0")
        if not self.acceptance or any(not 0 <= rate <= 1 for rate in self.acceptance):
            raise UsageError(f"--acceptance {self.acceptance} is not a list of fractions 0..1")
        if self.max_num_seqs < 1:
            raise UsageError(f"--max-num-seqs {self.max_num_seqs} is below 1")
        if self.output_tokens is not None and self.output_tokens < 1:
            raise UsageError(f"--output-tokens {self.output_tokens} is below 1")
        if unknown := sorted(self.quirks - QUIRKS.keys()):
            raise UsageError(f"--quirk {unknown[0]} is not known", hint=f"one of: {', '.join(QUIRKS)}")
        for name in ("prefill_s", "prefill_s_per_token", "step_s", "step_s_per_sequence", "draft_s"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} {getattr(self, name)} is below 0")

    @property
    def speculates(self) -> bool:
        return self.num_tokens > 0

    @property
    def width(self) -> int:
        """Tokens that a step verifies, the root included."""
        return self.num_draft_tokens or self.num_tokens + 1

    @property
    def is_instant(self) -> bool:
        """Whether no time is declared."""
        return not any(
            (self.prefill_s, self.prefill_s_per_token, self.step_s, self.step_s_per_sequence, self.draft_s)
        )

    def acceptance_at(self, position: int) -> float:
        """Conditional acceptance of draft `position`, from 0."""
        return self.acceptance[min(position, len(self.acceptance) - 1)]

    def drafts_for(self, num_running: int) -> int:
        """Drafts of a step with `num_running` sequences."""
        for first, last, num_tokens in self.schedule:
            if first <= num_running <= last:
                return min(num_tokens, self.num_tokens)
        return self.num_tokens

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "quirks": sorted(self.quirks)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MockSettings:
        """The reverse of to_dict, from JSON; unknown keys are usage errors."""
        if unknown := sorted(set(data) - {item.name for item in fields(cls)}):
            raise UsageError(f"a mock server has no setting {unknown[0]}")
        values = dict(data)
        for name in ("acceptance",):
            values[name] = tuple(values.get(name, (0.7,)))
        values["schedule"] = tuple(tuple(row) for row in values.get("schedule", ()))
        values["faults"] = tuple(Fault(**fault) for fault in values.get("faults", ()))
        values["quirks"] = frozenset(values.get("quirks", ()))
        return cls(**values)
