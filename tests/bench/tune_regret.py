"""What tuning by prediction loses against measuring everything, on this machine, with the default target.

    python tests/bench/tune_regret.py exhaustive --output DIR --max-seconds 230
    python tests/bench/tune_regret.py profile --output DIR
    python tests/bench/tune_regret.py errors --output DIR
    python tests/bench/tune_regret.py close --output DIR
    python tests/bench/tune_regret.py regret --output DIR --max-seconds 230
    python tests/bench/tune_regret.py fresh --output DIR --max-seconds 230
    python tests/bench/tune_regret.py report --output DIR

`exhaustive` decodes every configuration at every batch size, in groups of about ten that take turns with
an arm of plain decoding of their own, all on the same prompts; it goes on where it stopped (exit status 75
while something is left) and runs a group again while which others kept the machine busy. `profile` traces
those prompts once in plain decoding and times rounds on other prompts; `errors` compares what follows from
the two with what was measured, `close` does it with shapes and surfaces that take turns. `regret` tunes from scratch once a seed, `fresh` measures each tuned
configuration against the exhaustive best on further prompts, and `report` puts them beside random search
and Optuna's TPE at equal cost. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectune.backend.reference import ReferenceBackend
from spectune.measure.cell import CellRun, CellWork
from spectune.measure.contention import cores_of_others, read_cpu_clock
from spectune.measure.door import Door
from spectune.measure.progress import SilentProgress
from spectune.measure.requests import Block, RequestBuilder
from spectune.policy.arms import ArmData, pool_rounds
from spectune.policy.speedup import paired_speedup
from spectune.provenance import collect
from spectune.records import Cell, Launch, Point, Sampling, SpecConfig, Status
from spectune.stats import median, percentile
from spectune.store import RunStore, dump_strict
from spectune.store.surface import TimeSurface, read_surface, write_surface
from spectune.store.trace_file import read_trace, write_trace
from spectune.tune.evidence import profile_cells
from spectune.tune.job import run_tuning, start_tuning
from spectune.tune.manifest import build_manifest
from spectune.tune.objective import Objective
from spectune.tune.plan import SweepPlan, plan_sweep
from spectune.tune.predict import Forecast, forecast
from spectune.tune.profile import has_fixed_width, lattice, profile, repeatability
from spectune.tune.search import Knob, search
from spectune.tune.space import build_space
from spectune.tune.tuning import TuneJob
from spectune.workload import load_workload

HEAD = "smollm2-135m-eagle3"
OFF = SpecConfig.off()
BLOCKS = {1: 18, 2: 12, 4: 8, 8: 6}
FRESH_BLOCKS = {1: 24, 2: 16, 4: 10, 8: 8}
FRESH_PARTS = 4
CLOSE_BLOCKS = {1: 4, 2: 3, 4: 2, 8: 1}
CLOSE_PARTS = 4
GROUPS = 4
MAX_TOKENS = 32
BUSY_CORES = 0.15  # what a hypervisor takes counts as well
TUNE_SECONDS = {"profile": 42.0, "finalists": 90.0}
NGRAM = {"prompt_lookup_max": 5, "prompt_lookup_min": 1}
MORE = 75
ABOUT: dict[str, dict[str, Any]] = {
    name: {} for name in ("fingerprint", "workload", "sampling", "provenance")
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", choices=["exhaustive", "profile", "errors", "close", "regret", "fresh", "report"]
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--repetitions", type=int, default=10)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    return {
        "exhaustive": exhaustive,
        "profile": make_evidence,
        "errors": errors,
        "close": close,
        "regret": regret,
        "fresh": fresh,
        "report": report,
    }[arguments.part](arguments)


class Bench:
    """The engine, the space, and the requests that everybody decodes."""

    def __init__(self, output: Path, seed: int | None = None) -> None:
        self.output = output
        self.backend = ReferenceBackend(draft_model=HEAD)
        # a repetition draws prompts of its own
        workload = load_workload(None) if seed is None else load_workload(None, num_prompts=64, seed=seed)
        configs, pruned = build_space(
            ["eagle3", "ngram"],
            [1, 2, 3, 4, 5, 6, 8],
            [1, 2, 4],
            [4, 8, 16],
            options={"ngram": NGRAM},
            draft_model=HEAD,
        )
        self.plan: SweepPlan = plan_sweep(
            self.backend,
            workload,
            configs,
            batch_sizes=list(BLOCKS),
            sampling=Sampling(max_tokens=MAX_TOKENS),
            num_prompts=8,
            min_blocks=3,
            pruned=pruned,
        )
        self.builder = RequestBuilder(self.backend)

    def blocks(self, cell: Cell, count: int, part: int = 0) -> tuple[Block, ...]:
        return self.builder.blocks(
            self.plan.workload.prompts, cell, self.plan.sampling, count=count, repeat=part
        )

    def work(self, cell: Cell, points: Sequence[Point], blocks: tuple[Block, ...]) -> CellWork:
        repeat = points[0].repeat
        prompts = self.plan.workload.calibration
        return CellWork(
            cell=cell,
            points=tuple(points),
            off={repeat: points[0]},
            blocks={repeat: blocks},
            calibration=self.builder.calibration(prompts, cell, self.plan.sampling),
        )

    def run(self, store: RunStore, cell: Cell, points: Sequence[Point], blocks: tuple[Block, ...]) -> float:
        """Decode the points in turn; cores that others kept busy meanwhile."""
        launch = Launch(points=tuple(points))
        before = read_cpu_clock()
        with Door(self.backend, launch) as door:
            work = self.work(cell, points, blocks)
            CellRun(work=work, door=door, store=store, progress=SilentProgress()).run()
        return cores_of_others(before, read_cpu_clock()) or 0.0


def open_store(bench: Bench, name: str) -> RunStore:
    path = bench.output / name
    if (path / "manifest.json").exists():
        return RunStore.open(path)
    manifest = build_manifest(bench.plan, bench.backend, argv=sys.argv, config={})
    return RunStore.create(path, {**manifest, "points": []})


# --- everything, once ----------------------------------------------------------------------------------


def exhaustive(arguments: argparse.Namespace) -> int:
    start_s = time.perf_counter()
    bench = Bench(arguments.output)
    store = open_store(bench, "exhaustive")
    log = Log(arguments.output / "groups.jsonl")
    longest: dict[int, float] = {}
    num_done = 0  # a call does something, however short its time
    for row in log.rows:
        if row["busy_cores"] <= BUSY_CORES:
            longest[row["batch"]] = max(longest.get(row["batch"], 0.0), row["seconds"])
    for cell in bench.plan.cells:
        for group in range(GROUPS):
            tries = [r for r in log.rows if (r["batch"], r["group"]) == (cell.batch_size, group)]
            if any(row["busy_cores"] <= BUSY_CORES for row in tries) or len(tries) >= 3:
                continue
            expected_s = longest.get(cell.batch_size, 70.0)
            if num_done and time.perf_counter() - start_s + expected_s > arguments.max_seconds:
                print(f"stopped before batch {cell.batch_size}, group {group}")
                return MORE
            seconds, busy = run_group(bench, store, cell, group)
            num_done += 1
            longest[cell.batch_size] = max(longest.get(cell.batch_size, 0.0), seconds)
            log.add({"batch": cell.batch_size, "group": group, "seconds": seconds, "busy_cores": busy})
            print(f"batch {cell.batch_size}, group {group}: {seconds:.0f} s, others {busy:.2f} cores")
    print("complete")
    return 0


def run_group(bench: Bench, store: RunStore, cell: Cell, group: int) -> tuple[float, float]:
    candidates = [config for config in bench.plan.configs if not config.is_off][group::GROUPS]
    points = [bench.plan.point(config, cell, group) for config in (OFF, *candidates)]
    start_over(store, points)
    start_s = time.perf_counter()
    busy = bench.run(store, cell, points, bench.blocks(cell, BLOCKS[cell.batch_size]))
    return time.perf_counter() - start_s, busy


def start_over(store: RunStore, points: Sequence[Point]) -> None:
    """Add points to a run; what an interrupted or a disturbed call left of them is measured again."""
    for point in points:
        store.block_file(point.point_id).unlink(missing_ok=True)
    known = {row["point_id"]: row for row in store.manifest["points"]}
    known |= {point.point_id: {"point_id": point.point_id, **point.canonical} for point in points}
    store.update_manifest({"points": list(known.values())})


class Log:
    """Lines of JSON, on disk when they are added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(json.loads(dump_strict(row)))
        with self.path.open("a") as file:
            file.write(dump_strict(row) + "\n")


