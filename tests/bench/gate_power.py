"""How often the gate is wrong, on the SIMULATED backend: false alarms, caught slowdowns, caught drops.

Every trial is a whole life of a gate on a machine of its own: A/A calibration, the number of starts that
the gate announces from it, then one check. Noise has three levels: start, request, round; some texts
part under rounding. Nothing here is a measurement of a real engine.

    python tests/bench/gate_power.py --output reports/gate
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spectune import stats
from spectune.backend.simulated import SimulatedBackend
from spectune.backend.truth import SimulatedTruth
from spectune.errors import Inconclusive
from spectune.gate.calibrate import Wishes, calibrate, make_gate
from spectune.gate.file import GateFile, Minimum, Origin
from spectune.gate.paired import check_paired
from spectune.gate.pairs import BASE, HEAD, measure_start, requests_of
from spectune.gate.stored import check_acceptance
from spectune.gate.verdicts import GateReport
from spectune.measure.sides import Sides
from spectune.records import Cell, Point, Request, Sampling, SideArm, SpecConfig

CATEGORIES = ("chat", "code", "math", "json_extraction")
NOISE = {"boot_noise_sd": 0.01, "request_noise_sd": 0.02, "noise_sd": 0.05, "text_flip_rate": 0.1}
CALIBRATION_STARTS = 10


@dataclass(frozen=True, slots=True)
class Load:
    """Prompts and output tokens of one start."""

    num_prompts: int
    max_tokens: int

    @property
    def sampling(self) -> Sampling:
        return Sampling(max_tokens=self.max_tokens, ignore_eos=True)

    def blocks(self) -> tuple[tuple[Request, ...], ...]:
        return tuple(
            (
                Request(
                    request_id=f"prompt{i}-0",
                    prompt_ids=tuple(range(20)),
                    category=CATEGORIES[i % len(CATEGORIES)],
                    sampling=self.sampling,
                ),
            )
            for i in range(self.num_prompts)
        )

    def point(self) -> Point:
        cell = Cell(batch_size=1, context_tokens=0, temperature=0.0)
        return Point(
            config=SpecConfig.chain("eagle3", 3), cell=cell, workload_hash="bench", sampling=self.sampling
        )


SPEED_LOAD = Load(12, 32)
ACCEPTANCE_LOAD = Load(80, 64)


def declared(**changes: Any) -> SimulatedTruth:
    """The noisy machine."""
    return replace(SimulatedTruth(), **{**NOISE, **changes})


def slower(truth: SimulatedTruth, factor: float) -> SimulatedTruth:
    """Every second of the engine times `factor`."""
    plain = {batch: seconds * factor for batch, seconds in truth.plain_s_by_batch.items()}
    scaled = {
        name: getattr(truth, name) * factor
        for name in ("verify_s_per_token", "context_s_per_token", "other_s", "other_s_per_sequence")
    }
    steps = {method: seconds * factor for method, seconds in truth.draft_step_s.items()}
    return replace(truth, plain_s_by_batch=plain, draft_step_s=steps, **scaled)


def slower_verify(truth: SimulatedTruth, factor: float) -> SimulatedTruth:
    """Only the target's pass times `factor`."""
    plain = {batch: seconds * factor for batch, seconds in truth.plain_s_by_batch.items()}
    return replace(truth, plain_s_by_batch=plain, verify_s_per_token=truth.verify_s_per_token * factor)


def less_accepted(truth: SimulatedTruth, drop: float, config: SpecConfig) -> SimulatedTruth:
    """Acceptance probabilities scaled so that the mean acceptance length falls by `drop`."""

    def scaled(factor: float) -> SimulatedTruth:
        hazards = {
            method: {name: tuple(h * factor for h in values) for name, values in by_category.items()}
            for method, by_category in truth.hazards.items()
        }
        return replace(truth, hazards=hazards)

    def length(of: SimulatedTruth) -> float:
        total = 0.0
        for category in CATEGORIES:
            alive = 1.0
            for hazard in of.acceptance(config, category, 0.0):
                alive *= hazard
                total += alive / len(CATEGORIES)
        return 1 + total

    wanted, low, high = length(truth) * (1 - drop), 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if length(scaled(middle)) < wanted else (low, middle)
    return scaled(high)


def sides(load: Load, base: SimulatedTruth, head: SimulatedTruth, seed: int, phase: int) -> Sides:
    """Two engines on the machine `seed`; noise differs by phase, side and start."""
    backends = {
        side: SimulatedBackend(truth=truth, seed=seed, noise_seed=4 * seed + 2 * phase + place)
        for place, (side, truth) in enumerate(((BASE, base), (HEAD, head)))
    }
    return Sides(backends, load.blocks())


def new_gate(load: Load, truth: SimulatedTruth, seed: int, wishes: Wishes) -> GateFile:
    """Calibrated on the trial's own machine."""
    calibration = calibrate(sides(load, truth, truth, seed, 0), load.point(), num_starts=CALIBRATION_STARTS)
    gate, _ = make_gate(
        "bench", Origin(created="bench"), load.point(), {}, calibration.blocks, calibration, wishes
    )
    # a start of this bench is short, so that thousands of them are cheap
    return replace(gate, minimum=Minimum(num_prompts=load.num_prompts, num_steps=100))


Trial = tuple[GateFile, GateReport] | None


