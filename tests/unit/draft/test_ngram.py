"""Prompt lookup, every case by hand."""

from __future__ import annotations

import pytest
import torch

from spectune.draft.ngram import NgramDrafter, lookup
from spectune.engine.sampling import RowSampling
from spectune.errors import InfeasibleConfig
from spectune.records import SpecConfig
from tests.support.toys import CPU

NO_FEATURES = torch.empty(0)
NO_SAMPLING = RowSampling.of([], CPU)


@pytest.mark.parametrize(
    ("text", "num_tokens", "window_max", "window_min", "expected"),
    [
        pytest.param([1, 2, 3, 4, 1, 2], 2, 5, 1, [3, 4], id="pair-seen-before"),
        pytest.param([1, 2, 3, 4, 1, 2], 9, 5, 1, [3, 4, 1, 2], id="to-the-end-of-the-text"),
        pytest.param([9, 2, 7, 1, 2, 8, 1, 2], 1, 2, 1, [8], id="longer-match-wins"),
        pytest.param([9, 2, 7, 1, 2, 8, 1, 2], 1, 1, 1, [7], id="window-of-one-takes-the-earliest"),
        pytest.param([5, 1, 5, 2, 5], 1, 3, 1, [1], id="earliest-of-two"),
        pytest.param([1, 2, 3], 3, 5, 1, [], id="nothing-repeats"),
        pytest.param([1, 2, 3, 9, 3], 3, 5, 2, [], id="below-the-smallest-window"),
        pytest.param([4, 4, 4], 3, 5, 1, [4], id="overlap-with-the-tail"),
        pytest.param([7], 3, 5, 1, [], id="one-token"),
        pytest.param([7, 7], 3, 5, 1, [7], id="two-equal-tokens"),
        pytest.param([], 3, 5, 1, [], id="no-text"),
    ],
)
def test_lookup(
    text: list[int], num_tokens: int, window_max: int, window_min: int, expected: list[int]
) -> None:
    """The earliest earlier occurrence of the longest tail proposes what followed it."""
    assert expected == lookup(text, num_tokens, window_max, window_min)


def started(*texts: list[int]) -> NgramDrafter:
    drafter = NgramDrafter(CPU)
    for slot, text in enumerate(texts):
        drafter.start(slot, torch.tensor(text), NO_FEATURES)
    return drafter


def test_propose_ragged_rows_are_padded_as_invalid() -> None:
    """Rows find two, one and no drafts; each keeps its own root."""
    drafter = started([1, 2, 3, 1], [4, 4], [5, 6])

    tree = drafter.propose([0, 1, 2], SpecConfig.chain("ngram", 2), NO_SAMPLING)

    assert [[1, 2, 3], [4, 4, 0], [6, 0, 0]] == tree.tokens.tolist()
    assert [[True] * 3, [True, True, False], [True, False, False]] == tree.valid.tolist()
    assert tree.is_chain


def test_propose_without_any_match_is_the_root_alone() -> None:
    """A round in which nothing repeats is plain decoding."""
    tree = started([1, 2], [3]).propose([0, 1], SpecConfig.chain("ngram", 3), NO_SAMPLING)

    assert [[2], [3]] == tree.tokens.tolist()


def test_propose_asks_the_slots_in_the_given_order() -> None:
    """Rows are slots, not positions."""
    tree = started([1, 2, 1], [3, 4, 3]).propose([1, 0], SpecConfig.chain("ngram", 1), NO_SAMPLING)

    assert [[3, 4], [1, 2]] == tree.tokens.tolist()


def test_commit_extends_by_the_real_tokens_only() -> None:
    """Padding after a row's count is no text."""
    drafter = started([1, 2], [8, 9])

    drafter.commit([0, 1], torch.tensor([[1, 5], [8, 9]]), NO_FEATURES, torch.tensor([1, 2]))
    tree = drafter.propose([0, 1], SpecConfig.chain("ngram", 2), NO_SAMPLING)

    assert [[1, 2, 1], [9, 8, 9]] == tree.tokens.tolist()


def test_restarted_slot_has_forgotten_its_text() -> None:
    """A slot that is used again knows the new text only."""
    drafter = started([1, 2, 1])
    drafter.stop(0)
    drafter.start(0, torch.tensor([3, 1]), NO_FEATURES)

    assert [[1]] == drafter.propose([0], SpecConfig.chain("ngram", 2), NO_SAMPLING).tokens.tolist()


def test_window_options_of_a_config_are_used() -> None:
    """The windows of vLLM's options override the drafter's own."""
    drafter = started([9, 2, 7, 1, 2, 8, 1, 2])
    options = (("prompt_lookup_max", 1), ("prompt_lookup_min", 1))

    own = drafter.propose([0], SpecConfig.chain("ngram", 1), NO_SAMPLING)
    asked = drafter.propose([0], SpecConfig.chain("ngram", 1, options=options), NO_SAMPLING)

    assert ([[2, 8]], [[2, 7]]) == (own.tokens.tolist(), asked.tokens.tolist())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(
            SpecConfig(method="ngram", num_steps=3, topk=2, num_draft_tokens=5), "topk 2", id="tree"
        ),
        pytest.param(
            SpecConfig.chain("ngram", 3, options=(("prompt_lookup_max", 1), ("prompt_lookup_min", 2))),
            "window 2..1",
            id="empty-window",
        ),
    ],
)
def test_reserve_refuses_what_lookup_cannot_do(config: SpecConfig, words: str) -> None:
    """Trees and empty windows are named before anything runs."""
    with pytest.raises(InfeasibleConfig, match=words):
        NgramDrafter(CPU).reserve(1, 64, config)


def test_drafter_with_an_empty_window_is_refused() -> None:
    """The drafter's own windows are checked when it is made."""
    with pytest.raises(InfeasibleConfig, match=r"window 0\.\.5"):
        NgramDrafter(CPU, window_min=0)


def test_expand_is_the_proposed_chain_as_a_pool() -> None:
    """Traces see the same drafts; padding scores minus infinity."""
    pools = started([1, 2, 3, 1], [4, 4]).expand([0, 1], [1], 2)

    assert [[2, 3], [4, 0]] == pools[0].tokens.tolist()
    assert [[-1, 0]] * 2 == pools[0].parents.tolist()
    assert [[1, 2]] * 2 == pools[0].depths.tolist()
    assert [[0.0, 0.0], [0.0, float("-inf")]] == pools[0].log_scores.tolist()


def test_expand_refuses_trees() -> None:
    """A pool of more than one candidate a level is not lookup's."""
    with pytest.raises(InfeasibleConfig, match="topk"):
        started([1, 1]).expand([0], [1, 2], 2)
