"""`spectune trace`: decode once, record the drafts along the way, and tell every configuration's acceptance."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import duration, keep_log_in, print_json, say
from spectune.cli.options import parse_settings, with_flags
from spectune.cli.trace_options import TraceOptions
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.backend.reference import ReferenceBackend
    from spectune.records import Request, SpecConfig
    from spectune.store.trace_file import Trace
    from spectune.workload.workload import Workload

PARTS = "trace-parts"
NGRAM_WINDOW = {"prompt_lookup_max": 5, "prompt_lookup_min": 1}
ROWS_SHOWN = 12


@with_flags(TraceOptions)
def trace(
    called: typer.Context,
    *,
    show: Annotated[
        Path | None, typer.Option("--show", help="Replay this trace file instead; needs no engine.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in --output-dir; finished groups are kept.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be traced and stop.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every configuration as JSON on stdout.")
    ] = False,
    **flags: Any,
) -> None:
    """Decode a workload once and get the acceptance of every draft configuration from it.

    A lossless configuration never changes the text, so the drafts along one plain run tell what each
    depth, topk and node budget would have accepted: exact counts, no further decoding.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    options: TraceOptions = parse_settings(TraceOptions, given)
    if show is not None:
        raise typer.Exit(show_trace(show, options, given, as_json=as_json))
    if dry_run:
        raise typer.Exit(show_plan(options, as_json=as_json))
    argv = ("spectune", *called.obj)
    raise typer.Exit(run(options, given, argv=argv, resume=resume, as_json=as_json))


def run(
    options: TraceOptions, given: Mapping[str, Any], *, argv: tuple[str, ...], resume: bool, as_json: bool
) -> int:
    """Record the trace and show it; returns the exit code. given: the settings that flags name."""
    from spectune.backend.reference_trace import recorders_of
    from spectune.engine.trace_record import record
    from spectune.records import SpecConfig
    from spectune.store.trace_file import TRACE_FILE, read_trace, write_trace

    folder = _output_folder(options, resume=resume)
    if (folder / TRACE_FILE).exists():
        made = read_trace(folder)
        _check_same(made, given, folder)
        say(f"{folder / TRACE_FILE} is complete")
        return _tell(made, folder / TRACE_FILE, _space(options), as_json=as_json)
    workload, backend = _workload(options), _backend(options)
    requests = _requests(options, workload, backend)
    recorders = recorders_of(backend, _head_name(options), _space(options), vocab_slices=options.vocab_slices)
    about = _about(options, workload, backend, argv)
    folder.mkdir(parents=True, exist_ok=True)
    begin_s = time.perf_counter()

    def on_part(done: int, of: int) -> None:
        say(f"traced {done} of {of} requests in {duration(time.perf_counter() - begin_s)}")

    with keep_log_in(folder, go_on=f"the same command with --output-dir {folder} --resume"):
        made = record(
            backend.engine(SpecConfig.off(), options.batch_size),
            requests,
            recorders,
            about,
            group_size=4 * options.batch_size,
            parts_dir=folder / PARTS,
            on_part=on_part,
        )
        write_trace(folder / TRACE_FILE, made)
        shutil.rmtree(folder / PARTS)
    say(f"trace: {folder / TRACE_FILE}")
    return _tell(made, folder / TRACE_FILE, _space(options), as_json=as_json)


def _check_same(made: Trace, given: Mapping[str, Any], folder: Path) -> None:
    """UsageError where flags ask for another trace than the finished one in the folder."""
    told = {**made.sampling, "model": made.fingerprint.get("target")}
    asked = dict(given)
    if "model" in asked:
        asked["model"] = Path(asked["model"]).name
        told["model"] = None if told["model"] is None else Path(str(told["model"])).name
    for name, value in asked.items():
        if told.get(name) is not None and told[name] != value:
            raise UsageError(
                f"--resume {folder} holds a finished trace with {name} {told[name]}, {value} is asked",
                hint="another --output-dir makes another trace",
            )


