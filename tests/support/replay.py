"""Comparing replayed steps with live ones, request by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spectune.records import RequestRecord, SpecConfig
from spectune.replay.accepted import accepted_counts
from spectune.replay.rounds import tied_positions, visited
from spectune.store.trace_file import Trace

TIE = 1e-5
"""Difference of two cumulative draft log-probabilities below which another kernel may order them otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first step of a request in which replay and live decoding differ."""

    config: str
    request_id: str
    num_outputs: int
    live: int
    replayed: int
    margin: float | None  # of the nearest tie that the trace lists there, None without one
    is_text: bool = False  # the live text itself left the traced one before

    @property
    def is_listed(self) -> bool:
        return self.margin is not None and self.margin < TIE


def steps_of(trace: Trace, config: SpecConfig) -> list[list[tuple[int, int]]]:
    """(num_outputs at the root, accepted) of every replayed step, by request."""
    counts = accepted_counts(trace, [config])
    hits = visited(trace, counts)[0]
    steps, first = [], 0
    for outputs in trace.num_outputs:
        last = first + max(0, int(outputs) - 1)
        at = first + np.flatnonzero(hits[first:last])
        steps.append([(int(p) - first + 1, int(counts[0, p])) for p in at])
        first = last
    return steps


def compare(trace: Trace, config: SpecConfig, live: Sequence[RequestRecord]) -> list[Difference]:
    """The first difference of each request whose steps are not the live ones."""
    found = []
    firsts = np.concatenate([[0], np.cumsum(np.maximum(trace.num_outputs - 1, 0))])
    ends = np.cumsum(trace.num_outputs)
    for index, (record, steps) in enumerate(zip(live, steps_of(trace, config), strict=True)):
        assert record.request_id == trace.request_ids[index]
        text = trace.output_ids[ends[index] - trace.num_outputs[index] : ends[index]].tolist()
        same_text = _common(text, list(record.output_ids))
        is_text = same_text < max(len(text), record.num_output_tokens)
        at = 1
        lived = []
        for step in record.steps:
            lived.append((at, step.num_accepted))
            at += step.num_emitted
        for mine, theirs in zip(steps, lived, strict=False):
            if theirs[0] + theirs[1] >= same_text and is_text:
                break  # from here on another text is decoded
            if mine != theirs:
                position = int(firsts[index]) + mine[0] - 1
                found.append(
                    Difference(
                        config=config.label,
                        request_id=record.request_id,
                        num_outputs=mine[0],
                        live=theirs[1],
                        replayed=mine[1],
                        margin=_margin(trace, config, position),
                    )
                )
                break
        else:
            if not is_text and len(steps) != len(lived):
                raise AssertionError(f"{record.request_id}: {len(steps)} rounds replayed, {len(lived)} live")
        if is_text:
            found.append(
                Difference(
                    config=config.label,
                    request_id=record.request_id,
                    num_outputs=same_text,
                    live=0,
                    replayed=0,
                    margin=None,
                    is_text=True,
                )
            )
    return found


def _common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _margin(trace: Trace, config: SpecConfig, position: int) -> float | None:
    """The smallest listed margin that concerns the configuration at a position."""
    for floor in (1e-7, 1e-6, TIE, 1e-4):
        if position in tied_positions(trace, config, floor):
            return floor * 0.999
    return None
