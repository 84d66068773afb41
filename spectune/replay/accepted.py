"""Accepted drafts of a configuration at every position of a trace: one comparison a path node."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spectune.errors import UsageError
from spectune.records import SpecConfig
from spectune.store.trace_file import DrafterTrace, Trace

Counts = NDArray[np.uint8]


class AcceptedCounts:
    """What a traced drafter's configurations accept; dense ranks are made once a topk."""

    def __init__(self, drafter: DrafterTrace) -> None:
        self._drafter = drafter
        self._dense = functools.cache(self._dense_ranks)

    def of(self, config: SpecConfig) -> Counts:
        """num_accepted [P] of a step at each position, the end of the text as its only cut.

        Raises UsageError for what the trace cannot answer.
        """
        drafter = self._drafter
        if reason := drafter.refusal(config):
            raise UsageError(f"{config.label}: {reason}", hint="trace again with this configuration")
        path = drafter.path[:, drafter.topks.index(config.topk)]
        if config.is_chain:  # every node of a chain is verified
            return np.minimum(path, np.uint8(config.num_steps))
        depth, limit = config.num_steps, config.num_draft_tokens - 1
        ranks = self._dense(config.topk)[depth - 1, :depth]  # [depth, P]
        counts = np.zeros(drafter.num_positions, np.uint8)
        for row in ranks:
            counts += row < limit
        return counts

    def _dense_ranks(self, topk: int) -> NDArray[np.unsignedinteger]:
        """[D, l, P]: rank of the text's node at depth l+1 in the pool of depth D+1; never where none is."""
        drafter = self._drafter
        column = drafter.topks.index(topk)
        flat, path = drafter.ranks[column], drafter.path[:, column]
        depths = np.arange(drafter.max_steps)
        stored = (depths[:, None] < path[:, None, None]) & (depths[None, None, :] >= depths[:, None])
        if flat.size != int(stored.sum()):
            raise UsageError(
                f"the trace of topk {topk} holds {flat.size} ranks, its paths ask for {int(stored.sum())}",
                hint="the file is damaged: trace again",
            )
        dense = np.full(stored.shape, np.iinfo(flat.dtype).max, flat.dtype)  # [P, l, D]
        dense[stored] = flat
        return np.ascontiguousarray(dense.transpose(2, 1, 0))


def accepted_counts(trace: Trace, configs: Sequence[SpecConfig]) -> Counts:
    """num_accepted [C, P] of each configuration at each position; plain decoding accepts none."""
    made: dict[int, AcceptedCounts] = {}
    counts = np.zeros((len(configs), trace.num_positions), np.uint8)
    for row, config in enumerate(configs):
        if config.is_off:
            continue
        drafter = trace.drafter_of(config)
        counts[row] = made.setdefault(id(drafter), AcceptedCounts(drafter)).of(config)
    return counts


def verified_counts(trace: Trace, config: SpecConfig) -> NDArray[np.integer]:
    """Drafts [P] that the target scores in a step at each position."""
    if config.is_off:
        return np.zeros(trace.num_positions, np.uint8)
    drafter = trace.drafter_of(config)
    if drafter.drafted is not None:
        return np.minimum(drafter.drafted, config.num_steps)
    return np.full(trace.num_positions, config.num_draft_tokens - 1, np.uint16)
