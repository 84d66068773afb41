"""Which positions a configuration visits: hop t -> t + accepted(t) + 1, all texts and configurations at once.

A step at position t with m tokens of the text left emits min(accepted + 1, m) tokens; it is cut where
accepted >= m, as the engine cuts a block at the end of a request (EOS, stop string or max_tokens).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectune.records import SpecConfig
from spectune.replay.accepted import accepted_counts
from spectune.store.trace_file import Trace

_CELLS = 1 << 26  # (configuration, position) pairs worked on at once: bounds memory


@dataclass(frozen=True, slots=True)
class TimeMajor:
    """Positions in the order in which all texts are walked together.

    order: [P] position numbers, by output index and, within it, by text, longest text first.
    begins: where each output index begins, one more at the end. requests: [P] text of each position.
    """

    order: NDArray[np.int64]
    begins: NDArray[np.int64]
    requests: NDArray[np.int64]

    @classmethod
    def of(cls, num_outputs: NDArray[np.integer]) -> TimeMajor:
        counts = np.maximum(num_outputs.astype(np.int64) - 1, 0)
        firsts = np.cumsum(counts) - counts
        longest_first = np.argsort(-counts, kind="stable")
        active = np.searchsorted(np.sort(-counts), -np.arange(counts.max(initial=0)), side="left")
        order = [firsts[longest_first[:n]] + t for t, n in enumerate(active)]
        whole = np.concatenate([np.zeros(0, np.int64), *order])
        requests = np.repeat(np.arange(len(counts)), counts)
        return cls(whole, np.concatenate([[0], np.cumsum(active)]).astype(np.int64), requests)


def visited(trace: Trace, counts: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """[C, P]: positions at which each configuration stands in a step, for accepted counts [C, P]."""
    walk = TimeMajor.of(trace.num_outputs)
    steps = np.ascontiguousarray(counts[:, walk.order].T)  # [P, C], as walked
    hits = np.empty(steps.shape, np.bool_)
    skip = np.zeros((int(walk.begins[1]) if len(walk.begins) > 1 else 0, len(counts)), np.uint8)
    for begin, end in zip(walk.begins[:-1], walk.begins[1:], strict=True):
        skip = skip[: end - begin]
        hit = hits[begin:end]
        np.equal(skip, 0, out=hit)
        skip -= 1  # wraps where hit, and is replaced there
        np.copyto(skip, steps[begin:end], where=hit)
    result = np.empty(counts.shape, np.bool_)
    result[:, walk.order] = hits.T
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayCounts:
    """Raw counts of configurations C in groups G of positions; they add up over groups.

    histogram: [C, G, A] steps that accepted 0 .. A-1 drafts. num_verified, num_draft_steps, num_emitted,
    num_cut: [C, G] as the engine's step records would count them.
    """

    configs: tuple[SpecConfig, ...]
    groups: tuple[str, ...]
    histogram: NDArray[np.int64]
    num_verified: NDArray[np.int64]
    num_draft_steps: NDArray[np.int64]
    num_emitted: NDArray[np.int64]
    num_cut: NDArray[np.int64]

    @property
    def num_steps(self) -> NDArray[np.int64]:
        """[C, G]: rounds of a batch of one; the unit over which acceptance is averaged."""
        steps: NDArray[np.int64] = self.histogram.sum(2)
        return steps

    @property
    def num_accepted(self) -> NDArray[np.int64]:
        accepted: NDArray[np.int64] = self.histogram @ np.arange(self.histogram.shape[2])
        return accepted

    def pooled(self) -> ReplayCounts:
        """All groups as one, named `all`."""
        return ReplayCounts(
            configs=self.configs,
            groups=("all",),
            histogram=self.histogram.sum(1, keepdims=True),
            num_verified=self.num_verified.sum(1, keepdims=True),
            num_draft_steps=self.num_draft_steps.sum(1, keepdims=True),
            num_emitted=self.num_emitted.sum(1, keepdims=True),
            num_cut=self.num_cut.sum(1, keepdims=True),
        )

    def acceptance_length(self, config: int, group: int = 0) -> float | None:
        """1 + accepted / steps; None where nothing was ever drafted or no step was made."""
        steps = int(self.num_steps[config, group])
        if not steps or not self.num_draft_steps[config, group]:
            return None
        return 1 + int(self.num_accepted[config, group]) / steps

    def survival(self, config: int, group: int = 0) -> tuple[float, ...]:
        """survival[j]: share of steps that accept at least j+1 drafts; () where nothing was drafted."""
        steps = int(self.num_steps[config, group])
        if not steps or not self.num_draft_steps[config, group]:
            return ()
        at_least = self.histogram[config, group, ::-1].cumsum()[::-1][1:]
        return tuple(float(n) / steps for n in at_least[: self.configs[config].max_accepted])

    def zero_accept_share(self, config: int, group: int = 0) -> float | None:
        """Share of drafting steps that keep nothing; None without such a step."""
        drafting = int(self.num_draft_steps[config, group])
        if not drafting:
            return None
        idle = int(self.num_steps[config, group]) - drafting
        return (int(self.histogram[config, group, 0]) - idle) / drafting


def replay(
    trace: Trace,
    configs: Sequence[SpecConfig],
    groups: Sequence[str] = ("all",),
    group_of: NDArray[np.integer] | None = None,
) -> ReplayCounts:
    """Counts of every configuration, by group of positions (`group_of` [P] indexes `groups`).

    Exact for a drafter that is pure in its prefix: the text is the same for all, so the steps of each
    configuration are the positions it visits. Raises UsageError for configurations outside the trace.
    """
    size = max(1, _CELLS // max(1, trace.num_positions))
    index = np.zeros(trace.num_positions, np.int64) if group_of is None else group_of.astype(np.int64)
    parts = [_replay(trace, configs[i : i + size], groups, index) for i in range(0, len(configs), size)]
    columns = ("histogram", "num_verified", "num_draft_steps", "num_emitted", "num_cut")
    return ReplayCounts(
        configs=tuple(configs),
        groups=tuple(groups),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns},
    )


def _replay(
    trace: Trace, configs: Sequence[SpecConfig], groups: Sequence[str], index: NDArray[np.int64]
) -> ReplayCounts:
    counts = accepted_counts(trace, configs)
    hits = visited(trace, counts)
    most = int(counts.max(initial=0)) + 1
    num_groups = len(groups)
    left = tokens_left(trace)
    tail = np.flatnonzero(left <= most)  # only here a step may reach the end of its text
    shape = (len(configs), num_groups)
    histogram = np.zeros((*shape, most), np.int64)
    cut, verified, drafting = (np.zeros(shape, np.int64) for _ in range(3))
    bins = index * (most + 1) + 1
    for row, config in enumerate(configs):
        marks = np.where(hits[row], counts[row], np.int16(-1))
        found = np.bincount(bins + marks, minlength=num_groups * (most + 1))
        histogram[row] = found.reshape(num_groups, most + 1)[:, 1:]
        is_cut = hits[row, tail] & (counts[row, tail] >= left[tail])
        cut[row] = np.bincount(index[tail], is_cut, minlength=num_groups)
        verified[row], drafting[row] = _verified(trace, config, hits[row], index, histogram[row].sum(1))
    steps = histogram.sum(2)
    emitted = steps + histogram @ np.arange(most) - cut
    return ReplayCounts(
        configs=tuple(configs),
        groups=tuple(groups),
        histogram=histogram,
        num_verified=verified,
        num_draft_steps=drafting,
        num_emitted=emitted,
        num_cut=cut,
    )


def _verified(
    trace: Trace,
    config: SpecConfig,
    hits: NDArray[np.bool_],
    index: NDArray[np.int64],
    steps: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Drafts scored, and steps that scored any, by group."""
    if config.is_off:
        return np.zeros_like(steps), np.zeros_like(steps)
    drafted = trace.drafter_of(config).drafted
    if drafted is None:
        return steps * (config.num_draft_tokens - 1), steps
    drafts = np.minimum(drafted, config.num_steps) * hits
    both = [np.bincount(index, values, minlength=len(steps)) for values in (drafts, drafts > 0)]
    return both[0].astype(np.int64), both[1].astype(np.int64)


