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

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectune.store.trace_file import ABSENT, TiedCut

TIE_FLOOR = 1e-4
_OWN = 127  # branch of the text's own candidates: no rounding changes their order


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpace:
    """What a trace must be able to answer for.

    vocab_slices: sizes of the draft vocabulary whose child ranks are kept, the whole one first; a
    slice holds the lowest ids, which byte-pair vocabularies give to their most frequent pieces.
    """

    topks: tuple[int, ...]
    max_steps: int
    max_draft_tokens: int
    max_child_rank: int = 16
    vocab_slices: tuple[int, ...] = ()
    tie_floor: float = TIE_FLOOR


@dataclass(frozen=True, slots=True)
class Children:
    """What a drafter says after M nodes: its best W tokens, and the token that the text has there.

    scores, tokens: [M, W] log-probabilities, best first, and target ids. own: [M] log-probability of
    the text's token, -inf where it cannot be drafted. own_ranks: [M, S] its rank in each vocabulary
    slice, ABSENT at most. own_sampled: [M] log-probability at the row's temperature.
    """

    scores: Tensor
    tokens: Tensor
    own: Tensor
    own_ranks: Tensor
    own_sampled: Tensor


class RootsAlongText(Protocol):
    """A drafter at R roots of texts that are known; node ids of the roots are 0 .. R-1."""

    def roots(self, text_tokens: Tensor) -> Children:
        """What is proposed at the roots [R]; `text_tokens` are the text's own there, -1 past its end."""
        ...

    def grow(self, parents: Tensor, tokens: Tensor, text_tokens: Tensor) -> tuple[Tensor, Children]:
        """Nodes `tokens` [M] below `parents` [M], all of one level: their ids and their children."""
        ...


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
    path = _OwnPath.follow(head, text, space, wants_sampled=wants_sampled)
    beams = [_Beam(topk, path, space) for topk in space.topks]
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
    beams: list[_Beam],
    path: _OwnPath,
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