def arms_of(store: RunStore, cell: Cell) -> dict[SpecConfig, ArmData]:
    """Everything that was measured in a cell, by configuration."""
    arms: dict[SpecConfig, ArmData] = {}
    for outcome in store.outcomes().values():
        point = outcome.point
        if point.cell != cell or outcome.status is not Status.OK:
            continue
        known = arms.get(point.config)
        blocks = {(point.repeat, i): block for i, block in store.blocks(point.point_id).items()}
        if known is not None:
            blocks = {**known.blocks, **blocks}
        arms[point.config] = ArmData(config=point.config, cell=cell, blocks=blocks)
    return arms


def speedups(store: RunStore, cell: Cell) -> dict[SpecConfig, float]:
    """Paired speedup of every configuration over the plain decoding of its own group; 1 for plain."""
    arms = arms_of(store, cell)
    found = {OFF: 1.0}
    for config, arm in arms.items():
        interval = None if config.is_off else paired_speedup(arms[OFF], arm)
        if interval is not None:
            found[config] = interval.value
    return found


# --- prediction ----------------------------------------------------------------------------------------


def make_evidence(arguments: argparse.Namespace) -> int:
    """A trace of the prompts that `exhaustive` decodes, and a surface of the calibration prompts."""
    bench = Bench(arguments.output)
    bench.backend.fingerprint()
    start_s = time.perf_counter()
    count = max(size * blocks for size, blocks in BLOCKS.items())
    first = Cell(batch_size=1, context_tokens=0, temperature=0.0)
    requests = [request for block in bench.blocks(first, count) for request in block]
    parts = arguments.output / "parts"
    trace = bench.backend.record_trace(requests, bench.plan.configs, ABOUT, parts_dir=parts)
    write_trace(arguments.output / "trace.npz", trace)
    trace_s = time.perf_counter() - start_s
    before = read_cpu_clock()
    surface = profile(
        bench.backend,
        bench.plan.configs,
        profile_cells(bench.plan, bench.builder),
        budget_s=min(80.0, arguments.max_seconds),
        provenance=collect(sys.argv),
        say=print,
    )
    busy = cores_of_others(before, read_cpu_clock())
    earlier = surface_files(arguments.output)
    if earlier:
        changes = repeatability(read_surface(earlier[-1]), surface)
        print(f"against the surface before: {changes[0]:.1%} (median), {changes[1]:.1%} (95th)")
    write_surface(arguments.output / f"time-surface-{len(earlier) + 1}.json", surface)
    told = surface.held_out
    print(f"trace of {trace.num_requests} requests, {trace.num_positions} positions in {trace_s:.0f} s")
    print(
        f"surface of {len(surface.points)} points in {surface.duration_s:.0f} s, others {busy or 0:.2f} "
        f"cores, drift {surface.drift or 0:+.1%}; held out {told.num_points} shapes: median "
        f"{told.median or 0:.1%}, 95th {told.p95 or 0:.1%}"
    )
    return 0


