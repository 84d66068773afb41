"""From a gate or a run to something that decodes: settings, engines of both sides, requests."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectune.cli.console import say
from spectune.errors import NotComparable, UsageError

if TYPE_CHECKING:
    from spectune.cli.sweep_options import SweepOptions
    from spectune.gate.pairs import Blocks
    from spectune.measure.requests import Block
    from spectune.records import Backend, Cell, Point

BASELINE_SUFFIX = ".baseline.jsonl.gz"
NOISE_SEEDS = {"base": 1, "head": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What every arm decodes, and the hash of the prompts that it was made of."""

    blocks: tuple[Block, ...]
    calibration: Block
    workload_digest: str


def settings_with(settings: Mapping[str, Any], changes: Sequence[str], flag: str) -> SweepOptions:
    """The settings of a gate's run, with NAME=VALUE changes."""
    from spectune.cli.options import parse_settings, settings_of
    from spectune.cli.sweep_options import SweepOptions

    known = settings_of(SweepOptions)
    given: dict[str, Any] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals or name not in known:
            raise UsageError(
                f"{flag} {change}: expected NAME=VALUE with a setting of spectune sweep",
                hint="for example draft_model=heads/new or engine_python=../base/.venv/bin/python",
            )
        given[name] = value
    stored = {name: value for name, value in settings.items() if name in known}
    sources = {name: f"{flag} {name}" for name in given}
    options: SweepOptions = parse_settings(SweepOptions, stored, given, sources=sources)
    return options


def open_side(options: SweepOptions, side: str, command: str | None = None) -> Backend:
    """The engine of one side: here, or in a process that `command` starts.

    What would make the measurement useless, a head of another target for example, is a UsageError first.
    """
    from spectune.cli.doctor import preflight
    from spectune.cli.inputs import open_backend

    if command is not None:
        from spectune.backend.worker import WorkerBackend

        return WorkerBackend(shlex.split(command), asdict(options), side=side)
    preflight(options)
    return with_noise(open_backend(options), side)


def with_noise(backend: Backend, side: str) -> Backend:
    """Simulated sides need noise of their own, or A/A would compare a number with itself."""
    if backend.capabilities().is_simulated and hasattr(backend, "noise_seed"):
        backend.noise_seed = NOISE_SEEDS[side]
    return backend


def requests_for(options: SweepOptions, backend: Backend, point: Point) -> Requests:
    """The prompts of the settings, encoded; NotComparable if they are not the gate's."""
    from spectune.cli.inputs import plan_of, read_workload
    from spectune.measure.requests import RequestBuilder, num_blocks

    workload = read_workload(options)
    plan = plan_of(options, workload, backend)
    if workload.digest != point.workload_hash:
        raise NotComparable(
            f"workload {workload.name} has digest {workload.digest[:12]}, the gate {point.workload_hash[:12]}",
            hint="the prompts changed: --update-baseline with the reason, or use the old ones",
        )
    cell: Cell = point.cell
    builder = RequestBuilder(backend, plan.context_text)
    count = num_blocks(cell.batch_size, num_prompts=plan.num_prompts, min_blocks=plan.min_blocks)
    prompts = plan.workload.calibration or plan.workload.prompts
    return Requests(
        blocks=builder.blocks(plan.workload.prompts, cell, point.sampling, count=count),
        calibration=builder.calibration(prompts, cell, point.sampling),
        workload_digest=workload.digest,
    )


def baseline_path(gate: Path) -> Path:
    """The file of the baseline's requests, beside the gate."""
    return gate.with_suffix(BASELINE_SUFFIX)


def write_baseline(gate: Path, blocks: Blocks) -> None:
    """Texts and steps of the baseline, in the layout of a run's request files; written whole or not at all."""
    from spectune.store.codec import pack_block
    from spectune.store.files import naming_errors, replacing

    path = baseline_path(gate)
    with naming_errors(path), replacing(path) as temporary:
        temporary.write_bytes(b"".join(pack_block(index, blocks[index]) for index in sorted(blocks)))


def read_baseline(gate: Path) -> Blocks | None:
    """The baseline's blocks; None, with a word about it, where the file is not there."""
    from spectune.store.codec import unpack_blocks

    path = baseline_path(gate)
    if not path.exists():
        say(f"note: {path} is missing: acceptance is compared without the baseline's text")
        return None
    return unpack_blocks(path.read_bytes(), where=str(path))
