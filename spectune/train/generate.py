"""Many answers at once from the target: one decode pass a token for all rows, prefill in groups.

A job is a prompt, or the wish that the target write the prompt itself (its own chat template, opened at
the user's words; the answer then continues from the same cache). All rows share the template's opening,
which is run once. Every pass also yields what a head trains on, so nothing is run a second time.

B rows (slots), H hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectune.engine.kv_cache import KVCache, SlotView
from spectune.engine.sampling import uniform
from spectune.engine.target import Target
from spectune.errors import RunError
from spectune.train.decoder import WideDecoder, can_decode
from spectune.train.loops import cap_loop, ends_in_loop, loop_start

MAX_USER_TOKENS = 128
MIN_USER_TOKENS = 6
PREFILL_GROUP = 16
LOOP_CHECK_EVERY = 16
MAX_ATTEMPTS = 4
REPORT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFrame:
    """Ids that the chat template puts before the user's words, and between them and the answer."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One row of the corpus to make.

    prompt_ids: the rendered chat. writes_prompt: the target samples its own user turn first;
    prompt_ids is then what is asked when it fails to write a usable one.
    """

    index: int
    prompt_ids: tuple[int, ...]
    temperature: float
    writes_prompt: bool = False
    user_temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished row. activations: bf16 [T - 1, 4H], features then final hidden; top: int32 [T - 1].

    `top` is the target's greedy next token, defined from the last prompt token on.
    """

    index: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    wrote_prompt: bool
    had_loop: bool
    activations: Tensor
    top: Tensor


@dataclass(slots=True)
class _Row:
    """What one slot is doing: `ids` are all ids fed or chosen, of which the last is not yet fed."""

    job: Job
    ids: list[int]
    answer_start: int | None
    attempt: int = 0
    key: int = 0
    fed: int = 0
    queue: list[int] = field(default_factory=list)


