"""Ranks of the target's own text among a drafter's candidates, for every topk, depth and node budget.

A configuration accepts, at a root, the nodes that spell the text and are in its tree. Which nodes of
the text are in the pool of a topk is decided by the beam; which of these are in the tree by how many
candidates of the pool stand before them. So candidates are grown for two questions only:

1. the text's own nodes, level by level: one chain a root, the same for every topk;
2. candidates that may stand before one of them. A child never scores above its parent, so below the
   deepest node of the text that can still be selected nothing needs growing.

Nodes of all roots and of all topks (a node of two beams once) go through the drafter together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectune.engine.trace_beam import Beam, TiedRows
from spectune.engine.trace_path import Children, OwnPath, RootsAlongText, TraceSpace
from spectune.store.trace_file import TiedCut


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """The columns of a DrafterTrace for R roots; `ties` count positions from the first root."""

    path: NDArray[np.uint8]
    ranks: tuple[NDArray[np.unsignedinteger], ...]
    ties: TiedCut
    child_length: NDArray[np.uint8]
    child_ranks: NDArray[np.uint8]
    sampled: NDArray[np.float32]  # [R, D] log q of the text's token at the row's temperature

    @classmethod
    def none(cls, space: TraceSpace, num_slices: int) -> RankRows:
        """Rows of no root."""
        kind = np.uint8 if space.max_draft_tokens <= 256 else np.uint16
        return cls(
            path=np.zeros((0, len(space.topks)), np.uint8),
            ranks=tuple(np.zeros(0, np.uint8 if k == 1 else kind) for k in space.topks),
            ties=TiedCut.none(),
            child_length=np.zeros(0, np.uint8),
            child_ranks=np.zeros((0, num_slices), np.uint8),
            sampled=np.zeros((0, space.max_steps), np.float32),
        )


def rank_rows(head: RootsAlongText, text: Tensor, space: TraceSpace, *, wants_sampled: bool) -> RankRows:
    """Ranks at R roots; text [R, D] are the target's tokens after each root, -1 past the end."""
    path = OwnPath.follow(head, text, space, wants_sampled=wants_sampled)
    beams = [Beam(topk, path, space) for topk in space.topks]
    parent_ids = torch.arange(len(text), device=text.device)
    table = path.children[0]
    for depth in range(1, space.max_steps + 1):
        for beam in beams:
            beam.take(depth, table.scores)
        if depth == space.max_steps:
            break
        parent_ids, table = _grow(head, beams, path, depth, parent_ids, table)
    ties = _joined([beam.ties() for beam in beams])
    child_length, child_ranks = path.child_ranks(space.max_child_rank)
    return RankRows(
        path=np.stack([beam.length.cpu().numpy() for beam in beams], 1).astype(np.uint8),
        ranks=tuple(beam.flat_ranks() for beam in beams),
        ties=ties,
        child_length=child_length,
        child_ranks=child_ranks,
        sampled=path.sampled.cpu().numpy(),
    )


def _grow(
    head: RootsAlongText,
    beams: list[Beam],
    path: OwnPath,
    depth: int,
    parent_ids: Tensor,
    table: Children,
) -> tuple[Tensor, Children]:
    """Grow the frontiers of all beams together; row r of the new table is root r's own path node."""
    width = table.scores.shape[1]
    wanted = torch.cat([beam.wanted.flatten() for beam in beams])
    keys = torch.unique(wanted[wanted >= 0])  # [U] parent row · W + column
    ids, children = path.ids[depth], path.children[depth]
    if len(keys):
        parents, columns = keys // width, keys % width
        tokens = table.tokens[parents, columns]
        new_ids, grown = head.grow(parent_ids[parents], tokens, torch.full_like(tokens, -1))
        ids = torch.cat([ids, new_ids])
        children = Children(
            torch.cat([children.scores, grown.scores]),
            torch.cat([children.tokens, grown.tokens]),
            children.own,
            children.own_ranks,
            children.own_sampled,
        )
    for beam in beams:
        beam.settle(keys)
    return ids, children


def _joined(lists: list[list[TiedRows]]) -> TiedCut:
    rows = [row for one in lists for row in one]
    if not rows:
        return TiedCut.none()
    position, topk, steps, nodes, margin = (np.concatenate(column) for column in zip(*rows, strict=True))
    order = np.lexsort((nodes, steps, topk, position))
    return TiedCut(
        position=position[order].astype(np.int32),
        topk=topk[order].astype(np.uint8),
        steps=steps[order].astype(np.uint8),
        nodes=nodes[order].astype(np.uint16),
        margin=margin[order].astype(np.float32),
    )
