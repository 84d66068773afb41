"""Expected steps of chains with sampled drafts: against enumeration of every draft and every text."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from spectune.errors import MetricMissing
from spectune.replay.sampled import expected_steps, sampled_chain
from tests.support.traces import chain_drafter, toy_trace

P = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.25, 0.25, 0.5]])  # target: next token given the last
Q = np.array([[0.3, 0.6, 0.1], [0.5, 0.5, 0.0], [0.2, 0.2, 0.6]])  # draft


@functools.cache
def live_steps(last: int, left: int, num_tokens: int) -> tuple[float, float]:
    """Expected (steps, accepted) of the p/q rule from a root, by going through all drafts and coins."""
    if left == 0:
        return 0.0, 0.0
    steps, accepted = 1.0, 0.0
    for drafts in itertools.product(range(3), repeat=num_tokens):
        chance, before = 1.0, last
        for draft in drafts:
            chance *= Q[before, draft]
            before = draft
        if chance == 0:
            continue
        alive, before = chance, last
        for count in range(num_tokens + 1):
            if count == left:  # the text is full: what follows is cut
                accepted += alive * left
                break
            p, q = P[before], Q[before]
            full = count == num_tokens
            keep = 0.0 if full else min(1.0, p[drafts[count]] / q[drafts[count]])
            rest = p if full else np.maximum(p - q, 0) / max(np.maximum(p - q, 0).sum(), 1e-300)
            stop = alive * (1 - keep)
            accepted += stop * count
            for token in range(3):
                more = live_steps(token, left - count - 1, num_tokens)
                steps += stop * rest[token] * more[0]
                accepted += stop * rest[token] * more[1]
            if full:
                break
            alive *= keep
            before = drafts[count]
    return steps, accepted


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_one_plain_sample_gives_the_expectation_of_live_sampled_speculation(num_tokens: int) -> None:
    """Averaged over all texts, the programme equals the enumeration of the speculative process."""
    left, root, depth = 4, 0, 3
    steps = accepted = 0.0
    for text in itertools.product(range(3), repeat=left):
        before = [root, *text[:-1]]
        chance = np.prod([P[a, b] for a, b in zip(before, text, strict=True)])
        ratio = [min(1.0, Q[a, b] / P[a, b]) for a, b in zip(before, text, strict=True)]
        table = np.zeros((left, depth))
        for position in range(left):
            row = ratio[position : position + depth]
            table[position, : len(row)] = row
        mine = expected_steps(table, num_tokens)
        steps, accepted = steps + chance * mine[0], accepted + chance * mine[1]

    assert live_steps(root, left, num_tokens) == pytest.approx((steps, accepted), abs=1e-12)


def test_sure_drafts_make_full_steps() -> None:
    """q = p: every draft is kept; 9 tokens in steps of 3 + 1 are 3 steps, the last one cut."""
    accept = np.ones((9, 3))
    for position in range(7, 9):
        accept[position, 9 - position :] = 0

    assert (3.0, 7.0) == expected_steps(accept, 3)


def test_a_greedy_trace_has_no_draft_probabilities() -> None:
    """Asking a greedy trace for sampled drafts names what to do."""
    with pytest.raises(MetricMissing, match="draft probabilities"):
        sampled_chain(toy_trace([3], chain_drafter([0, 1])), 2)


def test_requests_are_summed_before_the_ratio() -> None:
    """Two requests with certain and impossible drafts: (3 + 0) accepted in (1 + 4) steps."""
    sampled = np.zeros((8, 8), np.float16)
    sampled[0, :3] = 1
    chain = sampled_chain(toy_trace([5, 5], chain_drafter([0] * 8, sampled=sampled)), 3)

    assert [1.0, 4.0] == chain.num_steps.tolist()
    assert 1 + 3 / 5 == chain.acceptance_length
