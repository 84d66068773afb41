"""Predictions: round time of the surface over tokens of the trace, with both errors and the reasons."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spectune.errors import UsageError
from spectune.metrics.goodput import Promises
from spectune.records import Cell, SpecConfig
from spectune.store.surface import HeldOut, TimeSurface
from spectune.tune.objective import Objective, expected_goodput, front, score, violation
from spectune.tune.predict import ALL, Forecasts, forecast, ratio_error
from spectune.tune.surface import Sample, fit_lines, points_of
from tests.support.traces import chain_drafter, toy_trace

OFF = SpecConfig.off()
CELL = Cell(batch_size=1, context_tokens=0, temperature=0.0)
ERROR = 0.02


def chain(num_tokens: int) -> SpecConfig:
    return SpecConfig.chain("eagle3", num_tokens)


def surface_of(
    parts: dict[SpecConfig, tuple[float, float, float]], batch_size: int = 1, error: float = ERROR
) -> TimeSurface:
    """A surface of rounds that cost exactly (draft, verify, other) seconds, timed at 20 cached tokens."""
    samples = [
        Sample(
            batch_size=batch_size,
            config=config,
            width=config.num_draft_tokens,
            kv_tokens=20.0 * batch_size,
            commit_tokens=1.0,
            draft_s=draft,
            verify_s=verify,
            other_s=other,
            turn=0,
        )
        for config, (draft, verify, other) in parts.items()
    ]
    return TimeSurface(
        fingerprint={},
        provenance={},
        source="rounds",
        points=points_of(samples),
        lines=fit_lines(samples),
        held_out=HeldOut(num_points=3, median=error, p95=error, rms=error),
        drift=0.0,
        duration_s=1.0,
    )


def forecasts_of(
    parts: dict[SpecConfig, tuple[float, float, float]], path: list[int], num_outputs: list[int]
) -> Forecasts:
    trace = toy_trace(num_outputs, chain_drafter(path))
    return forecast(surface_of(parts), {(0, 0.0): trace}, list(parts), [CELL])


def test_time_per_token_is_round_time_over_tokens_of_a_step() -> None:
    """Positions 0..5 with 1 accepted at 0 and 3: four steps for six tokens, 1.5 tokens a step."""
    told = forecasts_of({OFF: (0.0, 0.009, 0.001), chain(1): (0.002, 0.010, 0.001)}, [1, 0, 0, 1, 0, 0], [7])

    row = told.find(chain(1), CELL)

    assert row is not None
    assert row.tokens_per_step == pytest.approx(6 / 4)
    assert row.tpot_s.value == pytest.approx(0.013 / 1.5)
    assert row.throughput_per_s.value == pytest.approx(1.5 / 0.013)
    assert row.speedup is not None
    assert row.speedup.value == pytest.approx(0.010 / (0.013 / 1.5))


def test_the_interval_carries_acceptance_and_time_errors() -> None:
    """Half width of the logarithm: t · √(acceptance² + time²), time twice for a ratio to plain decoding."""
    path = [1, 0, 1, 0, 0, 0, 0, 0]
    told = forecasts_of({OFF: (0, 0.01, 0), chain(1): (0, 0.012, 0)}, path, [5, 5])
    row = told.find(chain(1), CELL)
    assert row is not None
    assert row.speedup is not None
    assert row.speedup.low is not None
    t = 12.706  # two requests: one degree of freedom, 97.5%

    expected = t * math.sqrt(row.acceptance_error**2 + 2 * ERROR**2)

    assert row.acceptance_error > 0
    assert row.time_error == ERROR
    assert math.log(row.speedup.value / row.speedup.low) == pytest.approx(expected, rel=1e-3)


def test_error_of_a_ratio_has_the_request_as_its_unit() -> None:
    """Three requests of 10 tokens in 5, 4 and 8 steps, by hand."""
    tokens, steps = np.array([10, 10, 10]), np.array([5, 4, 8])
    ratio = 30 / 17
    residuals = [10 - ratio * 5, 10 - ratio * 4, 10 - ratio * 8]

    expected = math.sqrt(3 / 2 * sum(r * r for r in residuals)) / 30

    assert expected == pytest.approx(ratio_error(tokens, steps))


def test_conditional_rates_are_the_ones_that_do_not_fall_with_the_length() -> None:
    """Survival 0.543, 0.357, 0.264 is conditional acceptance 0.543, 0.657, 0.739."""
    # 1,000 independent steps: each text has one position, so that none is hopped over
    lengths = [3] * 264 + [2] * 93 + [1] * 186 + [0] * 457
    path = [length for length in lengths for _ in range(1)]
    trace = toy_trace([2] * 1000, chain_drafter(path))
    surface = surface_of({OFF: (0, 0.01, 0), chain(2): (0, 0.01, 0), chain(3): (0, 0.01, 0)})

    told = forecast(surface, {(0, 0.0): trace}, [chain(2), chain(3)], [CELL])
    row, short = told.find(chain(3), CELL), told.find(chain(2), CELL)

    assert row is not None
    assert short is not None
    assert row.survival == pytest.approx((0.543, 0.357, 0.264))
    assert [round(rate or 0, 3) for rate in row.conditional_acceptance] == [0.543, 0.657, 0.739]
    assert short.conditional_acceptance == row.conditional_acceptance[:2]


def test_a_slow_draft_loses_whatever_it_accepts_and_the_cause_is_named() -> None:
    """Acceptance length 3.5 with a draft of a third of the target a token: break-even is above it."""
    # five drafts of 10 ms beside a plain step of 30 ms: 3.53 plain steps a round (verify 56 ms)
    # four steps accept 5, 4, 1 and 0 drafts
    path = [5, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 1, 0, 0]
    told = forecasts_of({OFF: (0.0, 0.030, 0.0), chain(5): (0.050, 0.056, 0.0)}, path, [15])
    row = told.find(chain(5), CELL)

    assert row is not None
    assert row.acceptance_length is not None
    assert row.break_even_acceptance_length == pytest.approx(106 / 30)
    assert row.acceptance_length == pytest.approx(3.5)
    assert row.speedup is not None
    assert row.speedup.value < 1
    assert row.limit is not None
    assert "break-even acceptance length 3.53" in row.limit
    assert row.zero_accept_share == 0.25
    assert told.of(CELL)[0].config == OFF


@pytest.mark.parametrize(
    ("parts", "limit"),
    [
        pytest.param((0.009, 0.010, 0.0), "draft too expensive", id="draft"),
        pytest.param((0.001, 0.018, 0.0), "verification too expensive", id="verify"),
        pytest.param((0.001, 0.010, 0.008), "overhead too large", id="host-overhead"),
        pytest.param((0.006, 0.015, 0.006), "acceptance too low for these costs", id="acceptance"),
    ],
)
def test_what_limits_a_slow_configuration_is_its_own_measured_part(
    parts: tuple[float, float, float], limit: str
) -> None:
    """1.5 tokens a step: the part without whose extra cost it would pay, from this machine's rounds."""
    told = forecasts_of({OFF: (0.0, 0.010, 0.0), chain(1): parts}, [1, 0, 0, 1, 0, 0], [7])
    row = told.find(chain(1), CELL)

    assert row is not None
    assert row.limit is not None
    assert row.limit.startswith(limit)


