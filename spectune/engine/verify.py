"""Verification: how much of a draft the target keeps, without changing the target's distribution.

Sample-and-match (the default): the target draws its own token y at a node; if y is a child of the
node, descend, else emit y and stop. Lossless by construction for drafts that are a deterministic
function of the prefix. A child of probability q = 1 under the draft is right to be accepted with
p(x) and, when refused, to be left out of what is drawn next: that is what drawing y first does.

Residual (chains whose drafts were sampled from q): accept x with min(1, p(x)/q(x)); on refusal draw
from (p - q)+ and stop; all accepted: draw from p (Leviathan et al. 2023, Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectune.engine.sampling import RowSampling, gumbel, uniform, warp
from spectune.engine.tree import DraftTree, uses_kernels
from spectune.engine.uploads import is_remote, on_device

_REFUSAL_STREAM = 0x5851F42D4C957F2D


@dataclass(frozen=True, slots=True)
class Verdict:
    """num_accepted [B]; path [B, P]: node indices from the root, padded by its last node;
    next_tokens [B]: the target's own token after the accepted path.

    P is that of the longest path where the host knows it at once, all nodes of the tree on a device.
    """

    num_accepted: Tensor
    path: Tensor
    next_tokens: Tensor

    def cut(self, longest: int) -> Verdict:
        """The verdict whose longest path has `longest` nodes, without the padding beyond it."""
        return replace(self, path=self.path[:, :longest])


@dataclass(frozen=True, slots=True)
class ForcedAcceptance:
    """Accept a given mean number of drafts a step, whatever the target says: isolates cost.

    Not lossless; never part of a measurement that is reported as speed of a model.
    """

    mean_accepted: float

    def count(self, step: int, limit: int) -> int:
        """Drafts to accept in the given step of a request; the mean is met by error diffusion."""
        wanted = int((step + 1) * self.mean_accepted + 1e-9) - int(step * self.mean_accepted + 1e-9)
        return min(wanted, limit)


def match(tree: DraftTree, choices: Tensor) -> Verdict:
    """Descend from the root while the target's choice [B, N] at a node is one of its children."""
    if uses_kernels(tree.tokens):
        from spectune.engine.cpu import trees

        return Verdict(*trees.match(tree.tokens, tree.parents, tree.valid, choices))
    kept = tree.valid & (tree.tokens == choices.gather(1, tree.parents))  # [B, N]
    kept[:, 0] = True
    above = tree.parents  # [B, N]: 1, 2, 4 ... steps up
    for _ in range((tree.num_nodes - 1).bit_length()):
        kept = kept & kept.gather(1, above)
        above = above.gather(1, above)
    return _verdict(tree, kept, choices)


def _verdict(tree: DraftTree, kept: Tensor, choices: Tensor) -> Verdict:
    num_accepted = kept.sum(1) - 1
    width = tree.num_nodes if is_remote(kept) else int(num_accepted.max()) + 1
    depth_order = torch.where(kept, tree.depths, tree.num_nodes).sort(dim=1, stable=True).indices
    steps = torch.arange(width, device=kept.device).expand(kept.shape[0], -1)
    path = depth_order.gather(1, torch.minimum(steps, num_accepted.unsqueeze(1)))  # [B, P]
    last = path[:, -1:]
    return Verdict(num_accepted, path, choices.gather(1, last).squeeze(1))


def force(tree: DraftTree, choices: Tensor, counts: Sequence[int], vocab_size: int) -> Tensor:
    """Choices [B, N] changed so that row b accepts counts[b] drafts, down its first path so deep.

    A row without so deep a path accepts its deepest one. Nothing waits for the device.
    """
    num_nodes, device = tree.num_nodes, choices.device
    places = torch.arange(num_nodes, device=device)
    depths = torch.where(tree.valid, tree.depths, -1)
    wanted = torch.minimum(on_device(counts, device), depths.amax(1)).unsqueeze(1)
    last = torch.where(depths == wanted, places, num_nodes).amin(1, keepdim=True)  # [B, 1]
    path = tree.ancestors().gather(1, last.unsqueeze(2).expand(-1, -1, num_nodes)).squeeze(1)  # [B, N]
    # each node of the path is what its parent chooses; the others write to a column of no use
    column = torch.where(path & (places > 0), tree.parents, num_nodes)
    choices = torch.cat([choices, choices[:, :1]], 1).scatter(1, column, tree.tokens)[:, :num_nodes]
    # after the last one a token that none of its children is: fewer children than nodes, so one is free
    is_child = tree.valid & (tree.parents == last) & (places > 0)
    tried = (choices.gather(1, last) + places) % vocab_size  # [B, N]
    is_taken = ((tried.unsqueeze(2) == tree.tokens.unsqueeze(1)) & is_child.unsqueeze(1)).any(2)
    free = torch.where(is_taken, num_nodes, places).amin(1, keepdim=True)
    return choices.scatter(1, last, tried.gather(1, free))


def verify_residual(tree: DraftTree, logits: Tensor, rows: RowSampling, indices: Tensor) -> Verdict:
    """Chains with sampled drafts: tree.q [B, K, V] is what each draft was drawn from.

    Args:
        logits: [B, K+1, V] of the target at root and drafts.
        indices: [B, K+1] output index that the choice at each node would fill.
    """
    assert tree.is_chain, "residual verification is for chains"
    assert tree.q is not None, "residual verification needs what the drafts were drawn from"
    p = _probabilities(logits, rows)  # [B, K+1, V]
    drafts = tree.tokens[:, 1:]
    p_draft = p[:, :-1].gather(2, drafts.unsqueeze(2)).squeeze(2)  # [B, K]
    q_draft = tree.q.gather(2, drafts.unsqueeze(2)).squeeze(2)
    keys = rows.keys.unsqueeze(1).expand_as(indices)
    coins = uniform(keys ^ _REFUSAL_STREAM, indices, torch.zeros_like(indices))[:, :-1]
    # accept x with probability min(1, p/q); strict, so that p(x) = 0 is never accepted
    accepted = (coins * q_draft < p_draft) & tree.valid[:, 1:]
    kept = torch.cat([torch.ones_like(accepted[:, :1]), accepted.cumprod(1).bool()], 1)  # [B, K+1]
    # refused: draw from (p - q)+; nothing refused: draw from p
    refused_q = torch.cat([tree.q * tree.valid[:, 1:].unsqueeze(2), torch.zeros_like(p[:, :1])], 1)
    residual = (p - refused_q).clamp_min(0)
    empty = residual.sum(-1, keepdim=True) <= 0
    residual = torch.where(empty, p, residual)
    noise = gumbel(keys, indices, logits.shape[-1])
    return _verdict(tree, kept, (residual.log() + noise).argmax(-1))


def _probabilities(logits: Tensor, rows: RowSampling) -> Tensor:
    """What each row draws from [B, T, V]; rows at T = 0 put everything on their best token."""
    p = warp(logits, rows).softmax(-1)
    best = torch.zeros_like(p).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where((rows.temperature > 0).view(-1, 1, 1), p, best)
