"""Static trees: the optimal shape against all shapes, and their replay."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from spectune.errors import MetricMissing, UsageError
from spectune.replay.static_tree import (
    RankPath,
    best_static_tree,
    child_paths,
    rank_acceptance,
    static_acceptance_length,
    static_accepted,
)
from spectune.store.trace_file import ABSENT
from tests.support.traces import chain_drafter, toy_trace


def value(nodes: tuple[RankPath, ...], acceptance: np.ndarray) -> float:
    """Σ over nodes of the product of acceptances on their path."""
    return sum(float(np.prod([acceptance[d, r] for d, r in enumerate(path)])) for path in nodes)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_tree_is_the_best_of_all_trees(seed: int) -> None:
    """Depth 3, 2 children: no connected set of up to 6 nodes is worth more than the programme's."""
    acceptance = np.sort(np.random.default_rng(seed).random((3, 2)) / 2, 1)[:, ::-1]
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(2), repeat=depth)]
    for budget in range(1, 7):
        best = max(
            value(nodes, acceptance)
            for nodes in itertools.combinations(paths, budget)
            if all(len(p) == 1 or p[:-1] in nodes for p in nodes)
        )
        tree = best_static_tree(acceptance, budget + 1)

        assert best == pytest.approx(tree.expected_accepted)
        assert tree.expected_accepted == pytest.approx(value(tree.nodes, acceptance))
        assert len(tree.nodes) <= budget


def test_a_sure_first_child_gives_a_chain() -> None:
    """Rank 0 is always right: four nodes are a chain of four."""
    acceptance = np.tile([1.0, 0.0], (5, 1))

    assert ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)) == best_static_tree(acceptance, 5).nodes


def drafter(
    paths: list[list[int]], *, slices: tuple[int, ...] = (32,), sliced: list[list[int]] | None = None
):
    flat = [rank for path in paths for rank in path]
    columns = [flat] if sliced is None else [flat, [rank for path in sliced for rank in path]]
    return chain_drafter(
        [0] * len(paths),
        max_steps=3,
        vocab_slices=slices,
        max_child_rank=16,
        child_length=np.array([len(path) for path in paths], np.uint8),
        child_ranks=np.array(columns, np.uint8).T.reshape(-1, len(columns)),
    )


def test_a_static_tree_accepts_the_text_as_far_as_its_nodes_go() -> None:
    """Nodes 0, 1, 0-0: texts 0-0-0, 1-0, 0-1 and 2 keep 2, 1, 1 and 0 drafts."""
    nodes: tuple[RankPath, ...] = ((0,), (1,), (0, 0))
    paths = np.array([[0, 0, 0], [1, 0, ABSENT], [0, 1, ABSENT], [2, ABSENT, ABSENT]])

    assert [2, 1, 1, 0] == static_accepted(paths, nodes).tolist()


def test_a_node_without_its_parent_is_refused() -> None:
    """(0, 1) without (0,) is no tree."""
    with pytest.raises(UsageError, match="parent"):
        static_accepted(np.zeros((1, 2), np.int64), ((0, 1),))


def test_rank_shares_count_the_parents_that_the_text_reaches() -> None:
    """Depth 1 of four positions: ranks 0, 1, 0, none; depth 2 below three of them, one at the end."""
    traced = drafter([[0, 0], [1], [0], []])
    trace = toy_trace([5], traced)  # tokens left: 4, 3, 2, 1

    shares = rank_acceptance(trace, traced, 2)

    assert [0.5, 0.25] == shares[0].tolist()
    assert [1 / 3, 0.0] == pytest.approx(shares[1].tolist())


def test_acceptance_length_of_a_static_tree_is_over_its_own_steps() -> None:
    """A chain of two best children: 2 kept at position 0, then 0 at 3: 1 + 2/2."""
    traced = drafter([[0, 0, 0], [0, 0], [0], []])
    tree = best_static_tree(np.tile([1.0, 0.0], (3, 1)), 3)

    assert 2.0 == static_acceptance_length(toy_trace([5], traced), traced, tree)


def test_a_vocabulary_slice_has_its_own_ranks() -> None:
    """In the slice the text's token moves from rank 1 to 0, or is not there and ends the path."""
    traced = drafter([[1, 0], [0, 2]], slices=(32, 8), sliced=[[0, 0], [ABSENT, 1]])
    trace = toy_trace([3], traced)

    assert [[1, 0, ABSENT], [0, 2, ABSENT]] == child_paths(trace, traced).tolist()
    assert [[0, 0, ABSENT], [ABSENT] * 3] == child_paths(trace, traced, 8).tolist()
    with pytest.raises(UsageError, match="was not traced"):
        child_paths(trace, traced, 4)


def test_a_lookup_drafter_has_no_children() -> None:
    """n-gram traces hold no child ranks, and say so."""
    with pytest.raises(MetricMissing, match="child ranks"):
        child_paths(toy_trace([3], chain_drafter([0, 1])), chain_drafter([0, 1]))
