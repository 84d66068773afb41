"""The beam of one topk at all roots: where the text's nodes rank in it, and which cuts are near ties."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectune.engine.trace_path import OwnPath, TraceSpace

_OWN = 127  # branch of the text's own candidates: no rounding changes their order

TiedRows = tuple[NDArray[np.generic], ...]
"""(row, topk, num_steps, num_draft_tokens, margin), one entry a near tie."""


class Beam:
    """The beam of one topk at all roots: the ranks of the text's nodes, and what must still grow.

    Rows of `front` [R, F] point into the table of the level's nodes: row r < R is the own path node
    of root r, -1 is a node that need not be grown.
    """

    def __init__(self, topk: int, path: OwnPath, space: TraceSpace) -> None:
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

    def ties(self) -> list[TiedRows]:
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