def surface_files(output: Path) -> list[Path]:
    """What `profile` left, in the order in which it was made."""
    return sorted(output.glob("time-surface*.json"))


def tuned_surfaces(output: Path) -> list[Path]:
    """What each tuning timed for itself."""
    return sorted(
        output.glob("tune-*/time-surface.json"), key=lambda path: int(path.parent.name.split("-")[1])
    )


def predictions(bench: Bench, surface: TimeSurface) -> dict[tuple[SpecConfig, Cell], Forecast]:
    """Forecasts of the requests that each batch size decoded."""
    trace = read_trace(bench.output / "trace.npz")
    found: dict[tuple[SpecConfig, Cell], Forecast] = {}
    for cell in bench.plan.cells:
        asked = {r.request_id for block in bench.blocks(cell, BLOCKS[cell.batch_size]) for r in block}
        told = forecast(surface, {(0, 0.0): trace}, bench.plan.configs, [cell], requests=asked)
        found |= {(row.config, cell): row for row in told.of(cell)}
    return found


def errors(arguments: argparse.Namespace) -> int:
    """Predicted against measured time per token of every point, by each surface and by their mean."""
    bench = Bench(arguments.output)
    store = open_store(bench, "exhaustive")
    files = [*surface_files(arguments.output), *tuned_surfaces(arguments.output)]
    told = {str(path.relative_to(arguments.output)): predictions(bench, read_surface(path)) for path in files}
    told["mean"] = {
        key: mean_forecast([found[key] for found in told.values()]) for key in next(iter(told.values()))
    }
    rows = {}
    for name, found in told.items():
        rows[name] = error_rows(bench, store, found)
        print(name)
        tell_errors(rows[name])
    (arguments.output / "errors.json").write_text(dump_strict(rows, indent=1) + "\n")
    if text := cuts_text(bench, store):
        print(text)
    for is_steady in (False, True):
        print(
            f"the same plain decoding in two groups of a batch size differs by "
            f"{floor_text(bench, store, is_steady=is_steady)}, {'steady' if is_steady else 'all'} rounds"
        )
    return 0


