"""Counts, cuts and comparisons of heads on small tables that can be added up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spectune.records import AskedText, Interval, Pair
from spectune.train.compare import (
    HeadText,
    acceptance,
    by_place,
    head_text,
    paired,
    report_of,
    verdict,
)
from spectune.train.evaluate import Round, TextMatches


def text_of(name: str = "a", *, category: str = "chat", loops: bool = False, prompt: int = 10) -> AskedText:
    return AskedText(
        prompt_id=name,
        category=category,
        temperature=0.0,
        num_prompt_tokens=prompt,
        num_output_tokens=6,
        had_loop=loops,
    )


def rounds_text(text: AskedText, *accepted: int) -> HeadText:
    """A head that accepted so many drafts of two in each round, roots in order."""
    rounds, position = [], 0
    for count in accepted:
        rounds.append(Round(position, count))
        position += count + 1
    return HeadText(
        text=text,
        rounds=(tuple(rounds),),
        reached=(len(accepted), sum(a > 0 for a in accepted)),
        accepted=(sum(a > 0 for a in accepted), sum(a > 1 for a in accepted)),
        bins=tuple((0, 0.0, 0) for _ in range(10)),
        num_covered=3,
        num_tokens=4,
    )


def test_head_text_counts_what_was_reached_and_kept() -> None:
    """Four roots of two drafts: 3 of 4 first drafts right, 1 of the 2 second ones that were reached."""
    matches = torch.tensor([[[1, 1], [1, 0], [0, 1], [1, 0]]]).bool()
    inside = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]]).bool()
    confidence = torch.tensor([[0.95, 0.5], [0.95, 0.55], [0.05, 0.9], [1.0, 0.3]])

    found = head_text(
        text_of(),
        TextMatches(
            matches=matches,
            inside=inside,
            confidence=confidence,
            covered=torch.tensor([True, True, False, True]),
        ),
    )

    assert (found.reached, found.accepted) == ((4, 2), (3, 1))
    assert found.rounds == ((Round(0, 2), Round(3, 1)),)
    assert (found.num_covered, found.num_tokens) == (3, 4)
    assert found.roots == ((2, 2), (2, 1), (2, 0), (1, 1))  # drafts with a token to match, first ones that do
    # 0.05: one draft, wrong; 0.5 and 0.55: two, one right; 0.95, 0.95, 1.0: three, all right
    assert [(count, right) for count, _, right in found.bins if count] == [(1, 0), (2, 1), (3, 3)]


def test_acceptance_pools_rounds_over_texts() -> None:
    """Rounds of 2, 0 and 1 accepted drafts: 1 + 3/3 = 2 tokens a round; conditional 2/3 and 1/2."""
    found = acceptance([rounds_text(text_of("a"), 2, 0), rounds_text(text_of("b"), 1)])

    assert found.acceptance_length is not None
    assert found.acceptance_length.value == 2.0
    assert found.conditional == (pytest.approx(2 / 3), pytest.approx(1 / 2))
    assert (found.num_rounds, found.num_texts) == (3, 2)


def test_report_leaves_looping_texts_out_and_shows_them_apart() -> None:
    """The text of the loop accepts everything; without it the length is 1.5, with it 2.2."""
    clean = rounds_text(text_of("a"), 1, 0)
    looping = rounds_text(text_of("b", loops=True), 2, 2, 1)

    report = report_of("h", [clean, looping])

    assert report.overall.acceptance_length is not None
    assert report.with_loops.acceptance_length is not None
    assert report.overall.acceptance_length.value == 1.5
    assert report.with_loops.acceptance_length.value == pytest.approx(1 + 6 / 5)
    assert report.coverage == 0.75
    assert set(report.by_category) == {"chat"}


def test_report_calibration_is_counts_by_tenth_and_their_mean_gap() -> None:
    """Ten drafts at 0.95 of which 9 are right, ten at 0.15 of which 3 are: gaps 0.05 and 0.15, mean 0.1."""
    bins = [(0, 0.0, 0)] * 10
    bins[9], bins[1] = (10, 9.5, 9), (10, 1.5, 3)
    base = rounds_text(text_of(), 1)
    text = HeadText(
        text=base.text, rounds=base.rounds, reached=base.reached, accepted=base.accepted,
        bins=tuple(bins), num_covered=1, num_tokens=1,
    )  # fmt: skip

    report = report_of("h", [text])

    assert [(cell.confidence, cell.accepted, cell.num_drafts) for cell in report.calibration] == [
        (pytest.approx(0.15), 0.3, 10),
        (pytest.approx(0.95), 0.9, 10),
    ]
    assert report.calibration_error == pytest.approx(0.1)


def test_by_place_parts_rounds_at_their_root() -> None:
    """Roots at 0, 3 and 4 with an edge at 4: 1 + (2 + 0)/2 before it, 1 + 1/1 from it on."""
    cut = by_place([rounds_text(text_of(), 2, 0, 1)], (4,), lambda one, root: root)

    lengths = {label: found.acceptance_length for label, found in cut.items()}
    assert {label: found.value for label, found in lengths.items() if found} == {"0-3": 2.0, "4+": 2.0}
    assert {label: found.num_rounds for label, found in cut.items()} == {"0-3": 2, "4+": 1}


def test_by_place_tells_acceptance_draft_by_draft() -> None:
    """Roots 0 and 1: 2 of 2 first drafts, 1 of 2 second ones; roots 2 and 3: 1 of 2, the last has no second."""
    text = replace(rounds_text(text_of(), 2, 0), roots=((2, 2), (2, 1), (2, 0), (1, 1)))

    cut = by_place([text], (2,), lambda one, root: root)

    assert cut["0-1"].conditional == (1.0, 0.5)
    assert cut["2+"].conditional == (0.5, None)


def test_paired_ratio_is_of_pooled_lengths_and_certain_where_all_texts_agree() -> None:
    """One head emits 3 tokens a round on each of 20 texts, the other 2: 1.5 without any spread."""
    texts = [text_of(str(i)) for i in range(20)]
    pair = paired(
        "new", [rounds_text(t, 2, 2) for t in texts], "old", [rounds_text(t, 1, 1, 1) for t in texts]
    )

    assert pair is not None
    assert (pair.ratio.value, pair.ratio.low, pair.ratio.high, pair.ratio.n) == (1.5, 1.5, 1.5, 20)


def test_paired_ignores_looping_texts() -> None:
    """Two texts of which one loops leave nothing to resample."""
    texts = [text_of("a"), text_of("b", loops=True)]

    assert paired("x", [rounds_text(t, 1) for t in texts], "y", [rounds_text(t, 1) for t in texts]) is None


@pytest.mark.parametrize(
    ("low", "words"),
    [
        (1.05, "new is the best: 3.00 tokens a round with a chain of 2, 1.100 times old (1.050 to 1.200)"),
        (0.97, "1.100 times old (0.970 to 1.200), but not beyond the noise"),
    ],
    ids=["clear", "noise"],
)
def test_verdict_names_a_winner_only_beyond_the_noise(low: float, words: str) -> None:
    """The interval of the ratio decides between a winner and a head that is merely ahead."""
    reports = [report_of("new", [rounds_text(text_of(), 2)]), report_of("old", [rounds_text(text_of(), 1)])]
    pair = Pair(head="new", base="old", ratio=Interval(value=1.1, low=low, high=1.2, n=9, level=0.95))

    assert words in verdict(reports, [pair])


def test_verdict_says_by_how_much_of_a_pair_named_the_other_way_round() -> None:
    """The pair says old over new, 0.8 (0.5 to 1.0); new is 1.25 times old, 1.0 to 2.0."""
    reports = [report_of("new", [rounds_text(text_of(), 2)]), report_of("old", [rounds_text(text_of(), 1)])]
    pair = Pair(head="old", base="new", ratio=Interval(value=0.8, low=0.5, high=1.0, n=9, level=0.95))

    assert "1.250 times old (1.000 to 2.000)" in verdict(reports, [pair])


def test_verdict_single_head_that_drafts_nothing_right_says_what_to_check() -> None:
    """Of twenty first drafts none accepted: the pair of head and target is doubted."""
    assert "check its layer ids" in verdict([report_of("h", [rounds_text(text_of(), *[0] * 20)])], [])
