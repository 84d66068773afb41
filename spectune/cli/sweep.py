"""`spectune sweep`: plan, measure, decide, show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.config import read_config
from spectune.cli.console import duration, keep_log_in, print_json, say
from spectune.cli.options import parse_settings, settings_of, with_flags
from spectune.cli.servers import SERVING
from spectune.cli.sweep_options import QUICK, QUICK_SERVER, SweepOptions
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.records import Backend
    from spectune.tune.plan import SweepPlan

UNTIMED = ("simulated", "sglang")
"""Backends whose seconds nobody has measured on the machine of the other estimates."""


@with_flags(SweepOptions)
def sweep(
    called: typer.Context,
    *,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings from a spectune.yaml; flags override it.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small grid for a first answer in minutes.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Complete this run directory with its own settings.")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: run failed points again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
    **flags: Any,
) -> None:
    """Measure decoding with and without speculation, decide what to run at which load, and report.

    Every arm decodes the same prompts as plain decoding, in turn with it. The verdict may be not to
    speculate.
    """
    options = stored_settings(resume, flags) if resume else read_settings(flags, config, quick=quick)
    if dry_run:
        raise typer.Exit(show_plan(options, as_json=as_json))
    argv = ("spectune", *called.obj)
    raise typer.Exit(run(options, resume, argv=argv, retry_failed=retry_failed, as_json=as_json))


def run(
    options: SweepOptions, resume: Path | None, *, argv: Sequence[str], retry_failed: bool, as_json: bool
) -> int:
    """The whole sweep; returns the exit code. `argv` is what was typed, for the manifest."""
    from spectune.cli.doctor import preflight
    from spectune.cli.inputs import open_backend, plan_of, read_workload, work_s
    from spectune.cli.progress import sweep_progress
    from spectune.cli.results import exit_code, save_results, show_results
    from spectune.policy.summary import summarize
    from spectune.tune.sweep import resume_run, run_sweep, start_run

    preflight(options)
    workload = read_workload(options)
    path = resume or run_directory(options)
    backend = open_backend(options, path)
    plan = plan_of(options, workload, backend)
    if resume is not None:
        store = resume_run(path, plan, backend)
    else:
        store = start_run(path, plan, backend, argv=argv, config=asdict(options))
    for line in (*plan_lines(plan), *start_lines(options, plan, backend)[:1]):
        say(line)
    say(f"run directory: {path}")
    with keep_log_in(path, go_on=f"spectune sweep --resume {path}"):
        with sweep_progress(work_s(plan)) as progress:
            run_sweep(plan, backend, store, progress, retry_failed=retry_failed)
        summary = summarize(store)
        page = save_results(store, summary)
    show_results(summary, page, as_json=as_json)
    return exit_code(summary)


def read_settings(flags: dict[str, Any], config: Path | None, *, quick: bool) -> SweepOptions:
    """Flags over --quick over the file over defaults."""
    from_file, places = read_config(config) if config else ({}, {})
    given = {name: value for name, value in flags.items() if value is not None}
    is_server = {**from_file, **given}.get("backend") in SERVING
    preset = (QUICK_SERVER if is_server else QUICK) if quick else {}
    sources = {name: place for name, place in places.items() if name not in given and name not in preset}
    options: SweepOptions = parse_settings(SweepOptions, from_file, preset, given, sources=sources)
    return options


def stored_settings(run: Path, flags: dict[str, Any]) -> SweepOptions:
    """The settings that a run was started with; other ones would make it another run."""
    from spectune.store import RunStore

    if given := [name for name, value in flags.items() if value is not None]:
        flag = settings_of(SweepOptions)[given[0]].flags[0]
        raise UsageError(
            f"--resume {run} keeps the settings of that run, {flag} cannot change them",
            hint=f"spectune sweep --resume {run}",
        )
    options: SweepOptions = parse_settings(SweepOptions, RunStore.open(run).manifest["config"])
    return options


def run_directory(options: SweepOptions) -> Path:
    """--output-dir, or runs/<date-time>."""
    return Path(options.output_dir or f"runs/{datetime.now():%Y-%m-%d-%H%M%S}")


def show_plan(options: SweepOptions, *, as_json: bool) -> int:
    """Arms, cells, requests, what was pruned, and how long it takes; runs nothing."""
    from spectune.cli.inputs import open_backend, plan_of, read_workload, work_s

    backend = open_backend(options)
    plan = plan_of(options, read_workload(options), backend)
    # Only the default target on the CPU has been timed.
    is_timed = options.backend not in UNTIMED and options.model is None and options.device == "cpu"
    estimate_s = work_s(plan) if is_timed else None
    commands = start_lines(options, plan, backend)
    if commands and estimate_s is not None:
        from spectune.cli.servers import starts_s

        estimate_s += starts_s(plan, is_eager=options.enforce_eager is not False)
    if as_json:
        print_json({**plan_document(plan), "estimated_s": estimate_s, "starts": commands})
        return 0
    for line in (*plan_lines(plan), *commands):
        print(line)
    if estimate_s is None:
        print("estimated time: not known for this backend, target and device")
    else:
        print(f"estimated time: about {duration(estimate_s)} on two cores")
    return 0


def start_lines(options: SweepOptions, plan: SweepPlan, backend: Backend) -> list[str]:
    """What is going to be started, for serving engines that we start."""
    if options.backend not in SERVING:
        return []
    from spectune.backend.launched import LaunchedBackend
    from spectune.cli.inputs import work_s
    from spectune.cli.servers import launch_lines, start_line

    if not isinstance(backend, LaunchedBackend):
        return []
    is_eager = options.enforce_eager is not False
    seconds = None if options.backend in UNTIMED else work_s(plan)
    return [start_line(plan, seconds, is_eager=is_eager), *launch_lines(backend, plan.points)]


def plan_lines(plan: SweepPlan) -> list[str]:
    """What a sweep is going to do, for people."""
    labels = ", ".join(config.label for config in plan.configs)
    pruned: dict[str, list[str]] = {}
    for label, reason in plan.pruned:
        pruned.setdefault(reason, []).append(label)
    runs = f" x {plan.repeats} runs" if plan.repeats > 1 else ""
    trees = "; D, k, N: a tree of depth D, k children a node, N tokens verified"
    return [
        f"arms: {labels}",
        f"(K: a chain of K drafts{trees if any(config.is_tree for config in plan.configs) else ''})",
        f"cells: {'; '.join(cell.label for cell in plan.cells)}",
        f"{len(plan.points)} points ({len(plan.configs)} arms x {len(plan.cells)} cells{runs}), "
        f"{plan.num_requests} requests of at most {plan.sampling.max_tokens} tokens",
        *(f"pruned: {', '.join(names)}: {reason}" for reason, names in pruned.items()),
    ]


def plan_document(plan: SweepPlan) -> dict[str, Any]:
    """The plan as plain JSON values."""
    return {
        "points": len(plan.points),
        "arms": [config.label for config in plan.configs],
        "cells": [cell.label for cell in plan.cells],
        "repeats": plan.repeats,
        "requests": plan.num_requests,
        "pruned": [{"point": label, "reason": reason} for label, reason in plan.pruned],
    }
