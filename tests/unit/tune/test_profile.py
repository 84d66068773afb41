"""Profiling: which shapes are timed, that the declared engine comes back, and what cannot be profiled."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import replace

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.backend.truth import SimulatedTruth
from spectune.errors import UsageError
from spectune.records import Cell, Request, Sampling, SpecConfig
from spectune.tune.profile import (
    COLD_ROUNDS,
    MIN_TURNS,
    PLAIN_ROUNDS,
    PLAIN_VISITS,
    lattice,
    profile,
    repeatability,
)
from spectune.tune.space import build_space
from spectune.tune.surface import Costs, draft_family

QUIET = SimulatedTruth(noise_sd=0.0)
CONFIGS, _ = build_space(["eagle3", "ngram"], [1, 2, 3, 5], [1, 2, 4], [4, 8])


def cells_of(*batch_sizes: int, prompt_tokens: int = 60) -> dict[Cell, tuple[Request, ...]]:
    return {
        Cell(batch_size=size, context_tokens=0, temperature=0.0): tuple(
            Request(
                request_id=f"r{i}",
                prompt_ids=tuple(range(prompt_tokens)),
                category="c",
                sampling=Sampling(),
            )
            for i in range(size)
        )
        for size in batch_sizes
    }


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_profile_recovers_what_the_engine_declares(batch_size: int) -> None:
    """Every configuration's round: declared draft, verification at its width, and the rest."""
    surface = profile(SimulatedBackend(truth=QUIET), CONFIGS, cells_of(1, 4), budget_s=0)
    costs, kv_tokens = Costs(surface.lines), 70 * batch_size

    for config in CONFIGS:
        told = costs.round_times(config, batch_size, kv_tokens, 2.0)
        extra = config.num_draft_tokens - 1
        assert told.draft_s == pytest.approx(QUIET.draft_s(config), abs=2e-6)
        assert told.verify_s == pytest.approx(QUIET.verify_s(batch_size, extra, kv_tokens), rel=1e-3)
        assert told.other_s == pytest.approx(QUIET.other_s + QUIET.other_s_per_sequence * batch_size)


def test_what_forcing_costs_is_taken_out() -> None:
    """An engine that needs a millisecond a round to force acceptance is told without it."""

    class Forcing(SimulatedBackend):
        @contextmanager
        def open(self, launch):
            with super().open(launch) as session:
                plain = session.time_rounds

                def time_rounds(point, requests, configs, kept):
                    extra_s = 0.0 if all(config.is_off for config in configs) else 1e-3
                    rounds = plain(point, requests, configs, kept)
                    return tuple(replace(turn, other_s=turn.other_s + extra_s) for turn in rounds)

                session.time_rounds = time_rounds
                yield session

    surface = profile(Forcing(truth=QUIET), CONFIGS, cells_of(1), budget_s=0)

    declared = QUIET.other_s + QUIET.other_s_per_sequence
    for point in surface.points:
        assert point.other_s == pytest.approx(declared)


def test_a_machine_that_slows_down_meanwhile_slows_every_batch_size_alike() -> None:
    """From 1 to 1.5 over the rounds: what batch 4 costs over batch 1 stays what the engine declares."""

    class Slowing(SimulatedBackend):
        num_calls = 0

        @contextmanager
        def open(self, launch):
            with super().open(launch) as session:
                plain = session.time_rounds

                def time_rounds(point, requests, configs, kept):
                    if any(not config.is_off for config in configs):
                        self.num_calls += 1
                    factor = 1 + 0.01 * self.num_calls
                    return tuple(
                        replace(
                            turn,
                            draft_s=turn.draft_s * factor,
                            verify_s=turn.verify_s * factor,
                            other_s=turn.other_s * factor,
                        )
                        for turn in plain(point, requests, configs, kept)
                    )

                session.time_rounds = time_rounds
                yield session

    cells = cells_of(1, 4, 16)
    slowing = Slowing(truth=QUIET)
    steady = profile(SimulatedBackend(truth=QUIET), CONFIGS, cells, budget_s=1e6)
    told = profile(slowing, CONFIGS, cells, budget_s=1e6)

    before, after = ({(p.batch_size, p.config): p.total_s for p in s.points} for s in (steady, told))
    slower = {key: after[key] / before[key] for key in before}
    assert slowing.num_calls > 20
    assert min(slower.values()) > 1.1
    assert max(slower.values()) / min(slower.values()) < 1.03


