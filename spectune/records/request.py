"""What is asked and what happened to it: prompt, request, step, round."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from json.encoder import encode_basestring


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the target's distribution is warped and when a request ends."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One workload row. `turns` are the user's turns, run as a conversation.

    `answers` are the replies to the first of them where they are fixed: the turn after them is asked.
    """

    prompt_id: str
    category: str
    turns: tuple[str, ...]
    system: str | None = None
    max_tokens: int | None = None
    answers: tuple[str, ...] = ()

    @property
    def asked(self) -> str:
        """The turn that is asked: the one after the answers."""
        return self.turns[len(self.answers)]

    @property
    def digest(self) -> str:
        """sha256 of `[system, [turns]]`, and `[answers]` if any, as JSON without escapes of other scripts."""
        # put together by hand: json.dumps takes longer than the hash, and a file may hold a million rows
        system = b"null" if self.system is None else _quoted(self.system)
        text = b"[%b, [%b]" % (system, b", ".join(map(_quoted, self.turns)))
        if self.answers:
            text += b", [%b]" % b", ".join(map(_quoted, self.answers))
        return hashlib.sha256(text + b"]").hexdigest()


_ESCAPED = bytes([*range(32), *b'"\\'])


def _quoted(text: str) -> bytes:
    """The text as a JSON string in UTF-8; looking whether it needs escapes is faster than escaping."""
    data = text.encode()
    if len(data.translate(None, _ESCAPED)) == len(data):
        return b'"%b"' % data
    return encode_basestring(text).encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt made ready for an engine: token ids with the chat template applied.

    `request_id` names the prompt and its sample number, never its arrival order, so that seeded
    sampling does not depend on scheduling.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    category: str
    sampling: Sampling
    prompt_text: str = ""


class Cut(enum.StrEnum):
    """Why fewer tokens were emitted than accepted + 1."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One verification of one sequence after its first token (off steps included).

    `num_verified` counts the drafted tokens that the target really scored (the root excluded);
    `num_proposed` those that were drafted, discarded ones included.
    """

    num_proposed: int
    num_verified: int
    num_accepted: int
    num_emitted: int
    cut: str | None = None

    def __post_init__(self) -> None:
        if self.num_accepted > self.num_verified or self.num_verified > self.num_proposed:
            raise ValueError(f"accepted <= verified <= proposed is broken: {self}")
        full = self.num_accepted + 1
        if self.cut is None and self.num_emitted != full:
            raise ValueError(f"an uncut step emits accepted + 1: {self}")
        if self.cut is not None and not 1 <= self.num_emitted <= full:
            raise ValueError(f"a cut step emits between 1 and accepted + 1: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One turn of the whole batch. The prefill of a new slot is a round of its own."""

    kind: str  # "prefill" or "decode"
    batch_size: int
    kv_tokens: int
    config: str  # SpecConfig.label
    start_s: float
    draft_s: float
    verify_s: float
    other_s: float
    num_emitted: int = 0
    stolen_s: float = 0.0  # CPU seconds that the hypervisor gave to others meanwhile, in ticks of 10 ms

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What happened to one request. A failed request carries `error` and no latency.

    `arrival_s` is when the request was handed to a free slot (closed loop) or sent, `scheduled_s` when a
    load that waits for nobody asked for it (None in a closed loop); times are seconds on one clock per run. `chunk_s` are the arrival times of output chunks: a chunk may hold
    several tokens.
    """

    request_id: str
    category: str
    num_prompt_tokens: int
    output_ids: tuple[int, ...]
    arrival_s: float
    first_token_s: float | None
    finish_s: float | None
    finish_reason: str | None
    chunk_s: tuple[float, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    error: str | None = None
    scheduled_s: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.finish_s is None else self.finish_s - self.arrival_s

    @property
    def asked_s(self) -> float:
        """When the load asked for it: what a user waits counts from here."""
        return self.arrival_s if self.scheduled_s is None else self.scheduled_s

    @property
    def scheduled_ttft_s(self) -> float | None:
        """First token - when the load asked for it, the client's own queue included."""
        return None if self.first_token_s is None else self.first_token_s - self.asked_s

    @property
    def scheduled_e2e_s(self) -> float | None:
        """Finish - when the load asked for it."""
        return None if self.finish_s is None else self.finish_s - self.asked_s

    @property
    def tpot_s(self) -> float | None:
        """(e2e - ttft) / (output tokens - 1); None for fewer than two tokens.

        Also None where the whole answer came at one moment: that says nothing of a token's time.
        """
        if self.first_token_s is None or self.finish_s is None or self.num_output_tokens < 2:
            return None
        if self.finish_s == self.first_token_s:
            return None
        return (self.finish_s - self.first_token_s) / (self.num_output_tokens - 1)

    def broken_identity(self) -> str | None:
        """Name of the counting identity that this record breaks, or None.

        output_tokens = 1 + Σ num_emitted.
        """
        if self.error is not None:
            return None
        emitted = 1 + sum(step.num_emitted for step in self.steps)
        if emitted != self.num_output_tokens:
            return f"output_tokens {self.num_output_tokens} != 1 + emitted {emitted - 1}"
        return None
