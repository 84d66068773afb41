from __future__ import annotations

import re

import pytest

from spectune.train.forms import FORMS
from spectune.train.loops import cap_loop, ends_in_loop, loop_start
from spectune.train.prompts import fill, ngram_overlap, template_prompt
from spectune.workload.read import load_workload


def test_template_prompt_covers_all_categories_and_fills_every_slot() -> None:
    """The categories take turns; no placeholder is left; the same index gives the same prompt."""
    prompts = [template_prompt(0, i) for i in range(3000)]

    assert [p.category for p in prompts[: len(FORMS)]] == list(FORMS)
    assert len(FORMS) == 15
    assert [p.text for p in prompts if re.search(r"\{[a-z_0-9]+(:[a-z])?\}|\0|\1", p.text)] == []
    assert prompts[17] == template_prompt(0, 17)
    assert template_prompt(1, 17) != template_prompt(0, 17)


def test_template_prompt_every_form_can_be_filled() -> None:
    """Each form of each category names only slots that exist."""
    for category, forms in FORMS.items():
        for form in forms:
            assert fill(form, seed=1) != "", (category, form)


def test_template_prompts_are_varied_and_not_those_that_measure() -> None:
    """Of 3,000 prompts 95% are different, and none shares eight words in a row with workloads/."""
    texts = [template_prompt(0, i).text for i in range(3000)]
    workload = load_workload(None)
    turns = [turn for prompt in (*workload.prompts, *workload.calibration) for turn in prompt.turns]

    assert len(set(texts)) > 0.95 * 3000
    assert ngram_overlap(texts, turns, n=8) == 0.0


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


@pytest.mark.parametrize(
    "ids",
    [[*range(40)], [9, 8, *[1, 2, 3] * 8], [5, *[7] * 30], [1, 2, 3] * 3, [*range(20), *[4, 5, 6, 7] * 6]],
)
def test_ends_in_loop_agrees_with_loop_start_at_the_end_of_a_text(ids: list[int]) -> None:
    """A text that has begun to repeat is found while it grows."""
    assert ends_in_loop(ids) == (loop_start(ids) is not None)


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
