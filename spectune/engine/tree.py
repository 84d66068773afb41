"""The nouns of a draft: what a drafter proposes and what the target then scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectune.engine.cpu.build import can_compile


def uses_kernels(tensor: Tensor) -> bool:
    """Whether loops over nodes run compiled: on CPUs that have the fast twin."""
    return tensor.device.type == "cpu" and can_compile(torch.float32)


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One draft tree a row; node 0 is the root, the last token already emitted.

    tokens, parents, depths, log_scores, valid: [B, N]; a parent's index is below its child's, the
    root is its own parent. Rows with fewer drafts are padded with invalid nodes.
    q: [B, N, V] draft distribution of each node's token given its parent, only where drafts were
    sampled from it (chains).
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_scores: Tensor
    valid: Tensor
    num_drafted: int | None = None  # candidates drafted for each row; None: the valid nodes
    q: Tensor | None = None
    is_chain: bool = False

    @property
    def num_nodes(self) -> int:
        return int(self.tokens.shape[1])

    def ancestors(self) -> Tensor:
        """[B, N, N] bool: node j is node i or above it. None is needed for a chain."""
        if uses_kernels(self.parents):
            from spectune.engine.cpu import trees

            return trees.ancestors(self.parents)
        batch, num_nodes = self.tokens.shape
        mask = torch.eye(num_nodes, dtype=torch.bool, device=self.tokens.device).repeat(batch, 1, 1)
        above = self.parents  # [B, N]: 1, 2, 4 ... steps up
        for _ in range((num_nodes - 1).bit_length()):
            mask = mask | mask.gather(1, above.unsqueeze(2).expand(-1, -1, num_nodes))
            above = above.gather(1, above)
        return mask

    @classmethod
    def root_only(cls, roots: Tensor) -> DraftTree:
        """Plain decoding as a tree of one node; roots [B]."""
        tokens = roots.unsqueeze(1)
        zeros = torch.zeros_like(tokens)
        return cls(
            tokens=tokens,
            parents=zeros,
            depths=zeros,
            log_scores=torch.zeros_like(tokens, dtype=torch.float32),
            valid=torch.ones_like(tokens, dtype=torch.bool),
            is_chain=True,
        )

    @classmethod
    def chain(
        cls, roots: Tensor, drafts: Tensor, log_scores: Tensor, valid: Tensor, q: Tensor | None = None
    ) -> DraftTree:
        """A chain from roots [B] and drafts, log_scores, valid [B, K]."""
        batch, length = drafts.shape
        steps = torch.arange(length + 1, device=roots.device).expand(batch, -1)
        return cls(
            tokens=torch.cat([roots.unsqueeze(1), drafts], 1),
            parents=(steps - 1).clamp_min(0),
            depths=steps,
            log_scores=torch.cat([torch.zeros_like(log_scores[:, :1]), log_scores], 1),
            valid=torch.cat([torch.ones_like(valid[:, :1]), valid], 1),
            q=q,
            is_chain=True,
        )


@dataclass(frozen=True, slots=True)
class DraftPool:
    """All candidates of one expansion with a fixed topk: [B, P], level by level.

    Level 1 holds topk candidates, each deeper one topk². `parents` are pool indices, -1 for the
    root. At equal topk a smaller depth is a prefix of a deeper pool.
    """

    topk: int
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_scores: Tensor


def rerank(pool: DraftPool, roots: Tensor, num_draft_tokens: int) -> DraftTree:
    """The N-1 best candidates by path score, ties to the shallower, as a tree (EAGLE-2, section 4).

    A child never scores above its parent and stands behind it in the pool, so the selection is
    connected.
    """
    keep = num_draft_tokens - 1
    if uses_kernels(pool.parents):
        from spectune.engine.cpu import trees

        found = (pool.tokens, pool.parents, pool.depths, pool.log_scores)
        tokens, chosen, depths, log_scores = trees.rerank(found, roots, keep)
        return DraftTree(
            tokens=tokens,
            parents=chosen,
            depths=depths,
            log_scores=log_scores,
            valid=torch.ones(roots.shape[0], num_draft_tokens, dtype=torch.bool),
            num_drafted=pool.tokens.shape[1],
            is_chain=pool.topk == 1,
        )
    order = pool.log_scores.sort(dim=1, descending=True, stable=True).indices[:, :keep]
    chosen = order.sort(1).values  # [B, N-1], parents first
    parents = pool.parents.gather(1, chosen)
    position = torch.searchsorted(chosen, parents.clamp_min(0).contiguous()) + 1
    position = torch.where(parents < 0, 0, position)

    def with_root(values: Tensor, root: Tensor) -> Tensor:
        return torch.cat([root.unsqueeze(1).to(values.dtype), values.gather(1, chosen)], 1)

    zeros = torch.zeros_like(roots)
    return DraftTree(
        tokens=with_root(pool.tokens, roots),
        parents=torch.cat([zeros.unsqueeze(1), position], 1),
        depths=with_root(pool.depths, zeros),
        log_scores=with_root(pool.log_scores, zeros),
        valid=torch.ones(roots.shape[0], num_draft_tokens, dtype=torch.bool, device=roots.device),
        num_drafted=pool.tokens.shape[1],
        is_chain=pool.topk == 1,
    )
