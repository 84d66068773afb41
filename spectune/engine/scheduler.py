"""Continuous batching over slots: admit, prefill, decode rounds, cut, finish.

In: requests (token ids and sampling). Out: request and round records. The batch is held at the
requested size while requests wait; the prefill of a new slot is a round of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from spectune.engine.drafter import Drafter
from spectune.engine.kv_cache import Cache
from spectune.engine.memory import peak_memory_bytes, reset_peak_memory
from spectune.engine.rounds import Rounds
from spectune.engine.running import RowView
from spectune.engine.stolen import nothing_stolen
from spectune.engine.target import Target
from spectune.engine.tokenizer import Tokenizer
from spectune.engine.verify import ForcedAcceptance
from spectune.errors import InfeasibleConfig, UsageError
from spectune.records import (
    BlockResult,
    Chooser,
    Request,
    RequestRecord,
    SpecConfig,
)


class CacheRoom:
    """The cache of engines that never decode at the same time.

    Arms that are compared share it: where memory lies may decide some percent of a round, and no arm's may lie
    better than another's.
    """

    def __init__(self) -> None:
        self.cache: Cache | None = None


class Engine:
    """Decodes requests with one target, and with a drafter where the configuration speculates."""

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer | None = None,
        *,
        drafter: Drafter | None = None,
        batch_size: int = 1,
        prefill_chunk: int = 512,
        clock: Callable[[], float] = time.perf_counter,
        stolen: Callable[[], float] = nothing_stolen,
        eos_ids: Sequence[int] | None = None,
        cache_room: CacheRoom | None = None,
    ) -> None:
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.batch_size, self.prefill_chunk = batch_size, prefill_chunk
        self.clock, self.stolen = clock, stolen
        ids = eos_ids if eos_ids is not None else (tokenizer.eos_ids if tokenizer else ())
        self.eos_ids = frozenset(ids)
        self._cache_room = cache_room or CacheRoom()
        self.room = 0  # columns past the longest text: most nodes that a round may verify
        self.margins: dict[str, list[float]] = {}

    def generate(
        self,
        requests: Sequence[Request],
        config: SpecConfig | None = None,
        *,
        chooser: Chooser | None = None,
        forced: ForcedAcceptance | None = None,
        forced_text: dict[str, Sequence[int]] | None = None,
        on_round: Callable[[Sequence[RowView]], None] | None = None,
        wants_margins: bool = False,
        on_progress: Callable[[int], None] | None = None,
        scratch: SpecConfig | None = None,
        limit: Callable[[int], int] | None = None,
    ) -> BlockResult:
        """Decode all requests at the engine's batch size.

        Args:
            config: the configuration of every round (plain decoding if absent), or
            chooser: picks it anew before each round; the drafter is then kept fresh in off rounds.
            forced: accept a fixed mean number of drafts (cost measurements; not lossless).
            forced_text: output ids by request id that the target is made to emit (replay).
            on_round: called with the running rows before each decode round (trace).
            wants_margins: keep the top-2 gap of each emitted token in `self.margins`.
            on_progress: called with the number of tokens emitted so far.
            scratch: the largest configuration that a chooser or observer will ask for.
            limit: from the tokens emitted so far, how many requests may run at once (a load that rises
                and falls); at least one does, and none that runs is stopped.
        """
        with torch.inference_mode(), self.target.own_threads():
            return self._generate(
                requests,
                config or SpecConfig.off(),
                chooser=chooser,
                forced=forced,
                forced_text=forced_text,
                on_round=on_round,
                wants_margins=wants_margins,
                on_progress=on_progress,
                scratch=scratch,
                limit=limit,
            )

    def _generate(
        self,
        requests: Sequence[Request],
        config: SpecConfig,
        *,
        chooser: Chooser | None,
        forced: ForcedAcceptance | None,
        forced_text: dict[str, Sequence[int]] | None,
        on_round: Callable[[Sequence[RowView]], None] | None,
        wants_margins: bool,
        on_progress: Callable[[int], None] | None,
        scratch: SpecConfig | None,
        limit: Callable[[int], int] | None,
    ) -> BlockResult:
        drafter = self.drafter if chooser is not None or not config.is_off or on_round else None
        if drafter is None and not config.is_off:
            raise UsageError(f"{config.label} needs a drafter", hint="give --draft-model or --method ngram")
        self._reserve(requests, scratch or config, drafter)
        self.margins = {}
        run = Rounds(self, drafter, forced_text)
        waiting = deque(requests)
        finished: list[RequestRecord] = []
        reset_peak_memory(self.target.device)
        start_s = self.clock()
        while waiting or run.running:
            allowed = (
                self.batch_size if limit is None else max(1, min(self.batch_size, limit(run.num_emitted)))
            )
            while waiting and len(run.running) < allowed:
                run.admit(waiting.popleft(), finished)
            if not run.running:
                continue
            if on_round is not None:
                on_round(run.views())
            chosen = run.ask(chooser) if chooser is not None else config
            run.decode(chosen, forced, wants_margins, finished)
            if on_progress is not None:
                on_progress(run.num_emitted)
        order = {request.request_id: index for index, request in enumerate(requests)}
        finished.sort(key=lambda record: order[record.request_id])
        return BlockResult(
            requests=tuple(finished),
            rounds=tuple(run.rounds),
            duration_s=self.clock() - start_s,
            peak_memory_bytes=peak_memory_bytes(self.target.device),
        )

    def _reserve(self, requests: Sequence[Request], config: SpecConfig, drafter: Drafter | None) -> None:
        names = [request.request_id for request in requests]
        if len(set(names)) != len(names):
            raise UsageError("two requests of one run share a request id")
        for request in requests:
            if not request.prompt_ids:
                raise UsageError(f"request {request.request_id} has no prompt tokens")
            if request.sampling.stop and self.tokenizer is None:
                raise UsageError(f"request {request.request_id} has stop strings, the engine no tokenizer")
        longest = max((len(r.prompt_ids) + r.sampling.max_tokens for r in requests), default=1)
        limit = self.target.config.max_position_embeddings
        if longest > limit:
            raise UsageError(
                f"prompt and output need {longest} tokens, the target's context is {limit}",
                hint="lower --max-tokens or --context",
            )
        self.room = max(16, config.num_draft_tokens)
        columns = _round_up(longest + self.room, 64)
        cache = self._cache_room.cache
        if cache is None or cache.num_slots < self.batch_size or cache.max_len < columns:
            self._cache_room.cache = None  # freed first
            self._cache_room.cache = self.target.new_cache(self.batch_size, columns)
        if drafter is not None:
            if drafter.max_context is not None and longest > drafter.max_context:
                raise InfeasibleConfig(
                    f"prompt and output need {longest} tokens, the draft head's context is "
                    f"{drafter.max_context}",
                    hint="lower --max-tokens or --context, or train a head for longer text",
                )
            drafter.reserve(self.batch_size, columns, config)

    @property
    def cache(self) -> Cache:
        """The target's cache, made by `generate`."""
        cache = self._cache_room.cache
        assert cache is not None, "the cache is made by generate()"
        return cache


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
