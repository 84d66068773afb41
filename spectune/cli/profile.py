"""`spectune profile`: what rounds cost over batch, tokens per sequence and context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import duration, ms, print_json, say
from spectune.cli.options import parse_settings, with_flags
from spectune.cli.tune_options import ProfileOptions

if TYPE_CHECKING:
    from spectune.store.surface import TimeSurface


@with_flags(ProfileOptions)
def profile(
    called: typer.Context,
    *,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Take step times from this run instead (servers); needs no engine."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="Also compare with this surface: how repeatable it is.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the shapes and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the surface as JSON on stdout.")] = False,
    **flags: Any,
) -> None:
    """Time single rounds with forced acceptance and fit what every shape costs.

    Draft, verification and the rest are timed apart, all shapes in turn, at the engine's real sizes; what
    the fit is off by on shapes that it has not seen stands beside it.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    options: ProfileOptions = parse_settings(ProfileOptions, given)
    if dry_run:
        raise typer.Exit(show_shapes(options, as_json=as_json))
    surface = from_run(run) if run else measure(options, argv=("spectune", *called.obj))
    raise typer.Exit(finish(surface, options, against, as_json=as_json))


def measure(options: ProfileOptions, *, argv: tuple[str, ...]) -> TimeSurface:
    """A surface of the engine that the options name."""
    from spectune.cli.inputs import open_backend, plan_of, read_workload
    from spectune.measure.requests import RequestBuilder
    from spectune.provenance import collect
    from spectune.tune.evidence import profile_cells
    from spectune.tune.profile import profile as profile_rounds

    backend = open_backend(options)
    plan = plan_of(options, read_workload(options), backend)
    return profile_rounds(
        backend,
        plan.configs,
        profile_cells(plan, RequestBuilder(backend, plan.context_text)),
        budget_s=options.profile_seconds,
        seed=options.seed,
        provenance=collect(argv),
        say=say,
    )


def from_run(run: Path) -> TimeSurface:
    """A surface of step times of a stored run."""
    from spectune.store import RunStore
    from spectune.tune.steps import step_surface

    return step_surface(RunStore.open(run))


def show_shapes(options: ProfileOptions, *, as_json: bool) -> int:
    """Which shapes would be timed; runs nothing."""
    from spectune.cli.inputs import open_backend, plan_of, read_workload
    from spectune.tune.profile import lattice

    plan = plan_of(options, read_workload(options), open_backend(options))
    shapes = [config.label for config in lattice(plan.configs)]
    cells = len({(cell.batch_size, cell.context_tokens) for cell in plan.cells})
    if as_json:
        print_json({"shapes": shapes, "cells": cells, "points": (len(shapes) + 1) * cells})
    else:
        print(f"{(len(shapes) + 1) * cells} points: off, {', '.join(shapes)} at {cells} loads")
    return 0


def finish(surface: TimeSurface, options: ProfileOptions, against: Path | None, *, as_json: bool) -> int:
    """Save, compare, tell."""
    import json

    from spectune.store.surface import SURFACE_FILE, read_surface, surface_document, write_surface
    from spectune.tune.profile import repeatability

    change = None if against is None else repeatability(read_surface(against), surface)
    file = None
    if options.output_dir is not None:
        file = Path(options.output_dir) / SURFACE_FILE
        write_surface(file, surface)
        say(f"time surface: {file}")
    if as_json:
        from spectune.store import dump_strict

        told = {"surface": surface_document(surface), "repeatability": change}
        print_json(json.loads(dump_strict(told)))
        return 0
    show(surface)
    if change is not None:
        print(f"against {against}: shapes changed by {change[0]:.1%} (median), {change[1]:.1%} (95%)")
    if file is None:
        print("nothing was saved: --output-dir DIR keeps the surface for spectune tune --surface DIR")
    return 0


def show(surface: TimeSurface) -> None:
    """The points, and how far the fit is off."""
    from spectune.cli.tables import print_table

    if surface.fingerprint.get("is_simulated"):
        print("SIMULATED: declared costs, nothing was measured")
    rows = [
        (
            str(point.batch_size),
            point.config.label,
            str(point.config.num_draft_tokens),
            f"{point.kv_tokens:.0f}",
            ms(point.draft_s),
            ms(point.verify_s),
            ms(point.other_s),
            ms(point.total_s),
            "-" if point.half_width is None else f"{point.half_width:.1%}",
        )
        for point in surface.points
    ]
    header = ("batch", "shape", "tokens", "cached", "draft", "verify", "other", "round", "95%")
    print_table(header, rows)
    told = surface.held_out
    if told.median is not None and told.p95 is not None:
        print(
            f"{len(surface.points)} points in {duration(surface.duration_s)}; held-out error of "
            f"{told.num_points} shapes: {told.median:.1%} (median), {told.p95:.1%} (95th percentile)"
        )
    if surface.drift is not None:
        print(f"plain rounds late over early: {surface.drift:+.1%} at worst")
