"""`spectune gate ...`: make a performance gate from a run, check it in CI."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import print_json, say
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.gate.calibrate import Wishes
    from spectune.gate.file import GateFile
    from spectune.gate.verdicts import GateReport

PARTS = ("acceptance", "speed")

app = typer.Typer(no_args_is_help=True, help="Performance gates for CI.")


@app.command(epilog="Example: spectune gate init runs/2026-11-30-101500 --output gate.yaml")
def init(
    run: Annotated[Path, typer.Argument(help="Run directory with the arm to guard.", metavar="RUN")],
    output: Annotated[Path, typer.Option("--output", help="Gate file to write.")] = Path("gate.yaml"),
    arm: Annotated[
        str | None, typer.Option("--arm", help='Which arm, by its label: "eagle3 K=3". The only one if one.')
    ] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Of which cell.")] = None,
    context: Annotated[int | None, typer.Option("--context", help="Of which cell.")] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", help="acceptance: guard that alone, without calibration, for any machine."),
    ] = None,
    max_slowdown: Annotated[
        float, typer.Option("--max-slowdown", help="Slowdown that must be caught, as a fraction.")
    ] = 0.03,
    acceptance_tolerance: Annotated[
        float | None,
        typer.Option("--acceptance-tolerance", help="Largest relative change of acceptance; from the noise."),
    ] = None,
    false_alarm_rate: Annotated[
        float, typer.Option("--false-alarm-rate", help="Chance that equal engines fail the gate.")
    ] = 0.005,
    power: Annotated[float, typer.Option("--power", help="Chance that --max-slowdown is caught.")] = 0.95,
    num_starts: Annotated[
        int | None, typer.Option("--num-starts", help="Starts of a check; as many as the noise asks for.")
    ] = None,
    calibration_starts: Annotated[
        int, typer.Option("--calibration-starts", help="A/A starts that measure the noise, at least 5.")
    ] = 10,
    allow_synthetic: Annotated[
        bool, typer.Option("--allow-synthetic", help="Guard a run on synthetic prompts all the same.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the gate as JSON on stdout.")] = False,
) -> None:
    """Write a gate file from a run, with tolerances from an A/A calibration that this command runs."""
    from spectune.gate.calibrate import Wishes
    from spectune.gate.file import Statistics
    from spectune.gate.runs import guarded_arm
    from spectune.store import RunStore

    _check_only(only)
    store = RunStore.open(run)
    _refuse_synthetic(run, store.manifest, is_allowed=allow_synthetic)
    chosen = guarded_arm(store, label=arm, batch_size=batch_size, context_tokens=context)
    wishes = Wishes(
        max_slowdown=max_slowdown,
        acceptance_tolerance=acceptance_tolerance,
        num_starts=num_starts,
        statistics=Statistics(false_alarm_rate=false_alarm_rate, power=power),
    )
    origin = {"run": str(run), "created": _now()}
    starts = None if only == "acceptance" else calibration_starts
    gate = _make(output, store.manifest, chosen, wishes, origin, calibration_starts=starts)
    _show_gate(gate, output, as_json=as_json)


@app.command(epilog="Example: spectune gate check gate.yaml runs/2026-12-01-090000 --junit gate.xml")
def check(
    gate: Annotated[Path, typer.Argument(help="Gate file.", metavar="GATE")],
    run: Annotated[
        Path | None, typer.Argument(help="Stored run to check; without it the gate decodes.", metavar="[RUN]")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="acceptance or speed alone.")] = None,
    base: Annotated[
        list[str] | None,
        typer.Option("--base", help="Setting of the base side, NAME=VALUE: measure base against head."),
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option("--head", help="Setting of what is checked, NAME=VALUE.")
    ] = None,
    base_cmd: Annotated[
        str | None,
        typer.Option(
            "--base-cmd",
            help="Start the base side in its own environment: 'BASE/.venv/bin/python -m spectune.cli.worker'.",
        ),
    ] = None,
    head_cmd: Annotated[
        str | None,
        typer.Option("--head-cmd", help="The same for the head side, so that both are started anew."),
    ] = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML here.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write the report as JSON here.")] = None,
    summary: Annotated[
        Path | None,
        typer.Option("--summary", help="Append Markdown here; GITHUB_STEP_SUMMARY if that is set."),
    ] = None,
    update_baseline: Annotated[
        bool,
        typer.Option("--update-baseline", help="Replace the baseline by what is measured; needs --reason."),
    ] = False,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why the baseline is replaced; kept in the gate.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
) -> None:
    """Check a gate: base against head in turn, or a stored run against the baseline.

    Exit code 3 is a regression, 4 inconclusive, 5 not comparable, 6 a missing metric.
    """
    from spectune.cli.gate_check import Sides, run_check
    from spectune.gate.file import read_gate

    _check_only(only)
    guarded = read_gate(gate)
    if update_baseline:
        reason = reason or _ask_reason(gate)
    sides = Sides(base=tuple(base or ()), head=tuple(head or ()), base_cmd=base_cmd, head_cmd=head_cmd)
    if run is not None and (sides.is_pair or sides.head):
        raise UsageError(f"{run}: a stored run is not measured again, drop --base, --head and --base-cmd")
    found = run_check(guarded, gate, run, sides, only=only)
    _write_reports(found, junit, report, summary)
    if as_json:
        from spectune.gate.tell import report_document

        print_json(report_document(found))
    else:
        _print_report(found)
    if update_baseline:
        assert reason is not None
        _update(guarded, gate, run, sides, reason)
        return
    raise typer.Exit(found.exit_code)


@app.command(epilog="Example: spectune gate schema > gate.schema.json")
def schema(
    as_json: Annotated[bool, typer.Option("--json", help="The default: a schema is JSON.")] = True,
) -> None:
    """Print the JSON schema of a gate file."""
    from spectune.gate.file import schema_text

    print(schema_text(), end="")


def _refuse_synthetic(run: Path, manifest: dict[str, Any], *, is_allowed: bool) -> None:
    """UsageError where the run's prompts were drawn by a program and nobody forced it."""
    from spectune.policy.synthetic import refusal

    if not is_allowed and refusal(manifest) is not None:
        raise UsageError(
            f"{run}: its prompts are synthetic, and acceptance on meaningless words guards nothing real",
            hint="make the gate from a run on real prompts, or force it: --allow-synthetic",
        )


