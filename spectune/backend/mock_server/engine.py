"""Sequences, steps and counters that follow from the declared settings; knows no protocol.

The text is a pure function of the prompt, so it is the same with and without speculation, as lossless
engines give it. Acceptance is drawn from (seed, prompt), so a second run repeats the first.
"""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from spectune.backend.mock_server.settings import MockSettings

EOS = 2
FIRST_WORD = 16
# Short and long characters, an emoji outside the basic plane and the line separator U+2028.
WORDS = (
    " the",
    " of",
    " caf\u00e9",
    " na\u00efve",
    " \u6f22\u5b57",
    " \U0001f600",
    " a\u2028b",
    " \u03bb",
    " end",
    ".",
)
BLOCK = 16
"""Prompt tokens of a block of the prefix cache."""


@dataclass(slots=True)
class Counters:
    """What /metrics tells."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    num_requests: int = 0
    num_steps: int = 0
    queue_s: float = 0.0
    life_s: float = 0.0
    created: float = field(default_factory=time.time)


@dataclass(slots=True, kw_only=True)
class MockSequence:
    """One request in the engine."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    ends_at: int  # tokens of the natural answer, the end mark included; above max_tokens if never reached
    num_cached: int = 0
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    num_emitted: int = 0
    num_steps: int = 0  # after the first token, those without drafts included

    @property
    def num_output(self) -> int:
        """Tokens of the whole answer."""
        return min(self.max_tokens, self.ends_at)

    @property
    def finish_reason(self) -> str:
        return "stop" if self.ends_at <= self.max_tokens else "length"


class Engine:
    """Declared continuous batching: a step takes longer the more sequences run."""

    def __init__(self, settings: MockSettings) -> None:
        self.settings = settings
        self.counters = Counters(accepted_per_position=[0] * settings.num_tokens)
        self.num_running = 0
        self.num_waiting = 0
        self.max_running = 0
        self.started_s = time.monotonic()
        self._slots = asyncio.Semaphore(settings.max_num_seqs)
        self._cache: set[int] = set()

    @property
    def is_up(self) -> bool:
        return time.monotonic() - self.started_s >= self.settings.start_delay_s

    def sequence(
        self, prompt: str | Sequence[int], max_tokens: int, *, ignores_eos: bool = False
    ) -> MockSequence:
        """A request; a text becomes one id for four characters."""
        ids = tuple(prompt) if not isinstance(prompt, str) else text_ids(prompt)
        natural = self.settings.output_tokens
        never = max_tokens + 1
        return MockSequence(
            prompt_ids=ids,
            max_tokens=max_tokens,
            ends_at=never if natural is None or ignores_eos else natural,
            num_cached=self._look_up(ids),
        )

    async def decode(self, sequence: MockSequence) -> AsyncIterator[list[int]]:
        """Ids of each step, the prefill's one token first."""
        arrived_s = time.monotonic()
        self.num_waiting += 1
        async with self._slots:
            self.num_waiting -= 1
            self.counters.queue_s += time.monotonic() - arrived_s
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
            try:
                async for ids in self._steps(sequence):
                    yield ids
            finally:
                self.num_running -= 1
                self.counters.life_s += time.monotonic() - arrived_s

    def reset_cache(self) -> None:
        self._cache.clear()

    async def _steps(self, sequence: MockSequence) -> AsyncIterator[list[int]]:
        settings, counters = self.settings, self.counters
        chance = random.Random(f"{settings.seed}|{sequence.prompt_ids[-64:]}")
        salt = zlib.crc32(repr(sequence.prompt_ids).encode())
        computed = len(sequence.prompt_ids) - sequence.num_cached
        due_s = time.monotonic() + settings.prefill_s + settings.prefill_s_per_token * computed
        counters.prompt_tokens += len(sequence.prompt_ids)
        await _until(due_s)
        yield self._emit(sequence, 1, salt)
        while sequence.num_emitted < sequence.num_output:
            num_drafts = settings.drafts_for(self.num_running)
            due_s += (
                settings.step_s
                + settings.step_s_per_sequence * self.num_running
                + settings.draft_s * num_drafts
            )
            await _until(due_s)
            sequence.num_steps += 1
            counters.num_steps += 1
            yield self._emit(sequence, self._verify(sequence, num_drafts, chance) + 1, salt)
        counters.num_requests += 1

    def _verify(self, sequence: MockSequence, num_drafts: int, chance: random.Random) -> int:
        """Accepted drafts of a step; counted before the end cuts them, as vLLM does."""
        if num_drafts == 0:
            return 0
        accepted = 0
        while accepted < num_drafts and chance.random() < self.settings.acceptance_at(accepted):
            self.counters.accepted_per_position[accepted] += 1
            accepted += 1
        self.counters.num_drafts += 1
        self.counters.num_draft_tokens += num_drafts
        self.counters.num_accepted += accepted
        sequence.accepted.append(accepted)
        sequence.drafted.append(num_drafts)
        return accepted

    def _emit(self, sequence: MockSequence, count: int, salt: int) -> list[int]:
        start = sequence.num_emitted
        count = min(count, sequence.num_output - start)
        sequence.num_emitted += count
        self.counters.generation_tokens += count
        ids = [FIRST_WORD + (salt + 7919 * i) % len(WORDS) for i in range(start, start + count)]
        if sequence.num_emitted == sequence.ends_at:
            ids[-1] = EOS
        return ids

    def _look_up(self, ids: tuple[int, ...]) -> int:
        """Prompt tokens whose blocks are cached; caches the rest. The last token is always computed.

        Without a cache nothing is asked of it and its counters stay at zero, as vLLM's do.
        """
        if not self.settings.has_prefix_cache:
            return 0
        hits, mark, is_hit = 0, 0, True
        for end in range(BLOCK, len(ids), BLOCK):
            mark = zlib.crc32(repr(ids[end - BLOCK : end]).encode(), mark)
            is_hit = is_hit and mark in self._cache
            hits += BLOCK if is_hit else 0
            self._cache.add(mark)
        self.counters.cache_queries += len(ids)
        self.counters.cache_hits += hits
        return hits


def text_ids(text: str) -> tuple[int, ...]:
    """One made-up id for four characters, at least one."""
    return tuple(zlib.crc32(text[i : i + 4].encode()) % 50000 for i in range(0, max(len(text), 1), 4))


def words(ids: Sequence[int]) -> str:
    """The text of output ids; the end mark has none."""
    return "".join(WORDS[i - FIRST_WORD] for i in ids if i != EOS)


async def _until(due_s: float) -> None:
    """Sleep to a moment, so that late wake-ups do not add up; always lets others run."""
    await asyncio.sleep(max(0.0, due_s - time.monotonic()))
