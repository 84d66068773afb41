"""`spectune tune`: trace, profile, predict everything, measure the finalists, decide."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.config import read_config
from spectune.cli.console import duration, keep_log_in, print_json, say
from spectune.cli.options import parse_settings, settings_of, with_flags
from spectune.cli.tune_options import QUICK_TUNE, TuneOptions
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.policy.comparison import RunSummary
    from spectune.records import OPTION, Backend
    from spectune.store import RunStore
    from spectune.tune.plan import SweepPlan
    from spectune.tune.tuning import TuneJob, Tuning
    from spectune.workload.workload import Workload

DONE, NOTHING_USABLE, DONE_WITH_FAILURES = 0, 1, 7


@with_flags(TuneOptions)
def tune(
    called: typer.Context,
    *,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Settings of a sweep from a spectune.yaml; flags override it."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first answer within six minutes.")] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Complete this run directory with its own settings.")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: run failed points again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print tuning and summary as JSON.")] = False,
    **flags: Any,
) -> None:
    """Find the fastest configuration at every load: predict all of them, measure only the finalists.

    One plain run tells what every draft would be worth, a short profile what every round costs; the
    predicted best are measured in turn with plain decoding. The verdict may be not to speculate.
    """
    options = stored_settings(resume, flags) if resume else read_settings(flags, config, quick=quick)
    if dry_run:
        raise typer.Exit(show_plan(options, as_json=as_json))
    argv = ("spectune", *called.obj)
    raise typer.Exit(run(options, resume, argv=argv, retry_failed=retry_failed, as_json=as_json))


def run(
    options: TuneOptions, resume: Path | None, *, argv: Sequence[str], retry_failed: bool, as_json: bool
) -> int:
    """The whole tuning; returns the exit code."""
    from spectune.cli.doctor import preflight
    from spectune.cli.inputs import open_backend
    from spectune.cli.progress import sweep_progress
    from spectune.cli.results import save_results
    from spectune.cli.tune_show import show_tuning
    from spectune.tune.document import TUNING_FILE, document
    from spectune.tune.job import resume_tuning, run_tuning, start_tuning

    preflight(options)
    if options.knob:
        from spectune.tune.knobs import parse_knobs

        parse_knobs(options.knob, options.backend)  # a wrong one is told before hours of measuring
    path = resume or Path(options.output_dir or f"runs/{datetime.now():%Y-%m-%d-%H%M%S}-tune")
    workload, backend = read_prompts(options), open_backend(options, path)
    job = job_of(options, workload, backend)
    if resume is not None:
        store = resume_tuning(path, job, backend)
    else:
        store = start_tuning(path, job, backend, argv=argv, config=asdict(options))
    for line in plan_lines(job.plan):
        say(line)
    say(f"run directory: {path}")

    def keep(tuning: Tuning) -> None:
        store.write_json(TUNING_FILE, document(tuning, store))

    with keep_log_in(path, go_on=f"spectune tune --resume {path}"):
        with sweep_progress(job.budget_s) as progress:
            tuning = run_tuning(
                job, backend, store, progress, retry_failed=retry_failed, say=progress.note, on_step=keep
            )
        knobs = search_knobs(options, tuning, backend)
        told = document(tuning, store, knobs)
        store.write_json(TUNING_FILE, told)
        summary = conclude(tuning, store)
        page = save_results(store, summary)
    show_tuning(store.read_json(TUNING_FILE), summary, page, as_json=as_json)
    return exit_code(tuning, summary)


def read_settings(flags: dict[str, Any], config: Path | None = None, *, quick: bool) -> TuneOptions:
    """Flags over --quick over the file over defaults."""
    from_file, places = read_config(config) if config else ({}, {})
    given = {name: value for name, value in flags.items() if value is not None}
    preset = QUICK_TUNE if quick else {}
    sources = {name: place for name, place in places.items() if name not in given and name not in preset}
    options: TuneOptions = parse_settings(TuneOptions, from_file, preset, given, sources=sources)
    return options


def stored_settings(run: Path, flags: dict[str, Any]) -> TuneOptions:
    """The settings that a run was started with; only its budget may be another one."""
    from spectune.store import RunStore

    given = {name: value for name, value in flags.items() if value is not None}
    budget = {name: given.pop(name) for name in ("budget",) if name in given}
    if given:
        flag = settings_of(TuneOptions)[next(iter(given))].flags[0]
        raise UsageError(
            f"--resume {run} keeps the settings of that run, {flag} cannot change them",
            hint=f"spectune tune --resume {run}",
        )
    stored = RunStore.open(run).manifest["config"]
    known = {name: value for name, value in stored.items() if name in settings_of(TuneOptions)}
    options: TuneOptions = parse_settings(TuneOptions, known, budget)
    return options


def read_prompts(options: TuneOptions) -> Workload:
    """As many prompts as the trace and the stages of the largest load can use."""
    from spectune.cli.inputs import read_workload
    from spectune.errors import NotComparable

    wanted = max(options.trace_prompts, 4 * max(options.batch_size) * options.min_blocks)
    workload = read_workload(replace(options, num_prompts=wanted))
    if workload.is_synthetic and not options.allow_synthetic:
        raise NotComparable(
            "the prompts are synthetic: what drafts get right on them says nothing about real text",
            hint="--allow-synthetic tunes on them all the same",
        )
    return workload


def job_of(options: TuneOptions, workload: Workload, backend: Backend) -> TuneJob:
    """Everything that is tuned, its objective and its budget."""
    from spectune.cli.inputs import plan_of
    from spectune.metrics.goodput import parse_goodput
    from spectune.tune.objective import Objective
    from spectune.tune.race import RaceRules
    from spectune.tune.tuning import TuneJob

    objective = Objective(
        kind=options.objective,
        promises=parse_goodput(options.goodput) if options.goodput else None,
        max_tpot_s=None if options.max_tpot_ms is None else options.max_tpot_ms / 1e3,
        max_memory_bytes=None if options.max_memory_gb is None else int(options.max_memory_gb * 1e9),
    )
    return TuneJob(
        plan=plan_of(options, workload, backend),
        objective=objective,
        rules=RaceRules(epsilon=options.epsilon),
        num_finalists=options.finalists,
        num_trace_prompts=options.trace_prompts,
        budget_s=options.budget * 60,
        profile_s=options.profile_seconds,
        seed=options.seed,
        trace=None if options.trace is None else Path(options.trace),
        surface=None if options.surface is None else Path(options.surface),
    )


def show_plan(options: TuneOptions, *, as_json: bool) -> int:
    """Configurations, cells, what was pruned, and what may be measured; runs nothing."""
    from spectune.cli.inputs import open_backend

    backend = open_backend(options)
    job = job_of(options, read_prompts(options), backend)
    plan = job.plan
    if as_json:
        print_json(
            {
                "configs": [config.label for config in plan.configs],
                "cells": [cell.label for cell in plan.cells],
                "predicted": len(plan.configs) * len(plan.cells),
                "finalists_per_cell": job.num_finalists,
                "trace_prompts": job.num_trace_prompts,
                "budget_s": job.budget_s,
                "profile_s": job.profile_s,
                "objective": job.objective.kind,
                "pruned": [{"point": label, "reason": reason} for label, reason in plan.pruned],
            }
        )
        return DONE
    for line in plan_lines(plan):
        print(line)
    print(
        f"one traced pass over {job.num_trace_prompts} prompts, a profile of at most "
        f"{duration(job.profile_s)}, then at most {job.num_finalists} finalists at each load within "
        f"{duration(job.budget_s)}"
    )
    return DONE


def plan_lines(plan: SweepPlan) -> list[str]:
    """What is going to be predicted, for people."""
    pruned: dict[str, int] = {}
    for _, reason in plan.pruned:
        pruned[reason] = pruned.get(reason, 0) + 1
    lines = [
        f"{len(plan.configs)} configurations, plain decoding included, x {len(plan.cells)} loads",
        f"loads: {'; '.join(cell.label for cell in plan.cells)}",
    ]
    if pruned:
        lines.append(f"{sum(pruned.values())} combinations pruned: --dry-run --json says why")
    return lines


def conclude(tuning: Tuning, store: RunStore) -> RunSummary:
    """The summary over plain decoding and the winner of each load; where plain decoding stays, over all
    that were measured, so that the reason stands there."""
    from spectune.policy.summary import summarize

    winners = {race.cell: race.winner for race in tuning.races}
    rows = []
    for outcome in store.outcomes().values():
        point = outcome.point
        winner = winners.get(point.cell)
        if winner is None or winner.is_off or point.config.is_off or point.config == winner:
            rows.append({"point_id": point.point_id, **point.canonical})
    store.update_manifest({"points": rows})
    return summarize(store)


def exit_code(tuning: Tuning, summary: RunSummary) -> int:
    """0 done, 1 nothing usable, 7 done with failed finalists."""
    if summary.outcome == "no data":
        return NOTHING_USABLE
    return DONE_WITH_FAILURES if any(race.failed for race in tuning.races) else DONE


def _study_of(plan: SweepPlan, backend: Backend, knobs: Sequence[str]) -> str:
    """Hash of what the scores of a study depend on beside its name: engine, prompts, and the choices asked."""
    from spectune.tune.manifest import comparable

    told = [comparable(backend.fingerprint()), plan.workload.digest, sorted(knobs)]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:12]


def search_knobs(options: TuneOptions, tuning: Tuning, backend: Backend) -> dict[str, Any] | None:
    """Settings outside the model at the first load, starting from what the model answered."""
    if not options.knob:
        return None
    from spectune.backend import create_backend
    from spectune.cli.inputs import backend_options
    from spectune.measure.requests import RequestBuilder
    from spectune.tune.knobs import evaluator, parse_knobs
    from spectune.tune.search import search

    knobs = parse_knobs(options.knob, options.backend)
    race, plan = tuning.races[0], tuning.job.plan
    builder = RequestBuilder(backend, plan.context_text)
    blocks = builder.blocks(plan.workload.prompts, race.cell, plan.sampling, count=plan.min_blocks)

    def make(values: Mapping[str, OPTION]) -> Backend:
        return create_backend(options.backend, **{**backend_options(options), **values})

    found = search(
        knobs,
        evaluator(make, plan.point(race.winner, race.cell, 0), blocks),
        num_trials=options.num_trials,
        seed=options.seed,
        storage=options.storage,
        # a storage may be shared by runs on other machines, models and prompts: their scores are not ours
        study_name=f"spectune {race.winner.label} {race.cell.label} {_study_of(plan, backend, options.knob)}",
    )
    rows = [{"values": dict(one.values), "score": one.score, "failure": one.failure} for one in found.tried]
    best = None if found.best is None else {"values": dict(found.best.values), "score": found.best.score}
    say(f"knobs: {len(rows)} of {found.num_combinations} combinations tried, {found.end}")
    return {"cell": asdict(race.cell), "tried": rows, "best": best, "end": found.end}