def show_trace(path: Path, options: TraceOptions, given: dict[str, Any], *, as_json: bool) -> int:
    """Replay a trace on disk for the asked configurations, or for all that it was made for."""
    from spectune.store.trace_file import TRACE_FILE, read_trace

    made = read_trace(path)
    file = path / TRACE_FILE if path.is_dir() else path
    asked = {"num_tokens", "topk", "num_draft_tokens", "method"}
    if other := [name for name in given if name not in asked]:
        raise UsageError(
            f"--show {path} replays a trace that is there, --{other[0].replace('_', '-')} cannot change it",
            hint="--method, --num-tokens, --topk and --num-draft-tokens choose what is shown",
        )
    return _tell(made, file, _space(options), as_json=as_json, is_strict=bool(given))


def show_plan(options: TraceOptions, *, as_json: bool) -> int:
    """Requests, drafters and configurations; runs nothing."""
    workload, configs = _workload(options), _space(options)
    plan = {
        "prompts": len(workload.prompts),
        "max_tokens": options.max_tokens,
        "drafters": list(options.method),
        "configurations": len(configs),
    }
    if as_json:
        print_json(plan)
    else:
        print(
            f"{plan['prompts']} prompts of at most {options.max_tokens} output tokens, decoded once; "
            f"{' and '.join(options.method)} traced; {plan['configurations']} configurations replayed"
        )
    return 0


def _space(options: TraceOptions) -> list[SpecConfig]:
    from spectune.tune.space import build_space

    configs, _ = build_space(
        options.method,
        options.num_tokens,
        options.topk,
        options.num_draft_tokens,
        options={"ngram": NGRAM_WINDOW},
    )
    return list(configs)


def _tell(
    made: Trace, file: Path, configs: list[SpecConfig], *, as_json: bool, is_strict: bool = True
) -> int:
    """The acceptance table; configurations that the trace cannot answer are left out unless asked for."""
    from spectune.replay.summary import summarize_trace

    if not is_strict:
        configs = [c for c in configs if c.is_off or any(not d.refusal(c) for d in made.drafters)]
    begin_s = time.perf_counter()
    summary = summarize_trace(made, configs)
    replay_s = time.perf_counter() - begin_s
    size = file.stat().st_size
    per_position = size / made.num_positions if made.num_positions else None
    if as_json:
        about = {"file": str(file), "bytes": size, "bytes_per_position": per_position, "replay_s": replay_s}
        labels = {"fingerprint": made.fingerprint, "workload": made.workload, "sampling": made.sampling}
        print_json({**about, **labels, **summary})
        return 0
    position = "" if per_position is None else f" ({per_position:.1f} bytes a position)"
    label = "SYNTHETIC prompts: " if made.workload.get("is_synthetic") else ""
    print(
        f"{label}{summary['num_requests']} requests, {summary['num_output_tokens']} tokens, {size} bytes{position}; "
        f"{len(configs)} configurations replayed in {replay_s * 1e3:.0f} ms"
    )
    for line in _table(summary["configs"]):
        print(line)
    for row in summary["sampled_chains"]:
        print(f"{row['label']}: acceptance length {row['acceptance_length']:.3f} (expected value)")
    return 0


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """The configurations that accept most, smaller ones first among equals, with steps and categories."""
    drafting = [row for row in rows if row["acceptance_length"] is not None]
    drafting.sort(key=lambda row: (-row["acceptance_length"], row["config"]["num_draft_tokens"]))
    names = sorted({name for row in drafting for name in row["by_category"]})
    lines = []
    if drafting:
        head = f"{'configuration':<22} {'accept. length':>14} {'steps':>7} {'kept none':>9}  "
        lines.append(head + "  ".join(f"{name[:12]:>12}" for name in names))
    for row in drafting[:ROWS_SHOWN]:
        groups = row["by_category"]
        cells = (_number(groups.get(name, {}).get("acceptance_length")) for name in names)
        idle = "-" if row["zero_accept_share"] is None else f"{row['zero_accept_share']:.0%}"
        lines.append(
            f"{row['label']:<22} {row['acceptance_length']:>14.3f} {row['num_steps']:>7} {idle:>9}  "
            + "  ".join(f"{cell:>12}" for cell in cells)
        )
    if len(drafting) > ROWS_SHOWN:
        lines.append(f"... {len(drafting) - ROWS_SHOWN} more: --json has all of them")
    silent = [row["label"] for row in rows if row["acceptance_length"] is None and row["label"] != "off"]
    if silent:
        lines.append(f"no draft steps observed: {', '.join(silent)}")
    lines.append("acceptance is not speed: which configuration is fastest also needs times (spectune sweep)")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _output_folder(options: TraceOptions, *, resume: bool) -> Path:
    from spectune.store.trace_file import TRACE_FILE

    folder = Path(options.output_dir or f"runs/{datetime.now():%Y-%m-%d-%H%M%S}-trace")
    if resume and options.output_dir is None:
        raise UsageError("--resume needs --output-dir", hint="give the folder of the trace to go on with")
    if not resume and ((folder / PARTS).exists() or (folder / TRACE_FILE).exists()):
        raise UsageError(
            f"--output-dir {folder} holds a trace already",
            hint="--resume goes on there, or give another folder",
        )
    return folder


