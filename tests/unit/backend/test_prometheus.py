"""Counters: differences of sums over engines; restarts and gaps are named, never guessed over."""

from __future__ import annotations

import pytest

from spectune.backend.prometheus import (
    ACCEPTED,
    DRAFT_TOKENS,
    DRAFTS,
    RUNNING,
    cache_hit_rate,
    grown,
    parse_exposition,
    spec_counts,
)
from spectune.errors import EngineFailure
from spectune.records import SpecCounts

ENGINES = (22, 15, 29, 20, 25, 24, 27, 26)


def page(drafts: tuple[int, ...] = ENGINES, *, created: float = 1.7e9, model: str = "m") -> str:
    """Counters of a server whose every draft had two tokens and accepted one."""
    lines = ["# HELP vllm:spec_decode_num_drafts_total Number of drafts.", "# TYPE x counter"]
    for engine, count in enumerate(drafts):
        own = f'engine="{engine}",model_name="{model}"'
        for name, value in ((DRAFTS, count), (DRAFT_TOKENS, 2 * count), (ACCEPTED, count)):
            lines.append(f"{name}{{{own}}} {value}.0")
            lines.append(f"{name.removesuffix('_total')}_created{{{own}}} {created}")
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f'{name}{{{own},position="0"}} {count}.0')
        lines.append(f'{name}{{{own},position="1"}} 0.0')
    return "\n".join(lines) + "\n"


NOTHING = parse_exposition("")


def test_engines_are_summed_and_creation_times_are_not_counts() -> None:
    """Eight data-parallel ranks drafted 188 times together."""
    counts = spec_counts(parse_exposition(page((0,) * 8)), parse_exposition(page()))

    assert counts == SpecCounts(
        num_drafts=188, num_draft_tokens=376, num_accepted_tokens=188, accepted_per_position=(188, 0)
    )


def test_only_what_grew_between_two_readings_counts() -> None:
    """Counters hold warm-up and everything before; the window holds neither."""
    counts = spec_counts(parse_exposition(page((100, 50))), parse_exposition(page((110, 50))))

    assert counts is not None
    assert (10, 20, 10) == (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens)


def test_series_that_appears_started_at_zero() -> None:
    """Labels are exported from their first use on."""
    counts = spec_counts(NOTHING, parse_exposition(page((5,))))

    assert counts is not None
    assert 5 == counts.num_drafts


def test_server_without_speculation_has_no_counts() -> None:
    """Absent counters are not zero drafts."""
    assert spec_counts(NOTHING, parse_exposition("vllm:prompt_tokens_total 5\n")) is None


def test_speculation_without_any_draft_is_all_zero() -> None:
    """Counters that stood still are counts, from which acceptance stays unknown."""
    reading = parse_exposition(page((7,)))

    counts = spec_counts(reading, reading)

    assert counts is not None
    assert (0, 0, 0) == (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens)


@pytest.mark.parametrize(
    "after",
    [page((5, 50)), page((200, 50), created=1.8e9), page((200,))],
    ids=["fell", "created anew", "rank gone"],
)
def test_restart_between_two_readings_is_an_error(after: str) -> None:
    """Counts of two server starts are never joined, even where the new ones are larger."""
    with pytest.raises(EngineFailure, match="the server was restarted"):
        spec_counts(parse_exposition(page((100, 50))), parse_exposition(after))


def test_other_models_of_the_server_do_not_count() -> None:
    """One server may serve several models, each with counters of its own."""
    both = parse_exposition(page((5,)) + page((7,), model="other"))

    counts = spec_counts(NOTHING, both, model="m")

    assert counts is not None
    assert 5 == counts.num_drafts
    assert spec_counts(NOTHING, both, model="third") is None


def test_hit_rate_is_of_the_window() -> None:
    """30 of 40 prompt tokens asked between the readings were cached, whatever came before."""
    before = parse_exposition("vllm:prefix_cache_queries_total 100\nvllm:prefix_cache_hits_total 100\n")
    after = parse_exposition("vllm:prefix_cache_queries_total 140\nvllm:prefix_cache_hits_total 130\n")

    assert 0.75 == cache_hit_rate(before, after)
    assert cache_hit_rate(before, before) is None
    assert cache_hit_rate(NOTHING, NOTHING) is None


def test_exposition_allows_escapes_stamps_exemplars_and_special_values() -> None:
    """Everything that the text format may hold is read."""
    text = (
        'a{x="say \\"hi\\" # {\\\\} a\\nb",y="2"} 1.5 1700000000\n'
        'b_total 3 # {trace_id="1"} 1.0\n'
        'c_bucket{le="+Inf"} +Inf\n'
        "d 1e3\r\n"
        "# EOF\n"
    )

    reading = parse_exposition(text)

    assert 1.5 == reading.total("a", {"x": 'say "hi" # {\\} a\nb'})
    assert 3.0 == reading.total("b_total")
    assert float("inf") == reading.total("c_bucket")
    assert 1000.0 == reading.total("d")
    assert reading.total("e") is None


@pytest.mark.parametrize("line", ["<html>", "a{x=1", "a one"], ids=["page", "no value", "no number"])
def test_what_is_no_exposition_names_its_line(line: str) -> None:
    """A proxy's page of HTML is an error with its line, not zero counters."""
    with pytest.raises(EngineFailure, match="metrics line 2 cannot be read"):
        parse_exposition(f"a 1\n{line}\n")


def test_gauges_and_counters_can_be_asked_by_name() -> None:
    """Sum over engines of any series."""
    before = parse_exposition(f'{RUNNING}{{engine="0"}} 2\n{RUNNING}{{engine="1"}} 1\nx_total 3\n')
    after = parse_exposition("x_total 5\n")

    assert 3.0 == before.total(RUNNING)
    assert 2.0 == grown(before, after, "x_total")
    assert grown(before, after, "y_total") is None
