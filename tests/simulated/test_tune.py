"""Tuning end to end on declared costs: it finds what is best, survives failures, and goes on when resumed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.backend.truth import SimulatedTruth
from spectune.errors import NotComparable, UsageError
from spectune.measure.contention import CpuClock
from spectune.measure.progress import SilentProgress
from spectune.policy.summary import summarize
from spectune.records import Sampling, SpecConfig, Status
from spectune.store import RunStore
from spectune.store.surface import read_surface, write_surface
from spectune.tune.document import document
from spectune.tune.job import resume_tuning, run_tuning, start_tuning
from spectune.tune.objective import Objective
from spectune.tune.plan import plan_sweep
from spectune.tune.race import RaceRules
from spectune.tune.space import build_space
from spectune.tune.tuning import TuneJob, Tuning

OFF = SpecConfig.off()
CONFIGS, PRUNED = build_space(["eagle3", "ngram"], [1, 2, 3, 5], [1, 2], [4, 8])
COSTLY = SimulatedTruth(draft_step_s={"eagle3": 0.030, "ngram": 0.030}, noise_sd=0.005)

CLOSE_AT_8 = SimulatedTruth(verify_s_per_token=1.7e-3)
"""Longer verification than one wins back at batch 8, but for the shortest chain, a few percent ahead there."""

Make = Callable[..., Tuning]


@pytest.fixture
def job_of(workload_of: Callable[..., Any]) -> Callable[..., TuneJob]:
    """A job over a small space; changes go to the job, `batch_sizes` and `configs` to its plan."""

    def build(
        backend: SimulatedBackend,
        *,
        batch_sizes: tuple[int, ...] = (1,),
        configs: Any = CONFIGS,
        **changes: Any,
    ) -> TuneJob:
        plan = plan_sweep(
            backend,
            workload_of(each=24),
            configs,
            batch_sizes=batch_sizes,
            sampling=Sampling(max_tokens=32, ignore_eos=True),
            num_prompts=8,
            min_blocks=3,
            pruned=PRUNED,
        )
        fields: dict[str, Any] = {
            "objective": Objective(),
            "num_trace_prompts": 24,
            "profile_s": 0.0,
            "budget_s": 60.0,
        }
        return TuneJob(plan=plan, **(fields | changes))

    return build


@pytest.fixture
def tune(tmp_path: Path) -> Make:
    """Runs a job in a new directory."""

    def run(job: TuneJob, backend: SimulatedBackend, name: str = "run", progress: Any = None) -> Tuning:
        store = start_tuning(tmp_path / name, job, backend)
        return run_tuning(job, backend, store, progress or SilentProgress())

    return run


def true_speed(truth: SimulatedTruth, config: SpecConfig, batch_size: int) -> float:
    """Speed over plain decoding as declared: costs at 20 cached tokens a sequence, acceptance of chat and
    code, which have equally many tokens. A round is as wide as its widest row."""

    def tokens_per_step(category: str) -> float:
        survival, tokens = truth.proposal_rate.get(config.method, 1.0), 1.0
        for hazard in truth.acceptance(config, category, 0.0):
            survival *= hazard
            tokens += survival
        return tokens

    def round_s(one: SpecConfig) -> float:
        idle = (1 - truth.proposal_rate.get(one.method, 1.0)) ** batch_size
        widths = {0: idle, one.num_draft_tokens - 1: 1 - idle}
        verify_s = sum(p * truth.verify_s(batch_size, n, 20 * batch_size) for n, p in widths.items())
        return truth.draft_s(one) + verify_s + truth.other_s + truth.other_s_per_sequence * batch_size

    mean = 2 / sum(1 / tokens_per_step(category) for category in ("chat", "code"))
    return mean * round_s(OFF) / round_s(config)


def test_tuning_finds_a_configuration_within_three_percent_of_the_best(job_of: Any, tune: Make) -> None:
    """At batch 1 and 8, by what the engine declares of every configuration."""
    backend = SimulatedBackend()
    job = job_of(backend, batch_sizes=(1, 8))

    tuning = tune(job, backend)

    for race in tuning.races:
        size = race.cell.batch_size
        speeds = {config: true_speed(backend.truth, config, size) for config in job.plan.configs}
        assert speeds[race.winner] > max(speeds.values()) / 1.03


def test_one_stage_is_enough_because_acceptance_comes_from_the_trace(job_of: Any, tune: Make) -> None:
    """Eight prompts of one stage accept what they happen to; the told speed is the declared one within 5%
    all the same, and its interval holds it."""
    truth = SimulatedTruth(noise_sd=0.005)
    backend = SimulatedBackend(truth=truth)

    [race] = tune(job_of(backend, budget_s=0.0), backend).races

    told, true = race.speedup, true_speed(truth, race.winner, 1)
    assert told is not None
    assert told.low is not None
    assert told.high is not None
    assert told.value == pytest.approx(true, rel=0.05)
    assert told.low < true < told.high


def test_only_finalists_and_plain_decoding_are_measured(job_of: Any, tune: Make, tmp_path: Path) -> None:
    """Everything is predicted; at most the asked number of configurations runs; the rest is listed."""
    backend = SimulatedBackend()
    job = job_of(backend, num_finalists=2)

    tuning = tune(job, backend)

    store = RunStore.open(tmp_path / "run")
    ran = {outcome.point.config for outcome in store.outcomes().values()}
    told = json.loads(json.dumps(document(tuning, store), default=str))
    assert ran == {OFF, *tuning.finalists[job.plan.cells[0]]}
    assert len(tuning.forecasts.of(job.plan.cells[0])) == len(job.plan.configs)
    assert told["cells"][0]["not_tried"]["num"] == len(job.plan.configs) - 3


def test_when_everything_is_slower_the_verdict_is_not_to_speculate(
    job_of: Any, tune: Make, tmp_path: Path
) -> None:
    """A draft that costs a plain step a token never pays, whatever is accepted."""
    backend = SimulatedBackend(truth=COSTLY)

    tuning = tune(job_of(backend), backend)

    assert [OFF] == [race.winner for race in tuning.races]
    assert [len(finalists) for finalists in tuning.finalists.values()] == [1]  # checks the prediction
    assert summarize(RunStore.open(tmp_path / "run")).outcome == "do not speculate"


def test_equal_speed_takes_the_smaller_configuration(job_of: Any, tune: Make) -> None:
    """Deeper drafts that are free and never accepted are as fast as the short one: the short one is taken."""
    truth = SimulatedTruth(
        hazards={"eagle3": {"default": (0.8, 0.0)}},
        draft_step_s={"eagle3": 1e-7},
        verify_s_per_token=1e-7,
        noise_sd=0.001,
    )
    backend = SimulatedBackend(truth=truth)
    configs, _ = build_space(["eagle3"], [1, 2, 3])

    tuning = tune(job_of(backend, configs=configs), backend)

    assert SpecConfig.chain("eagle3", 1) == tuning.races[0].winner


def test_a_failing_finalist_is_told_and_another_wins(job_of: Any, tune: Make) -> None:
    """The engine dies in the predicted best: it leaves the race with its reason."""
    backend = SimulatedBackend()
    best = tune(job_of(backend), backend, "first").races[0].winner
    broken = SimulatedBackend(failing={best.label: "engine"})

    tuning = tune(job_of(broken), broken, "second")

    race = tuning.races[0]
    assert race.winner not in (best, OFF)
    assert [best.label] == [label for label, _ in race.failed]


def test_failed_points_keep_their_outcome_on_resume_unless_asked(job_of: Any, tmp_path: Path) -> None:
    """A resumed run does not try them again; --retry-failed does, and they can win."""
    well = SimulatedBackend()
    job = job_of(well)
    store = start_tuning(tmp_path / "well", job, well)
    best = run_tuning(job, well, store, SilentProgress()).races[0].winner
    broken = SimulatedBackend(failing={best.label: "oom"})
    store = start_tuning(tmp_path / "run", job, broken)
    run_tuning(job, broken, store, SilentProgress())

    kept = run_tuning(job, well, resume_tuning(tmp_path / "run", job, well), SilentProgress())
    retried = run_tuning(
        job, well, resume_tuning(tmp_path / "run", job, well), SilentProgress(), retry_failed=True
    )

    assert [best.label] == [label for label, _ in kept.races[0].failed]
    assert () == retried.races[0].failed
    assert best == retried.races[0].winner


def test_plain_decoding_that_fails_leaves_nothing_to_compare(job_of: Any, tune: Make) -> None:
    """Then plain decoding is the answer, with the reason."""
    backend = SimulatedBackend(failing={"off": "engine"})

    race = tune(job_of(backend), backend).races[0]

    assert (OFF, "nothing to compare") == (race.winner, race.end)
    assert "died" in race.reason


@pytest.mark.parametrize("stop_at", [("block", 1), ("block", 20), ("point", 2)], ids=str)
def test_an_interrupted_tuning_ends_like_a_whole_one(
    job_of: Any, tune: Make, recorder: Any, tmp_path: Path, stop_at: tuple[str, int]
) -> None:
    """Trace and surface are kept, stored blocks are not run again, and the winner is the same."""
    backend = SimulatedBackend()
    job = job_of(backend)
    whole = tune(job, backend, "whole")
    store = start_tuning(tmp_path / "broken", job, backend)
    # the surface of the whole run: profiling takes as many rounds as the clock allows
    write_surface(tmp_path / "broken" / "time-surface.json", read_surface(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        run_tuning(job, backend, store, recorder(stop_at=stop_at))

    resumed = resume_tuning(tmp_path / "broken", job, backend)
    tuning = run_tuning(job, backend, resumed, SilentProgress())

    assert [race.winner for race in whole.races] == [race.winner for race in tuning.races]
    assert len(whole.races[0].stages) == len(tuning.races[0].stages)


def test_resume_with_other_settings_or_another_engine_is_refused(
    job_of: Any, tune: Make, tmp_path: Path
) -> None:
    """It names what differs."""
    backend = SimulatedBackend()
    job = job_of(backend)
    tune(job, backend)

    with pytest.raises(UsageError, match="num_finalists"):
        resume_tuning(tmp_path / "run", replace(job, num_finalists=9), backend)
    with pytest.raises(NotComparable, match="truth"):
        resume_tuning(tmp_path / "run", job, SimulatedBackend(truth=COSTLY))


def test_a_surface_of_another_machine_is_refused(job_of: Any, tune: Make, tmp_path: Path) -> None:
    """Times measured at one tensor parallel size say nothing about another: the field is named."""
    backend = SimulatedBackend()
    tune(job_of(backend), backend)
    surface = read_surface(tmp_path / "run")
    other = replace(surface, fingerprint={**surface.fingerprint, "settings": {"truth": "tp=4", "seed": 0}})
    write_surface(tmp_path / "tp4.json", other)

    with pytest.raises(NotComparable, match=r"settings\.truth"):
        tune(job_of(backend, surface=tmp_path / "tp4.json"), backend, "second")


def test_an_engine_that_cannot_be_traced_is_refused_before_anything_is_written(
    job_of: Any, tmp_path: Path
) -> None:
    """The message says what measures every configuration there."""

    class Server(SimulatedBackend):
        record_trace = None  # type: ignore[assignment]  # as a backend without it

    with pytest.raises(UsageError, match="cannot be traced"):
        start_tuning(tmp_path / "run", job_of(SimulatedBackend()), Server())

    assert not (tmp_path / "run").exists()


def test_a_machine_that_others_keep_busy_is_doubted(job_of: Any, tmp_path: Path) -> None:
    """Times beside other work say little: the run says so once for the profile and once for the race."""

    class Real(SimulatedBackend):
        def capabilities(self):
            return replace(super().capabilities(), is_simulated=False)

        def fingerprint(self):
            return replace(super().fingerprint(), device="cpu", threads=64)

    ticks = itertools.count(1)

    def clock() -> CpuClock:
        second = float(next(ticks))
        return CpuClock(wall_s=second, busy_s=64 * second, own_s=0.0)

    backend, job = Real(), job_of(SimulatedBackend())
    store = start_tuning(tmp_path / "run", job, backend)

    run_tuning(job, backend, store, SilentProgress(), read_clock=clock)

    told = [text for text in store.manifest["cautions"] if text.startswith("other processes")]
    assert [True, True] == ["busy while" in text for text in told]


def test_a_race_ends_when_no_challenger_can_be_better_by_epsilon(job_of: Any, tune: Make) -> None:
    """Every other finalist's upper end lies below 1 + ε, or it left as the slower half."""
    backend = SimulatedBackend()

    race = tune(job_of(backend, rules=RaceRules(epsilon=0.15, max_stages=6)), backend).races[0]

    last = {one.config: one for one in race.stages[-1].challengers}
    assert race.end == "settled"
    for one in last.values():
        if one.status == "settled":
            assert one.against is None or one.against.high is None or one.against.high < 1.15
    assert {one.status for one in last.values()} <= {"incumbent", "settled", "halved"}