def _workload(options: TraceOptions) -> Workload:
    from spectune.workload.read import load_workload

    if options.workload and options.dataset_path:
        raise UsageError(f"--workload {options.workload} and --dataset-path {options.dataset_path}: give one")
    workload = load_workload(
        options.dataset_path or options.workload,
        categories=options.categories or None,
        num_prompts=options.num_prompts,
        seed=options.seed,
    )
    say(workload.accounting)
    return workload


def _backend(options: TraceOptions) -> ReferenceBackend:
    from spectune.backend.reference import ReferenceBackend

    return ReferenceBackend(
        model=options.model,
        draft_model=_head_name(options),
        dtype=options.dtype,
        device=options.device,
        progress=say,
    )


def _head_name(options: TraceOptions) -> str | None:
    from spectune.cli.inputs import head_of
    from spectune.cli.sweep_options import SweepOptions

    return head_of(SweepOptions(model=options.model, draft_model=options.draft_model, method=options.method))


def _requests(options: TraceOptions, workload: Workload, backend: ReferenceBackend) -> list[Request]:
    from spectune.measure.requests import RequestBuilder
    from spectune.records import Cell, Sampling

    sampling = Sampling(**_sampling(options))
    cell = Cell(batch_size=1, context_tokens=0, temperature=options.temperature)
    blocks = RequestBuilder(backend).blocks(workload.prompts, cell, sampling, count=len(workload.prompts))
    return [request for block in blocks for request in block]


def _sampling(options: TraceOptions) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "ignore_eos")
    return {name: getattr(options, name) for name in names}


def _about(
    options: TraceOptions, workload: Workload, backend: ReferenceBackend, argv: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    from spectune.provenance import collect
    from spectune.store import dump_strict

    fingerprint = asdict(backend.fingerprint())
    fingerprint.pop("read_bandwidth_bytes_per_s", None)  # measured anew each time, decides no count
    space = {
        "num_tokens": options.num_tokens,
        "topk": options.topk,
        "num_draft_tokens": options.num_draft_tokens,
        "method": options.method,
        "vocab_slices": options.vocab_slices,
    }
    about = {
        "fingerprint": fingerprint,
        "workload": {
            "name": workload.name,
            "digest": workload.digest,
            "dropped": len(workload.dropped),
            "is_synthetic": workload.is_synthetic,
        },
        "sampling": {**_sampling(options), "space": {k: list(v) for k, v in space.items()}},
        "provenance": collect(argv),
    }
    plain: dict[str, dict[str, Any]] = json.loads(dump_strict(about))  # as a saved part will say it
    return plain
