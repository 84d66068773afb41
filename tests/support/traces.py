"""Traces made by hand, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spectune.store.trace_file import DrafterTrace, TiedCut, Trace


def chain_drafter(path: Sequence[int], *, max_steps: int = 8, **changes: Any) -> DrafterTrace:
    """A drafter of chains whose path has the given length at each position."""
    fields: dict[str, Any] = {
        "method": "eagle3",
        "draft_model": "toy",
        "options": (),
        "topks": (1,),
        "max_steps": max_steps,
        "max_draft_tokens": max_steps + 1,
        "path": np.array(path, np.uint8).reshape(-1, 1),
        "ranks": (np.zeros(0, np.uint8),),
        "ties": TiedCut.none(),
    }
    return DrafterTrace(**(fields | changes))


def tree_drafter(
    ranks: Sequence[Sequence[Sequence[int]]], *, topk: int = 2, max_steps: int = 2, max_draft_tokens: int = 8
) -> DrafterTrace:
    """A drafter of one topk; ranks[position][l][D - l] of the text's node at depth l+1."""
    flat = [rank for position in ranks for node in position for rank in node]
    return chain_drafter(
        [len(position) for position in ranks],
        max_steps=max_steps,
        topks=(topk,),
        max_draft_tokens=max_draft_tokens,
        ranks=(np.array(flat, np.uint8),),
    )


def toy_trace(num_outputs: Sequence[int], *drafters: DrafterTrace, **changes: Any) -> Trace:
    """Requests of the given output lengths, alternately of category a and b."""
    count = len(num_outputs)
    fields: dict[str, Any] = {
        "fingerprint": {"target": "toy"},
        "workload": {},
        "sampling": {},
        "provenance": {},
        "request_ids": tuple(f"r{i}" for i in range(count)),
        "categories": tuple("ab"[i % 2] for i in range(count)),
        "finish_reasons": ("length",) * count,
        "num_prompt_tokens": np.full(count, 10, np.int32),
        "num_outputs": np.array(num_outputs, np.int32),
        "output_ids": np.zeros(sum(num_outputs), np.uint16),
    }
    return Trace(**(fields | changes), drafters=drafters)


def random_trace(seed: int, num_outputs: Sequence[int], *, topks: Sequence[int] = (1, 2, 4)) -> Trace:
    """A trace of random paths and ranks: any numbers that obey the order of a real one."""
    rng = np.random.default_rng(seed)
    depth, limit = 5, 16
    left = np.concatenate([np.arange(n - 1, 0, -1) for n in num_outputs])
    path = np.minimum(rng.geometric(0.5, (len(left), len(topks))) - 1, np.minimum(depth, left)[:, None])
    ranks = []
    for column, topk in enumerate(topks):
        flat: list[int] = []
        for length in path[:, column] if topk > 1 else ():
            row = np.full(depth + 1, -1)
            for level in range(int(length)):
                # behind the node above it at every depth, and pushed back by deeper candidates
                row = row[1:] + 1 + np.cumsum(rng.integers(0, 3, depth - level))
                flat.extend(np.minimum(row, limit - 1).tolist())
        ranks.append(np.array(flat, np.uint8))
    drafter = replace(
        chain_drafter([], max_steps=depth, topks=tuple(topks), max_draft_tokens=limit),
        path=path.astype(np.uint8),
        ranks=tuple(ranks),
    )
    return toy_trace(num_outputs, drafter)