def _make(
    path: Path,
    manifest: dict[str, Any],
    chosen: Any,
    wishes: Wishes,
    origin: dict[str, Any],
    *,
    calibration_starts: int | None,
    head: tuple[str, ...] = (),
) -> GateFile:
    from spectune.cli.gate_check import run_calibration
    from spectune.cli.gate_inputs import write_baseline
    from spectune.cli.outputs import write_text
    from spectune.gate.calibrate import make_gate
    from spectune.gate.file import Origin, gate_text

    calibration = None
    if calibration_starts is not None:
        calibration, manifest = run_calibration(manifest, chosen.point, head, num_starts=calibration_starts)
    blocks = chosen.repeats[0] if chosen.repeats else {}
    gate, source = make_gate(path.stem, Origin(**origin), chosen.point, manifest, blocks, calibration, wishes)
    write_text(path, gate_text(gate), "--output")
    write_baseline(path, source)
    return gate


def _update(gate: GateFile, path: Path, run: Path | None, sides: Any, reason: str) -> None:
    """The gate with a new baseline; what the user allowed stays as it was."""
    from spectune.gate.calibrate import Wishes
    from spectune.gate.runs import StoredArm, guarded_arm
    from spectune.store import RunStore

    manifest = {
        "fingerprint": gate.fingerprint,
        "config": gate.settings,
        "workload": {"name": gate.subject.workload, "template_digest": gate.subject.template_digest},
    }
    chosen = StoredArm(point=gate.point(), repeats=())
    if run is not None:
        store = RunStore.open(run)
        manifest = store.manifest
        chosen = guarded_arm(
            store,
            label=gate.config.label,
            batch_size=gate.subject.batch_size,
            context_tokens=gate.subject.context_tokens,
        )
    earlier = {
        "created": gate.origin.created,
        "run": gate.origin.run,
        "acceptance_length": round(gate.acceptance.acceptance_length, 4),
        "replaced": reason,
    }
    origin = {
        "created": _now(),
        "run": None if run is None else str(run),
        "reason": reason,
        "previous": (*gate.origin.previous, earlier),
        "max_age_days": gate.origin.max_age_days,
    }
    wishes = Wishes(
        max_slowdown=gate.speed.max_slowdown,
        acceptance_tolerance=gate.acceptance.tolerance,
        statistics=gate.statistics,
    )
    starts = max(5, len(gate.statistics.aa_log_ratios)) if gate.speed.is_enabled else None
    _make(path, manifest, chosen, wishes, origin, calibration_starts=starts, head=sides.head)
    say(f"baseline replaced: {path} ({reason})")


