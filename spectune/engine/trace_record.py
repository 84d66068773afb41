"""The recorder: texts in, drafters along them, one part of a trace out per group of requests.

A drafter is recorded through one of two doors: `HeadRecorder` for heads that read texts at many roots
at once, `LookupRecorder` for any other drafter whose chains are a pure function of the prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from spectune.engine.drafter import Drafter
from spectune.engine.sampling import RowSampling
from spectune.engine.scheduler import Engine
from spectune.engine.trace_path import RootsAlongText, TraceSpace
from spectune.engine.trace_ranks import RankRows, rank_rows
from spectune.engine.trace_texts import KnownText, decode
from spectune.errors import StoreError, UsageError
from spectune.records import OPTION, Request, SpecConfig
from spectune.store.trace_file import (
    DrafterTrace,
    TiedCut,
    Trace,
    join_drafters,
    join_traces,
    read_trace,
    write_trace,
)

MAX_ROOTS = 1024
"""Roots whose draft nodes grow together; bounds memory, not results."""


class ReadTexts(Protocol):
    """Texts that a head has read."""

    def at(self, roots: Sequence[tuple[int, int]]) -> RootsAlongText:
        """Roots as (text, index of the root token in it)."""
        ...


class ReadsTexts(Protocol):
    """A head that runs along known texts."""

    @property
    def vocab_slices(self) -> tuple[int, ...]: ...

    def read(self, texts: Sequence[KnownText], depth: int) -> ReadTexts:
        """Run all real pairs of the texts; drafts of up to `depth` levels may follow."""
        ...


class Recorder(Protocol):
    """Records one drafter along texts."""

    def record(self, texts: Sequence[KnownText]) -> DrafterTrace:
        """The drafter's rows at every position of the texts, in order."""
        ...


class HeadRecorder:
    """Records a head: every topk, depth and node budget of the space."""

    def __init__(self, head: ReadsTexts, space: TraceSpace, *, method: str, draft_model: str | None) -> None:
        self._head, self._space = head, space
        self._method, self._draft_model = method, draft_model

    def record(self, texts: Sequence[KnownText]) -> DrafterTrace:
        space = self._space
        is_warm = any(text.log_p is not None for text in texts)
        rooted = [text for text in texts if text.num_positions]
        roots = [
            (index, text.num_prompt_tokens + num_outputs - 1)
            for index, text in enumerate(rooted)
            for num_outputs in range(1, len(text.output_ids))
        ]
        if not roots:
            return self._columns(RankRows.none(space, len(self._head.vocab_slices)), rooted, [], is_warm)
        read = self._head.read(rooted, space.max_steps)
        parts = []
        for begin in range(0, len(roots), MAX_ROOTS):
            chunk = roots[begin : begin + MAX_ROOTS]
            tokens = _after(rooted, chunk, space.max_steps).to(rooted[0].features.device)
            rows = rank_rows(read.at(chunk), tokens, space, wants_sampled=is_warm)
            parts.append(self._columns(rows, rooted, chunk, is_warm))
        return join_drafters(parts)

    def _columns(
        self, rows: RankRows, texts: Sequence[KnownText], roots: Sequence[tuple[int, int]], is_warm: bool
    ) -> DrafterTrace:
        space = self._space
        return DrafterTrace(
            method=self._method,
            draft_model=self._draft_model,
            options=(),
            topks=space.topks,
            max_steps=space.max_steps,
            max_draft_tokens=space.max_draft_tokens,
            path=rows.path,
            ranks=rows.ranks,
            ties=rows.ties,
            tie_floor=space.tie_floor,
            vocab_slices=self._head.vocab_slices,
            max_child_rank=space.max_child_rank,
            child_length=rows.child_length,
            child_ranks=rows.child_ranks,
            sampled=_accept_probability(rows.sampled, texts, roots) if is_warm else None,
        )


class LookupRecorder:
    """Records a drafter that needs no features and proposes chains, such as n-gram lookup."""

    def __init__(
        self, drafter: Drafter, *, method: str, options: tuple[tuple[str, OPTION], ...], max_steps: int
    ) -> None:
        if drafter.needs_features or not drafter.pure_in_prefix:
            raise UsageError(f"method {method} cannot be traced from the text alone")
        self._drafter, self._method, self._options = drafter, method, options
        self._max_steps = max_steps

    def record(self, texts: Sequence[KnownText]) -> DrafterTrace:
        drafter, depth = self._drafter, self._max_steps
        nothing = torch.zeros(0, 0)
        longest = max((len(text.ids) for text in texts), default=1)
        config = SpecConfig.chain(self._method, depth, options=self._options)
        drafter.reserve(len(texts), longest, config)
        slots = [slot for slot, text in enumerate(texts) if text.num_positions]
        for slot in slots:
            text = texts[slot]
            drafter.start(slot, torch.tensor(text.ids[: text.num_prompt_tokens + 1]), nothing)
        path = [np.zeros(text.num_positions, np.uint8) for text in texts]
        drafted = [np.zeros(text.num_positions, np.uint8) for text in texts]
        num_outputs = 1
        while slots:
            rows = RowSampling.of([texts[slot].request for slot in slots], torch.device("cpu"))
            tree = drafter.propose(slots, config, rows)
            valid, drafts = tree.valid[:, 1:].cpu().numpy(), tree.tokens[:, 1:].cpu().numpy()
            for row, slot in enumerate(slots):
                rest = np.asarray(texts[slot].output_ids[num_outputs : num_outputs + drafts.shape[1]])
                agrees = valid[row, : len(rest)] & (drafts[row, : len(rest)] == rest)
                path[slot][num_outputs - 1] = np.cumprod(agrees).sum()
                drafted[slot][num_outputs - 1] = valid[row].sum()
            num_outputs += 1
            for slot in [s for s in slots if len(texts[s].output_ids) <= num_outputs]:
                drafter.stop(slot)
            slots = [slot for slot in slots if len(texts[slot].output_ids) > num_outputs]
            if slots:
                tokens = torch.tensor([[texts[slot].output_ids[num_outputs - 1]] for slot in slots])
                counts = torch.ones(len(slots), dtype=torch.int64)
                drafter.commit(slots, tokens, torch.zeros(len(slots), 1, 0), counts)
        return DrafterTrace(
            method=self._method,
            draft_model=None,
            options=self._options,
            topks=(1,),
            max_steps=depth,
            max_draft_tokens=depth + 1,
            path=np.concatenate([np.zeros(0, np.uint8), *path]).reshape(-1, 1),
            ranks=(np.zeros(0, np.uint8),),
            ties=TiedCut.none(),
            drafted=np.concatenate([np.zeros(0, np.uint8), *drafted]),
        )


