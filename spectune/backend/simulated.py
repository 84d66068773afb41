"""A backend with declared costs and acceptance, and a virtual clock: a sweep takes seconds.

Everything follows from (truth, seed, point, requests), so a resumed run repeats what it lost. It
imports no theory: that theory recovers the declared truth is a test of both.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from spectune.backend.truth import DEFAULT, SimulatedTruth, load_truth
from spectune.errors import EngineFailure, UsageError
from spectune.records import (
    BlockResult,
    Capabilities,
    Cut,
    Fingerprint,
    Gap,
    Launch,
    Method,
    Point,
    Prompt,
    Request,
    RequestRecord,
    RoundRecord,
    Session,
    StepRecord,
    chain_or_tree_pool,
)

FAILURES = ("oom", "engine", "requests", "identity", "capped")

CHARACTERS_PER_TOKEN = 4


class SimulatedBackend:
    """Declared, not measured.

    Args:
        truth: the declared costs and acceptance, or a YAML/JSON file of them.
        seed: of lengths, acceptance and noise.
        failing: what goes wrong, by config label or point label: "oom" (no memory), "engine" (it
            dies), "requests" (every request is refused), "identity" (token counts do not add up),
            "capped" (decodes half of the batch).
        has_trees: whether trees can be verified.
        max_batch_size: the largest batch it says it can decode.
    """

    def __init__(
        self,
        *,
        truth: SimulatedTruth | str | Path | None = None,
        seed: int = 0,
        failing: Mapping[str, str] | None = None,
        has_trees: bool = True,
        max_batch_size: int | None = None,
    ) -> None:
        self.truth = truth if isinstance(truth, SimulatedTruth) else load_truth(truth)
        self.seed = seed
        self.failing = dict(failing or {})
        self._has_trees = has_trees
        self._max_batch_size = max_batch_size
        for label, kind in self.failing.items():
            if kind not in FAILURES:
                raise UsageError(f"failure {kind} of {label} is not known", hint=", ".join(FAILURES))

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="simulated",
            methods=(Method.OFF.value, *self.truth.hazards),
            has_trees=self._has_trees,
            has_rounds=True,
            is_simulated=True,
            max_batch_size=self._max_batch_size,
        )

    def plan(self, points: Sequence[Point]) -> list[Launch]:
        return [Launch(points=tuple(points))] if points else []

    def open(self, launch: Launch) -> AbstractContextManager[Session]:
        return _open(self)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(
            backend="simulated",
            engine_version="1",
            target="declared, not measured",
            draft=None,
            device="simulated",
            dtype="simulated",
            threads=1,
            settings={"truth": self.truth.digest, "seed": self.seed},
            is_simulated=True,
        )

    def encode(self, prompt: Prompt, context_text: str, context_tokens: int) -> tuple[int, ...]:
        """Fake ids, one a four characters, exactly `context_tokens` of them for the context."""
        own = self._ids("\n".join(filter(None, (prompt.system, prompt.turns[0]))))
        if context_tokens == 0:
            return own
        piece = self._ids(context_text[: context_tokens * CHARACTERS_PER_TOKEN] or " ")
        repeated = piece * math.ceil(context_tokens / len(piece))
        return repeated[:context_tokens] + own

    def failure(self, point: Point) -> str | None:
        """The kind of failure declared for a point, or None."""
        return self.failing.get(point.label, self.failing.get(point.config.label))

    def _ids(self, text: str) -> tuple[int, ...]:
        pieces = range(0, max(len(text), 1), CHARACTERS_PER_TOKEN)
        return tuple(
            zlib.crc32(text[i : i + CHARACTERS_PER_TOKEN].encode()) % self.truth.vocab_size for i in pieces
        )


@contextmanager
def _open(backend: SimulatedBackend) -> Iterator[Session]:
    yield _SimulatedSession(backend)


class _SimulatedSession:
    """Continuous batching over slots; a freed slot is prefilled in a round of its own."""

    def __init__(self, backend: SimulatedBackend) -> None:
        self._backend = backend
        self._now_s = 0.0

    def gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        """Simulated tokens have no logits."""
        return None

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult:
        failure = self._backend.failure(point)
        if failure == "oom":
            raise MemoryError(f"simulated engine: no memory for {point.label}")
        if failure == "engine":
            raise EngineFailure(f"simulated engine died in {point.label}")
        start_s = self._now_s
        if failure == "requests":
            refused = tuple(_refused(request, start_s) for request in requests)
            return BlockResult(requests=refused, rounds=(), duration_s=0.0)
        num_slots = point.cell.batch_size
        if failure == "capped":
            num_slots = max(1, num_slots // 2)
        block = _Block(self._backend, point, self._now_s)
        self._now_s = block.decode(requests, num_slots)
        records = tuple(sequence.record() for sequence in block.finished(requests))
        if failure == "identity":
            records = tuple(replace(record, output_ids=(*record.output_ids, 0)) for record in records)
        return BlockResult(
            requests=records,
            rounds=tuple(block.rounds),
            duration_s=self._now_s - start_s,
            peak_memory_bytes=self._backend.truth.peak_memory_bytes,
        )


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """One request in a slot."""

    request: Request
    output_ids: tuple[int, ...]  # everything it will say, known to the simulator only
    last_cut: str  # why it ends there
    hazards: tuple[float, ...]
    proposal_rate: float
    chance: random.Random
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
        accepted = 0
        if num_verified == 0 or self.chance.random() >= self.proposal_rate:
            num_proposed = num_verified = 0
        else:
            while accepted < len(self.hazards) and self.chance.random() < self.hazards[accepted]:
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


class _Block:
    """The rounds of one block of one arm."""

    def __init__(self, backend: SimulatedBackend, point: Point, now_s: float) -> None:
        self._truth = backend.truth
        self._seed = backend.seed
        self._point = point
        self._now_s = now_s
        self._noise = random.Random(0)
        self._sequences: dict[str, _Sequence] = {}
        self.rounds: list[RoundRecord] = []

    def decode(self, requests: Sequence[Request], num_slots: int) -> float:
        """All requests to their end; the time after the last round."""
        first = requests[0].request_id if requests else ""
        self._noise = random.Random(f"{self._seed}|noise|{self._point.point_id}|{first}")
        waiting = deque(requests)
        active: list[_Sequence] = []
        while waiting or active:
            while waiting and len(active) < num_slots:
                sequence = self._prefill(waiting.popleft())
                if not sequence.is_done:
                    active.append(sequence)
            if active:
                self._round(active)
                active = [sequence for sequence in active if not sequence.is_done]
        return self._now_s

    def finished(self, requests: Sequence[Request]) -> list[_Sequence]:
        """In the order of the requests."""
        return [self._sequences[request.request_id] for request in requests]

    def _prefill(self, request: Request) -> _Sequence:
        sequence = self._start(request)
        verify_s = self._truth.plain_s(1) + self._truth.prefill_s_per_token * len(request.prompt_ids)
        self._book("prefill", [sequence], 0.0, verify_s, num_emitted=1)
        sequence.num_emitted = 1
        sequence.chunk_s.append(self._now_s)
        self._sequences[request.request_id] = sequence
        return sequence

    def _start(self, request: Request) -> _Sequence:
        config = self._point.config
        output_ids, last_cut = self._text(request)
        return _Sequence(
            request=request,
            output_ids=output_ids,
            last_cut=last_cut,
            hazards=self._truth.acceptance(config, request.category, request.sampling.temperature),
            proposal_rate=self._truth.proposal_rate.get(config.method, 1.0),
            chance=random.Random(f"{self._seed}|{request.request_id}|{config.label}"),
            arrival_s=self._now_s,
        )

    def _text(self, request: Request) -> tuple[tuple[int, ...], str]:
        """Pseudo words of a request: the same under every configuration, as lossless engines give."""
        sampling = request.sampling
        chance = random.Random(f"{self._seed}|{request.request_id}|{sampling.seed}|text")
        mean = self._truth.output_tokens.get(request.category, self._truth.output_tokens[DEFAULT])
        length = max(1, round(mean * math.exp(chance.gauss(0.0, self._truth.output_tokens_spread))))
        is_cut = sampling.ignore_eos or length >= sampling.max_tokens
        count = sampling.max_tokens if is_cut else length
        ids = tuple(chance.randrange(self._truth.vocab_size) for _ in range(count))
        return ids, Cut.LENGTH.value if is_cut else Cut.EOS.value

    def _round(self, active: list[_Sequence]) -> None:
        config = self._point.config
        pool = 0 if config.is_off else chain_or_tree_pool(config.num_steps, config.topk)
        steps = [sequence.step(pool, config.num_draft_tokens - 1) for sequence in active]
        extra = max(step.num_verified for step in steps)
        kv_tokens = sum(sequence.kv_tokens for sequence in active)
        verify_s = (
            self._truth.plain_s(len(active))
            + self._truth.context_s_per_token * kv_tokens
            + self._truth.verify_s_per_token * extra * len(active)
        )
        emitted = sum(step.num_emitted for step in steps)
        self._book("decode", active, self._truth.draft_s(config), verify_s, num_emitted=emitted)
        for sequence, step in zip(active, steps, strict=True):
            sequence.steps.append(step)
            sequence.num_emitted += step.num_emitted
            sequence.chunk_s.append(self._now_s)

    def _book(
        self, kind: str, active: list[_Sequence], draft_s: float, verify_s: float, *, num_emitted: int
    ) -> None:
        other_s = self._truth.other_s + self._truth.other_s_per_sequence * len(active)
        turn = RoundRecord(
            kind=kind,
            batch_size=len(active),
            kv_tokens=sum(sequence.kv_tokens for sequence in active),
            config=self._point.config.label,
            start_s=self._now_s,
            draft_s=self._noisy(draft_s),
            verify_s=self._noisy(verify_s),
            other_s=self._noisy(other_s),
            num_emitted=num_emitted,
        )
        self.rounds.append(turn)
        self._now_s += turn.total_s

    def _noisy(self, seconds: float) -> float:
        return seconds * math.exp(self._noise.gauss(0.0, self._truth.noise_sd)) if seconds else 0.0


def _refused(request: Request, now_s: float) -> RequestRecord:
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