def close(arguments: argparse.Namespace) -> int:
    """Shapes that no surface was fitted to, timed in turn with surfaces of a few rounds each: what is left
    of the errors when prediction and measurement are of the same minutes."""
    bench = Bench(arguments.output)
    shapes = set(lattice(bench.plan.configs))
    asked = [config for config in bench.plan.configs if config not in shapes]
    store = open_store(bench, "close")
    blocks = {
        (cell, part): bench.blocks(cell, CLOSE_BLOCKS[cell.batch_size], part)
        for cell in bench.plan.cells
        for part in range(CLOSE_PARTS)
    }
    requests = {r.request_id: r for own in blocks.values() for block in own for r in block}
    parts = arguments.output / "close-parts"
    trace = bench.backend.record_trace(list(requests.values()), bench.plan.configs, ABOUT, parts_dir=parts)
    surfaces = []
    for part in range(CLOSE_PARTS):
        cells = profile_cells(bench.plan, bench.builder)
        surface = profile(bench.backend, bench.plan.configs, cells, budget_s=0.0, seed=part)
        write_surface(arguments.output / f"close-surface-{part}.json", surface)
        surfaces.append(surface)
        for cell in bench.plan.cells[:: 1 if part % 2 == 0 else -1]:
            points = [bench.plan.point(config, cell, part) for config in (OFF, *asked)]
            start_over(store, points)
            bench.run(store, cell, points, blocks[cell, part])
    told: dict[tuple[SpecConfig, Cell], list[Forecast]] = {}
    for cell in bench.plan.cells:
        own = {
            r.request_id
            for (one, _), found in blocks.items()
            if one == cell
            for block in found
            for r in block
        }
        for surface in surfaces:
            rows = forecast(surface, {(0, 0.0): trace}, [OFF, *asked], [cell], requests=own).of(cell)
            for row in rows:
                told.setdefault((row.config, cell), []).append(row)
    errors_found = error_rows(bench, store, {key: mean_forecast(rows) for key, rows in told.items()})
    (arguments.output / "close.json").write_text(dump_strict(errors_found, indent=1) + "\n")
    tell_errors(errors_found)
    return 0


def mean_forecast(rows: Sequence[Forecast]) -> Forecast:
    """A forecast with the mean times of several of one configuration and cell, whose acceptance is equal."""
    first = rows[0]
    parts: dict[str, Any] = {
        name: math.fsum(getattr(row.times, name) for row in rows) / len(rows)
        for name in ("draft_s", "verify_s", "other_s")
    }
    tpot_s = math.fsum(row.tpot_s.value for row in rows) / len(rows)
    return replace(first, times=replace(first.times, **parts), tpot_s=replace(first.tpot_s, value=tpot_s))


