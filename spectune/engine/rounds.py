"""The rounds of one run of the engine: admit and prefill a request, decode all rows, cut, finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from spectune.engine.drafter import Drafter
from spectune.engine.kv_cache import SlotView
from spectune.engine.running import RowView, Running
from spectune.engine.sampling import RowSampling, choose
from spectune.engine.step import Batch, Stopwatch, Turn, step
from spectune.engine.uploads import on_device
from spectune.engine.verify import ForcedAcceptance
from spectune.errors import InfeasibleConfig
from spectune.records import (
    Chooser,
    Cut,
    Request,
    RequestRecord,
    RoundRecord,
    SpecConfig,
    StepRecord,
)

if TYPE_CHECKING:
    from spectune.engine.scheduler import Engine

_EMA = 0.2


class Rounds:
    """One call of `generate`: the rows that run, the rounds so far."""

    def __init__(
        self, engine: Engine, drafter: Drafter | None, texts: dict[str, Sequence[int]] | None
    ) -> None:
        self._engine, self._drafter, self._texts = engine, drafter, texts
        self.running: list[Running] = []
        self.rounds: list[RoundRecord] = []
        self.num_emitted = 0
        self._free = list(range(engine.batch_size))
        self._ema: float | None = None  # of the configuration that drafted last
        self._drafted_by: SpecConfig | None = None
        self._names: list[str] = []
        self._slots = SlotView([0], engine.target.device)
        self._sampling = RowSampling.of([], engine.target.device)

    def views(self) -> list[RowView]:
        return [row.view() for row in self.running]

    def ask(self, chooser: Chooser) -> SpecConfig:
        """The configuration of the next round, from what the engine sees of its load."""
        tokens = sum(row.length for row in self.running) // len(self.running)
        return chooser.choose(batch_size=len(self.running), context_tokens=tokens, acceptance_ema=self._ema)

    def admit(self, request: Request, finished: list[RequestRecord]) -> None:
        """Prefill a request into the lowest free slot and emit its first token."""
        engine = self._engine
        row = Running(request=request, slot=min(self._free), arrival_s=engine.clock())
        self._free.remove(row.slot)
        watch = Stopwatch(engine.clock, engine.target.device)
        start_s = row.arrival_s
        token, parts = self._prefill(row, watch)
        row.output_ids.append(token)
        row.chunk_s.append(engine.clock())
        self.num_emitted += 1
        self.rounds.append(
            RoundRecord(
                kind="prefill",
                batch_size=1,
                kv_tokens=len(request.prompt_ids),
                config="off" if self._drafter is None else "draft",
                start_s=start_s,
                draft_s=parts["draft"],
                verify_s=parts["verify"],
                other_s=parts["other"],
                num_emitted=1,
            )
        )
        self.running.append(row)
        reason = self._ends(row, token, [token])
        if reason is not None:
            self._finish(row, reason, finished)

    def _prefill(self, row: Running, watch: Stopwatch) -> tuple[int, dict[str, float]]:
        """Run the prompt in chunks through target and draft; returns the first output token."""
        engine, drafter = self._engine, self._drafter
        target, prompt = engine.target, row.request.prompt_ids
        view = SlotView([row.slot], target.device)
        rows = RowSampling.of([row.request], target.device)
        ids = on_device(prompt, target.device)
        token = -1
        for begin in range(0, len(prompt), engine.prefill_chunk):
            chunk = ids[begin : begin + engine.prefill_chunk]
            end = begin + len(chunk)
            positions = torch.arange(begin, end, device=target.device).unsqueeze(0)
            hidden, features = target.forward(chunk[None], positions, engine.cache, view, [begin], None)
            if end == len(prompt):
                logits = target.logits(hidden[:, -1:])
                index = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
                token = int(choose(logits, rows, index, draw=target.draw))
                if self._texts is not None:
                    token = self._texts[row.request.request_id][0]
            watch.lap("verify")
            if drafter is not None:
                following = list(prompt[begin + 1 : end + 1])
                following += [token] if end == len(prompt) else []
                tokens = on_device(following, target.device)
                if begin == 0:
                    drafter.start(row.slot, torch.cat([ids[:1], tokens]), features[0])
                else:
                    count = torch.tensor([len(following)])
                    drafter.commit([row.slot], tokens[None], features, count)
            watch.lap("draft")
        row.length = len(prompt)
        return token, watch.seconds

    def decode(
        self,
        config: SpecConfig,
        forced: ForcedAcceptance | None,
        wants_margins: bool,
        finished: list[RequestRecord],
    ) -> None:
        """One decode round of all running rows."""
        engine = self._engine
        if config.num_draft_tokens > engine.room:
            raise InfeasibleConfig(
                f"{config.label} verifies {config.num_draft_tokens} tokens, room was made for {engine.room}"
            )
        stolen_s, start_s = engine.stolen(), engine.clock()
        self.running.sort(key=lambda row: row.slot)
        rows = list(self.running)
        batch = self._batch(rows)
        turn = step(
            batch,
            engine.target,
            engine.cache,
            self._drafter,
            config,
            clock=engine.clock,
            forced=forced,
            wants_margins=wants_margins,
        )
        now = engine.clock()
        emitted = sum(self._apply(row, index, turn, now, finished) for index, row in enumerate(rows))
        self.num_emitted += emitted
        mean_accepted = sum(turn.num_accepted) / len(rows)
        if not config.is_off:  # a lookup that found nothing has cost its round too
            if config != self._drafted_by:
                self._drafted_by, self._ema = config, None
            self._ema = mean_accepted if self._ema is None else (1 - _EMA) * self._ema + _EMA * mean_accepted
        self.rounds.append(
            RoundRecord(
                kind="decode",
                batch_size=len(rows),
                kv_tokens=sum(batch.lengths),
                config=config.label,
                start_s=start_s,
                draft_s=turn.draft_s,
                verify_s=turn.verify_s,
                # whatever the clock saw outside the parts: lists, cuts, records
                other_s=turn.other_s + (engine.clock() - start_s - _parts(turn)),
                num_emitted=emitted,
                stolen_s=engine.stolen() - stolen_s,
            )
        )

    def _batch(self, rows: list[Running]) -> Batch:
        device = self._engine.target.device
        requests = [row.request for row in rows]
        names = [request.request_id for request in requests]
        if names != self._names:  # what lasts while the same rows run
            self._names = names
            self._slots = SlotView([row.slot for row in rows], device)
            self._sampling = RowSampling.of(requests, device)
        return Batch(
            slots=self._slots,
            lengths=[row.length for row in rows],
            num_outputs=[len(row.output_ids) for row in rows],
            num_steps=[len(row.steps) for row in rows],
            roots=on_device([row.output_ids[-1] for row in rows], device),
            rows=self._sampling,
            forced_text=None if self._texts is None else [self._texts[r.request_id] for r in requests],
        )

    def _apply(self, row: Running, index: int, turn: Turn, now: float, finished: list[RequestRecord]) -> int:
        """Add a round's tokens to a row, cut at EOS, stop or length; returns how many were emitted."""
        tokens = turn.emitted[index]
        kept: list[int] = []
        reason: Cut | None = None
        for token in tokens:
            row.output_ids.append(token)
            kept.append(token)
            reason = self._ends(row, token, kept)
            if reason is not None:
                break
        accepted = min(turn.num_accepted[index], len(kept))
        is_cut = reason is not None and len(kept) < len(tokens)
        row.steps.append(
            StepRecord(
                num_proposed=turn.num_proposed[index],
                num_verified=turn.num_verified[index],
                num_accepted=accepted,
                num_emitted=len(kept),
                cut=str(reason) if is_cut else None,
            )
        )
        if turn.margins is not None:
            row.margins.extend(turn.margins[index][: len(kept)])
        row.length += len(tokens)
        row.chunk_s.append(now)
        if reason is not None:
            self._finish(row, reason, finished)
        return len(kept)

    def _ends(self, row: Running, token: int, kept: list[int]) -> Cut | None:
        """Why the row ends with the token just appended, or None."""
        sampling = row.request.sampling
        if self._texts is not None:
            is_last = len(row.output_ids) >= len(self._texts[row.request.request_id])
            return Cut.LENGTH if is_last else None
        if not sampling.ignore_eos and token in self._engine.eos_ids:
            return Cut.EOS
        if sampling.stop and self._engine.tokenizer is not None:
            text = self._engine.tokenizer.decode(row.output_ids)
            if any(stop in text for stop in sampling.stop):
                return Cut.STOP
        if len(row.output_ids) >= sampling.max_tokens:
            return Cut.LENGTH
        return None

    def _finish(self, row: Running, reason: Cut, finished: list[RequestRecord]) -> None:
        self.running.remove(row)
        self._free.append(row.slot)
        if self._drafter is not None:
            self._drafter.stop(row.slot)
        if row.margins:
            self._engine.margins[row.request.request_id] = row.margins
        finished.append(row.record(reason))


def _parts(turn: Turn) -> float:
    return turn.draft_s + turn.verify_s + turn.other_s + turn.forcing_s
