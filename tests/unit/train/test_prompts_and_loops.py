from __future__ import annotations

import pytest

from spectune.train.loops import cap_loop, loop_start
from spectune.train.prompts import TEMPLATES, ngram_overlap, template_prompt


def test_template_prompt_covers_all_categories_and_fills_every_slot() -> None:
    """Eight categories take turns; no placeholder is left; the same index gives the same prompt."""
    prompts = [template_prompt(0, i) for i in range(400)]

    assert [p.category for p in prompts[:8]] == list(TEMPLATES)
    assert len(TEMPLATES) == 8
    slots = [p.text for p in prompts if "{person" in p.text or "{passage" in p.text or "\0" in p.text]
    assert slots == []
    assert prompts[17] == template_prompt(0, 17)
    assert template_prompt(1, 17) != template_prompt(0, 17)


@pytest.mark.parametrize(
    ("ids", "start"),
    [
        ([*range(40)], None),
        ([9, 8, *[1, 2, 3] * 8], 2),
        ([5, *[7] * 30], 1),
        ([1, 2, 3] * 3, None),
        ([*range(20), *[4, 5, 6, 7] * 6, 99], 20),
        ([x for i in range(12) for x in (1, 2, 3, 100 + i)], None),
    ],
    ids=["no-repeat", "block-of-three", "one-token", "too-short", "loop-that-ends", "list-with-changes"],
)
def test_loop_start_finds_where_a_block_begins_to_repeat(ids: list[int], start: int | None) -> None:
    """A block repeated three times over 24 tokens is a loop; lists whose entries change are not."""
    assert loop_start(ids) == start


def test_cap_loop_keeps_text_and_a_little_of_the_loop() -> None:
    """Of 3 tokens and a loop of 60, 3 + 24 remain and the loop is reported."""
    kept, had_loop = cap_loop([10, 11, 12, *[1, 2] * 30])

    assert kept == [10, 11, 12, *[1, 2] * 12]
    assert had_loop


def test_ngram_overlap_counts_texts_with_a_shared_sequence() -> None:
    """One of two texts shares three consecutive words with the reference, whatever case and commas."""
    reference = ["The quick brown fox jumps."]

    assert ngram_overlap(["a QUICK, brown fox", "a fox, brown and quick"], reference, n=3) == 0.5
    assert ngram_overlap(["a quick brown fox"], reference, n=4) == 0.0
    assert ngram_overlap([], reference, n=3) == 0.0
