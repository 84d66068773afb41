"""The whole tuning of a plan: trace once, profile once, predict everything, measure the finalists.

Each step leaves a file in the run directory and is not done again when the run is resumed. The measured
points are those of a sweep, so report, policy and gate read a tuned run like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectune.errors import UsageError
from spectune.measure.contention import CpuClock, cores_of_others, read_cpu_clock
from spectune.measure.door import Door
from spectune.measure.progress import SweepProgress
from spectune.measure.requests import RequestBuilder
from spectune.records import Backend, Cell, Clock, Launch, Point, SpecConfig, Status
from spectune.store import RunStore
from spectune.store.trace_file import Trace
from spectune.tune.conversations import with_conversations
from spectune.tune.evidence import RecordsTraces, find_surface, find_traces
from spectune.tune.finalists import Race, start_race
from spectune.tune.manifest import build_manifest, check_same_run, first_difference
from spectune.tune.objective import memory_bytes, score, violation
from spectune.tune.predict import Forecast, Forecasts, forecast
from spectune.tune.race import Guess
from spectune.tune.sweep import doubt_busy_machine
from spectune.tune.tuning import TuneJob, Tuning, settings_of


def start_tuning(
    path: Path,
    job: TuneJob,
    backend: Backend,
    *,
    argv: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
) -> RunStore:
    """A new run directory; its points are added as stages of finalists begin."""
    check_traces(backend)
    manifest = build_manifest(job.plan, backend, argv=argv, config=config or {})
    return RunStore.create(path, {**manifest, "points": [], "tune": settings_of(job)})


def resume_tuning(path: Path, job: TuneJob, backend: Backend) -> RunStore:
    """An existing run directory, if the job is the one that it was started with."""
    store = RunStore.open(path)
    if "tune" not in store.manifest:
        raise UsageError(f"{path} is not a tuning run", hint=f"spectune sweep --resume {path}")
    whole = [{"point_id": point.point_id} for point in job.plan.points]
    check_same_run(RunStore(path, {**store.manifest, "points": whole}), job.plan, backend)
    known = {name: store.manifest["tune"].get(name) for name in settings_of(job)}
    if difference := first_difference(known, settings_of(job), "tune"):
        where, old, new = difference
        raise UsageError(
            f"{path} was started with {where} = {old}, now it is {new}",
            hint="resume with the flags it was started with",
        )
    return store


def check_traces(backend: Backend) -> None:
    """Raise for an engine that cannot say what drafts would have been worth."""
    if not isinstance(backend, RecordsTraces):
        raise UsageError(
            f"backend {backend.capabilities().name} cannot be traced: acceptance has to be measured there",
            hint="spectune sweep measures every configuration; spectune trace and tune on the reference "
            "engine predict it for the same head",
        )


def run_tuning(
    job: TuneJob,
    backend: Backend,
    store: RunStore,
    progress: SweepProgress,
    *,
    retry_failed: bool = False,
    clock: Clock = time.perf_counter,
    say: Callable[[str], None] = lambda text: None,
    on_step: Callable[[Tuning], None] = lambda tuning: None,
    read_clock: Callable[[], CpuClock | None] = read_cpu_clock,
) -> Tuning:
    """All steps; `on_step` hears what is known after the prediction and after every cell.

    Args:
        read_clock: tells how busy other processes keep the machine.
    """
    check_traces(backend)
    seconds: dict[str, float] = {}
    plan = with_conversations(job.plan, backend, store, progress)
    job = replace(job, plan=plan)
    builder = RequestBuilder(backend, plan.context_text)
    begin_s = clock()
    traces = find_traces(job, backend, store, builder, say)
    seconds["trace"], begin_s = clock() - begin_s, clock()
    quiet = read_clock()
    surface = find_surface(job, backend, store, builder, say)
    is_real = not backend.capabilities().is_simulated
    if is_real:
        doubt_busy_machine(cores_of_others(quiet, read_clock()), "while profiling", store, progress)
    seconds["profile"], begin_s = clock() - begin_s, clock()
    forecasts = forecast(surface, traces, plan.configs, plan.cells)
    chosen, excluded = _finalists(job, backend, forecasts, traces)
    seconds["predict"] = clock() - begin_s
    tuning = Tuning(
        job=job,
        surface=surface,
        traces=traces,
        forecasts=forecasts,
        finalists=chosen,
        excluded=excluded,
        races=(),
        seconds=seconds,
    )
    on_step(tuning)
    say(f"{len(forecasts.rows)} predictions in {seconds['predict']:.2f} s; measuring the finalists")
    quiet = read_clock()
    raced = _races(tuning, backend, store, builder, progress, retry_failed, clock, on_step)
    if is_real:
        doubt_busy_machine(cores_of_others(quiet, read_clock()), "while measuring", store, progress)
    return raced


def _finalists(
    job: TuneJob, backend: Backend, forecasts: Forecasts, traces: Mapping[tuple[int, float], Trace]
) -> tuple[dict[Cell, tuple[SpecConfig, ...]], tuple[tuple[str, str], ...]]:
    """The predicted best of each cell within the limits, and what the limits exclude.

    Where no prediction comes near plain decoding, one finalist checks the model; the time of the others is
    worth more where it is open what to run.
    """
    chosen: dict[Cell, tuple[SpecConfig, ...]] = {}
    excluded: list[tuple[str, str]] = []
    fingerprint = backend.fingerprint()
    for cell in job.plan.cells:
        trace = traces[cell.context_tokens, cell.temperature]
        longest = float((trace.num_prompt_tokens + trace.num_outputs).max())
        allowed = []
        for row in forecasts.of(cell):
            needed = memory_bytes(fingerprint, row.config, cell, longest)
            reason = violation(row, job.objective, needed)
            if reason is None:
                allowed.append(row)
            else:
                excluded.append((f"{row.config.label} @ {cell.label}", reason))
        allowed.sort(key=lambda row: (-score(row, job.objective), row.config.size))
        drafting = [row for row in allowed if not row.config.is_off]
        hopeful = [row for row in drafting if _may_win(row, drafting[0])] or drafting[:1]
        chosen[cell] = tuple(row.config for row in hopeful)[: job.num_finalists]
    return chosen, tuple(excluded)


def _may_win(row: Forecast, best: Forecast) -> bool:
    """Whether the interval of a configuration reaches that of the predicted best of its cell, and plain decoding."""
    if row.speedup is None or best.speedup is None:
        return True
    high, low = row.speedup.high, best.speedup.low
    return high is None or low is None or high >= max(low, 1.0)


def _races(
    tuning: Tuning,
    backend: Backend,
    store: RunStore,
    builder: RequestBuilder,
    progress: SweepProgress,
    retry_failed: bool,
    clock: Clock,
    on_step: Callable[[Tuning], None],
) -> Tuning:
    job, seconds = tuning.job, dict(tuning.seconds)
    begin_s = clock()
    deadline_s = begin_s + job.budget_s
    retry = frozenset(
        point_id
        for point_id, outcome in store.outcomes().items()
        if retry_failed and outcome.status is not Status.OK
    )
    launch = Launch(points=tuple(job.plan.point(config, job.plan.cells[0], 0) for config in job.plan.configs))
    races: list[Race] = []

    def add_points(points: Sequence[Point]) -> None:
        rows = list(store.manifest["points"])
        known = {row["point_id"] for row in rows}
        rows += [{"point_id": p.point_id, **p.canonical} for p in points if p.point_id not in known]
        store.update_manifest({"points": rows})
        progress.started(len(rows), sum(row["point_id"] in known for row in rows))

    def told() -> Tuning:
        seconds["finalists"] = clock() - begin_s
        results = tuple(race.result() for race in races)
        now = replace(tuning, races=results, seconds=dict(seconds))
        on_step(now)
        return now

    with Door(backend, launch) as door:
        for cell in job.plan.cells:
            race = start_race(
                job.plan,
                cell,
                tuning.finalists[cell],
                _guesses(tuning, cell),
                door=door,
                store=store,
                requests=builder,
                progress=progress,
                rules=job.rules,
                on_points=add_points,
                retry=retry,
            )
            race.advance(clock)
            races.append(race)
            told()
        last = races[-1]
        while (chosen := _next_race(races, deadline_s - clock())) is not None:
            if chosen is not last:
                chosen.cool()
            chosen.advance(clock)
            last = chosen
            told()
        return told()


def _next_race(races: Sequence[Race], left_s: float) -> Race | None:
    """The race whose next stage is worth most and fits: whether to speculate at all comes before the choice
    among finalists alike, then whoever ran least."""
    open_races = [race for race in races if not race.is_over and race.expected_s <= left_s]
    return min(open_races, key=lambda race: (not race.is_in_doubt, len(race.stages)), default=None)


def _guesses(tuning: Tuning, cell: Cell) -> dict[SpecConfig, Guess]:
    """Predicted speedups of the traced prompts; the error of times alone, since prompts are shared."""
    plain = tuning.forecasts.find(SpecConfig.off(), cell)
    return {
        row.config: Guess(
            speedup=row.speedup.value,
            error=2**0.5 * row.time_error,
            gain=None if plain is None else row.tokens_per_step / plain.tokens_per_step,
            gain_error=row.acceptance_error,
        )
        for row in tuning.forecasts.of(cell)
        if row.speedup is not None
    }