def record(
    engine: Engine,
    requests: Sequence[Request],
    recorders: Sequence[Recorder],
    about: dict[str, dict[str, Any]],
    *,
    group_size: int,
    parts_dir: Path,
    texts: dict[str, Sequence[int]] | None = None,
    on_part: Callable[[int, int], None] | None = None,
) -> Trace:
    """Trace all requests in groups; each group is saved in `parts_dir` and is not run again.

    `about` holds fingerprint, workload, sampling and provenance. `on_part` hears (done, of) requests.
    """
    parts = []
    done = 0
    for index, group in enumerate(_groups(requests, group_size)):
        file = parts_dir / f"part-{index:04d}.npz"
        part = _saved_part(file, group, about)
        if part is None:
            part = trace_group(engine, group, recorders, about, texts)
            write_trace(file, part)
        parts.append(part)
        done += len(group)
        if on_part is not None:
            on_part(done, len(requests))
    return join_traces(parts)


def trace_group(
    engine: Engine,
    requests: Sequence[Request],
    recorders: Sequence[Recorder],
    about: dict[str, dict[str, Any]],
    texts: dict[str, Sequence[int]] | None = None,
) -> Trace:
    """Decode the requests once and record every drafter along their texts."""
    known = decode(engine, requests, texts)
    largest = max((token for text in known for token in text.output_ids), default=0)
    return Trace(
        **about,
        request_ids=tuple(text.request.request_id for text in known),
        categories=tuple(text.request.category for text in known),
        finish_reasons=tuple(text.finish_reason for text in known),
        num_prompt_tokens=np.array([text.num_prompt_tokens for text in known], np.int32),
        num_outputs=np.array([len(text.output_ids) for text in known], np.int32),
        output_ids=np.array(
            [token for text in known for token in text.output_ids],
            np.uint16 if largest < 1 << 16 else np.uint32,
        ),
        drafters=tuple(recorder.record(known) for recorder in recorders),
    )


def _groups(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    for begin in range(0, len(requests), size):
        yield requests[begin : begin + size]


def _saved_part(file: Path, group: Sequence[Request], about: dict[str, dict[str, Any]]) -> Trace | None:
    """The part of an earlier run; None where it is missing or damaged. StoreError for another run's."""
    try:
        part = read_trace(file)
    except StoreError:
        return None
    same = {name: getattr(part, name) for name in ("fingerprint", "workload", "sampling")}
    asked = tuple(request.request_id for request in group)
    if part.request_ids != asked or any(about[name] != value for name, value in same.items()):
        raise StoreError(f"{file} belongs to a trace with other settings", hint="give another --output-dir")
    return part


def _after(texts: Sequence[KnownText], roots: Sequence[tuple[int, int]], depth: int) -> torch.Tensor:
    """The text's tokens [R, depth] after each root, -1 past its end."""
    after = torch.full((len(roots), depth), -1)
    ids = [torch.tensor(text.ids) for text in texts]
    for row, (text, index) in enumerate(roots):
        tokens = ids[text][index + 1 : index + 1 + depth]
        after[row, : len(tokens)] = tokens
    return after


def _accept_probability(
    log_q: NDArray[np.float32], texts: Sequence[KnownText], roots: Sequence[tuple[int, int]]
) -> NDArray[np.float16]:
    """min(1, q/p) [R, D] of the text's tokens after each root; 0 past the end and where q is 0."""
    result = np.zeros(log_q.shape, np.float32)
    log_p = [np.zeros(0) if text.log_p is None else text.log_p.cpu().numpy() for text in texts]
    for row, (text, index) in enumerate(roots):
        first = index - texts[text].num_prompt_tokens + 1
        known = log_p[text][first : first + log_q.shape[1]]
        result[row, : len(known)] = np.exp(np.minimum(0, log_q[row, : len(known)] - known))
    return result.astype(np.float16)
