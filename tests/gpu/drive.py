"""One call on one GPU: every part within its share of the time, gpu.json rewritten after every part.

    tests/gpu/run.sh OUT                              on a GPU
    tests/gpu/run.sh OUT --resume EARLIER/gpu.json    goes on where an earlier call stopped
    tests/gpu/run.sh OUT --rehearse                   toy models on a CPU: shows that it runs, nothing else

Needs Python, torch, numpy, safetensors and tokenizers, and no network. The default target is taken from
--model, from the cache or from joined pieces (tests/gpu/pieces.py); without it the small model has random
weights, and every row says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from spectune.engine.default_target import NAME, default_cache_dir
from spectune.engine.kv_cache import SlotView
from spectune.errors import SpectuneError
from spectune.store.gpu_run import GPU_FILE, CheckRow, GpuDocument, PartState, RoundRow, read_gpu
from tests.gpu import checks, machine, parts
from tests.gpu.models import Models, random_target
from tests.gpu.parts import OutOfTime, Work
from tests.gpu.plan import ON_A_DEVICE, REHEARSAL, Plan
from tests.gpu.shapes import wait

SECONDS = 450.0
"""Of a call of 8 minutes; the rest is for starting Python and for the last shape to end."""
SAVE_EVERY_S = 10.0
Part = tuple[str, Callable[[Work], None], Callable[[Plan], int], float]
PARTS: tuple[Part, ...] = (
    ("equality", checks.equality, checks.num_equality, 0.16),
    ("graphs", checks.graphs, checks.num_graphs, 0.04),
    ("mbu", parts.mbu, parts.num_mbu, 0.14),
    ("rounds", parts.rounds, parts.num_rounds, 0.18),
    ("surface", parts.surface, parts.num_surface, 0.20),
    ("crossover", parts.crossover, parts.num_crossover, 0.28),
)
"""Name, what runs it, how many rows it has, its share of the time; what a part leaves over goes on."""


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(given)
    try:
        return run(options, ["tests/gpu/run.sh", *given])
    except SpectuneError as error:
        say(f"error: {error.message}" + (f" (hint: {error.hint})" if error.hint else ""))
        return error.exit_code


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path, help=f"folder for {GPU_FILE}")
    made.add_argument("--rehearse", action="store_true", help="toy models on a CPU, labelled")
    made.add_argument("--resume", type=Path, help=f"{GPU_FILE} of an earlier call")
    made.add_argument("--model", type=Path, help=f"folder of {NAME}")
    made.add_argument("--seconds", type=float, default=SECONDS, help="time of the whole call")
    made.add_argument("--only", default="", help="parts, by comma")
    return made


def run(options: argparse.Namespace, argv: list[str]) -> int:
    """Measure what is missing; 0 when every part is whole, 7 when some rows are missing or failed."""
    start_s = time.monotonic()
    is_rehearsal = options.rehearse
    if not is_rehearsal and not torch.cuda.is_available():
        say("error: this torch sees no CUDA device; --rehearse runs toy models on the CPU")
        return 2
    device = torch.device("cpu" if is_rehearsal else "cuda")
    if is_rehearsal:
        say("REHEARSAL: toy models on a CPU; no number of it says anything about a GPU")
    document = GpuDocument(
        is_rehearsal=is_rehearsal,
        device=machine.describe(device, probe_bytes=64 << 20 if is_rehearsal else machine.PROBE_BYTES),
        provenance=machine.provenance(argv),
    )
    if options.resume is not None:
        document.go_on_from(read_gpu(options.resume))
    file = options.out / GPU_FILE
    document.write(file)
    real = None if is_rehearsal else real_target(options.model)
    if real is None and not is_rehearsal:
        say(f"{NAME} is not at hand: the small model has random weights")
    kernels, reason = working_kernels(device)
    if reason is not None:
        say(f"graphs cannot be captured here, so everything runs without them: {reason}")
        document.provenance = {**document.provenance, "no_graphs": reason}
    work = Work(
        plan=REHEARSAL if is_rehearsal else ON_A_DEVICE,
        models=Models(device, real_target=real, say=say),
        document=document,
        dtype=torch.float32 if is_rehearsal else torch.bfloat16,
        kernels=kernels,
        check=lambda: None,
        keep=lambda row: None,
    )
    wanted = options.only.split(",") if options.only else [name for name, *_ in PARTS]
    allotted_s = 0.0
    for part in PARTS:
        allotted_s += part[3] * options.seconds
        if part[0] in wanted:
            run_part(part, work, file, ends_s=start_s + allotted_s)
    states = [document.parts[name] for name in wanted if name in document.parts]
    say(f"{file}: {sum(s.num_done for s in states)} of {sum(s.num_planned for s in states)} rows")
    rows = [*document.checks.values(), *document.rounds.values()]
    is_whole = all(state.is_whole for state in states) and all(row.status != "failed" for row in rows)
    unsound = [row for row in document.checks.values() if not row.is_sound]
    for row in unsound:
        say(f"NOT EQUAL: {row.model} {row.dtype}, {row.what}: {row.num_different} of {row.num_compared}")
    return 3 if unsound else 0 if is_whole else 7


def run_part(part: Part, work: Work, file: Path, *, ends_s: float) -> None:
    """One part until it is whole, its time is up or it breaks; the document is written in every case."""
    name, measure, count, _ = part
    document, planned = work.document, count(work.plan)
    before = document.parts.get(name, PartState())
    start_s = saved_s = time.monotonic()
    reason = None

    def rows() -> list[CheckRow | RoundRow]:
        return [row for row in (*document.checks.values(), *document.rounds.values()) if row.part == name]

    def state() -> PartState:
        return PartState(
            # the pass alone stands beside a row of the plan
            num_done=sum(isinstance(row, CheckRow) or not row.is_pass_alone for row in rows()),
            num_planned=planned,
            seconds=before.seconds + time.monotonic() - start_s,
            reason=reason,
        )

    def check() -> None:
        if time.monotonic() >= ends_s:
            raise OutOfTime

    def keep(row: object) -> None:
        nonlocal saved_s
        assert isinstance(row, CheckRow | RoundRow)
        document.add(row)
        if time.monotonic() - saved_s > SAVE_EVERY_S:
            saved_s = time.monotonic()
            document.parts[name] = state()
            document.write(file)

    work.check, work.keep = check, keep
    try:
        measure(work)
    except OutOfTime:
        reason = "its time was up; --resume measures the rest"
    except (RuntimeError, AssertionError, SpectuneError) as error:  # the parts after it still run
        reason = f"{type(error).__name__}: {error}"[:400]
        say(f"{name} broke off: {reason}")
    document.parts[name] = state()
    document.write(file)
    told = document.parts[name]
    say(f"{name}: {told.num_done} of {planned} rows in {time.monotonic() - start_s:.0f} s {reason or ''}")


def working_kernels(device: torch.device) -> tuple[str, str | None]:
    """`auto` where a captured pass of a toy runs, else `plain` and why: a call should not be lost to it."""
    if device.type != "cuda":
        return "plain", None
    try:
        target = random_target("toy", device, torch.bfloat16)
        cache, view = target.new_cache(1, 64), SlotView([0], device)
        ids = torch.ones(1, 2, dtype=torch.int64, device=device)
        with torch.inference_mode():
            for _ in range(3):  # uncaptured, captured, replayed
                target.forward(ids, ids, cache, view, [0], None)
        wait(device)
    except RuntimeError as error:
        return "plain", f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return "auto", None


def real_target(given: Path | None) -> Path | None:
    """Folder of the default target: the given one, or the cached one if it is there; nothing is fetched."""
    folder = given or default_cache_dir() / "models" / NAME
    return folder if (folder / "model.safetensors").is_file() else None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