def test_share_of_steps_that_keep_nothing_counts_drafting_steps() -> None:
    """Four steps, two of which accept nothing."""
    told = forecasts_of({OFF: (0, 0.01, 0), chain(1): (0, 0.01, 0)}, [1, 0, 0, 1, 0, 0], [7])
    row = told.find(chain(1), CELL)

    assert row is not None
    assert row.zero_accept_share == pytest.approx(2 / 4)


def test_speed_ranks_and_acceptance_never_does() -> None:
    """A chain of 5 accepts a little more than one of 3 and takes a quarter longer: the shorter is first."""
    path = [3, 0, 0, 0] * 9 + [5, 0, 0, 0, 0, 0] * 1
    parts = {OFF: (0.0, 0.020, 0.0), chain(3): (0.003, 0.022, 0.0), chain(5): (0.006, 0.026, 0.0)}
    told = forecasts_of(parts, path, [len(path) + 1])
    three, five = told.find(chain(3), CELL), told.find(chain(5), CELL)

    assert three is not None
    assert five is not None
    assert (five.acceptance_length or 0) > (three.acceptance_length or 0)
    assert [chain(3), chain(5), OFF] == [row.config for row in told.of(CELL)]


def test_equal_times_rank_the_smaller_configuration_first() -> None:
    """Both chains give two tokens in 10 ms: the chain of 1 stands first."""
    parts = {OFF: (0.0, 0.010, 0.0), chain(1): (0.0, 0.010, 0.0), chain(2): (0.0, 0.010, 0.0)}
    told = forecasts_of(parts, [1, 0, 1, 0, 1, 0], [7])

    assert [chain(1), chain(2), OFF] == [row.config for row in told.of(CELL)]


