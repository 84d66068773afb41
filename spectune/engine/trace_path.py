"""The text's own nodes below each root, and the door to a drafter that runs along known texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spectune.store.trace_file import ABSENT

TIE_FLOOR = 1e-4


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


@dataclass(slots=True)
class OwnPath:
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
    def follow(cls, head: RootsAlongText, text: Tensor, space: TraceSpace, *, wants_sampled: bool) -> OwnPath:
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
