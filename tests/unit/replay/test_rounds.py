"""Hopping through a trace: the steps of every configuration, exactly as the engine would count them."""

from __future__ import annotations

import numpy as np
import pytest

from spectune.errors import UsageError
from spectune.records import SpecConfig
from spectune.replay.accepted import accepted_counts
from spectune.replay.rounds import by_category, by_context, by_request, replay, tied_positions, visited
from spectune.store.trace_file import TiedCut
from tests.support.traces import chain_drafter, random_trace, toy_trace, tree_drafter


def tree(num_steps: int, topk: int, num_draft_tokens: int) -> SpecConfig:
    return SpecConfig(method="eagle3", num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens)


def chain(num_tokens: int) -> SpecConfig:
    return SpecConfig.chain("eagle3", num_tokens)


SPACE = [
    SpecConfig.off(),
    *[chain(k) for k in range(1, 6)],
    *[
        tree(d, k, n)
        for d in range(1, 6)
        for k in (2, 4)
        for n in range(2, 17)
        if n - 1 <= k + (d - 1) * k * k
    ],
]


def test_a_chain_accepts_the_path_as_far_as_it_drafts() -> None:
    """accepted = min(K, length of the path): 0, 2 and 3 matching drafts under K = 2."""
    trace = toy_trace([7], chain_drafter([0, 2, 3, 1, 0, 1]))

    assert [0, 2, 2, 1, 0, 1] == accepted_counts(trace, [chain(2)])[0].tolist()


def test_a_tree_accepts_the_nodes_whose_rank_is_inside_the_budget() -> None:
    """Ranks at depth 1 and 2 of a tree: node 1 is 0th, then pushed to 1st; node 2 is 3rd."""
    # one position, two nodes: node 1 ranks [0 at D=1, 1 at D=2], node 2 ranks [3 at D=2]
    trace = toy_trace([3], tree_drafter([[[0, 1], [3]], []]))

    counts = accepted_counts(
        trace, [tree(1, 2, 2), tree(2, 2, 2), tree(2, 2, 3), tree(2, 2, 4), tree(2, 2, 5)]
    )

    assert [1, 0, 1, 1, 2] == counts[:, 0].tolist()


def test_steps_hop_over_what_was_accepted() -> None:
    """t -> t + accepted + 1: with 2, 0, 1 accepted at the positions it stands on."""
    trace = toy_trace([8], chain_drafter([2, 5, 5, 0, 1, 5, 0]))

    hits = visited(trace, accepted_counts(trace, [chain(8)]))[0]

    assert [True, False, False, True, True, False, True] == hits.tolist()


def test_plain_decoding_stands_everywhere_and_has_no_acceptance_length() -> None:
    """Off makes one step a token; nothing was proposed, so there is no acceptance length."""
    trace = toy_trace([5, 1, 3], chain_drafter([1, 0, 1, 0, 0, 0]))

    counts = replay(trace, [SpecConfig.off()])

    assert 6 == counts.num_steps[0, 0]
    assert counts.acceptance_length(0) is None
    assert () == counts.survival(0)


def test_acceptance_is_averaged_over_rounds_and_not_over_positions() -> None:
    """Path 3, 2, 1, 0 at four positions: one round of 3 accepted, not a mean of 1.5 over positions."""
    trace = toy_trace([5], chain_drafter([3, 2, 1, 0]))

    counts = replay(trace, [chain(3)])

    assert 1 == counts.num_steps[0, 0]
    assert 4.0 == counts.acceptance_length(0)


@pytest.mark.parametrize("seed", range(3))
def test_all_configurations_hop_as_one_at_a_time_in_plain_python(seed: int) -> None:
    """Steps, accepted, emitted and cut of every configuration and request equal a loop's."""
    lengths = [9, 1, 30, 2, 17]
    trace = random_trace(seed, lengths)

    counts = by_request(trace, SPACE)

    accepted = accepted_counts(trace, SPACE)
    for row, config in enumerate(SPACE):
        first = 0
        for request, outputs in enumerate(lengths):
            t, steps, kept, emitted, cut = 1, 0, 0, 0, 0
            while t < outputs:
                a, left = int(accepted[row, first + t - 1]), outputs - t
                steps, kept, emitted = steps + 1, kept + min(a, left), emitted + min(a + 1, left)
                cut += a + 1 > left
                t += a + 1
            first += max(0, outputs - 1)
            mine = (counts.num_steps, counts.num_accepted, counts.num_emitted, counts.num_cut)
            assert [steps, kept, emitted, cut] == [int(table[row, request]) for table in mine], config.label
            assert outputs == 1 + emitted