def test_time_that_is_left_goes_where_it_is_open_whether_to_speculate(job_of: Any, tmp_path: Path) -> None:
    """At batch 1 speculation wins by far at once, at 8 it is about as fast as plain decoding: the rest of the
    time is spent there, by a clock that advances a second a look."""
    backend = SimulatedBackend(truth=replace(CLOSE_AT_8, noise_sd=0.4))
    job = job_of(backend, batch_sizes=(1, 8), budget_s=24.0)
    seconds = itertools.count()

    store = start_tuning(tmp_path / "run", job, backend)
    tuning = run_tuning(job, backend, store, SilentProgress(), clock=lambda: float(next(seconds)))

    alone, many = tuning.races
    assert not alone.winner.is_off
    assert len(many.stages) > len(alone.stages)


@pytest.mark.parametrize("seed", range(6))
def test_a_settled_race_leaves_plain_decoding_only_to_what_is_no_faster(
    job_of: Any, tune: Make, seed: int
) -> None:
    """A chain that is truly ahead by more than ε wins or is still running: no race is settled for plain decoding
    because the chain has not beaten it beyond the noise yet."""
    backend = SimulatedBackend(truth=replace(CLOSE_AT_8, noise_sd=0.2), noise_seed=seed)

    race = tune(job_of(backend, batch_sizes=(8,)), backend).races[0]

    assert true_speed(backend.truth, SpecConfig.chain("eagle3", 1), 8) > 1.02
    assert (race.end, race.winner) != ("settled", OFF)
    for one in race.stages[-1].challengers if race.end == "settled" and race.winner.is_off else ():
        if one.status == "incumbent" and not one.config.is_off:
            assert one.speedup.high < 1.02
        elif one.status == "settled":
            assert one.against.high < 1.02


