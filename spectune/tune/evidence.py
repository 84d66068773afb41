"""What a tuning knows before it measures anything: a trace for acceptance, a surface for times.

Each is a file of the run directory, made once; files of the user's own are checked against the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from spectune.errors import NotComparable, UsageError
from spectune.measure.requests import Block, RequestBuilder
from spectune.records import Backend, Cell, Request, SpecConfig
from spectune.store import RunStore, dump_strict
from spectune.store.surface import SURFACE_FILE, TimeSurface, read_surface, write_surface
from spectune.store.trace_file import Trace, read_trace, write_trace
from spectune.tune.manifest import comparable, first_difference
from spectune.tune.plan import SweepPlan
from spectune.tune.profile import profile
from spectune.tune.tuning import TuneJob

PARTS = "trace-parts"
LENGTH_PROMPTS = 64
"""Prompts whose mean length is profiled."""


@runtime_checkable
class RecordsTraces(Protocol):
    """A backend that can say what every draft would have been worth, from one plain run."""

    def record_trace(
        self,
        requests: Sequence[Request],
        configs: Sequence[SpecConfig],
        about: Mapping[str, Mapping[str, Any]],
        *,
        parts_dir: Path,
    ) -> Trace: ...


def trace_file(context_tokens: int, temperature: float) -> str:
    """Name of the trace of one context and temperature in a run directory."""
    if context_tokens == 0 and temperature == 0:
        return "trace.npz"
    return f"trace-context{context_tokens}-T{temperature:g}.npz"


def find_traces(
    job: TuneJob, backend: Backend, store: RunStore, builder: RequestBuilder, say: Callable[[str], None]
) -> dict[tuple[int, float], Trace]:
    plan = job.plan
    keys = list(dict.fromkeys((cell.context_tokens, cell.temperature) for cell in plan.cells))
    if job.trace is not None:
        if len(keys) > 1:
            raise UsageError(f"--trace {job.trace} holds one context and temperature, {len(keys)} are asked")
        made = read_trace(job.trace)
        check_fingerprint(job.trace, made.fingerprint, backend)
        traced, (_, wanted) = made.sampling.get("temperature"), keys[0]
        if traced is not None and float(traced) != wanted:
            raise UsageError(
                f"--trace {job.trace} is of temperature {traced:g}, {wanted:g} is asked",
                hint="spectune trace --temperature makes one of another temperature",
            )
        if made.workload.get("digest") not in (None, plan.workload.digest):
            say(
                f"caution: --trace {job.trace} is of other prompts ({made.workload.get('name')}): acceptance is "
                "theirs"
            )
        return {keys[0]: made}
    found = {}
    for context, temperature in keys:
        file = store.path / trace_file(context, temperature)
        if not file.is_file():
            cell = Cell(batch_size=1, context_tokens=context, temperature=temperature)
            requests = [
                request
                for block in builder.blocks(
                    plan.workload.prompts,
                    cell,
                    plan.sampling,
                    count=min(job.num_trace_prompts, len(plan.workload.prompts)),
                )
                for request in block
            ]
            say(f"tracing {len(requests)} prompts with context {context} at T={temperature:g}")
            assert isinstance(backend, RecordsTraces)
            parts = store.path / f"{PARTS}-{context}-{temperature:g}"
            about = _about(job, backend, temperature)
            made = backend.record_trace(requests, plan.configs, about, parts_dir=parts)
            write_trace(file, made)
            for part in parts.glob("*.npz"):
                part.unlink()
            if parts.is_dir():
                parts.rmdir()
        found[context, temperature] = read_trace(file)
    return found


def _about(job: TuneJob, backend: Backend, temperature: float) -> dict[str, dict[str, Any]]:
    workload = job.plan.workload
    about = {
        "fingerprint": comparable(backend.fingerprint()),
        "workload": {"name": workload.name, "digest": workload.digest},
        "sampling": asdict(replace(job.plan.sampling, temperature=temperature)),
        "provenance": {},
    }
    plain: dict[str, dict[str, Any]] = json.loads(dump_strict(about))  # as a saved part will say it
    return plain


def find_surface(
    job: TuneJob, backend: Backend, store: RunStore, builder: RequestBuilder, say: Callable[[str], None]
) -> TimeSurface:
    if job.surface is not None:
        surface = read_surface(job.surface)
        check_fingerprint(job.surface, surface.fingerprint, backend)
        return surface
    file = store.path / SURFACE_FILE
    if not file.is_file():
        say(f"profiling rounds for at most {job.profile_s:.0f} s")
        made = profile(
            backend,
            job.plan.configs,
            profile_cells(job.plan, builder),
            budget_s=job.profile_s,
            seed=job.seed,
            provenance=store.manifest.get("provenance") or {},
            say=say,
        )
        write_surface(file, made)
    return read_surface(file)


def profile_cells(plan: SweepPlan, builder: RequestBuilder) -> dict[Cell, Block]:
    """A batch for every batch size and context, of calibration prompts repeated or cut to the mean length
    of the workload's: with forced acceptance only lengths count. Rounds cost the same at any temperature.
    """
    cells: dict[Cell, Block] = {}
    for cell in plan.cells:
        cold = replace(cell, temperature=0.0)
        if cold in cells:
            continue
        asked = [builder.request(p, 0, cold, plan.sampling) for p in plan.workload.prompts[:LENGTH_PROMPTS]]
        length = round(sum(len(request.prompt_ids) for request in asked) / len(asked))
        prompts = plan.workload.calibration or plan.workload.prompts
        batch = builder.blocks(prompts, cold, plan.sampling, count=1)[0]
        cells[cold] = tuple(replace(r, prompt_ids=_of_length(r.prompt_ids, length)) for r in batch)
    return cells


def _of_length(ids: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (ids * (length // len(ids) + 1))[:length]


def check_fingerprint(file: Path, theirs: Mapping[str, Any], backend: Backend) -> None:
    """Counts and times of another engine, model or machine say nothing here."""
    ours = comparable(backend.fingerprint())
    shared = {name: theirs[name] for name in ours if theirs.get(name) is not None}
    if difference := first_difference(shared, {name: ours[name] for name in shared}, "fingerprint"):
        where, old, new = difference
        raise NotComparable(
            f"{file} was made with {where} = {old}, here it is {new}", hint="make it again on this machine"
        )