def paired_trials(load: Load, head: SimulatedTruth, seeds: Sequence[int]) -> Iterator[Trial]:
    """One calibrated check of base against head a seed; None where the gate refused itself."""
    base = declared()
    for seed in seeds:
        try:
            gate = new_gate(load, base, seed, Wishes())
        except Inconclusive:
            yield None
            continue
        yield gate, check_paired(gate, sides(load, base, head, seed, 1), is_simulated=True)


def replayed_trials(load: Load, head: SimulatedTruth, seeds: Sequence[int]) -> Iterator[Trial]:
    """One baseline run a seed, whose text the head replays: acceptance without a clock."""
    base = declared()
    for seed in seeds:
        arm = SideArm(side=BASE, point=load.point())
        (baseline,) = measure_start(sides(load, base, base, seed, 0), [arm], start=0)
        gate, _ = make_gate("bench", Origin(created="bench"), load.point(), {}, baseline, None, Wishes())
        texts = {record.request_id: record.output_ids for record in requests_of(baseline)}
        engine = SimulatedBackend(truth=head, seed=seed, noise_seed=4 * seed + 2)
        replay = Sides({BASE: engine}, load.blocks(), texts=texts)
        (replayed,) = measure_start(replay, [arm], start=0)
        checks = check_acceptance(gate, baseline, [replayed])
        yield gate, GateReport(gate=gate.name, mode="replay", checks=checks, is_simulated=True, num_starts=1)


def row_of(series: str, seed: int, trial: Trial) -> dict[str, Any]:
    """What is kept of a trial."""
    row: dict[str, Any] = {"series": series, "seed": seed, "is_refused": trial is None}
    if trial is not None:
        gate, report = trial
        row |= {
            "outcome": str(report.outcome),
            "exit_code": report.exit_code,
            "failed_checks": [check.name for check in report.checks if check.is_bad],
            "culprit": report.culprit,
            "announced_starts": gate.statistics.num_starts,
            "used_starts": report.num_starts,
            "was_repeated": report.was_repeated,
            "aa_log_ratios": [round(value, 5) for value in gate.statistics.aa_log_ratios],
        }
    return row


def summarise(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of one series, with an exact interval of the share that failed."""
    done = [row for row in rows if not row["is_refused"]]
    failed = [row for row in done if row["exit_code"] == 3]
    interval = stats.rate_interval(len(failed), len(done))
    starts = sorted(row["announced_starts"] for row in done)
    noise = [value for row in done for value in row["aa_log_ratios"]]
    return {
        "series": name,
        "backend": "simulated",
        "trials": len(done),
        "refused": len(rows) - len(done),
        "failed": len(failed),
        "failed_share": len(failed) / len(done),
        "failed_share_95": [interval.low, interval.high] if interval else None,
        "failed_checks": dict(Counter(check for row in failed for check in row["failed_checks"])),
        "outcomes": dict(Counter(row["outcome"] for row in done)),
        "culprits": dict(Counter(str(row["culprit"]) for row in failed)),
        "measured_again": sum(row["was_repeated"] for row in done),
        "announced_starts": {"min": starts[0], "median": starts[len(starts) // 2], "max": starts[-1]},
        "mean_starts_used": sum(row["used_starts"] for row in done) / len(done),
        "start_noise": stats.standard_deviation(noise) if len(noise) > 1 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aa", type=int, default=2000, help="equal engines")
    parser.add_argument("--slower", type=int, default=600, help="3%% slower")
    parser.add_argument("--verify", type=int, default=200, help="5%% slower verify")
    parser.add_argument("--acceptance", type=int, default=500, help="2%% less acceptance")
    parser.add_argument("--seed", type=int, default=100_000)
    parser.add_argument("--output", type=Path, required=True, help="folder; trials that are there are kept")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    base = declared()
    drop = less_accepted(base, 0.02, ACCEPTANCE_LOAD.point().config)
    series = (
        ("equal engines", SPEED_LOAD, base, options.aa, paired_trials),
        ("3% slower", SPEED_LOAD, slower(base, 1.03), options.slower, paired_trials),
        ("verify 5% slower", SPEED_LOAD, slower_verify(base, 1.05), options.verify, paired_trials),
        ("acceptance 2% lower, by replay", ACCEPTANCE_LOAD, drop, options.acceptance, replayed_trials),
        ("equal engines, by replay", ACCEPTANCE_LOAD, base, options.acceptance, replayed_trials),
    )
    log = options.output / "gate-power.trials.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for line in lines:
        row = json.loads(line)
        rows[row["series"], row["seed"]] = row
    for number, (name, load, head, count, run) in enumerate(series):
        first = options.seed + 10_000 * number
        todo = [seed for seed in range(first, first + count) if (name, seed) not in rows]
        with log.open("a", encoding="utf-8") as stream:
            for seed, trial in zip(todo, run(load, head, todo), strict=True):
                rows[name, seed] = row_of(name, seed, trial)
                stream.write(json.dumps(rows[name, seed]) + "\n")
                stream.flush()
        own = [rows[name, seed] for seed in range(first, first + count)]
        if own:
            print(json.dumps(summarise(name, own)), flush=True)
    document = {
        "what": "error rates of the gate on the simulated backend; nothing real was measured",
        "noise": NOISE,
        "calibration_starts": CALIBRATION_STARTS,
        "designed_false_alarm_rate": 0.005,
        "series": [
            summarise(name, own)
            for name, *_ in series
            if (own := [row for (of, _), row in sorted(rows.items()) if of == name])
        ],
    }
    text = json.dumps(document, indent=1) + "\n"
    (options.output / "gate-power.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