def test_survival_adds_up_to_acceptance_length() -> None:
    """Σ survival = acceptance length - 1, for chains and trees, where depth was not cut."""
    counts = replay(random_trace(5, [40, 60]), SPACE)

    for row, config in enumerate(SPACE[1:], start=1):
        length = counts.acceptance_length(row)
        assert length is not None
        assert config.max_accepted >= len(counts.survival(row))
        assert length - 1 == pytest.approx(sum(counts.survival(row)))


def test_groups_add_up_to_the_whole() -> None:
    """Categories and contexts split the same steps; pooled counts, never averaged rates."""
    trace = random_trace(2, [20, 9, 33, 12])

    whole = replay(trace, SPACE)

    for split in (by_category(trace, SPACE), by_context(trace, SPACE, [12, 20, 31])):
        assert (whole.num_steps[:, 0] == split.num_steps.sum(1)).all()
        assert (whole.num_accepted == split.pooled().num_accepted).all()
    assert ("< 12", "12..19", "20..30", ">= 31") == by_context(trace, SPACE, [12, 20, 31]).groups


def test_a_context_is_what_stands_before_the_draft() -> None:
    """Ten prompt tokens and the outputs so far: positions 1..4 have contexts 11..14."""
    trace = toy_trace([5], chain_drafter([0, 0, 0, 0]))

    assert [[2, 2]] == by_context(trace, [chain(1)], [13]).num_steps.tolist()


def test_a_drafter_that_finds_nothing_verifies_nothing() -> None:
    """Lookup drafts 0, 2 and 5 tokens: a chain of 3 verifies 0, 2, 3, and two of three steps draft."""
    drafter = chain_drafter(
        [0, 0, 0], method="ngram", draft_model=None, drafted=np.array([0, 2, 5], np.uint8)
    )
    trace = toy_trace([4], drafter)

    counts = replay(trace, [SpecConfig.chain("ngram", 3)])

    assert 5 == counts.num_verified[0, 0]
    assert 2 == counts.num_draft_steps[0, 0]
    assert 1.0 == counts.zero_accept_share(0)


def test_nothing_ever_drafted_has_no_acceptance_length() -> None:
    """An n-gram that never matched: None, not 1."""
    drafter = chain_drafter([0, 0], method="ngram", draft_model=None, drafted=np.zeros(2, np.uint8))

    counts = replay(toy_trace([3], drafter), [SpecConfig.chain("ngram", 3)])

    assert counts.acceptance_length(0) is None
    assert counts.zero_accept_share(0) is None


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (chain(9), "deeper"),
        (tree(2, 3, 4), "topk 3"),
        (tree(2, 2, 4), "topk 2"),
        (SpecConfig.chain("ngram", 2), "not traced"),
    ],
)
def test_what_was_not_traced_is_refused_by_name(config: SpecConfig, word: str) -> None:
    """A configuration outside the trace names what is missing, instead of an answer."""
    with pytest.raises(UsageError, match=word):
        replay(toy_trace([3], chain_drafter([0, 1])), [config])


def test_a_tie_concerns_the_configurations_that_it_decides() -> None:
    """A tie at a node budget concerns that budget; one at a beam every tree at least that deep."""
    ties = TiedCut(
        position=np.array([0, 1], np.int32),
        topk=np.array([2, 2], np.uint8),
        steps=np.array([2, 2], np.uint8),
        nodes=np.array([4, 0], np.uint16),
        margin=np.array([1e-6, 1e-6], np.float32),
    )
    base = tree_drafter([[], [], []], max_steps=3)
    trace = toy_trace(
        [4],
        chain_drafter([0, 0, 0], max_steps=3, topks=(2,), max_draft_tokens=8, ranks=base.ranks, ties=ties),
    )

    found = {(d, n): tied_positions(trace, tree(d, 2, n), 1e-5).tolist() for d, n in [(1, 3), (2, 4), (3, 4)]}

    assert {(1, 3): [], (2, 4): [0, 1], (3, 4): [1]} == found
    assert [] == tied_positions(trace, tree(2, 2, 4), 1e-7).tolist()
