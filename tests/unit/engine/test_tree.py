"""Draft trees: chains, rerank over a pool and ancestors, checked by hand and over random pools."""

from __future__ import annotations

import itertools

import pytest
import torch

from spectune.engine.tree import DraftPool, DraftTree, rerank
from spectune.errors import InfeasibleConfig
from spectune.records import SpecConfig, chain_or_tree_pool


def random_pool(
    topk: int, depth: int, seed: int, *, batch: int = 2, rounding: float | None = None
) -> DraftPool:
    """A pool as a beam grows it: scores are sums of log-probabilities <= 0, frontiers the best topk.

    `rounding` coarsens the scores so that many are tied.
    """
    generator = torch.Generator().manual_seed(seed)

    def steps(count: int) -> torch.Tensor:
        drawn = -torch.rand(batch, count, generator=generator) * 2
        return drawn if rounding is None else (drawn / rounding).round() * rounding

    scores = [steps(topk)]
    parents = [torch.full((batch, topk), -1)]
    offset = 0
    for _ in range(2, depth + 1):
        best = scores[-1].topk(topk).indices
        frontier = scores[-1].gather(1, best)
        parents.append((best + offset).repeat_interleave(topk, 1))
        offset += scores[-1].shape[1]
        scores.append(frontier.repeat_interleave(topk, 1) + steps(topk * topk))
    depths = [torch.full_like(p, level + 1) for level, p in enumerate(parents)]
    log_scores = torch.cat(scores, 1)
    tokens = torch.arange(log_scores.shape[1]).expand(batch, -1) + 100
    return DraftPool(topk, tokens, torch.cat(parents, 1), torch.cat(depths, 1), log_scores)


def prefix(pool: DraftPool, depth: int) -> DraftPool:
    """The pool of the same beam grown to a smaller depth."""
    size = chain_or_tree_pool(depth, pool.topk)
    return DraftPool(
        pool.topk,
        pool.tokens[:, :size],
        pool.parents[:, :size],
        pool.depths[:, :size],
        pool.log_scores[:, :size],
    )


