"""How a gate gets its evidence: from a stored run, from base and head in turn, or from the head alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectune.cli.console import say

if TYPE_CHECKING:
    from spectune.gate.calibrate import Calibration
    from spectune.gate.file import GateFile
    from spectune.gate.pairs import Blocks
    from spectune.gate.verdicts import Check, GateReport
    from spectune.records import Backend, MeasureSides, Point

ONE_PROCESS = (
    "both sides ran in one process: what differs from start to start of a process is in no interval "
    "(--base-cmd and --head-cmd start processes)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What the user said about base and head."""

    base: tuple[str, ...] = ()
    head: tuple[str, ...] = ()
    base_cmd: str | None = None
    head_cmd: str | None = None

    @property
    def is_pair(self) -> bool:
        return bool(self.base) or self.base_cmd is not None


def run_check(gate: GateFile, path: Path, run: Path | None, sides: Sides, *, only: str | None) -> GateReport:
    """The report of a gate; refusals of the comparison are checks in it, not exceptions."""
    from spectune.errors import NotComparable
    from spectune.gate.stored import COMPARABLE
    from spectune.gate.verdicts import Check, GateReport, Outcome

    try:
        if run is not None:
            found = _check_stored(gate, path, run, only)
        elif sides.is_pair:
            found = _check_paired(_only(gate, only), sides)
        else:
            found = _check_live(gate, path, sides, only)
    except NotComparable as error:
        refused = Check(name=COMPARABLE, outcome=Outcome.NOT_COMPARABLE, text=error.message, hint=error.hint)
        found = GateReport(gate=gate.name, mode="refused", checks=(refused,))
    return replace(found, notes=(*found.notes, *stale_notes(gate, found, datetime.now(UTC))))


def stale_notes(gate: GateFile, found: GateReport, now: datetime) -> tuple[str, ...]:
    """Why the baseline should be replaced: its age, or a gain that would hide a later loss."""
    from spectune.gate.stored import SPEEDUP

    notes = []
    try:
        created = datetime.fromisoformat(gate.origin.created)
    except ValueError:
        created = None
    if created is not None:
        age = (now - (created if created.tzinfo else created.replace(tzinfo=UTC))).days
        if age > gate.origin.max_age_days:
            notes.append(f"stale baseline: {age} days old, replace it with --update-baseline --reason ...")
    for check in found.checks:
        if check.name == SPEEDUP and check.value is not None and check.reference is not None:
            gain = check.value / check.reference - 1
            if gain > gate.speed.max_slowdown:
                notes.append(
                    f"stale baseline: {gain:.1%} faster than it, a later loss would hide behind the gain"
                )
    return tuple(notes)


def run_calibration(
    manifest: Mapping[str, Any], point: Point, head: Sequence[str], *, num_starts: int
) -> tuple[Calibration, dict[str, Any]]:
    """A/A on the engine of the manifest's settings, and the manifest with what that engine is."""
    from spectune.cli.gate_inputs import open_side, requests_for, settings_with, with_noise
    from spectune.gate.calibrate import calibrate
    from spectune.gate.pairs import BASE, HEAD

    options = settings_with(manifest.get("config", {}), head, "--head")
    backend = open_side(options, BASE)
    # a simulated side needs a noise of its own; a real engine is loaded once and started twice
    other = open_side(options, HEAD) if backend.capabilities().is_simulated else backend
    requests = requests_for(options, backend, point)
    backends = {BASE: with_noise(backend, BASE), HEAD: with_noise(other, HEAD)}
    measure = _told(backends, requests.blocks, requests.calibration, f"of {num_starts} (equal engines)")
    found = calibrate(measure, point, num_starts=num_starts)
    return found, {**manifest, "fingerprint": asdict(backend.fingerprint())}


def _check_stored(gate: GateFile, path: Path, run: Path, only: str | None) -> GateReport:
    from spectune.cli.gate_inputs import read_baseline
    from spectune.gate.runs import measured_of
    from spectune.gate.stored import check_measured
    from spectune.gate.verdicts import GateReport
    from spectune.store import RunStore

    store = RunStore.open(run)
    now = measured_of(gate, store)
    return GateReport(
        gate=gate.name,
        mode=f"stored run {run}",
        checks=check_measured(gate, read_baseline(path), now, only=only),
        is_simulated=bool(store.manifest.get("fingerprint", {}).get("is_simulated")),
        notes=_under_test(gate, now.fingerprint),
    )


def _check_paired(gate: GateFile, sides: Sides) -> GateReport:
    from spectune.cli.gate_inputs import open_side, requests_for, settings_with
    from spectune.cli.inputs import head_of
    from spectune.errors import NotComparable
    from spectune.gate import comparable
    from spectune.gate.paired import check_paired
    from spectune.gate.pairs import BASE, HEAD

    settings = {
        BASE: settings_with(gate.settings, sides.base, "--base"),
        HEAD: settings_with(gate.settings, sides.head, "--head"),
    }
    commands = {BASE: sides.base_cmd, HEAD: sides.head_cmd}
    backends = {side: open_side(options, side, commands[side]) for side, options in settings.items()}
    points = {
        side: gate.point(replace(gate.config, draft_model=head_of(options)))
        if gate.config.draft_model is not None
        else gate.point()
        for side, options in settings.items()
    }
    encoder = backends[HEAD] if commands[HEAD] is None else open_side(settings[HEAD], HEAD)
    requests = requests_for(settings[HEAD], encoder, gate.point())
    marks = {side: asdict(backend.fingerprint()) for side, backend in backends.items()}
    if found := comparable.fingerprint_differences(marks[BASE], marks[HEAD]):
        raise NotComparable(f"base and head are not comparable: {comparable.describe(found)}")
    measure = _told(
        backends, requests.blocks, requests.calibration, f"of at most {gate.statistics.num_starts}"
    )
    report = check_paired(
        gate,
        measure,
        points=(points[BASE], points[HEAD]),
        is_simulated=backends[HEAD].capabilities().is_simulated,
    )
    differing = tuple(
        f"under test: {name} {base} (base), {head} (head)"
        for name, base, head in comparable.under_test(marks[BASE], marks[HEAD])
    )
    in_one = () if None not in commands.values() or report.is_simulated else (ONE_PROCESS,)
    return replace(report, notes=(*report.notes, *differing, *in_one))