def _write_reports(found: GateReport, junit: Path | None, report: Path | None, summary: Path | None) -> None:
    import json

    from spectune.cli.outputs import write_text
    from spectune.gate import tell

    if junit is not None:
        write_text(junit, tell.junit_text(found), "--junit")
    if report is not None:
        text = json.dumps(tell.report_document(found), indent=1, ensure_ascii=False, allow_nan=False)
        write_text(report, text + "\n", "--report")
    step_summary = os.environ.get("GITHUB_STEP_SUMMARY")
    target = summary or (Path(step_summary) if step_summary else None)
    if target is not None:
        try:
            with target.open("a", encoding="utf-8") as stream:
                stream.write(tell.markdown_text(found) + "\n")
        except OSError as error:
            raise UsageError(f"--summary {target} cannot be written: {error.strerror}") from error


def _print_report(found: GateReport) -> None:
    from spectune.cli.tables import print_table, print_wrapped
    from spectune.gate import tell

    if found.is_simulated:
        print(tell.SIMULATED)
    print_table(("check", "outcome"), [(name, outcome) for name, outcome, _ in tell.rows(found)])
    for name, _, text in tell.rows(found):
        print_wrapped(text if text.startswith(name) else f"{name}: {text}")
    for line in tell.summary_lines(found):
        print_wrapped(line)
    for one in found.checks:
        if one.hint:
            print_wrapped(f"hint: {one.hint}")
    print(f"gate {found.gate}: {found.outcome}")


def _show_gate(gate: GateFile, path: Path, *, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        print_json(asdict(gate))
    acceptance, speed = gate.acceptance, gate.speed
    say(
        f"acceptance length {acceptance.acceptance_length:.3f} within {acceptance.tolerance:.2%} "
        f"({acceptance.num_steps} steps)"
    )
    if speed.is_enabled:
        say(
            f"equal engines vary by {gate.statistics.pair_noise:.2%} a start: {gate.statistics.num_starts} starts "
            f"catch a slowdown of {speed.max_slowdown:.1%} in {gate.statistics.power:.0%} of the cases and fail "
            f"falsely in {gate.statistics.false_alarm_rate:.1%}"
        )
    say(f"gate: {path} (commit it with its .baseline file); check it: spectune gate check {path}")


def _ask_reason(gate: Path) -> str:
    import sys

    if sys.stdin.isatty():
        return str(typer.prompt(f"why is the baseline of {gate} replaced"))
    raise UsageError(
        "--update-baseline needs --reason", hint='--reason "new head, trained on our own prompts"'
    )


def _check_only(only: str | None) -> None:
    if only is not None and only not in PARTS:
        raise UsageError(f"--only {only} is not one of {', '.join(PARTS)}")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
