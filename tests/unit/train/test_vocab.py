from __future__ import annotations

import pytest
import torch

from spectune.errors import CheckpointError
from spectune.train.vocab import build_vocab, count_tokens, map_problem


def test_build_vocab_keeps_frequent_and_forced_tokens() -> None:
    """Tokens 7 and 3 are frequent and 1 is forced; offsets map drafts 0, 1, 2 to 1, 3, 7."""
    counts = count_tokens([[7, 7, 7, 3], [3, 5]], 9)

    vocab = build_vocab(counts, 3, forced=[1])

    assert vocab.d2t.tolist() == [1, 2, 5]
    assert vocab.target_ids.tolist() == [1, 3, 7]
    assert vocab.t2d.nonzero().flatten().tolist() == [1, 3, 7]
    assert vocab.coverage == pytest.approx(5 / 6)


def test_build_vocab_few_distinct_tokens_pads_with_lowest_ids() -> None:
    """With one distinct token and room for three, the lowest unused ids fill up."""
    assert build_vocab(count_tokens([[6, 6]], 8), 3).target_ids.tolist() == [0, 1, 6]


@pytest.mark.parametrize(
    ("d2t", "kept", "phrase"),
    [
        ([1, 3, 7], [1, 3, 7], "leaves"),
        ([0, 0, -1], [0, 1], "rise"),
        ([0, 0, 0], [0, 1, 4], "differ"),
    ],
    ids=["absolute-ids", "not-rising", "other-ids-marked"],
)
def test_map_problem_names_the_broken_rule(d2t: list[int], kept: list[int], phrase: str) -> None:
    """A map of absolute ids, one that does not rise and one that disagrees with t2d are refused."""
    t2d = torch.zeros(8, dtype=torch.bool)
    t2d[kept] = True

    problem = map_problem(torch.tensor(d2t), t2d)

    assert problem is not None
    assert phrase in problem


def test_build_vocab_too_large_is_refused_with_both_numbers() -> None:
    """A draft vocabulary beyond the target's is an error that shows both sizes."""
    with pytest.raises(CheckpointError, match=r"9 is not within 1\.\.8"):
        build_vocab(torch.zeros(8, dtype=torch.int64), 9)


def test_build_vocab_fills_up_with_preferred_tokens_before_low_ids() -> None:
    """Tokens 3 and 5 were seen; of the two other places one goes to the preferred 9, one to 0."""
    counts = torch.zeros(12, dtype=torch.int64)
    counts[3], counts[5] = 4, 1

    vocab = build_vocab(counts, 4, preferred=torch.tensor([9]))

    assert vocab.target_ids.tolist() == [0, 3, 5, 9]