def error_rows(
    bench: Bench, store: RunStore, told: Mapping[tuple[SpecConfig, Cell], Forecast]
) -> list[dict[str, Any]]:
    """Told over measured - 1 of every point of a store."""
    rows = []
    for cell in bench.plan.cells:
        found, plain = speedups(store, cell), told.get((OFF, cell))
        for config, arm in arms_of(store, cell).items():
            rounds, row = pool_rounds(arm), told.get((config, cell))
            steady = pool_rounds(arm, is_steady=has_fixed_width(config))
            if rounds is None or steady is None or row is None:
                print(f"no prediction: {config.label} at batch {cell.batch_size}")
                continue
            rows.append(
                {
                    "batch": cell.batch_size,
                    "config": config.label,
                    "predicted_tpot_s": row.tpot_s.value,
                    "measured_tpot_s": rounds.round_tpot_s,
                    "steady_tpot_s": steady.round_tpot_s,
                    "error": row.tpot_s.value / rounds.round_tpot_s - 1,
                    "steady_error": row.tpot_s.value / steady.round_tpot_s - 1,
                    "tokens_per_step_error": row.tokens_per_step / rounds.tokens_per_sequence - 1,
                    "round_error": row.times.total_s / rounds.total_s - 1,
                    "speedup_error": None
                    if plain is None or config.is_off or config not in found
                    else plain.tpot_s.value / row.tpot_s.value / found[config] - 1,
                }
            )
    return rows


def tell_errors(rows: Sequence[dict[str, Any]]) -> None:
    for batch in [*BLOCKS, None]:
        own = [row for row in rows if batch in (None, row["batch"])]
        if own:
            print(f"{'all' if batch is None else f'batch {batch}':8} {len(own):4} points: {error_text(own)}")
    worst = sorted(rows, key=lambda row: -abs(row["error"]))[:6]
    for row in worst:
        print(f"  batch {row['batch']} {row['config']}: {row['error']:+.1%}, round {row['round_error']:+.1%}")


def floor_text(bench: Bench, store: RunStore, *, is_steady: bool = False) -> str:
    """What no prediction can fall below: plain decoding of one group told by that of another."""
    changes = []
    for cell in bench.plan.cells:
        plain = arms_of(store, cell)[OFF]
        groups = [plain.only(key for key in plain.blocks if key[0] == group) for group in range(GROUPS)]
        pooled = [pool_rounds(own, is_steady=is_steady) for own in groups]
        times = [rounds.round_tpot_s for rounds in pooled if rounds is not None]
        changes += [abs(b / a - 1) for a in times for b in times if a is not b]
    return f"{median(changes) or 0:.1%} (median), {percentile(changes, 95) or 0:.1%} (95th)"


def cuts_text(bench: Bench, store: RunStore) -> str:
    """Rounds that the hypervisor cut into beside the others of their arm; empty where none was, or none of the
    runs told."""
    cut, whole = [], []
    for cell in bench.plan.cells:
        for arm in arms_of(store, cell).values():
            full = [r for r in arm.rounds if r.kind == "decode" and r.batch_size >= cell.batch_size]
            usual_s = median([r.total_s for r in full if r.stolen_s <= 0])
            if usual_s is not None:
                cut += [r.total_s / usual_s for r in full if r.stolen_s > 0]
                whole += [r.total_s / usual_s for r in full if r.stolen_s <= 0]
    if not cut:
        return ""
    return (
        f"the hypervisor cut into {len(cut) / max(1, len(cut) + len(whole)):.1%} of the full rounds; over the "
        f"median of their arm's others they took {math.fsum(cut) / max(1, len(cut)):.2f} (mean), "
        f"{percentile(cut, 95) or 0:.2f} (95th), the others {math.fsum(whole) / max(1, len(whole)):.2f} and "
        f"{percentile(whole, 95) or 0:.2f}"
    )


def error_text(rows: Sequence[dict[str, Any]]) -> str:
    parts = []
    for name in ("error", "steady_error", "round_error", "tokens_per_step_error", "speedup_error"):
        values = [row[name] for row in rows if row[name] is not None]
        sizes = [abs(value) for value in values]
        mean = math.fsum(values) / max(1, len(values))
        parts.append(
            f"{name} median {median(sizes) or 0:.1%}, 95th {percentile(sizes, 95) or 0:.1%}, mean {mean:+.1%}"
        )
    return "; ".join(parts)


# --- tuning, once a seed -------------------------------------------------------------------------------


