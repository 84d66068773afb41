"""Loops over the nodes of draft trees: ancestors, the best candidates, the accepted path.

The tensors are those of `DraftTree` and `DraftPool`; engine/tree.py and engine/verify.py hold the plain
versions and what the names mean.
"""

import numpy as np
import torch
from torch import Tensor

from spectune.engine.cpu.jit import kernel


@kernel
def _ancestors(parents, mask):
    for b in range(parents.shape[0]):
        for node in range(parents.shape[1]):
            if node > 0:
                for above in range(node):
                    mask[b, node, above] = mask[b, parents[b, node], above]
            mask[b, node, node] = True


@kernel
def _match(tokens, parents, valid, choices, counts, path):
    """path [B, N]: the accepted nodes from the root, its last one repeated; counts [B] accepted drafts."""
    for b in range(tokens.shape[0]):
        node, depth = 0, 0
        path[b, 0] = 0
        for child in range(1, tokens.shape[1]):  # a child stands behind its parent
            is_next = valid[b, child] and parents[b, child] == node and tokens[b, child] == choices[b, node]
            if is_next:
                node = child
                depth += 1
                path[b, depth] = node
        counts[b] = depth
        for place in range(depth + 1, tokens.shape[1]):
            path[b, place] = node


@kernel
def _select(scores, order, place):
    """The len(order) best candidates of one row, ties to the lower index, in index order; `place` maps
    a pool index to its node (0 where it was not chosen)."""
    num = order.shape[0]
    ranked = np.argsort(-scores, kind="mergesort")
    for i in range(num):
        place[ranked[i]] = 1
    node = 0
    for i in range(scores.shape[0]):
        if place[i] > 0:
            order[node] = i
            node += 1
            place[i] = node


@kernel
def _rerank(
    pool_tokens, pool_parents, pool_depths, pool_scores, roots, order, place, tokens, parents, depths, scores
):
    for b in range(roots.shape[0]):
        place[:] = 0
        _select(pool_scores[b], order, place)
        tokens[b, 0], parents[b, 0], depths[b, 0], scores[b, 0] = roots[b], 0, 0, 0.0
        for i in range(order.shape[0]):
            source = order[i]
            above = pool_parents[b, source]
            tokens[b, i + 1] = pool_tokens[b, source]
            parents[b, i + 1] = place[above] if above >= 0 else 0
            depths[b, i + 1] = pool_depths[b, source]
            scores[b, i + 1] = pool_scores[b, source]


def ancestors(parents: Tensor) -> Tensor:
    """[B, N, N] bool of parents [B, N]."""
    batch, num_nodes = parents.shape
    mask = torch.zeros(batch, num_nodes, num_nodes, dtype=torch.bool)
    _ancestors(parents.contiguous().numpy(), mask.numpy())
    return mask


def match(tokens: Tensor, parents: Tensor, valid: Tensor, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted drafts [B], their path [B, P] and the token after it [B]; all arguments [B, N]."""
    counts = torch.empty(tokens.shape[0], dtype=torch.int64)
    path = torch.empty(tokens.shape, dtype=torch.int64)
    arrays = [tensor.contiguous().numpy() for tensor in (tokens, parents, valid, choices)]
    _match(*arrays, counts.numpy(), path.numpy())
    path = path[:, : int(counts.max()) + 1]
    return counts, path, choices.gather(1, path[:, -1:]).squeeze(1)


def rerank(pool: tuple[Tensor, Tensor, Tensor, Tensor], roots: Tensor, keep: int) -> tuple[Tensor, ...]:
    """tokens, parents, depths, log_scores [B, keep + 1] of a pool's tokens, parents, depths, log_scores."""
    shape = (roots.shape[0], keep + 1)
    out = [torch.empty(shape, dtype=torch.int64) for _ in range(3)] + [torch.empty(shape)]
    size = pool[0].shape[1]
    arrays = [tensor.contiguous().numpy() for tensor in pool]
    order, place = np.empty(keep, dtype=np.int64), np.empty(size, dtype=np.int64)
    _rerank(*arrays, roots.contiguous().numpy(), order, place, *(tensor.numpy() for tensor in out))
    return tuple(out)
