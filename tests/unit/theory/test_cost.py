"""Time per token, throughput and money, by hand."""

from __future__ import annotations

import pytest

from spectune.errors import UsageError
from spectune.theory.cost import (
    breakeven_gpu_hours,
    latency_under_load,
    predicted_tpot,
    saving_per_mtok,
    throughput,
    usd_per_mtok,
    weighted_gain,
)


def test_predicted_tpot_divides_the_round_by_its_tokens() -> None:
    """A 25 ms round that yields 2.5 tokens takes 10 ms per token."""
    assert predicted_tpot(0.025, 2.5) == pytest.approx(0.010)


def test_throughput_counts_the_whole_batch() -> None:
    """Eight sequences with 2.5 tokens every 25 ms: 800 tokens/s."""
    assert throughput(8, 2.5, 0.025) == pytest.approx(800)


def test_usd_per_mtok_at_full_and_half_use() -> None:
    """5.2 dollars an hour at 1000 tokens/s: 1.444 dollars; twice that at half use, four times on 2 GPUs."""
    assert usd_per_mtok(5.2, 1000) == pytest.approx(1.4444, abs=1e-4)
    assert usd_per_mtok(5.2, 1000, num_gpus=2, utilisation=0.5) == pytest.approx(5.7778, abs=1e-4)


def test_usd_per_mtok_above_full_use_is_refused() -> None:
    """Utilisation is a fraction, not percent."""
    with pytest.raises(UsageError, match="utilisation 80"):
        usd_per_mtok(5.2, 1000, utilisation=80)


def test_saving_per_mtok_of_a_slowdown_is_a_loss() -> None:
    """Twice as fast saves half; half as fast costs the price again."""
    assert saving_per_mtok(1.2, 2.0) == pytest.approx(0.6)
    assert saving_per_mtok(1.2, 0.5) == pytest.approx(-1.2)


@pytest.mark.parametrize(("speedup", "hours"), [(1.3, 5824), (1.1, 14784)])
def test_breakeven_gpu_hours_of_a_trained_head(speedup: float, hours: float) -> None:
    """A head of 8 GPUs for 7 days (1344 hours) pays back after so many serving hours."""
    assert breakeven_gpu_hours(1344, speedup) == pytest.approx(hours)


def test_breakeven_gpu_hours_without_a_gain_never_comes() -> None:
    """No speedup, no payback."""
    assert breakeven_gpu_hours(1344, 1.0) is None


def test_weighted_gain_adds_times_not_speedups() -> None:
    """Half the time at 2x and half at 1x leaves 0.75 of the time: 1.333, not 1.5."""
    assert weighted_gain([(0.5, 2.0), (0.5, 1.0)]) == pytest.approx(4 / 3)


def test_latency_under_load_doubles_at_half_load_and_ends_at_full() -> None:
    """10 s alone, 0.2 s of engine time per request: 20 s at 2.5 requests/s, none at 5."""
    assert latency_under_load(10, 0.2, 2.5) == pytest.approx(20)
    assert latency_under_load(10, 0.2, 5) is None