def regret(arguments: argparse.Namespace) -> int:
    start_s = time.perf_counter()
    log = Log(arguments.output / "tuned.jsonl")
    longest = max((row["seconds"] for row in log.rows), default=150.0)
    num_done = 0
    for seed in range(1, arguments.repetitions + 1):
        if any(row["seed"] == seed for row in log.rows):
            continue
        if num_done and time.perf_counter() - start_s + longest > arguments.max_seconds:
            return MORE
        num_done += 1
        row = tune_once(arguments.output, seed)
        longest = max(longest, row["seconds"])
        log.add(row)
        print(json.dumps(row))
    return 0


def tune_once(output: Path, seed: int) -> dict[str, Any]:
    import shutil

    bench = Bench(output, seed=seed)
    bench.backend.fingerprint()  # loading is not tuning
    path = output / f"tune-{seed}"
    shutil.rmtree(path, ignore_errors=True)
    job = TuneJob(
        plan=bench.plan,
        objective=Objective(),
        num_finalists=3,
        num_trace_prompts=64,
        budget_s=TUNE_SECONDS["finalists"],
        profile_s=TUNE_SECONDS["profile"],
        seed=seed,
    )
    start_s, before = time.perf_counter(), read_cpu_clock()
    store = start_tuning(path, job, bench.backend)
    tuning = run_tuning(job, bench.backend, store, SilentProgress())
    seconds = time.perf_counter() - start_s
    return {
        "seed": seed,
        "seconds": seconds,
        "steps_s": dict(tuning.seconds),
        "busy_cores": cores_of_others(before, read_cpu_clock()),
        "winners": {str(race.cell.batch_size): race.winner.to_dict() for race in tuning.races},
        "labels": {str(race.cell.batch_size): race.winner.label for race in tuning.races},
        "predicted_best": {
            str(cell.batch_size): tuning.forecasts.of(cell)[0].config.label for cell in bench.plan.cells
        },
        "ends": {str(race.cell.batch_size): race.end for race in tuning.races},
        "held_out_median": tuning.surface.held_out.median,
    }


def fresh(arguments: argparse.Namespace) -> int:
    """Each tuned configuration against the exhaustive best, in turn, on prompts of its own."""
    start_s = time.perf_counter()
    bench = Bench(arguments.output)
    everything = open_store(bench, "exhaustive")
    store = open_store(bench, "fresh")
    log = Log(arguments.output / "fresh.jsonl")
    tuned = Log(arguments.output / "tuned.jsonl").rows
    for cell in bench.plan.cells:
        found = speedups(everything, cell)
        best = max(found, key=lambda config: found[config])
        picked = {SpecConfig.from_dict(row["winners"][str(cell.batch_size)]) for row in tuned}
        for config in sorted(picked - {best}, key=lambda config: config.label):
            done = [
                row for row in log.rows if row["batch"] == cell.batch_size and row["tuned"] == config.label
            ]
            part = len(done)
            while part < FRESH_PARTS and not is_clear(done):
                if time.perf_counter() - start_s + 40 > arguments.max_seconds:
                    return MORE
                points = [bench.plan.point(one, cell, 100 + part) for one in (best, config)]
                for point in points:
                    store.block_file(point.point_id).unlink(missing_ok=True)
                blocks = bench.blocks(cell, FRESH_BLOCKS[cell.batch_size], part=1 + part)
                busy = bench.run(store, cell, points, blocks)
                arms = arms_of(store, cell)
                ratio = paired_speedup(arms[config], arms[best])
                assert ratio is not None, "both arms decoded the same blocks"
                row = {
                    "batch": cell.batch_size,
                    "tuned": config.label,
                    "best": best.label,
                    "part": part,
                    "regret": ratio.value - 1,
                    "low": None if ratio.low is None else ratio.low - 1,
                    "high": None if ratio.high is None else ratio.high - 1,
                    "blocks": ratio.n,
                    "busy_cores": busy,
                }
                log.add(row)
                done.append(row)
                print(json.dumps(row))
                part += 1
    return 0