@dataclass(slots=True)
class _OwnPath:
    """The text's own nodes below each root, as far as any beam, slice or chain can follow them.

    scores [R, D] cumulative, steps [R, D] of one token, columns [R, D] among the parent's children (W
    where they are not), ranks [R, D, S], sampled [R, D]; ids[d], children[d]: nodes of depth d.
    """

    scores: Tensor
    steps: Tensor
    columns: Tensor
    ranks: Tensor
    sampled: Tensor
    ids: list[Tensor] = field(default_factory=list)
    children: list[Children] = field(default_factory=list)

    @classmethod
    def follow(
        cls, head: RootsAlongText, text: Tensor, space: TraceSpace, *, wants_sampled: bool
    ) -> _OwnPath:
        count, depths = text.shape
        device = text.device
        rows = torch.arange(count, device=device)
        ids, children = rows, head.roots(text[:, 0])
        width, slices = children.scores.shape[1], children.own_ranks.shape[1]
        nothing = torch.full((count, depths), float("-inf"), device=device)
        path = cls(
            nothing,
            nothing.clone(),
            torch.full((count, depths), width, device=device),
            torch.full((count, depths, slices), ABSENT, device=device),
            nothing.clone(),
        )
        before = torch.zeros(count, device=device)
        for depth in range(depths):
            path._keep(rows, ids, children, before, depth, text[rows, depth], count)
            if depth + 1 == depths:
                break
            is_near = path.ranks[rows, depth].amin(1) < space.max_child_rank
            goes_on = is_near | (path.columns[rows, depth] < width)
            if wants_sampled:
                goes_on |= path.sampled[rows, depth] > float("-inf")
            goes_on &= text[rows, depth + 1] >= 0
            rows, ids = rows[goes_on], ids[goes_on]
            before = path.scores[:, depth]
            if not len(rows):
                path._keep_nothing(depth + 1, depths, count)
                break
            ids, children = head.grow(ids, text[rows, depth], text[rows, depth + 1])
        return path

    def _keep(
        self,
        rows: Tensor,
        ids: Tensor,
        children: Children,
        before: Tensor,
        depth: int,
        tokens: Tensor,
        count: int,
    ) -> None:
        """Store what was said at the nodes of a depth, and where the text's next token stands in it."""
        width = children.scores.shape[1]
        is_own = children.tokens == tokens.unsqueeze(1)
        column = torch.where(is_own.any(1), is_own.int().argmax(1), width)
        self.scores[rows, depth] = children.own + before[rows]
        self.steps[rows, depth] = children.own
        self.columns[rows, depth] = column
        self.ranks[rows, depth] = children.own_ranks
        self.sampled[rows, depth] = children.own_sampled
        device = rows.device
        scores = torch.full((count, width), float("-inf"), device=device)
        all_tokens = torch.full((count, width), -1, device=device)
        all_ids = torch.full((count,), -1, device=device)
        scores[rows], all_tokens[rows], all_ids[rows] = children.scores, children.tokens, ids
        self.ids.append(all_ids)
        self.children.append(
            Children(scores, all_tokens, children.own, children.own_ranks, children.own_sampled)
        )

    def _keep_nothing(self, first: int, depths: int, count: int) -> None:
        empty = self.children[-1]
        blank = Children(
            torch.full_like(empty.scores, float("-inf")),
            torch.full_like(empty.tokens, -1),
            empty.own,
            empty.own_ranks,
            empty.own_sampled,
        )
        for _ in range(first, depths):
            self.ids.append(torch.full_like(self.ids[0], -1))
            self.children.append(blank)

    def child_ranks(self, limit: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Ranks down each text while a slice holds the token among its best `limit`."""
        is_near = self.ranks.amin(2) < limit
        length = is_near.int().cumprod(1).sum(1)
        keep = torch.arange(is_near.shape[1], device=is_near.device) < length.unsqueeze(1)
        ranks = self.ranks[keep].clamp_max(ABSENT)
        return length.cpu().numpy().astype(np.uint8), ranks.cpu().numpy().astype(np.uint8)


class _Beam:
    """The beam of one topk at all roots: the ranks of the text's nodes, and what must still grow.

    Rows of `front` [R, F] point into the table of the level's nodes: row r < R is the own path node
    of root r, -1 is a node that need not be grown.
    """

    def __init__(self, topk: int, path: _OwnPath, space: TraceSpace) -> None:
        self.topk, self._path, self._floor = topk, path, space.tie_floor
        count, depths = path.scores.shape
        device = path.scores.device
        # a chain verifies all it drafts
        self._never = depths if topk == 1 else space.max_draft_tokens - 1
        self._rows = torch.arange(count, device=device)
        self._reach = (path.columns < topk).int().cumprod(1).sum(1)  # text nodes that have a parent
        self._front = torch.where(self._reach > 0, self._rows, -1).unsqueeze(1)
        self._front_scores = torch.zeros(count, 1, device=device)
        self._front_branch = torch.zeros(count, 1, dtype=torch.int64, device=device)
        self._goes_on = self._reach > 0
        self._has_parent = torch.ones(count, dtype=torch.bool, device=device)
        self._own_row = torch.zeros(count, dtype=torch.int64, device=device)
        self._rank = torch.full((count, depths), self._never, device=device)
        self._ranks = torch.full((count, depths, depths), self._never, device=device)
        self.length = torch.zeros(count, dtype=torch.int64, device=device)
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._next = self._next_own = self._front
        self._tied: list[tuple[Tensor, ...]] = []  # (row, text depth, from level, is above, gap)
        self._cuts: list[tuple[Tensor, int, Tensor]] = []  # (row, from num_steps, gap)

    def take(self, depth: int, table: Tensor) -> None:
        """Take in the candidates of a level, children [L, W] of the frontier, and cut the next one."""
        k, path = self.topk, self._path
        children = table[self._front.clamp_min(0)][:, :, :k] + self._front_scores.unsqueeze(2)
        children = children.masked_fill((self._front < 0).unsqueeze(2), float("-inf"))
        scores = children.flatten(1)  # [R, F·k]
        column = path.columns[:, depth - 1]
        is_there = self._goes_on & (column < k)
        own = self._own_row * k + column.clamp_max(k - 1)
        branch = self._front_branch.repeat_interleave(k, 1)
        branch[self._rows[is_there], own[is_there]] = _OWN
        self._note_own_cut(depth)
        self._count(depth, scores, branch, is_there, own)
        self._seen.append((scores, branch))
        if depth < path.scores.shape[1]:
            self._cut(depth, table, scores, branch, own)

    def _count(self, depth: int, scores: Tensor, branch: Tensor, is_there: Tensor, own: Tensor) -> None:
        """Ranks of the text's nodes among all candidates down to `depth`."""
        text = self._path.scores[:, :depth].unsqueeze(2)  # [R, depth, 1]
        ahead = (scores.unsqueeze(1) > text).sum(2)  # a deeper candidate stands behind its equals
        last = text[:, -1]
        order = torch.arange(scores.shape[1], device=scores.device)
        ahead[:, -1] += ((scores == last) & (order < own.unsqueeze(1))).sum(1)
        for above, _ in self._seen:
            ahead[:, -1] += (above >= last).sum(1)
        self._rank[:, : depth - 1] += ahead[:, :-1]
        self._rank[:, depth - 1] = torch.where(is_there, ahead[:, -1], self._never)
        self._rank.clamp_max_(self._never)
        self._ranks[:, :depth, depth - 1] = self._rank[:, :depth]
        is_new = is_there & (self._rank[:, depth - 1] < self._never)
        self._note_ties(depth, scores, branch, is_there)
        self.length = torch.where(is_new, depth, self.length)
        self._goes_on = is_new

    def _cut(self, depth: int, table: Tensor, scores: Tensor, branch: Tensor, own: Tensor) -> None:
        """The best k candidates are the next frontier; keep of them what can still matter."""
        k = self.topk
        best = scores.topk(min(k + 1, scores.shape[1]), sorted=True)
        front_scores, index = best.values[:, :k], best.indices[:, :k]
        is_own = (index == own.unsqueeze(1)) & self._goes_on.unsqueeze(1)
        self._has_parent = is_own.any(1)
        self._own_row = is_own.int().argmax(1)
        self._goes_on = self._has_parent & (self._reach > depth)
        floor = self._lowest_that_matters(depth)
        keep = (front_scores > floor.unsqueeze(1)) & ~is_own
        parents = self._front.gather(1, index // k)
        columns = index % k
        self._note_cuts(depth, table, best.values, floor, keep, parents, columns)
        self._next = torch.where(keep, parents * table.shape[1] + columns, -1)
        self._next_own = is_own & self._goes_on.unsqueeze(1)
        self._front_scores = front_scores
        self._front_branch = torch.where(is_own, depth, branch.gather(1, index))

    def _lowest_that_matters(self, depth: int) -> Tensor:
        """Score [R] of the deepest text node that may still be selected; inf where there is none."""
        selectable = (self._rank[:, :depth] < self._never).sum(1)
        deepest = torch.where(self._goes_on, self._reach, selectable)
        score = self._path.scores.gather(1, (deepest - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        return torch.where(deepest > 0, score, float("inf"))

    @property
    def wanted(self) -> Tensor:
        """Keys [R, F] of the candidates to grow (parent row · W + column), -1 for the others."""
        return self._next

    def settle(self, keys: Tensor) -> None:
        """Turn the wanted keys into rows of the next table: own nodes first, then `keys` in order."""
        grown = len(self._rows) + torch.searchsorted(keys, self._next.clamp_min(0))
        front = torch.where(self._next >= 0, grown, -1)
        self._front = torch.where(self._next_own, self._rows.unsqueeze(1), front)

    def flat_ranks(self) -> NDArray[np.unsignedinteger]:
        """Ranks in the order root, text depth l, tree depth D >= l; nothing for chains."""
        kind = np.uint8 if self._never <= 255 else np.uint16
        if self.topk == 1:
            return np.zeros(0, kind)
        depths = torch.arange(self._ranks.shape[1], device=self._ranks.device)
        is_stored = (depths.unsqueeze(1) < self.length.view(-1, 1, 1)) & (
            depths >= depths.unsqueeze(1)
        ).unsqueeze(0)
        return self._ranks[is_stored].cpu().numpy().astype(kind)

    # Near ties: comparisons that another rounding may turn over.

    def _note_own_cut(self, depth: int) -> None:
        """The text's token against the k-th child of its parent."""
        k = self.topk
        step = self._path.steps[:, depth - 1]
        children = self._path.children[depth - 1].scores
        rival = torch.where(
            self._path.columns[:, depth - 1] < k,
            children[:, k] if children.shape[1] > k else float("-inf"),
            children[:, k - 1],
        )
        gap = (step - rival).abs()
        self._add_cut(self._has_parent & (gap < self._floor), depth, gap)

    def _note_cuts(
        self,
        depth: int,
        table: Tensor,
        best: Tensor,
        floor: Tensor,
        keep: Tensor,
        parents: Tensor,
        columns: Tensor,
    ) -> None:
        """The frontier's last against the first outside, and the last child of a node that grows."""
        k = self.topk
        if best.shape[1] > k:
            gap = best[:, k - 1] - best[:, k]
            matters = best[:, k - 1] > floor - self._floor
            self._add_cut(matters & (gap < self._floor), depth + 1, gap)
        if table.shape[1] > k:
            rows = table[parents.clamp_min(0)]
            gaps = (rows[:, :, k - 1] - rows[:, :, k]).masked_fill(~keep | (columns != k - 1), float("inf"))
            gap = gaps.amin(1)
            self._add_cut(gap < self._floor, depth + 1, gap)

    def _add_cut(self, is_tied: Tensor, steps: int, gap: Tensor) -> None:
        rows = is_tied.nonzero().flatten()
        if len(rows):
            self._cuts.append((rows, steps, gap[rows]))

    def _note_ties(self, depth: int, scores: Tensor, branch: Tensor, is_there: Tensor) -> None:
        """Candidates, not above or below it in the tree, that score like a node of the text."""
        text = self._path.scores
        for level in range(1, depth + 1):
            exists = is_there if level == depth else self.length >= level
            pairs = [(scores, branch), *(self._seen if level == depth else [])]
            for others, branches in pairs:
                gap = others - text[:, level - 1 : level]
                near = (gap.abs() < self._floor) & (branches < level) & exists.unsqueeze(1)
                rows, index = near.nonzero(as_tuple=True)
                if len(rows):
                    gaps = gap[rows, index]
                    at = torch.full_like(rows, level)
                    self._tied.append((rows, at, torch.full_like(rows, depth), gaps >= 0, gaps.abs()))

    def ties(self) -> list[tuple[NDArray[np.floating], ...]]:
        """(row, topk, num_steps, num_draft_tokens, margin) of every near tie."""
        found = []
        depths = self._ranks.shape[1]
        for rows, steps, gap in self._cuts:
            found.append((rows, torch.full_like(rows, steps), torch.zeros_like(rows), gap))
        for rows, at, first, is_above, gap in self._tied:
            for steps in range(1, depths + 1):
                use = first <= steps
                rank = self._ranks[rows[use], at[use] - 1, steps - 1]
                nodes = rank + torch.where(is_above[use], 1, 2)
                inside = nodes <= self._never + 1
                found.append(
                    (rows[use][inside], torch.full_like(rank, steps)[inside], nodes[inside], gap[use][inside])
                )
        return [
            (r.cpu().numpy(), np.full(len(r), self.topk), *(v.cpu().numpy() for v in (s, n, g)))
            for r, s, n, g in found
        ]


def _joined(lists: list[list[tuple[NDArray[np.floating], ...]]]) -> TiedCut:
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
