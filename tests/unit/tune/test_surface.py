"""A time surface tells what it was fitted to, and refuses the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spectune.errors import UsageError
from spectune.records import SpecConfig
from spectune.tune.surface import Costs, Sample, bucket_of, fit_lines, held_out, points_of, without_spikes

OFF = SpecConfig.off()


def chain(num_tokens: int) -> SpecConfig:
    return SpecConfig.chain("eagle3", num_tokens)


def seconds_of(config: SpecConfig, batch_size: int, kv_tokens: float, commit: float) -> tuple[float, ...]:
    """The declared engine: verify 10 ms + 1 ms a token + 10 µs a cached token; draft 2 ms + 1 ms a level
    + 0.5 ms a kept token; other 1 ms."""
    verify = 0.010 + 0.001 * batch_size * config.num_draft_tokens + 1e-5 * kv_tokens
    draft = 0.0 if config.is_off else 0.002 + 0.001 * config.num_steps + 0.0005 * commit
    return draft, verify, 0.001


def sample(
    config: SpecConfig,
    turn: int = 0,
    *,
    batch_size: int = 1,
    kv_tokens: float = 100.0,
    commit: float = 1.0,
    factor: float = 1.0,
) -> Sample:
    draft_s, verify_s, other_s = seconds_of(config, batch_size, kv_tokens, commit)
    return Sample(
        batch_size=batch_size,
        config=config,
        width=config.num_draft_tokens,
        kv_tokens=kv_tokens,
        commit_tokens=commit,
        draft_s=draft_s * factor,
        verify_s=verify_s * factor,
        other_s=other_s * factor,
        turn=turn,
    )


def lattice(*configs: SpecConfig, batch_size: int = 1) -> list[Sample]:
    """Each shape at four contexts and with one to four kept tokens."""
    return [
        sample(config, turn, batch_size=batch_size, kv_tokens=100.0 + 40 * turn, commit=1.0 + (turn + i) % 3)
        for turn in range(4)
        for i, config in enumerate(configs)
    ]


def test_fit_recovers_the_declared_costs() -> None:
    """Rounds without noise give back draft, verify and other of every shape, at contexts in between."""
    costs = Costs(fit_lines(lattice(OFF, *(chain(k) for k in (1, 2, 3, 5)))))

    told = costs.round_times(chain(3), 1, 150.0, 2.0)

    expected = seconds_of(chain(3), 1, 150.0, 2.0)
    assert pytest.approx(expected, rel=1e-3) == (told.draft_s, told.verify_s, told.other_s)


def test_rounds_that_scatter_are_told_by_their_mean() -> None:
    """Half of the rounds at 0.7 and half at 1.3 of what is declared: told is what is declared, not less."""
    samples = [
        sample(config, turn, factor=factor)
        for config in (OFF, *(chain(k) for k in (1, 2, 3)))
        for turn, factor in enumerate((0.7, 1.3, 1.3, 0.7))
    ]

    told = Costs(fit_lines(samples)).round_times(chain(2), 1, 100.0, 1.0)

    expected = seconds_of(chain(2), 1, 100.0, 1.0)
    assert pytest.approx(expected, rel=1e-3) == (told.draft_s, told.verify_s, told.other_s)


def test_moving_what_a_tree_keeps_is_told_by_how_much_it_keeps() -> None:
    """Trees whose rest is 1 ms and 0.2 ms for each kept token: 1.6 ms at three, whatever was forced."""
    trees = [SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=n) for n in (4, 8)]
    samples = [
        replace(sample(tree, turn, commit=commit), other_s=0.001 + 0.0002 * commit)
        for tree in trees
        for turn, commit in enumerate((1.0, 2.0, 1.0, 3.0))
    ]

    told = Costs(fit_lines(samples)).round_times(trees[0], 1, 100.0, 3.0)

    assert told.other_s == pytest.approx(0.0016, rel=1e-3)


def test_a_width_between_two_timed_ones_of_a_bucket_lies_on_their_line() -> None:
    """Chains of 1, 2 and 4 tell the chain of 3: four tokens share the tile of six."""
    costs = Costs(fit_lines(lattice(chain(1), chain(2), chain(4))))

    told = costs.round_times(chain(4), 1, 160.0, 1.0)
    between = costs._lines["verify", "target", 1]

    assert pytest.approx(0.010 + 0.004 + 0.0016, rel=1e-3) == (
        between.base_s[3] + (between.base_s[5] - between.base_s[3]) / 2 + between.kv_s[0] * 160.0
    )
    assert pytest.approx(sum(seconds_of(chain(4), 1, 160.0, 1.0)), rel=1e-3) == told.total_s


def test_nothing_is_interpolated_across_a_bucket_edge() -> None:
    """Five and nine tokens lie in the first two tiles of six: seven is told by neither."""
    tree = SpecConfig(method="eagle3", num_steps=4, topk=2, num_draft_tokens=7)
    costs = Costs(fit_lines(lattice(chain(4), chain(8), tree)))
    without = Costs(fit_lines(lattice(chain(4), chain(8))))

    assert costs.refusal(chain(6), 1, 120.0) is None
    assert "another bucket" in str(without.refusal(chain(6), 1, 120.0))


@pytest.mark.parametrize(
    ("config", "batch_size", "kv_tokens", "reason"),
    [
        pytest.param(chain(2), 2, 100.0, "batch sizes 1", id="another-batch-size"),
        pytest.param(chain(6), 1, 100.0, "outside the profiled", id="more-tokens"),
        pytest.param(chain(2), 1, 2000.0, "cached tokens", id="a-longer-context"),
        pytest.param(SpecConfig.chain("ngram", 2), 1, 100.0, "no such draft", id="another-method"),
    ],
)
def test_shapes_outside_of_what_was_timed_are_refused(
    config: SpecConfig, batch_size: int, kv_tokens: float, reason: str
) -> None:
    """A surface extrapolates nothing: it names what was profiled."""
    costs = Costs(fit_lines(lattice(OFF, chain(1), chain(2), chain(3))))

    with pytest.raises(UsageError, match=reason):
        costs.round_times(config, batch_size, kv_tokens, 1.0)


def test_a_round_of_varying_width_costs_its_mean() -> None:
    """Half of the rounds verify one token, half three: the mean of both times."""
    costs = Costs(fit_lines(lattice(OFF, chain(1), chain(2))))

    told = costs.round_times(chain(2), 1, 160.0, 1.0, {1: 0.5, 3: 0.5})

    assert pytest.approx(0.010 + 0.002 + 0.0016, rel=1e-3) == told.verify_s


def test_a_disturbed_round_is_left_out() -> None:
    """A round of twice the median of its shape is no measurement of the shape."""
    samples = [sample(chain(1), turn) for turn in range(5)] + [sample(chain(1), 5, factor=2.0)]

    assert 5 == len(without_spikes(samples))
    assert pytest.approx(sample(chain(1)).total_s) == points_of(samples)[0].total_s


def test_a_round_that_the_hypervisor_cut_into_is_left_out() -> None:
    """One that took 1.3 times as long, part of it stolen, does not speak where others do."""
    samples = [sample(chain(1), 0), replace(sample(chain(1), 1, factor=1.3), stolen_s=0.01)]

    assert points_of(samples)[0].total_s == pytest.approx(sample(chain(1)).total_s)
    assert len(without_spikes(samples[1:])) == 1


def test_rounds_that_slowed_down_while_texts_grew_leave_times_of_short_texts_positive() -> None:
    """10 ms at 100 cached tokens and 20 ms at 150, by drift: at 60 tokens a straight line would say 2 ms and at
    50 none; no more than half of a round is put down to the cache."""
    rounds = [
        replace(sample(chain(1), turn, kv_tokens=tokens), verify_s=seconds)
        for turn, (tokens, seconds) in enumerate([(100.0, 0.010), (150.0, 0.020)] * 3)
    ]

    told = Costs(fit_lines(rounds)).round_times(chain(1), 1, 60.0, 1.0)

    assert 0.0075 * 0.9 < told.verify_s < 0.015


def test_held_out_error_is_that_of_shapes_the_others_tell() -> None:
    """Exact rounds are told exactly; a shape that is 10% slower than its neighbours shows as such."""
    exact = lattice(OFF, *(chain(k) for k in (1, 2, 3, 4)))
    slow = [sample(chain(2), s.turn, kv_tokens=s.kv_tokens, commit=s.commit_tokens, factor=1.1)
            if s.config == chain(2) else s for s in exact]  # fmt: skip

    assert held_out(exact).rms == pytest.approx(0.0, abs=2e-3)
    found = held_out(slow)
    assert found.num_points == 4
    assert found.p95 == pytest.approx(0.09, abs=0.03)


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 0), (6, 0), (7, 1), (24, 3), (25, 4), (48, 4), (49, 5), (96, 5), (97, 6)]
)
def test_buckets_are_tiles_of_six_then_double(rows: int, bucket: int) -> None:
    """The compiled passes multiply six rows at once; beyond four tiles buckets double."""
    assert bucket == bucket_of(rows)