def stream_key(seed: int, index: int, attempt: int, part: str) -> int:
    """64-bit signed key of one random stream: nothing but the plan's seed and the job decide it."""
    digest = hashlib.sha256(f"{seed}:{index}:{attempt}:{part}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def sample_rows(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """One token a row by inverse CDF. logits: [n, V]; temperatures, uniforms: [n] -> int64 [n]"""
    mass = torch.softmax(logits.float() / temperatures[:, None], dim=-1).cumsum_(-1)
    drawn = torch.searchsorted(mass, (uniforms * mass[:, -1])[:, None], right=True)[:, 0]
    return drawn.clamp_(max=logits.shape[-1] - 1)


class Generator:
    """Answers jobs in `batch_size` slots; a run is a pure function of (seed, jobs)."""

    def __init__(
        self,
        target: Target,
        frame: ChatFrame,
        eos_ids: Sequence[int],
        *,
        batch_size: int,
        max_prompt_tokens: int,
        max_answer_tokens: int,
        seed: int,
    ) -> None:
        self.target, self.frame, self.eos_ids = target, frame, frozenset(eos_ids)
        self.max_answer_tokens, self.seed = max_answer_tokens, seed
        opening = len(frame.opening)
        longest = max(max_prompt_tokens, opening + MAX_USER_TOKENS + len(frame.closing))
        # a group is as wide as its widest row, and starts as late as a question that the target wrote itself
        self.max_len = longest + max(max_answer_tokens + 1, opening + MAX_USER_TOKENS)
        self.batch_size = batch_size
        cache = target.new_cache(batch_size, self.max_len)
        if not isinstance(cache, KVCache):
            raise RunError(
                "many rows at once need the plain pass", hint='load the target with kernels="plain"'
            )
        self._cache = cache
        self._decoder = (
            WideDecoder(target, self._cache, target.state_dict_hf()) if can_decode(target) else None
        )
        width = 4 * target.config.hidden_size
        self._activations = torch.zeros(batch_size, self.max_len, width, dtype=torch.bfloat16)
        self._top = torch.zeros(batch_size, self.max_len, dtype=torch.int32)
        self._rows: list[_Row | None] = [None] * batch_size
        self.num_decoded = 0

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job], on_progress: Callable[[int, int], None] | None = None) -> list[Answer]:
        """Answers in the order of their indices; on_progress gets (answers done, tokens decoded)."""
        self._share_opening()
        waiting = deque(sorted(jobs, key=lambda job: (not job.writes_prompt, len(job.prompt_ids), job.index)))
        finished: list[Answer] = []
        reported = time.monotonic()
        while waiting or any(row is not None for row in self._rows):
            self._admit(waiting)
            self._extend()
            finished += self._collect()
            self._compact(bool(waiting))
            self._decode()
            finished += self._collect()
            if on_progress is not None and time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                on_progress(len(finished), self.num_decoded)
        return sorted(finished, key=lambda answer: answer.index)

    def _share_opening(self) -> None:
        """Run the template's opening in slot 0 and copy it to all slots."""
        opening = self.frame.opening
        self._rows = [None] * self.batch_size
        logits = self._forward([0], [list(opening)], [0])
        self._first_logits = logits
        count = len(opening)
        self._cache.data[:, :, 1:, :, :count] = self._cache.data[:, :, :1, :, :count]
        self._activations[1:, :count] = self._activations[:1, :count]
        self._top[1:, :count] = self._top[:1, :count]

    def _admit(self, waiting: deque[Job]) -> None:
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        busy = self.batch_size - len(free)
        if not waiting or (len(free) < min(PREFILL_GROUP, len(waiting)) and busy):
            return
        for slot in free[: len(waiting)]:
            self._start(slot, waiting.popleft())

    def _start(self, slot: int, job: Job, attempt: int = 0) -> None:
        opening = list(self.frame.opening)
        if job.writes_prompt and attempt < MAX_ATTEMPTS:
            key = stream_key(self.seed, job.index, attempt, "user")
            row = _Row(job, opening, None, attempt, key, fed=len(opening))
            self._rows[slot] = row
            self._choose([slot], self._first_logits)
            return
        shared = 0
        limit = min(len(opening), len(job.prompt_ids) - 1)
        while shared < limit and job.prompt_ids[shared] == opening[shared]:
            shared += 1
        key = stream_key(self.seed, job.index, 0, "answer")
        self._rows[slot] = _Row(job, list(job.prompt_ids), len(job.prompt_ids), attempt, key, fed=shared)
        self._row(slot).queue = list(job.prompt_ids[shared:])

    def _row(self, slot: int) -> _Row:
        row = self._rows[slot]
        if row is None:
            raise RunError(f"slot {slot} holds no text")
        return row

    def _extend(self) -> None:
        """Feed queued prompt ids, rows of similar length together."""
        slots = [slot for slot, row in enumerate(self._rows) if row is not None and row.queue]
        slots.sort(key=lambda slot: len(self._row(slot).queue))
        for low in range(0, len(slots), PREFILL_GROUP):
            group = slots[low : low + PREFILL_GROUP]
            rows = [self._row(slot) for slot in group]
            logits = self._forward(group, [row.queue for row in rows], [row.fed for row in rows])
            for row in rows:
                row.fed += len(row.queue)
                row.queue = []
            self._choose(group, logits)

    def _decode(self) -> None:
        """One token for every row: all slots up to the last busy one in a single pass."""
        busy = [slot for slot, row in enumerate(self._rows) if row is not None and not row.queue]
        if not busy:
            return
        span = list(range(max(busy) + 1))
        rows = [self._rows[slot] for slot in span]
        idle = len(self.frame.opening)  # an idle slot repeats a harmless position
        ids = [[row.ids[-1] if row and not row.queue else 0] for row in rows]
        fed = [row.fed if row else idle for row in rows]
        logits = self._forward(span, ids, fed)
        for slot in busy:
            self._row(slot).fed += 1
        self._choose(busy, logits if len(busy) == len(span) else logits[busy])
        self.num_decoded += len(busy)

    def _forward(self, slots: Sequence[int], ids: Sequence[Sequence[int]], fed: Sequence[int]) -> Tensor:
        """Feed ids after each row's `fed` tokens, record what a head needs -> logits of the last [n, V]"""
        target, width = self.target, max(map(len, ids))
        padded = torch.tensor([[*row, *([0] * (width - len(row)))] for row in ids], device=target.device)
        starts = torch.tensor(fed)
        columns = starts[:, None] + torch.arange(width)
        view = SlotView(slots, target.device)
        positions = columns.to(target.device)
        if width == 1 and self._decoder is not None and slots[0] == 0 and view.span is not None:
            last_hidden, last_features = self._decoder.forward(padded[:, 0], starts)
            hidden, features = last_hidden[:, None], last_features[:, None]
        else:
            hidden, features = target.forward(padded, positions, self._cache, view, list(fed), None)
        rows = torch.tensor(slots)[:, None]
        self._activations[rows, columns] = torch.cat([features, hidden], -1).to("cpu", torch.bfloat16)
        last = torch.tensor([len(row) - 1 for row in ids])
        logits = target.logits(hidden[torch.arange(len(ids)), last.to(target.device)])  # [n, V]
        top = logits.max(-1).indices.to("cpu", torch.int32)
        self._top[rows[:, 0], starts + last] = top
        return logits

    def _choose(self, slots: Sequence[int], logits: Tensor) -> None:
        """Append each row's next token: the greedy one, or a sample from its own stream."""
        rows = [self._row(slot) for slot in slots]
        tokens = logits.max(-1).indices
        heat = [row.job.user_temperature if row.answer_start is None else row.job.temperature for row in rows]
        warm = [i for i, value in enumerate(heat) if value > 0]
        if warm:
            keys = torch.tensor([rows[i].key for i in warm], device=logits.device)
            places = torch.tensor([rows[i].fed for i in warm], device=logits.device)
            noise = uniform(keys, places, torch.zeros_like(places))
            picked = logits if len(warm) == len(rows) else logits[warm]
            temperatures = torch.tensor([heat[i] for i in warm], device=logits.device)
            tokens[warm] = sample_rows(picked, temperatures, noise)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.ids.append(token)

    def _collect(self) -> list[Answer]:
        """Take finished answers out of their slots; turn finished user turns into questions."""
        done = []
        for slot, row in enumerate(self._rows):
            if row is None or row.queue:
                continue
            if row.answer_start is None:
                self._end_user_turn(slot, row)
            elif self._has_ended(row):
                done.append(self._finish(slot, row))
        return done

    def _has_ended(self, row: _Row) -> bool:
        assert row.answer_start is not None
        length = len(row.ids) - row.answer_start
        if length >= self.max_answer_tokens or (length and row.ids[-1] in self.eos_ids):
            return True
        return length % LOOP_CHECK_EVERY == 0 and ends_in_loop(row.ids[row.answer_start :])

    def _end_user_turn(self, slot: int, row: _Row) -> None:
        """Go on to the answer when the turn ended well; try again when it did not."""
        words = row.ids[len(self.frame.opening) :]
        if not words:
            return
        ended = words[-1] in self.eos_ids
        if not ended and len(words) < MAX_USER_TOKENS:
            return
        words = words[:-1]
        if not ended or len(words) < MIN_USER_TOKENS or loop_start(words) is not None:
            self._start(slot, row.job, row.attempt + 1)
            return
        closing = list(self.frame.closing)
        row.ids = [*self.frame.opening, *words, *closing]
        row.answer_start = len(row.ids)
        row.key = stream_key(self.seed, row.job.index, row.attempt, "answer")
        row.queue = closing

    def _finish(self, slot: int, row: _Row) -> Answer:
        start = row.answer_start
        assert start is not None
        output, had_loop = cap_loop(row.ids[start:])
        count = start + len(output) - 1
        self._rows[slot] = None
        return Answer(
            index=row.job.index,
            prompt_ids=tuple(row.ids[:start]),
            output_ids=tuple(output),
            wrote_prompt=row.job.writes_prompt and row.attempt < MAX_ATTEMPTS,
            had_loop=had_loop,
            activations=self._activations[slot, :count].clone(),
            top=self._top[slot, :count].clone(),
        )

    def _compact(self, is_filling: bool) -> None:
        """While slots run empty for good, move the last rows into the gaps: passes become smaller."""
        busy = [slot for slot, row in enumerate(self._rows) if row is not None]
        if is_filling or not busy or max(busy) + 1 - len(busy) < max(4, len(busy) // 4):
            return
        gaps = [slot for slot in range(len(busy)) if self._rows[slot] is None]
        for gap, slot in zip(gaps, reversed(busy), strict=False):
            self._rows[gap], self._rows[slot] = self._rows[slot], None
            self._cache.data[:, :, gap] = self._cache.data[:, :, slot]
            self._activations[gap] = self._activations[slot]
            self._top[gap] = self._top[slot]
