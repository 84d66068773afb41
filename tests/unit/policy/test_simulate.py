"""Traffic played against measured speeds: times by hand, an oracle that nobody beats, money."""

from __future__ import annotations

import math

import pytest

from spectune.errors import UsageError
from spectune.policy.simulate import simulate
from spectune.policy.speed_table import SpeedTable, interpolate, speed_table
from spectune.policy.table import build_policy
from spectune.records import SpecConfig
from spectune.records.traffic import TrafficRequest

OFF, K3 = SpecConfig.off(), SpecConfig.chain("eagle3", 3)


@pytest.fixture
def policy(make):
    """K=3 alone, off from two on."""
    cells = [make.compare(make.cell(1), make.arm(K3, 2.0)), make.compare(make.cell(2), make.arm(K3, 0.5))]
    return build_policy(
        cells, (), run_name="run", fingerprint=make.fingerprint(), contexts={c.cell: (20, 300) for c in cells}
    )


def table(*, code: float | None = None) -> SpeedTable:
    """1 s a token alone, 2 s of two together; K=3 doubles the speed alone and halves it of two."""
    speedups = {(K3, None): {1: 2.0, 2: 0.5}}
    if code is not None:
        speedups[K3, "code"] = {1: code, 2: code}
    return SpeedTable(
        plain_s={1: 1.0, 2: 2.0},
        speedups=speedups,
        output_tokens={"chat": 10.0},
        context_tokens=0,
        temperature=0.0,
    )


def chat(at: float, tokens: int | None = 10, category: str = "chat") -> TrafficRequest:
    return TrafficRequest(arrival_s=at, category=category, num_output_tokens=tokens)


def test_requests_that_never_meet_run_at_the_speed_of_one(policy):
    """Two of 10 tokens, a minute apart: off takes 20 s, the policy and K=3 10 s."""
    found = simulate(policy, table(), [chat(0), chat(60)])

    assert [found.of(name).busy_s for name in ("off", "policy", "eagle3 K=3")] == pytest.approx([20, 10, 10])
    assert (found.speedup, found.regret, found.best_static) == (
        pytest.approx(2.0),
        pytest.approx(0.0),
        "eagle3 K=3",
    )
    assert found.of("policy").latency_s == pytest.approx(5.0)


def test_requests_that_meet_run_at_the_speed_of_two(policy):
    """Both at once: off gives each a token in 2 s, 20 s for 10; K=3 throughout takes 40 s."""
    found = simulate(policy, table(), [chat(0), chat(0)])

    assert [found.of(name).busy_s for name in ("off", "policy", "eagle3 K=3")] == pytest.approx([20, 20, 40])
    assert found.of("off").mean_batch == pytest.approx(2.0)


def test_policy_switches_when_the_second_request_comes_and_goes(policy):
    """Alone for 2 s at 2 tokens a second: 4 tokens; then two at half a token a second each: the first needs
    12 s for its 6; the second has 4 left and needs 2 s alone at 2 tokens a second."""
    served = simulate(policy, table(), [chat(0), chat(2)]).of("policy")

    assert served.busy_s == pytest.approx(2 + 12 + 2)
    assert dict(served.share_by_config) == pytest.approx({"eagle3 K=3": 4 / 16, "off": 12 / 16})
    assert served.latency_s == pytest.approx((14 + 14) / 2)


def test_requests_beyond_the_largest_batch_wait(policy):
    """Three at once, two at most: the third waits the 20 s of the first two, then has the engine alone."""
    served = simulate(policy, table(), [chat(0), chat(0), chat(0)]).of("off")

    assert served.wait_s == pytest.approx(20 / 3)
    assert served.busy_s == pytest.approx(20 + 10)


def test_oracle_is_never_slower_than_any_choice(policy):
    """On traffic of two categories that disagree it switches by what runs."""
    traffic = [chat(3.0 * i, category="code" if i % 3 else "chat") for i in range(40)]
    found = simulate(policy, table(code=1.6), traffic)
    oracle = found.of("oracle").busy_s

    assert all(oracle <= one.busy_s + 1e-6 for one in found.served)
    assert found.regret >= 0


def test_length_that_is_not_told_is_the_measured_mean(policy):
    """10 tokens is what chat answered in the run; another category takes the mean of all."""
    found = simulate(policy, table(), [chat(0, None), chat(60, None, "prose")])

    assert found.of("off").num_tokens == 20


def test_money_follows_the_price(policy):
    """20 tokens in 20 s at 3.60 USD an hour: 1000 USD a million; the policy halves it and saves 1 cent. A
    head of 5 GPU hours at 2x is paid after 10."""
    money = simulate(policy, table(), [chat(0), chat(60)], usd_per_gpu_hour=3.6, training_gpu_hours=5.0).money

    assert money is not None
    assert (money.usd_per_mtok_plain, money.usd_per_mtok_policy) == pytest.approx((1000.0, 500.0))
    assert money.usd_saved == pytest.approx(0.01)
    assert money.training_breakeven_gpu_hours == pytest.approx(10.0)


def test_batch_beyond_the_measured_is_refused(policy):
    """What happens there is not known."""
    with pytest.raises(UsageError, match="measured up to batch 2"):
        simulate(policy, table(), [chat(0)], max_batch_size=3)


def test_empty_traffic_is_refused(policy):
    """Nothing to play."""
    with pytest.raises(UsageError, match="no request"):
        simulate(policy, table(), [])


@pytest.mark.parametrize(("size", "value"), [(1, 1.0), (2, 1.5), (3, 2.0), (9, 2.0)])
def test_speeds_between_measured_batch_sizes_are_linear(size, value):
    """And flat beyond the last."""
    assert interpolate({1: 1.0, 3: 2.0}, size) == pytest.approx(value)


def test_speed_table_is_that_of_the_run(make):
    """Plain seconds, speedups by category, and mean lengths come from the summary's own arms."""
    cell = make.cell(1)
    whole = make.compare(cell, make.arm(K3, 1.5, num_requests=4, output_tokens=100))
    code = make.compare(cell, make.arm(K3, 1.8, num_requests=2, output_tokens=80), scope="code")

    class Summary:
        cells = (whole,)
        categories = (code,)

    found = speed_table([Summary()])  # type: ignore[list-item]

    assert found.plain_s == {1: 1.0}
    assert found.speedup(K3, 1, "code") == pytest.approx(1.8)
    assert found.speedup(K3, 1, "prose") == pytest.approx(1.5)
    assert found.mean_output_tokens("code") == 40.0
    assert math.isclose(found.token_s(K3, 1, "code"), 1 / 1.8)


def test_policy_pays_for_being_ready_to_speculate_where_it_is_off(policy):
    """Off from two on in an engine that can speculate: 10% more of the 20 s of two requests at once."""
    ready = {**policy, "standby": [{"method": "eagle3", "batch": 2, "cost": 1.1, "cost_ci": None}]}

    found = simulate(ready, table(), [chat(0), chat(0)])

    assert found.of("off").busy_s == pytest.approx(20.0)
    assert found.of("policy").busy_s == pytest.approx(22.0)
