"""Values as text: units, absence, strict JSON, flattened facts, label placement."""

from __future__ import annotations

import json

import pytest

from spectune.records import Interval
from spectune.report.svg import arm_styles, spread
from spectune.report.text import (
    Missing,
    escape,
    flatten,
    milliseconds,
    number,
    one_line,
    percent,
    speedup,
    strict_json,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0412, "41.20"), (0.3136, "313.6"), (0.00025, "0.250"), (1.5, "1,500.0"), (0.0, "0.000")],
    ids=["tens", "hundreds", "below-one", "thousands", "measured-zero"],
)
def test_milliseconds_scales_seconds(seconds: float, text: str) -> None:
    """Seconds are shown as milliseconds, more decimals for smaller values."""
    assert milliseconds(seconds, "unused") == text


def test_absent_values_carry_their_reason() -> None:
    """None gives the reason that the caller states; a non-finite number says that it is one."""
    assert milliseconds(None, "no rounds") == Missing(reason="no rounds")
    assert percent(None, "no steps") == Missing(reason="no steps")
    assert speedup(None, "plain arm") == Missing(reason="plain arm")
    assert number(float("nan"), "unused") == Missing(reason="the value is not a finite number")


def test_percent_signed_uses_a_true_minus() -> None:
    """Signed percentages have a plus or a minus sign, not a hyphen."""
    assert percent(-0.031, "", digits=1, signed=True) == "\N{MINUS SIGN}3.1%"
    assert percent(0.031, "", digits=1, signed=True) == "+3.1%"


def test_speedup_without_bounds_names_its_count() -> None:
    """One observation has no interval and says so."""
    assert "no interval, n=1" in str(speedup(Interval(value=1.4, low=None, high=None, n=1), ""))


def test_strict_json_has_no_nan() -> None:
    """Non-finite numbers become null and unknown types their text, so that strict readers agree."""
    text = strict_json({"a": float("nan"), "b": [1, float("inf")], "c": {"d": 2.5}})

    assert json.loads(text) == {"a": None, "b": [1, None], "c": {"d": 2.5}}


def test_flatten_names_nested_facts() -> None:
    """Nested facts become dotted rows, an argument vector one line to paste, absence None."""
    facts = {"argv": ["spectune", "sweep", "two words"], "machine": {"cores": 2}, "git": None, "flags": []}

    assert flatten(facts) == [
        ("argv", "spectune sweep 'two words'"),
        ("machine.cores", "2"),
        ("git", None),
        ("flags", None),
    ]


def test_escape_replaces_control_characters() -> None:
    """Characters that no document may hold are replaced, markup is escaped, markup of ours is kept."""
    assert escape("<b>\x00") == "&lt;b&gt;\N{REPLACEMENT CHARACTER}"
    assert escape(escape("<b>")) == "&lt;b&gt;"


def test_one_line_shortens_in_the_middle() -> None:
    """A long label keeps its head and its tail."""
    assert one_line("abcdefghij\nklmnopqrst", 12) == "abcdefgh\N{HORIZONTAL ELLIPSIS}rst"


def test_spread_separates_close_labels_and_keeps_order() -> None:
    """Labels that would overlap move apart around their middle; others stay."""
    assert spread([1.0, 5.0, 1.0], 2.0) == [0.0, 5.0, 2.0]


def test_arm_styles_never_rest_on_colour_alone() -> None:
    """Twelve arms get twelve different pairs of colour and marker or dash."""
    styles = arm_styles(f"arm {index}" for index in range(12))

    assert len({(style.colour, style.marker, str(style.dash)) for style in styles.values()}) == 12