@pytest.mark.parametrize(
    ("device", "num_visits"), [pytest.param("cpu", 4, id="cpu"), pytest.param("NVIDIA H200", 1, id="gpu")]
)
def test_batch_sizes_take_turns_except_where_each_change_costs_graphs(device: str, num_visits: int) -> None:
    """On a CPU a batch size comes up again and again; on a GPU it is timed at one go."""
    batch_sizes: list[int] = []

    class Watched(SimulatedBackend):
        def fingerprint(self):
            return replace(super().fingerprint(), device=device)

        @contextmanager
        def open(self, launch):
            with super().open(launch) as session:
                plain = session.time_rounds

                def time_rounds(point, requests, configs, kept):
                    batch_sizes.append(point.cell.batch_size)
                    return plain(point, requests, configs, kept)

                session.time_rounds = time_rounds
                yield session

    surface = profile(Watched(truth=QUIET), CONFIGS, cells_of(1, 4), budget_s=1e6)

    visits = [size for size, _ in itertools.groupby(batch_sizes)]
    assert {1, 4} == {point.batch_size for point in surface.points}
    assert visits.count(1) >= num_visits
    assert num_visits > 1 or visits == [1, 4]


def test_plain_rounds_between_drafting_ones_count_for_plain_decoding() -> None:
    """Plain decoding is timed as often as every other shape, and without the drafter's part."""
    surface = profile(SimulatedBackend(truth=QUIET), CONFIGS, cells_of(1), budget_s=0)

    plain = next(point for point in surface.points if point.config.is_off)
    alone = PLAIN_VISITS * (PLAIN_ROUNDS - COLD_ROUNDS)
    assert plain.num_rounds == alone + 2 * MIN_TURNS  # once a pass of either method
    assert plain.draft_s == 0.0


def test_two_profiles_of_one_engine_agree_within_its_noise() -> None:
    """Rounds of 1% noise, four of each: their means differ by about 0.7% and never by 3%."""
    cells = cells_of(1, 4)
    surfaces = [
        profile(SimulatedBackend(noise_seed=seed), CONFIGS, cells, budget_s=0, seed=seed) for seed in (1, 2)
    ]

    median, p95 = repeatability(*surfaces)

    assert 0 < median < p95 < 0.03


def test_held_out_error_of_a_quiet_engine_is_nothing() -> None:
    """Shapes that were left out are told by the others."""
    surface = profile(SimulatedBackend(truth=QUIET), CONFIGS, cells_of(4), budget_s=0)

    assert surface.held_out.num_points > 5
    assert surface.held_out.rms == pytest.approx(0.0, abs=5e-3)
    assert surface.drift == pytest.approx(0.0)


def test_the_lattice_holds_every_width_and_both_ends_of_every_draft_family() -> None:
    """So that no configuration of the space has to be extrapolated."""
    large, _ = build_space(["eagle3", "ngram"], range(1, 9), [1, 2, 4, 8], [4, 6, 8, 12, 16, 24, 32])

    kept = lattice(large)

    heads = [config for config in large if config.method == "eagle3"]
    assert {c.num_draft_tokens for c in heads} == {c.num_draft_tokens for c in kept if c.method == "eagle3"}
    for family in {draft_family(config) for config in large if not config.is_off}:
        depths = [c.num_steps for c in large if draft_family(c) == family]
        own = [c.num_steps for c in kept if draft_family(c) == family]
        assert (min(depths), max(depths)) == (min(own), max(own))
    assert len(kept) < len(large) / 2


def test_a_default_profile_times_at_least_seventy_points() -> None:
    """Three batch sizes of the default space of tuning."""
    space, _ = build_space(["eagle3", "ngram"], [1, 2, 3, 4, 5, 6, 8], [1, 2, 4], [4, 8, 16])

    surface = profile(SimulatedBackend(), space, cells_of(1, 4, 16), budget_s=0)

    assert len(surface.points) >= 70
    assert min(point.num_rounds for point in surface.points) >= 3


def test_a_backend_without_single_rounds_is_told_what_to_do() -> None:
    """A server cannot time rounds: its sweep tells step times."""

    class Server(SimulatedBackend):
        @contextmanager
        def open(self, launch):
            del launch
            yield object()

    with pytest.raises(UsageError, match="cannot time single rounds"):
        profile(Server(), CONFIGS, cells_of(1))


def test_plain_decoding_alone_is_nothing_to_profile() -> None:
    """Without a configuration that speculates there is no surface to make."""
    with pytest.raises(UsageError, match="nothing to profile"):
        profile(SimulatedBackend(), [SpecConfig.off()], cells_of(1))


def test_a_slower_engine_shows_as_a_change() -> None:
    """Verification 10% dearer: the points of the second profile are slower."""
    slow = SimulatedBackend(
        truth=replace(QUIET, plain_s_by_batch={k: v * 1.1 for k, v in QUIET.plain_s_by_batch.items()})
    )
    first = profile(SimulatedBackend(truth=QUIET), CONFIGS, cells_of(1), budget_s=0)

    median, _ = repeatability(first, profile(slow, CONFIGS, cells_of(1), budget_s=0))

    assert 0.04 < median < 0.1