def test_a_budget_of_nothing_measures_one_stage_and_says_who_is_unsettled(job_of: Any, tune: Make) -> None:
    """A stage that has begun is finished, then the budget ends the race."""
    backend = SimulatedBackend(truth=SimulatedTruth(noise_sd=0.2))

    race = tune(job_of(backend, budget_s=0.0), backend).races[0]

    assert (1, "budget") == (len(race.stages), race.end)
    assert race.unsettled


def test_a_limit_leaves_out_what_cannot_keep_it(job_of: Any, tune: Make) -> None:
    """No finalist above the limit, and each one left out is named."""
    backend = SimulatedBackend()
    job = job_of(backend, objective=Objective(max_tpot_s=0.022))

    tuning = tune(job, backend)

    cell = job.plan.cells[0]
    for config in tuning.finalists[cell]:
        row = tuning.forecasts.find(config, cell)
        assert row is not None
        assert (row.tpot_s.low or 0) <= 0.022
    assert any(label.startswith("off @") for label, _ in tuning.excluded)


def test_a_tuned_run_is_reported_like_a_sweep(job_of: Any, tune: Make, tmp_path: Path) -> None:
    """The measured points are those of a sweep: outcomes, blocks, a summary with a verdict."""
    backend = SimulatedBackend()
    tuning = tune(job_of(backend), backend)

    store = RunStore.open(tmp_path / "run")
    summary = summarize(store)

    assert {Status.OK} == {outcome.status for outcome in store.outcomes().values()}
    assert summary.outcome == "speculate"
    assert tuning.races[0].winner in {arm.config for arm in summary.cells[0].arms}