def tokens_left(trace: Trace) -> NDArray[np.int64]:
    """[P]: tokens of the text after each position's root."""
    outputs = trace.num_outputs.astype(np.int64)
    counts = np.maximum(outputs - 1, 0)
    ends = np.repeat(np.cumsum(counts), counts)
    return ends - np.arange(trace.num_positions)


def request_of(trace: Trace) -> NDArray[np.int64]:
    """[P]: number of the request that each position belongs to."""
    return np.repeat(np.arange(trace.num_requests), np.maximum(trace.num_outputs - 1, 0))


def by_request(trace: Trace, configs: Sequence[SpecConfig]) -> ReplayCounts:
    """Counts by request, in the trace's order."""
    return replay(trace, configs, trace.request_ids, request_of(trace))


def by_category(trace: Trace, configs: Sequence[SpecConfig]) -> ReplayCounts:
    """Counts by category, names sorted."""
    names = sorted(set(trace.categories))
    of_request = np.array([names.index(category) for category in trace.categories], np.int64)
    return replay(trace, configs, names, of_request[request_of(trace)])


def by_context(trace: Trace, configs: Sequence[SpecConfig], edges: Sequence[int]) -> ReplayCounts:
    """Counts by tokens before the draft (prompt and output): `< e1`, `e1..e2-1`, ..., `>= en`."""
    ordered = sorted(edges)
    firsts = trace.num_prompt_tokens.astype(np.int64)[request_of(trace)]
    outputs = trace.num_outputs.astype(np.int64)[request_of(trace)]
    context = firsts + outputs - tokens_left(trace)
    inner = [f"{a}..{b - 1}" for a, b in itertools.pairwise(ordered)]
    names = [f"< {ordered[0]}", *inner, f">= {ordered[-1]}"]
    return replay(trace, configs, names, np.searchsorted(ordered, context, side="right"))


def tied_positions(trace: Trace, config: SpecConfig, floor: float) -> NDArray[np.int64]:
    """Positions at which a comparison closer than `floor` decides what the configuration accepts."""
    if config.is_off:
        return np.zeros(0, np.int64)
    ties = trace.drafter_of(config).ties
    exact = (ties.nodes == config.num_draft_tokens) & (ties.steps == config.num_steps)
    any_size = (ties.nodes == 0) & (ties.steps <= config.num_steps)
    chosen = (ties.topk == config.topk) & (exact | any_size) & (ties.margin < floor)
    return np.unique(ties.position[chosen]).astype(np.int64)
