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
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectune.backend.chance import Noise, key_of
from spectune.backend.simulated_sequence import SimulatedSequence, refused
from spectune.backend.simulated_trace import simulated_trace, trace_point
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
    RoundRecord,
    Session,
    SpecConfig,
    chain_or_tree_pool,
)
from spectune.store.trace_file import Trace

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
        noise_seed: makes every start noisy in its own way, as real ones are; without it a point's noise
            is the same in every start, so that a resumed run repeats what it lost.
    """

    def __init__(
        self,
        *,
        truth: SimulatedTruth | str | Path | None = None,
        seed: int = 0,
        failing: Mapping[str, str] | None = None,
        has_trees: bool = True,
        max_batch_size: int | None = None,
        noise_seed: int | None = None,
    ) -> None:
        self.truth = truth if isinstance(truth, SimulatedTruth) else load_truth(truth)
        self.seed, self.noise_seed = seed, noise_seed
        self.num_starts = 0
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

    def record_trace(
        self,
        requests: Sequence[Request],
        configs: Sequence[SpecConfig],
        about: Mapping[str, Mapping[str, Any]],
        **where: Any,
    ) -> Trace:
        """Drafts drawn along the simulated texts; nothing needs to be kept in parts."""
        del where
        block = _Block(self, trace_point(requests), 0.0, "", {})
        texts = {request.request_id: block.text(request)[0] for request in requests}
        return simulated_trace(self.truth, self.seed, requests, texts, configs, about)

    def _ids(self, text: str) -> tuple[int, ...]:
        pieces = range(0, max(len(text), 1), CHARACTERS_PER_TOKEN)
        return tuple(
            zlib.crc32(text[i : i + CHARACTERS_PER_TOKEN].encode()) % self.truth.vocab_size for i in pieces
        )


@contextmanager
def _open(backend: SimulatedBackend) -> Iterator[Session]:
    backend.num_starts += 1
    start = "" if backend.noise_seed is None else f"{backend.noise_seed}|{backend.num_starts}|"
    yield _SimulatedSession(backend, start)


class _SimulatedSession:
    """Continuous batching over slots; a freed slot is prefilled in a round of its own."""

    def __init__(self, backend: SimulatedBackend, start: str) -> None:
        self._backend, self._start = backend, start
        self._now_s = 0.0

    def gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        """Simulated tokens have no logits."""
        return None

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult:
        return self.replay(point, requests, {})

    def replay(
        self, point: Point, requests: Sequence[Request], texts: Mapping[str, Sequence[int]]
    ) -> BlockResult:
        """The block with the given output ids (by request id) instead of its own."""
        failure = self._backend.failure(point)
        if failure == "oom":
            raise MemoryError(f"simulated engine: no memory for {point.label}")
        if failure == "engine":
            raise EngineFailure(f"simulated engine died in {point.label}")
        start_s = self._now_s
        if failure == "requests":
            refusals = tuple(refused(request, start_s) for request in requests)
            return BlockResult(requests=refusals, rounds=(), duration_s=0.0)
        num_slots = point.cell.batch_size
        if failure == "capped":
            num_slots = max(1, num_slots // 2)
        block = _Block(self._backend, point, self._now_s, self._start, texts)
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

    def time_rounds(
        self,
        point: Point,
        requests: Sequence[Request],
        configs: Sequence[SpecConfig],
        kept: Sequence[int],
    ) -> tuple[RoundRecord, ...]:
        """One round of all requests for each configuration, keeping kept[i] drafts of every sequence."""
        block = _Block(self._backend, point, self._now_s, self._start, {})
        kv_tokens = sum(len(request.prompt_ids) + 1 for request in requests)
        for config, count in zip(configs, kept, strict=True):
            block.force(config, len(requests), kv_tokens, count)
            kv_tokens += len(requests) * (count + 1)
        self._now_s += math.fsum(turn.total_s for turn in block.rounds)
        return tuple(block.rounds)


class _Block:
    """The rounds of one block of one arm."""

    def __init__(
        self,
        backend: SimulatedBackend,
        point: Point,
        now_s: float,
        start: str,
        texts: Mapping[str, Sequence[int]],
    ) -> None:
        self._truth = backend.truth
        self._seed = backend.seed
        self._point = point
        self._now_s = now_s
        self._start, self._texts = f"{start}{backend.seed}", texts
        self._noise = Noise(self._truth, self._start, self._start)
        self._sequences: dict[str, SimulatedSequence] = {}
        self.rounds: list[RoundRecord] = []

    def decode(self, requests: Sequence[Request], num_slots: int) -> float:
        """All requests to their end; the time after the last round."""
        first = requests[0].request_id if requests else ""
        stream = f"{self._start}|noise|{self._point.point_id}|{first}"
        self._noise = Noise(self._truth, stream, self._start)
        waiting = deque(requests)
        active: list[SimulatedSequence] = []
        while waiting or active:
            while waiting and len(active) < num_slots:
                sequence = self._prefill(waiting.popleft())
                if not sequence.is_done:
                    active.append(sequence)
            if active:
                self._round(active)
                active = [sequence for sequence in active if not sequence.is_done]
        return self._now_s

    def finished(self, requests: Sequence[Request]) -> list[SimulatedSequence]:
        """In the order of the requests."""
        return [self._sequences[request.request_id] for request in requests]

    def _prefill(self, request: Request) -> SimulatedSequence:
        sequence = self._begin(request)
        verify_s = self._truth.plain_s(1) + self._truth.prefill_s_per_token * len(request.prompt_ids)
        self._book("prefill", [sequence], 0.0, verify_s, num_emitted=1)
        sequence.num_emitted = 1
        sequence.chunk_s.append(self._now_s)
        self._sequences[request.request_id] = sequence
        return sequence

    def _begin(self, request: Request) -> SimulatedSequence:
        config = self._point.config
        output_ids, last_cut, flip = self.text(request)
        return SimulatedSequence(
            request=request,
            output_ids=output_ids,
            last_cut=last_cut,
            hazards=self._truth.acceptance(config, request.category, request.sampling.temperature),
            proposal_rate=self._truth.proposal_rate.get(config.method, 1.0),
            key=key_of(self._seed, request.request_id, config.label),
            flip=flip,
            noise=self._noise.of_request(request.request_id),
            arrival_s=self._now_s,
        )

    def text(self, request: Request) -> tuple[tuple[int, ...], str, int | None]:
        """Pseudo words of a request: the same under every configuration, as lossless engines give, up
        to where the declared near ties flip."""
        sampling = request.sampling
        chance = random.Random(f"{self._seed}|{request.request_id}|{sampling.seed}|text")
        mean = self._truth.output_tokens.get(request.category, self._truth.output_tokens[DEFAULT])
        length = max(1, round(mean * math.exp(chance.gauss(0.0, self._truth.output_tokens_spread))))
        is_cut = sampling.ignore_eos or length >= sampling.max_tokens
        count = sampling.max_tokens if is_cut else length
        ids = [chance.randrange(self._truth.vocab_size) for _ in range(count)]
        if request.request_id in self._texts:
            given = tuple(self._texts[request.request_id])
            # acceptance belongs to the text: from where it is another one, other coins are drawn
            parted = (index for index, (own, other) in enumerate(zip(ids, given)) if own != other)
            return given, Cut.LENGTH.value, next(parted, None)
        flip = self._noise.flip(request.request_id, count)
        if flip is not None:
            ids[flip:] = [(token + 1) % self._truth.vocab_size for token in ids[flip:]]
        return tuple(ids), Cut.LENGTH.value if is_cut else Cut.EOS.value, flip

    def _round(self, active: list[SimulatedSequence]) -> None:
        config = self._point.config
        pool = 0 if config.is_off else chain_or_tree_pool(config.num_steps, config.topk)
        steps = [sequence.step(pool, config.num_draft_tokens - 1) for sequence in active]
        extra = max(step.num_verified for step in steps)
        verify_s = self._truth.verify_s(len(active), extra, sum(sequence.kv_tokens for sequence in active))
        emitted = sum(step.num_emitted for step in steps)
        self._book("decode", active, self._truth.draft_s(config), verify_s, num_emitted=emitted)
        for sequence, step in zip(active, steps, strict=True):
            sequence.steps.append(step)
            sequence.num_emitted += step.num_emitted
            sequence.chunk_s.append(self._now_s)

    def force(self, config: SpecConfig, batch_size: int, kv_tokens: int, kept: int) -> None:
        """One full round of a given shape."""
        truth = self._truth
        factor = self._noise.of_round([1.0] * batch_size)
        parts = (
            truth.draft_s(config),
            truth.verify_s(batch_size, config.num_draft_tokens - 1, kv_tokens),
            truth.other_s + truth.other_s_per_sequence * batch_size,
        )
        draft_s, verify_s, other_s = (part * factor * self._noise.of_part() for part in parts)
        turn = RoundRecord(
            kind="decode",
            batch_size=batch_size,
            kv_tokens=kv_tokens,
            config=config.label,
            start_s=self._now_s,
            draft_s=draft_s,
            verify_s=verify_s,
            other_s=other_s,
            num_emitted=batch_size * (kept + 1),
        )
        self.rounds.append(turn)
        self._now_s += turn.total_s

    def _book(
        self, kind: str, active: list[SimulatedSequence], draft_s: float, verify_s: float, *, num_emitted: int
    ) -> None:
        other_s = self._truth.other_s + self._truth.other_s_per_sequence * len(active)
        factor = self._noise.of_round([sequence.noise for sequence in active])
        turn = RoundRecord(
            kind=kind,
            batch_size=len(active),
            kv_tokens=sum(sequence.kv_tokens for sequence in active),
            config=self._point.config.label,
            start_s=self._now_s,
            draft_s=draft_s * factor * self._noise.of_part(),
            verify_s=verify_s * factor * self._noise.of_part(),
            other_s=other_s * factor * self._noise.of_part(),
            num_emitted=num_emitted,
        )
        self.rounds.append(turn)
        self._now_s += turn.total_s