def is_clear(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the last interval is short enough to judge a limit of 4%."""
    if not rows or rows[-1]["high"] is None:
        return False
    return bool(rows[-1]["high"] <= 0.04 or rows[-1]["low"] > 0.02)


# --- the answer ----------------------------------------------------------------------------------------


def report(arguments: argparse.Namespace) -> int:
    bench = Bench(arguments.output)
    store = open_store(bench, "exhaustive")
    groups = Log(arguments.output / "groups.jsonl").rows
    tuned = Log(arguments.output / "tuned.jsonl").rows
    pairs = Log(arguments.output / "fresh.jsonl").rows
    used = {(row["batch"], row["group"]): row for row in groups}
    whole_s = sum(row["seconds"] for row in used.values())
    num_points = sum(len(speedups(store, cell)) for cell in bench.plan.cells)
    print(f"exhaustive: {num_points} points in {whole_s:.0f} s, {whole_s / max(1, num_points):.1f} s a point")
    mean_s = sum(row["seconds"] for row in tuned) / max(1, len(tuned))
    print(f"tuning: {len(tuned)} repetitions, {mean_s:.0f} s each, {mean_s / whole_s:.1%} of exhaustive")
    budget = max(1, round(mean_s / (whole_s / num_points) / len(bench.plan.cells)))
    good = dict.fromkeys((row["seed"] for row in tuned), True)
    for cell in bench.plan.cells:
        found = speedups(store, cell)
        best = max(found, key=lambda config: found[config])
        print(f"batch {cell.batch_size}: exhaustive best {best.label} {found[best]:.3f}x")
        for row in tuned:
            label = row["labels"][str(cell.batch_size)]
            value, high, text = regret_of(cell.batch_size, label, best.label, pairs)
            good[row["seed"]] &= value is not None and value <= 0.02 and high is not None and high <= 0.04
            print(f"  seed {row['seed']}: {label}: {text}")
        for name, run in (("random", by_random), ("TPE", by_tpe)):
            losses = [run(found, budget, seed) for seed in range(200 if name == "random" else 20)]
            print(
                f"  {name} search, {budget} points: mean regret {sum(losses) / len(losses):.1%}, "
                f"95th {percentile(losses, 95) or 0:.1%}, within 2% in "
                f"{sum(loss <= 0.02 for loss in losses) / len(losses):.0%}"
            )
    print(f"all batch sizes within 2% (upper 95% within 4%): {sum(good.values())} of {len(good)} repetitions")
    return 0


def regret_of(
    batch: int, label: str, best: str, pairs: Sequence[dict[str, Any]]
) -> tuple[float | None, float | None, str]:
    if label == best:
        return 0.0, 0.0, "the exhaustive best"
    rows = [row for row in pairs if row["batch"] == batch and row["tuned"] == label and row["best"] == best]
    if not rows:
        return None, None, "not compared yet"
    row = rows[-1]
    text = f"regret {row['regret']:+.1%}"
    if row["high"] is not None:
        text += f" ({row['low']:+.1%} to {row['high']:+.1%}), {row['blocks']} blocks"
    return row["regret"], row["high"], text


def by_random(found: dict[SpecConfig, float], budget: int, seed: int) -> float:
    """Regret of the best of `budget` random points, plain decoding known, judged by the same table."""
    others = [config for config in found if not config.is_off]
    picked = [OFF, *random.Random(seed).sample(others, min(budget, len(others)))]
    return max(found.values()) / max(found[config] for config in picked) - 1


def by_tpe(found: dict[SpecConfig, float], budget: int, seed: int) -> float:
    """The same by TPE over method, depth, topk and verified tokens; a point that is none costs nothing."""
    knobs = [
        Knob(name="method", values=("eagle3", "ngram")),
        Knob(name="num_steps", values=tuple(sorted({c.num_steps for c in found if not c.is_off}))),
        Knob(name="topk", values=tuple(sorted({c.topk for c in found if not c.is_off}))),
        Knob(name="nodes", values=(0, 4, 8, 16)),
    ]
    by_values = {
        (c.method, c.num_steps, c.topk, 0 if c.is_chain else c.num_draft_tokens): value
        for c, value in found.items()
        if not c.is_off
    }
    measured: list[float] = [1.0]

    def evaluate(values: Any) -> float:
        value = by_values.get(tuple(value for _, value in values))
        if value is None or len(measured) > budget:
            return 0.0
        measured.append(value)
        return value

    search(knobs, evaluate, num_trials=min(12 * budget, 150), seed=seed)
    return max(found.values()) / max(measured) - 1


if __name__ == "__main__":
    raise SystemExit(main())