def paths(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """The texts that a row's nodes stand for, the root left out."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    texts: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        texts.append((*texts[parents[node]], tokens[node]))
    return set(texts[1:])


ROOTS = torch.tensor([7, 8])
SHAPES = [(2, 3), (4, 3), (3, 5), (8, 2)]
EACH_POOL = pytest.mark.parametrize(("topk", "depth"), SHAPES, ids=lambda value: str(value))
EACH_ROUNDING = pytest.mark.parametrize("rounding", [None, 0.5], ids=["distinct", "tied"])


def test_chain_has_parents_and_depths_in_order() -> None:
    """Node i of a chain follows node i - 1 at depth i."""
    drafts = torch.tensor([[4, 5], [6, 0]])
    valid = torch.tensor([[True, True], [True, False]])

    chain = DraftTree.chain(ROOTS, drafts, torch.tensor([[-0.1, -0.3], [-0.2, 0.0]]), valid)

    assert [[7, 4, 5], [8, 6, 0]] == chain.tokens.tolist()
    assert [[0, 0, 1]] * 2 == chain.parents.tolist()
    assert [[0, 1, 2]] * 2 == chain.depths.tolist()
    assert [[True, True, True], [True, True, False]] == chain.valid.tolist()
    assert chain.is_chain


def test_root_only_is_a_chain_of_no_drafts() -> None:
    """Plain decoding verifies one node a row."""
    tree = DraftTree.root_only(ROOTS)

    assert (1, [[7], [8]], True) == (tree.num_nodes, tree.tokens.tolist(), tree.is_chain)


def test_ancestors_of_a_small_tree_are_those_by_hand() -> None:
    """Each row of the mask marks the node itself and the nodes above it."""
    # row 0: 0 -> 1, 2; 1 -> 3; 3 -> 4.  row 1: 0 -> 1, 2, 3; 2 -> 4
    parents = torch.tensor([[0, 0, 0, 1, 3], [0, 0, 0, 0, 2]])
    tree = DraftTree(parents, parents, parents, parents.float(), parents >= 0)

    by_hand = [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 1, 0, 1]],
    ]
    assert by_hand == tree.ancestors().int().tolist()


def test_rerank_small_pool_is_told_by_hand() -> None:
    """The best nodes of all levels are kept, in pool order, with parents counted among the kept."""
    # level 1: a -0.1, b -1.0; level 2 under a: c -0.2, d -2.0; under b: e -1.1, f -3.0
    pool = DraftPool(
        topk=2,
        tokens=torch.tensor([[10, 11, 12, 13, 14, 15]]),
        parents=torch.tensor([[-1, -1, 0, 0, 1, 1]]),
        depths=torch.tensor([[1, 1, 2, 2, 2, 2]]),
        log_scores=torch.tensor([[-0.1, -1.0, -0.2, -2.0, -1.1, -3.0]]),
    )

    tree = rerank(pool, torch.tensor([9]), 5)

    assert [[9, 10, 11, 12, 14]] == tree.tokens.tolist()
    assert [[0, 0, 0, 1, 2]] == tree.parents.tolist()
    assert [[0, 1, 1, 2, 2]] == tree.depths.tolist()
    assert [0.0, -0.1, -1.0, -0.2, -1.1] == pytest.approx(tree.log_scores[0].tolist())


def test_rerank_tie_goes_to_the_shallower_node() -> None:
    """A child that is certain (log-probability 0) never displaces its parent or another row's elder."""
    pool = DraftPool(
        topk=2,
        tokens=torch.tensor([[10, 11, 12, 13, 14, 15]]),
        parents=torch.tensor([[-1, -1, 0, 0, 1, 1]]),
        depths=torch.tensor([[1, 1, 2, 2, 2, 2]]),
        log_scores=torch.tensor([[-0.5, -0.5, -0.5, -9.0, -0.5, -9.0]]),
    )

    kept = [rerank(pool, torch.tensor([9]), size).tokens[0, 1:].tolist() for size in (2, 3, 4, 5)]

    assert [[10], [10, 11], [10, 11, 12], [10, 11, 12, 14]] == kept


@EACH_ROUNDING
@EACH_POOL
def test_rerank_selection_is_connected(topk: int, depth: int, rounding: float | None) -> None:
    """Every kept node's parent is kept, stands before it and lies one level above, also under ties."""
    for seed in range(10):
        pool = random_pool(topk, depth, seed, rounding=rounding)
        for size in range(2, chain_or_tree_pool(depth, topk) + 2):
            tree = rerank(pool, ROOTS, size)
            above = tree.depths.gather(1, tree.parents)

            assert bool((tree.parents[:, 1:] < torch.arange(1, size)).all())
            assert torch.equal(above[:, 1:] + 1, tree.depths[:, 1:])


@EACH_ROUNDING
@EACH_POOL
def test_rerank_selections_are_nested_in_size(topk: int, depth: int, rounding: float | None) -> None:
    """A larger N keeps all that a smaller N kept."""
    pool = random_pool(topk, depth, 3, rounding=rounding)
    sizes = range(2, chain_or_tree_pool(depth, topk) + 2)

    kept = [paths(rerank(pool, ROOTS, size), row=1) for size in sizes]

    assert all(small < large for small, large in itertools.pairwise(kept))


@EACH_POOL
def test_pools_are_nested_in_depth(topk: int, depth: int) -> None:
    """What a deeper tree keeps of its upper levels, the shallower tree of equal N keeps too."""
    pool = random_pool(topk, depth, 4)
    size = min(6, chain_or_tree_pool(depth - 1, topk) + 1)

    deep = paths(rerank(pool, ROOTS, size), row=0)
    shallow = paths(rerank(prefix(pool, depth - 1), ROOTS, size), row=0)

    assert {path for path in deep if len(path) < depth} <= shallow


def test_rerank_whole_pool_keeps_every_candidate() -> None:
    """N - 1 equal to the pool drops nothing."""
    pool = random_pool(3, 2, 5)

    tree = rerank(pool, ROOTS, 13)

    assert pool.tokens.tolist() == tree.tokens[:, 1:].tolist()


def test_rerank_of_topk_one_is_the_chain() -> None:
    """At topk 1 the tree is a chain and needs no mask."""
    tree = rerank(random_pool(1, 4, 6), ROOTS, 5)

    assert tree.is_chain
    assert [[0, 0, 1, 2, 3]] * 2 == tree.parents.tolist()


@pytest.mark.parametrize(
    ("num_steps", "topk", "num_draft_tokens", "words"),
    [
        pytest.param(3, 1, 5, "a chain of 3 verifies 4 tokens", id="chain-with-another-n"),
        pytest.param(2, 2, 8, "needs 7 drafted nodes, but num-tokens 2 with topk 2 drafts 6", id="pool"),
        pytest.param(1, 4, 6, "drafts 4", id="one-level"),
        pytest.param(0, 1, 2, "need at least", id="no-steps"),
        pytest.param(3, 0, 4, "need at least", id="no-children"),
        pytest.param(3, 2, 1, "need at least", id="root-only"),
    ],
)
def test_infeasible_tree_is_refused(num_steps: int, topk: int, num_draft_tokens: int, words: str) -> None:
    """A tree that cannot be built is named before anything runs."""
    with pytest.raises(InfeasibleConfig, match=words):
        SpecConfig(method="eagle3", num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)


def test_largest_feasible_tree_is_accepted() -> None:
    """N - 1 may equal topk + (D - 1) · topk²."""
    config = SpecConfig(method="eagle3", num_steps=2, topk=2, num_draft_tokens=7)

    assert (6, 2) == (chain_or_tree_pool(2, 2), config.max_accepted)