def _check_live(gate: GateFile, path: Path, sides: Sides, only: str | None) -> GateReport:
    """Head and plain decoding against the stored baseline; what fails is measured once more."""
    from spectune.cli.gate_inputs import open_side, read_baseline, requests_for, settings_with
    from spectune.gate.pairs import HEAD
    from spectune.gate.stored import check_measured
    from spectune.gate.verdicts import GateReport

    options = settings_with(gate.settings, sides.head, "--head")
    backend = open_side(options, HEAD, sides.head_cmd)
    encoder = backend if sides.head_cmd is None else open_side(options, HEAD)
    requests = requests_for(options, encoder, gate.point())
    baseline = read_baseline(path)
    needs_speed = gate.speed.is_enabled and only != "acceptance"
    texts = None
    if not needs_speed and baseline is not None:
        records = [record for block in baseline.values() for record in block.requests]
        texts = {record.request_id: record.output_ids for record in records}
    measure = _told({HEAD: backend}, requests.blocks, requests.calibration, "", texts=texts)
    num_starts = gate.statistics.num_starts if needs_speed else 1

    def once(first_start: int) -> tuple[Check, ...]:
        measured = _measure_live(gate, measure, backend, first_start, num_starts, needs_off=needs_speed)
        return check_measured(gate, baseline, measured, only=only)

    checks = once(0)
    was_repeated = any(check.is_bad for check in checks)
    if was_repeated:
        say("something looks worse: measuring once more before failing")
        checks = confirmed(checks, once(num_starts))
    return GateReport(
        gate=gate.name,
        mode="replay of the baseline's text" if texts is not None else "head against the stored baseline",
        checks=checks,
        is_simulated=backend.capabilities().is_simulated,
        num_starts=num_starts * (2 if was_repeated else 1),
        was_repeated=was_repeated,
        notes=_under_test(gate, asdict(backend.fingerprint())),
    )


def confirmed(first: Sequence[Check], second: Sequence[Check]) -> tuple[Check, ...]:
    """The fresh checks; one that was not bad at first cannot fail now, it is undecided."""
    from spectune.gate.verdicts import Outcome

    bad = {check.name for check in first if check.is_bad}
    return tuple(
        replace(check, outcome=Outcome.INCONCLUSIVE, text=f"{check.text}; not so in the first measurement")
        if check.is_bad and check.name not in bad
        else check
        for check in second
    )


def _measure_live(
    gate: GateFile,
    measure: MeasureSides,
    backend: Backend,
    first_start: int,
    num_starts: int,
    *,
    needs_off: bool,
) -> Any:
    from spectune.gate.pairs import HEAD, measure_start
    from spectune.gate.stored import Measured
    from spectune.records import SideArm, SpecConfig

    points = [gate.point(), *([gate.point(SpecConfig.off())] if needs_off else [])]
    arms = [SideArm(side=HEAD, point=point) for point in points]
    found: list[tuple[Blocks, ...]] = [
        measure_start(measure, arms, start=first_start + start) for start in range(num_starts)
    ]
    return Measured(
        spec=tuple(blocks[0] for blocks in found),
        off=tuple(blocks[1] for blocks in found) if needs_off else (),
        sampling=gate.sampling,
        workload_digest=gate.subject.workload_digest,
        template_digest=getattr(backend, "template_digest", None),
        fingerprint=asdict(backend.fingerprint()),
    )


def _told(
    backends: Mapping[str, Backend],
    blocks: Any,
    calibration: Any,
    of: str,
    *,
    texts: Mapping[str, Sequence[int]] | None = None,
) -> MeasureSides:
    """Sides that say which start is under way."""
    from spectune.measure.sides import Sides as Runner

    runner = Runner(backends, blocks, calibration, texts=texts)

    def measure(arms: Any, *, start: int) -> Any:
        say(f"start {start + 1} {of}".rstrip())
        return runner(arms, start=start)

    told: Callable[..., Any] = measure
    return told


def _only(gate: GateFile, only: str | None) -> GateFile:
    return replace(
        gate,
        acceptance=replace(gate.acceptance, is_enabled=gate.acceptance.is_enabled and only != "speed"),
        speed=replace(gate.speed, is_enabled=gate.speed.is_enabled and only != "acceptance"),
    )


def _under_test(gate: GateFile, fingerprint: Mapping[str, Any]) -> tuple[str, ...]:
    from spectune.gate import comparable

    return tuple(
        f"under test: {name} {base} (baseline), {head} (now)"
        for name, base, head in comparable.under_test(gate.fingerprint, fingerprint)
    )
