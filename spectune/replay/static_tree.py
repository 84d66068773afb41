"""Static trees: the best shape of n nodes for measured per-rank acceptance, and its exact replay.

A static tree is a set of rank paths: (0,), (0, 0), (1,) drafts the best child, the best child of it and
the second child. Which path the text takes at each root is in the trace, so any such tree, and any slice
of the draft vocabulary, replays exactly for our drafter. The reference engine runs dynamic trees only:
these numbers are replayed, never run live.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spectune.errors import MetricMissing, UsageError
from spectune.replay.rounds import tokens_left, visited
from spectune.store.trace_file import ABSENT, DrafterTrace, Trace

RankPath = tuple[int, ...]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTree:
    """Drafted nodes as rank paths, parents before children, and what the measured ranks promise."""

    nodes: tuple[RankPath, ...]
    expected_accepted: float


def child_paths(trace: Trace, drafter: DrafterTrace, vocab_slice: int | None = None) -> NDArray[np.int64]:
    """[P, D]: rank of the text's token among its parent's children, ABSENT where it was not recorded.

    Raises MetricMissing for a drafter without children, UsageError for a slice that was not traced.
    """
    if drafter.child_ranks is None or drafter.child_length is None:
        raise MetricMissing(f"{drafter.method} was traced without child ranks", hint="only heads have them")
    size = drafter.vocab_slices[0] if vocab_slice is None else vocab_slice
    if size not in drafter.vocab_slices:
        known = ", ".join(map(str, drafter.vocab_slices))
        raise UsageError(f"a draft vocabulary of {size} was not traced, only {known}")
    paths = np.full((drafter.num_positions, drafter.max_steps), ABSENT, np.int64)
    stored = np.arange(drafter.max_steps) < drafter.child_length[:, None]
    paths[stored] = drafter.child_ranks[:, drafter.vocab_slices.index(size)]
    paths[np.cumsum(paths == ABSENT, 1) > 0] = ABSENT  # below a token that the slice lacks
    return paths


def rank_acceptance(
    trace: Trace, drafter: DrafterTrace, num_ranks: int, vocab_slice: int | None = None
) -> Floats:
    """[D, r]: share of parents on the text at depth d whose child of rank r is the text's token.

    Parents are the roots of all positions and the text's nodes below them as far as recorded; positions
    that the text ends at are left out.
    """
    paths, left = child_paths(trace, drafter, vocab_slice), tokens_left(trace)
    shares = np.zeros((drafter.max_steps, num_ranks))
    is_parent = np.ones(len(paths), np.bool_)
    for depth in range(drafter.max_steps):
        rank = paths[is_parent & (left > depth), depth]
        if len(rank):
            shares[depth] = np.bincount(rank[rank < num_ranks], minlength=num_ranks) / len(rank)
        is_parent &= paths[:, depth] < drafter.max_child_rank
    return shares


def best_static_tree(acceptance: Floats, num_draft_tokens: int) -> StaticTree:
    """The tree of N verified tokens, root included, with the most expected accepted drafts.

    `acceptance` [D, r] as of `rank_acceptance`. Sequoia's programme (Chen et al. 2024, algorithm 1) with
    one acceptance vector a depth: G[d, r, m] is the most that m nodes below a node of depth d can add
    with children of rank r and worse, G = max_j p[d, r] (1 + G[d+1, 0, j-1]) + G[d, r+1, m-j].
    """
    if num_draft_tokens < 2:
        raise UsageError(f"num-draft-tokens {num_draft_tokens}: a tree needs at least 2, the root included")
    depths, ranks = acceptance.shape
    most = num_draft_tokens - 1
    gain = np.zeros((depths + 1, ranks + 1, most + 1))
    spent = np.zeros((depths, ranks, most + 1), np.int64)
    for depth in range(depths - 1, -1, -1):
        for rank in range(ranks - 1, -1, -1):
            for budget in range(1, most + 1):
                subtree = acceptance[depth, rank] * (1 + gain[depth + 1, 0, :budget])
                values = np.concatenate([[0.0], subtree]) + gain[depth, rank + 1, budget::-1]
                spent[depth, rank, budget] = int(values.argmax())
                gain[depth, rank, budget] = values.max()
    nodes: list[RankPath] = []

    def build(path: RankPath, rank: int, budget: int) -> None:
        depth = len(path)
        if depth == depths or rank == ranks or budget == 0:
            return
        used = int(spent[depth, rank, budget])
        if used:
            nodes.append((*path, rank))
            build((*path, rank), 0, used - 1)
        build(path, rank + 1, budget - used)

    build((), 0, most)
    ordered = tuple(sorted(nodes, key=lambda path: (len(path), path)))
    return StaticTree(nodes=ordered, expected_accepted=float(gain[0, 0, most]))


def static_accepted(paths: NDArray[np.int64], nodes: tuple[RankPath, ...]) -> NDArray[np.uint8]:
    """Drafts [P] that a static tree accepts at each position; paths [P, D] as of `child_paths`.

    Raises UsageError for a node whose parent is missing.
    """
    index = {(): 0} | {path: number for number, path in enumerate(nodes, start=1)}
    if orphans := [path for path in nodes if path[:-1] not in index]:
        raise UsageError(f"the static tree holds {orphans[0]} without its parent")
    table = np.full((len(index), ABSENT + 1), -1)
    for path in nodes:
        table[index[path[:-1]], path[-1]] = index[path]
    at = np.zeros(len(paths), np.int64)
    counts = np.zeros(len(paths), np.uint8)
    for ranks in paths.T:
        at = np.where(at < 0, -1, table[at, ranks])
        counts += at >= 0
    return counts


def static_acceptance_length(
    trace: Trace, drafter: DrafterTrace, tree: StaticTree, vocab_slice: int | None = None
) -> float | None:
    """1 + accepted / steps of a static tree, over the steps that it would make; None without one."""
    counts = static_accepted(child_paths(trace, drafter, vocab_slice), tree.nodes)
    hits = visited(trace, counts[None])[0]
    return 1 + float(counts[hits].sum()) / int(hits.sum()) if hits.any() else None