def test_every_config_slower_than_none_leaves_plain_decoding_first() -> None:
    """Deeper chains of a dear draft are ever slower; plain decoding wins with its reason at every other."""
    parts = {OFF: (0.0, 0.050, 0.0)} | {chain(k): (0.030 * k, 0.055, 0.0) for k in (3, 5, 8)}
    told = forecasts_of(parts, [1, 0, 2, 0, 0, 1, 0, 0], [9])

    assert [OFF, chain(3), chain(5), chain(8)] == [row.config for row in told.of(CELL)]
    assert all(row.limit for row in told.of(CELL)[1:])


def test_the_waterfall_splits_the_gap_into_verify_draft_and_the_rest() -> None:
    """Verification of three tokens took 41.28 ms where one takes 30.77: its part, the draft's and what a
    measurement leaves over add up to the measured speedup."""
    parts = {OFF: (0.0, 0.03077, 0.0), chain(2): (0.004, 0.04128, 0.001)}
    told = forecasts_of(parts, [1, 0, 0, 1, 0, 0], [7])
    row, plain = told.find(chain(2), CELL), told.find(OFF, CELL)
    assert row is not None
    assert plain is not None

    gains = dict(row.waterfall(plain, measured=0.9))

    assert gains["acceptance"] == pytest.approx(math.log(1.5))
    assert gains["verify"] < gains["draft"] < gains["other"] < 0
    assert sum(gains.values()) == pytest.approx(math.log(0.9))


def test_categories_are_predicted_by_their_own_steps() -> None:
    """Requests of category a accept everything, those of b nothing: one gains, one loses."""
    trace = toy_trace([5, 5], chain_drafter([1, 0, 1, 0, 0, 0, 0, 0]))
    surface = surface_of({OFF: (0.0, 0.010, 0.0), chain(1): (0.001, 0.011, 0.0)})

    told = forecast(surface, {(0, 0.0): trace}, [chain(1)], [CELL])

    rows = {name: told.find(chain(1), CELL, name) for name in ("a", "b", ALL)}
    gains = {name: row.speedup.value for name, row in rows.items() if row and row.speedup}
    assert gains == pytest.approx({"a": 2 / 1.2, "b": 1 / 1.2, ALL: (8 / 6) / 1.2})
    assert {name: row.num_steps for name, row in rows.items() if row} == {"a": 2, "b": 4, ALL: 6}
    assert [told.of(CELL, name)[0].config for name in ("a", "b")] == [chain(1), OFF]


