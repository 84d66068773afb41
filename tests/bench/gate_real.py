"""The gate on the real CPU reference engine: A/A checks, and checks with verification slowed down by 5%.

One gate is calibrated, then checked again and again. The slowdown is injected by a test-only subclass
that spends a share of each verification again on a busy loop; the product has no such switch. Raw data
stays; a run that was interrupted, or stopped by --max-seconds, goes on.

    python tests/bench/gate_real.py --output reports/gate --max-seconds 150
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectune import stats
from spectune.backend.heads import DEFAULT_HEAD
from spectune.backend.reference import ReferenceBackend
from spectune.engine import step as engine_step
from spectune.gate.calibrate import Wishes, calibrate, make_gate
from spectune.gate.file import GateFile, Minimum, Origin, gate_of, gate_text
from spectune.gate.paired import check_paired
from spectune.gate.pairs import BASE, HEAD
from spectune.gate.tell import report_document
from spectune.measure.requests import RequestBuilder
from spectune.measure.sides import Sides
from spectune.records import Backend, Cell, Launch, Point, Prompt, Sampling, Session, SideArm, SpecConfig
from spectune.workload import load_workload

SAMPLING = Sampling(max_tokens=24, ignore_eos=True)
CELL = Cell(batch_size=1, context_tokens=0, temperature=0.0)
CONFIG = SpecConfig.chain("eagle3", 3, draft_model=DEFAULT_HEAD)
POINT = Point(config=CONFIG, cell=CELL, workload_hash="gate-real", sampling=SAMPLING)
NUM_PROMPTS = 8
CALIBRATION_STARTS = 10


class SlowVerify:
    """The reference engine with each verification stretched by a factor, on the head side only."""

    def __init__(self, inner: ReferenceBackend, factor: float) -> None:
        self._inner, self._factor = inner, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @contextmanager
    def open(self, launch: Launch) -> Iterator[Session]:
        with self._inner.open(launch) as session:
            yield _SlowSession(session, self._factor)


class _SlowSession:
    """Stretches verification while this session decodes, and puts the true one back."""

    def __init__(self, inner: Session, factor: float) -> None:
        self._inner, self._factor = inner, factor

    def gap(self, *args: Any) -> Any:
        return self._inner.gap(*args)

    def run(self, point: Point, requests: Sequence[Any]) -> Any:
        true_verify = engine_step.verify

        def stretched(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            found = true_verify(*args, **kwargs)
            end = started + (time.perf_counter() - started) * self._factor
            while time.perf_counter() < end:
                pass
            return found

        engine_step.verify = stretched
        try:
            return self._inner.run(point, requests)
        finally:
            engine_step.verify = true_verify


class Bench:
    """One loaded engine, its prompts, the gate and the log."""

    def __init__(self, folder: Path, until: float) -> None:
        self.folder, self.until = folder, until
        self.engine = ReferenceBackend(draft_model=DEFAULT_HEAD)
        prompts: Sequence[Prompt] = load_workload(None, num_prompts=NUM_PROMPTS, seed=0).prompts
        builder = RequestBuilder(self.engine)
        self.blocks = builder.blocks(prompts, CELL, SAMPLING, count=NUM_PROMPTS)
        self.calibration = builder.calibration(prompts, CELL, SAMPLING)

    def sides(self, factor: float) -> Sides:
        head: Backend = self.engine if factor == 1 else SlowVerify(self.engine, factor)  # type: ignore[assignment]
        return Sides({BASE: self.engine, HEAD: head}, self.blocks, self.calibration)

    def measured(self, name: str, factor: float) -> Any:
        """`MeasureSides` that replays the starts on disk, and keeps each new one before it is used."""
        from spectune.store.codec import pack_block, unpack_blocks

        runner = self.sides(factor)
        raw = self.folder / "gate-real-raw"

        def measure(arms: Sequence[SideArm], *, start: int) -> Iterator[Any]:
            files = [raw / name / f"{start}-{place}.jsonl.gz" for place in range(len(arms))]
            if all(file.exists() for file in files):
                for arm, file in zip(arms, files, strict=True):
                    for index, block in unpack_blocks(file.read_bytes(), where=str(file)).items():
                        yield arm, index, block
                return
            if time.monotonic() > self.until:
                raise TimeoutError
            found: dict[int, dict[int, Any]] = {place: {} for place in range(len(arms))}
            for arm, index, block in runner(arms, start=start):
                found[arms.index(arm)][index] = block
            for place, file in enumerate(files):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(b"".join(pack_block(i, b) for i, b in sorted(found[place].items())))
            for place, arm in enumerate(arms):
                for index, block in found[place].items():
                    yield arm, index, block

        return measure

    def gate(self) -> GateFile:
        """The calibrated gate; made once, by eight A/A starts."""
        import yaml

        path = self.folder / "gate-real.yaml"
        if path.exists():
            return gate_of(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
        found = calibrate(self.measured("calibration", 1.0), POINT, num_starts=CALIBRATION_STARTS)
        manifest = {"workload": {"name": "default"}, "fingerprint": {}}
        gate, _ = make_gate(
            "gate-real", Origin(created="2026-11-30"), POINT, manifest, found.blocks, found, Wishes()
        )
        # a start is short here: eight prompts, 24 tokens each
        gate = replace(gate, minimum=Minimum(num_prompts=NUM_PROMPTS, num_steps=100))
        path.write_text(gate_text(gate), encoding="utf-8")
        return gate


def summarise(reports: Mapping[str, dict[str, Any]], kind: str) -> dict[str, Any]:
    own = [report for name, report in reports.items() if name.startswith(kind)]
    failed = [report for report in own if report["exit_code"] == 3]
    interval = stats.rate_interval(len(failed), len(own))
    return {
        "checks": len(own),
        "failed": len(failed),
        "failed_share_95": None if interval is None else [interval.low, interval.high],
        "named_verify": sum(report["culprit"] == "verify" for report in failed),
        "starts": sum(report["num_starts"] for report in own),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aa", type=int, default=30)
    parser.add_argument("--slower", type=int, default=20)
    parser.add_argument("--factor", type=float, default=1.05)
    parser.add_argument("--max-seconds", type=float, default=150.0, help="no new start after that")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.output, time.monotonic() + options.max_seconds)
    path = options.output / "gate-real.json"
    reports: dict[str, dict[str, Any]] = (
        json.loads(path.read_text(encoding="utf-8"))["reports"] if path.exists() else {}
    )
    # the two kinds in turn: what the machine does meanwhile meets both
    names = [f"equal-{i}" for i in range(options.aa)] + [f"slower-{i}" for i in range(options.slower)]
    names.sort(key=lambda name: (int(name.rsplit("-", 1)[1]), name))
    try:
        gate = bench.gate()
        for name in names:
            if name in reports:
                continue
            factor = 1.0 if name.startswith("equal") else options.factor
            reports[name] = report_document(check_paired(gate, bench.measured(name, factor)))
            document = {
                "what": "checks of one calibrated gate on the CPU reference engine, one process, both sides in it",
                "verify_factor": options.factor,
                "equal": summarise(reports, "equal"),
                "slower": summarise(reports, "slower"),
                "reports": reports,
            }
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except TimeoutError:
        print("time is up; the same command goes on")
    print(json.dumps({kind: summarise(reports, kind) for kind in ("equal", "slower")}))


if __name__ == "__main__":
    main()
