"""A small version of tests/bench/gate_power.py: whole lives of gates on the simulated backend."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "gate_power.py"


@pytest.fixture(scope="module")
def bench():
    """The bench as a module."""
    spec = importlib.util.spec_from_file_location("gate_power", BENCH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(sys.modules, "gate_power", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    monkeypatch.undo()


def failures(trials):
    done = [trial for trial in trials if trial is not None]
    return sum(report.exit_code == 3 for _, report in done), len(done)


@pytest.mark.slow
def test_equal_engines_fail_at_most_once_in_forty_calibrated_checks(bench):
    """Designed for one in two hundred."""
    failed, done = failures(bench.paired_trials(bench.SPEED_LOAD, bench.declared(), range(40)))

    assert done >= 30
    assert failed <= 1


@pytest.mark.slow
def test_a_true_slowdown_of_3_percent_is_caught_at_the_announced_starts(bench):
    """Twenty machines, each with its own calibration: at least eighteen are caught."""
    head = bench.slower(bench.declared(), 1.03)
    failed, done = failures(bench.paired_trials(bench.SPEED_LOAD, head, range(500, 520)))

    assert failed >= done - 2


def test_an_acceptance_drop_of_2_percent_is_caught_by_replay(bench):
    """The head replays the baseline's text: ten of ten, and no alarm where nothing changed."""
    base = bench.declared()
    drop = bench.less_accepted(base, 0.02, bench.ACCEPTANCE_LOAD.point().config)

    assert (10, 10) == failures(bench.replayed_trials(bench.ACCEPTANCE_LOAD, drop, range(10)))
    assert (0, 10) == failures(bench.replayed_trials(bench.ACCEPTANCE_LOAD, base, range(10)))