def test_what_cannot_be_told_is_refused_with_the_reason_and_the_rest_is_told() -> None:
    """An untraced topk and an unprofiled width are named; the others have predictions."""
    tree = SpecConfig(method="eagle3", num_steps=2, topk=2, num_draft_tokens=4)
    trace = toy_trace([4], chain_drafter([1, 0, 0]))
    surface = surface_of({OFF: (0, 0.01, 0), chain(1): (0, 0.01, 0)})

    told = forecast(surface, {(0, 0.0): trace}, [chain(1), chain(6), tree], [CELL])

    reasons = dict(told.refused)
    assert "topk 2 was not traced" in reasons[tree.label]
    assert "profiled" in reasons[f"{chain(6).label} @ {CELL.label}"]
    assert {OFF, chain(1)} == {row.config for row in told.of(CELL)}


def test_acceptance_can_be_restricted_to_some_requests() -> None:
    """Of two texts only the one that is asked for counts."""
    trace = toy_trace([5, 5], chain_drafter([1, 0, 1, 0, 0, 0, 0, 0]))
    surface = surface_of({OFF: (0, 0.01, 0), chain(1): (0, 0.01, 0)})

    told = forecast(surface, {(0, 0.0): trace}, [chain(1)], [CELL], requests={"r1"})

    row = told.find(chain(1), CELL)
    assert row is not None
    assert (row.tokens_per_step, row.num_steps) == (1.0, 4)
    with pytest.raises(UsageError, match="none of the requests"):
        forecast(surface, {(0, 0.0): trace}, [chain(1)], [CELL], requests={"other"})


def test_limits_exclude_what_cannot_keep_them_even_at_its_best() -> None:
    """A limit inside the interval excludes nothing; below its lower end, or above the memory, it does."""
    row = forecasts_of({OFF: (0, 0.010, 0), chain(1): (0, 0.012, 0)}, [1, 0], [3]).find(OFF, CELL)
    assert row is not None
    low = row.tpot_s.low or 0.0

    assert violation(row, Objective(max_tpot_s=low * 1.01), None) is None
    assert "above" in str(violation(row, Objective(max_tpot_s=low * 0.9), None))
    assert "GB" in str(violation(row, Objective(max_memory_bytes=10**9), 2 * 10**9))


def test_goodput_counts_requests_that_keep_their_promise() -> None:
    """One text of two keeps 8 ms a token: half of the requests of 5 tokens a second."""
    trace = toy_trace([5, 5], chain_drafter([1, 0, 1, 0, 0, 0, 0, 0]))
    surface = surface_of({OFF: (0.0, 0.010, 0.0), chain(1): (0.0, 0.012, 0.0)})
    row = forecast(surface, {(0, 0.0): trace}, [chain(1)], [CELL]).find(chain(1), CELL)
    assert row is not None
    promises = Promises(tpot_s=0.008)

    expected = 0.5 * row.throughput_per_s.value / 5

    assert row.request_tpot_s == pytest.approx((0.006, 0.012))
    assert expected == pytest.approx(expected_goodput(row, promises))
    assert score(row, Objective(kind="goodput", promises=promises)) == pytest.approx(expected, rel=1e-3)


def test_the_front_keeps_what_nothing_beats_in_both() -> None:
    """A batch of 8 gives more tokens and slower ones: both ends stay, what is between and worse goes."""
    one = forecasts_of({OFF: (0, 0.010, 0), chain(1): (0, 0.012, 0)}, [1, 0], [3])
    large = Cell(batch_size=8, context_tokens=0, temperature=0.0)
    trace = toy_trace([3], chain_drafter([1, 0]))
    eight = forecast(
        surface_of({OFF: (0, 0.040, 0), chain(1): (0, 0.100, 0)}, 8), {(0, 0.0): trace}, [chain(1)], [large]
    )

    kept = front([*one.of(CELL), *eight.of(large)])

    assert [(chain(1), 1), (OFF, 8)] == [(row.config, row.cell.batch_size) for row in kept]
