"""The page of judged heads shows what the judgement holds, and says why where it holds nothing."""

from __future__ import annotations

import re

from spectune.records import (
    Acceptance,
    AskedText,
    ConfidenceBin,
    HeadReport,
    Interval,
    Judgement,
    Pair,
)
from spectune.report.head_page import render_heads

NOTHING = Acceptance(acceptance_length=None, conditional=(), num_rounds=0, num_texts=0)


def pooled(value: float, *conditional: float | None) -> Acceptance:
    interval = Interval(value=value, low=value - 0.1, high=value + 0.1, n=7, level=0.95)
    return Acceptance(acceptance_length=interval, conditional=conditional, num_rounds=70, num_texts=7)


def report_of(name: str, value: float, **changes: object) -> HeadReport:
    values: dict[str, object] = {
        "name": name,
        "overall": pooled(value, 0.5, 0.4, None),
        "with_loops": pooled(value + 0.05),
        "by_category": {"chat": pooled(value, 0.44, 0.33), "code & more": pooled(value + 0.2)},
        "by_temperature": {"0": pooled(value)},
        "by_context": {"0-127": pooled(value)},
        "by_position": {"0-31": pooled(value)},
        "calibration": (
            ConfidenceBin(confidence=0.05, accepted=0.1, num_drafts=40),
            ConfidenceBin(confidence=0.95, accepted=0.9, num_drafts=60),
        ),
        "calibration_error": 0.05,
        "coverage": 0.93,
        "by_draft_vocab": {"1024": pooled(value - 0.3)},
    }
    return HeadReport(**{**values, **changes})  # type: ignore[arg-type]


def judgement_of(*reports: HeadReport) -> Judgement:
    ratio = Interval(value=1.0625, low=1.04, high=1.08, n=7, level=0.95)
    asked = [
        AskedText(
            prompt_id=f"p{i}",
            category="chat",
            temperature=0.0,
            num_prompt_tokens=9,
            num_output_tokens=40,
            had_loop=i == 0,
        )
        for i in range(8)
    ]
    return Judgement(
        reports=reports,
        pairs=(Pair(head="new", base="old", ratio=ratio),) if len(reports) > 1 else (),
        verdict=f"{reports[0].name} is ahead",
        texts=tuple(asked),
        num_tokens=3,
        settings={"target": "toy", "workload": "mine", "device": "cpu", "max_tokens": 64},
    )


def text_of(page: str) -> str:
    shown = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", shown))


def test_page_shows_every_head_pair_and_cut() -> None:
    """Two heads: lengths with intervals, the pair's ratio, categories, vocabulary cuts, counts of texts."""
    page = render_heads(judgement_of(report_of("new", 1.7), report_of("old", 1.6)))

    text = text_of(page)
    assert "new is ahead" in text
    assert "7 texts of the target without a loop, 1 with one" in text
    assert "1.700 (1.600 to 1.800)" in text
    assert "1.062 (1.040 to 1.080)" in text
    assert "code &amp; more" in page
    assert "44%, 33%" in text
    assert "1.400 (1.300 to 1.500)" in text  # cut to 1,024 tokens
    assert "toy \N{MIDDLE DOT} mine \N{MIDDLE DOT} cpu" in text
    for chart in ("head-positions", "head-categories", "head-reliability"):
        assert page.count(f'id="chart-{chart}"') == 1
    assert "http" not in re.sub(r"http://www\.w3\.org/[^\"]*|http-equiv", "", page)


def test_page_says_why_a_value_is_absent() -> None:
    """A third draft that was never reached and a head without any round are dashes with their reasons."""
    empty = report_of(
        "empty", 1.0, overall=NOTHING, with_loops=NOTHING, by_category={}, calibration=(),
        calibration_error=None, coverage=None, by_draft_vocab={},
    )  # fmt: skip

    page = render_heads(judgement_of(report_of("new", 1.7), empty))

    text = text_of(page)
    assert "this draft was never reached" in text
    assert "no round falls here" in text
    assert "not larger" in text
    assert not re.search(r"\bnan\b", text.lower())


def test_page_of_one_head_has_no_pairs() -> None:
    """One head alone: no table of pairs, no ratio."""
    page = render_heads(judgement_of(report_of("only", 1.5)))

    assert "Pairs, on the same texts" not in page
    assert "only is ahead" in page
