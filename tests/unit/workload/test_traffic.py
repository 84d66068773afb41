"""Mixes and traces of requests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from spectune.errors import UsageError, WorkloadError
from spectune.workload.traffic import mixed_traffic, parse_mix, read_traffic


def test_mix_is_read_as_shares() -> None:
    """Names and shares, in the order given."""
    assert parse_mix("chat=.6, code=.4") == {"chat": 0.6, "code": 0.4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chat", "'chat' is not NAME=SHARE"),
        ("chat=x", "'chat=x' is not NAME=SHARE"),
        ("chat=0,code=1", "'chat=0' is not NAME=SHARE"),
        ("chat=.5,chat=.5", "chat is given twice"),
        ("chat=.5,code=.2", "add up to 0.7"),
    ],
)
def test_mix_that_is_none_names_what_is_wrong(text: str, words: str) -> None:
    """The part at fault, or the sum."""
    with pytest.raises(UsageError, match=words):
        parse_mix(text)


def test_mixed_traffic_has_the_rate_and_the_shares() -> None:
    """5,000 requests at 2 a second take about 2,500 s; 60% of them are chat; the seed decides."""
    traffic = mixed_traffic({"chat": 0.6, "code": 0.4}, 5000, request_rate=2.0, seed=1)
    counts = Counter(request.category for request in traffic)

    assert abs(traffic[-1].arrival_s / 2500 - 1) < 0.06
    assert abs(counts["chat"] / 5000 - 0.6) < 0.03
    assert traffic == mixed_traffic({"chat": 0.6, "code": 0.4}, 5000, request_rate=2.0, seed=1)


def test_trace_is_read_with_what_it_knows(tmp_path: Path) -> None:
    """Milliseconds, any order, lengths under the names that traces use."""
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp_ms": 2500, "category": "code", "output_tokens": 40, "input_length": 9}\n'
        '{"timestamp_ms": 1500}\n'
    )

    first, second = read_traffic(file)

    assert (first.arrival_s, first.category, first.num_output_tokens) == (0.0, "default", None)
    assert (second.arrival_s, second.category) == (1.0, "code")
    assert (second.num_output_tokens, second.num_prompt_tokens) == (40, 9)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "line 2 is not an object"),
        ("{", "line 2 is not JSON"),
        ('{"when": 1}', "line 2 has no timestamp"),
        ('{"timestamp": "x"}', "timestamp is 'x'"),
        ('{"timestamp": 1, "output_tokens": 0}', "output_tokens is 0"),
    ],
)
def test_trace_that_is_damaged_names_line_and_value(tmp_path: Path, line: str, words: str) -> None:
    """The first bad line stops it."""
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 1}\n' + line + "\n")

    with pytest.raises(WorkloadError, match=words):
        read_traffic(file)
