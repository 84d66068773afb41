"""Arrivals: drawn before the run, seeded, and of the mean that was asked for."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from spectune.errors import UsageError, WorkloadError
from spectune.workload.arrivals import (
    ClosedLoop,
    OpenLoop,
    constant_arrivals,
    gamma_arrivals,
    open_loop,
    read_arrivals,
    trace_loop,
)


def gaps(arrivals: tuple[float, ...]) -> list[float]:
    return [arrivals[0], *(b - a for a, b in pairwise(arrivals))]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_their_gamma(burstiness: float) -> None:
    """Mean 1/rate and coefficient of variation 1/sqrt(burstiness), within 4 standard errors of 20000 draws."""
    drawn = gaps(gamma_arrivals(20_000, request_rate=5.0, burstiness=burstiness, seed=1))

    variation = 1 / math.sqrt(burstiness)
    assert pytest.approx(0.2, rel=4 * variation / math.sqrt(20_000)) == statistics.mean(drawn)
    assert pytest.approx(variation, rel=0.06) == statistics.stdev(drawn) / statistics.mean(drawn)


def test_the_same_seed_draws_the_same_and_a_longer_run_goes_on() -> None:
    """Arms meet the same arrivals; the first hundred do not depend on how many follow."""
    short, long = (gamma_arrivals(n, request_rate=2.0, seed=3) for n in (100, 200))

    assert short == long[:100]
    assert short != gamma_arrivals(100, request_rate=2.0, seed=4)


def test_constant_rate_is_a_grid_from_zero() -> None:
    """Four requests a second: 0, 0.25, 0.5."""
    assert (0.0, 0.25, 0.5) == constant_arrivals(3, request_rate=4.0)
    assert (0.0, 0.25, 0.5) == open_loop(3, request_rate=4.0, burstiness=math.inf).arrivals_s


def test_load_says_what_it_was_drawn_from() -> None:
    """Rate, burstiness and cap travel with the arrivals."""
    load = open_loop(3, request_rate=4.0, burstiness=2.0, max_concurrency=8, seed=1)

    assert (4.0, 2.0, 8) == (load.request_rate, load.burstiness, load.max_concurrency)
    assert load.arrivals_s == gamma_arrivals(3, request_rate=4.0, burstiness=2.0, seed=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"timestamp": 105}\n{"timestamp": 100}\n{"timestamp": 101.5}\n', (0.0, 1.5, 5.0)),
        ('{"timestamp_ms": 2000}\n\n{"timestamp_ms": 2500}\n', (0.0, 0.5)),
        ('{"arrival_s": 1, "prompt": "x"}\n{"arrival_s": 1}', (0.0, 0.0)),
    ],
    ids=["out of order", "milliseconds", "together"],
)
def test_trace_starts_at_zero(tmp_path: Path, text: str, expected: tuple[float, ...]) -> None:
    """Time stamps of any epoch become seconds after the start, in order."""
    file = tmp_path / "trace.jsonl"
    file.write_text(text, encoding="utf-8")

    assert expected == read_arrivals(file)
    assert tuple(at / 2 for at in expected) == read_arrivals(file, speed=2.0)
    assert expected == trace_loop(read_arrivals(file)).arrivals_s


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"timestamp": 1}\n{"time": 2}\n', "line 2 has no timestamp"),
        ('{"timestamp": "1"}\n', "line 1: timestamp is '1', not a number"),
        ('{"timestamp": true}\n', "line 1: timestamp is True"),
        ("[1]\n", "line 1 has no timestamp"),
        ("{\n", "line 1 is not JSON"),
        ("\n", "holds no timestamp"),
    ],
    ids=["other key", "text", "boolean", "list", "broken", "empty"],
)
def test_bad_trace_names_file_and_line(tmp_path: Path, text: str, error: str) -> None:
    """Which row of which file, and what is wrong with it."""
    file = tmp_path / "trace.jsonl"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(WorkloadError, match=f"trace.jsonl.*{error}"):
        read_arrivals(file)


def test_absent_trace_is_named(tmp_path: Path) -> None:
    """A path with a typo is told as it was typed."""
    with pytest.raises(WorkloadError, match=r"nothing\.jsonl cannot be read"):
        read_arrivals(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_impossible_rates_are_refused(rate: float) -> None:
    """A rate is a positive number; an infinite one is a closed loop without users."""
    with pytest.raises(UsageError, match="request-rate"):
        gamma_arrivals(3, request_rate=rate)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.nan])
def test_impossible_burstiness_is_refused(burstiness: float) -> None:
    """A gamma needs a positive shape."""
    with pytest.raises(UsageError, match="burstiness"):
        gamma_arrivals(3, request_rate=1.0, burstiness=burstiness)


@pytest.mark.parametrize(
    "arrivals", [(1.0, 0.5), (-1.0,), (math.nan,)], ids=["descending", "before 0", "nan"]
)
def test_loads_refuse_what_cannot_be(arrivals: tuple[float, ...]) -> None:
    """Arrivals ascend from 0 on, and nobody is fewer than one user."""
    with pytest.raises(UsageError):
        OpenLoop(arrivals_s=arrivals)
    with pytest.raises(UsageError, match="max-concurrency"):
        ClosedLoop(concurrency=0)
    with pytest.raises(UsageError, match="max-concurrency"):
        OpenLoop(arrivals_s=(), max_concurrency=0)
    with pytest.raises(UsageError, match="speed"):
        read_arrivals("trace.jsonl", speed=0.0)
