"""A head from 20 million tokens on one GPU, in calls of at most 8 minutes.

    tests/gpu/train.sh OUT WORK                 next phases; WORK is a large disk of that machine
    tests/gpu/train.sh OUT WORK --head FOLDER   goes on from the joined head of an earlier machine
    tests/gpu/train.sh OUT WORK --rehearse      a toy target on a CPU

What a head trains on takes 4.6 KB a token on disk, so the corpus comes in phases: each lets the target
answer new prompts, trains the head of the phase before on them, and drops them. A phase is what
`spectune train eagle3 --init-from HEAD --seed PHASE` does. OUT gets train.json, and the newest head in
pieces of at most 14 MB with their hashes; join them with tests/gpu/pieces.py. A phase that is cut by the
clock goes on in the next call on the same machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spectune.errors import SpectuneError
from spectune.store.strict_json import dump_strict
from spectune.train import pipeline
from spectune.train.plan import TrainEvent, TrainPlan
from tests.gpu import machine
from tests.gpu.drive import real_target
from tests.gpu.models import HEAD_FOLDER
from tests.gpu.pieces import split

STATE = "train.json"
PIECE_BYTES = 14_000_000
SECONDS = 440.0
PHASES = 5
TOKENS_PER_PHASE = 4_000_000
LATER_RATE = 0.5
"""Peak learning rate of the phases after the first, over the first one's."""
WORST_SHARE = 0.6
"""A phase is begun only if this share of the longest one so far is left: a cut one can go on."""


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path, help="state and the head in pieces")
    made.add_argument("work", type=Path, help="corpus, features and checkpoints: 20 GB or more")
    made.add_argument("--rehearse", action="store_true", help="a toy target on a CPU, labelled")
    made.add_argument("--model", type=Path, help="folder of the target")
    made.add_argument("--head", type=Path, help="head to go on from [default: the shipped one]")
    made.add_argument("--state", type=Path, help=f"{STATE} of an earlier machine, with --head")
    made.add_argument("--seconds", type=float, default=SECONDS)
    made.add_argument("--phases", type=int, help=f"[default: {PHASES}, in a rehearsal 2]")
    made.add_argument("--tokens-per-phase", type=int, help=f"[default: {TOKENS_PER_PHASE}]")
    options = made.parse_args(given)
    options.phases = options.phases or (2 if options.rehearse else PHASES)
    options.tokens_per_phase = options.tokens_per_phase or (150 if options.rehearse else TOKENS_PER_PHASE)
    try:
        return run(options, ["tests/gpu/train.sh", *given])
    except SpectuneError as error:
        say(f"error: {error.message}" + (f" (hint: {error.hint})" if error.hint else ""))
        return error.exit_code


def run(options: argparse.Namespace, argv: list[str]) -> int:
    """Phases until the time or the tokens are used up; 0 when all are done, 7 when some are left."""
    ends_s = time.monotonic() + options.seconds
    if not options.rehearse and not torch.cuda.is_available():
        say("error: this torch sees no CUDA device; --rehearse trains a toy on the CPU")
        return 2
    target = toy_target(options.work / "toy") if options.rehearse else real_target(options.model)
    if target is None:
        say("error: the default target is not at hand (hint: --model FOLDER, or tests/gpu/pieces.py unpack)")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    state = read_state(options, argv)
    longest_s = 0.0
    while state["num_phases_done"] < options.phases:
        if ends_s - time.monotonic() < max(WORST_SHARE * longest_s, 1.0):
            break
        phase, start_s = state["num_phases_done"], time.monotonic()
        plan = plan_of(options, target, phase)
        plan.output_dir.mkdir(parents=True, exist_ok=True)
        try:
            with until(ends_s):
                result = pipeline.run(plan, say_event)
        except KeyboardInterrupt:
            say(f"phase {phase} was cut by the clock; the next call on this machine goes on with it")
            break
        longest_s = max(longest_s, time.monotonic() - start_s)
        keep(options, state, plan, result, time.monotonic() - start_s)
    write_state(options.out, state)
    say(f"{state['num_phases_done']} of {options.phases} phases, {state['num_tokens']} answer tokens")
    return 0 if state["num_phases_done"] >= options.phases else 7


def read_state(options: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """The state of this machine, of an earlier one, or a fresh one."""
    for file in (options.work / STATE, options.state):
        if file is not None and file.is_file():
            state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return state
    device = torch.device("cpu" if options.rehearse else "cuda")
    return {
        "schema_version": 1,
        "kind": "gpu-training",
        "is_rehearsal": options.rehearse,
        "device": asdict(machine.describe(device, probe_bytes=64 << 20)),
        "provenance": machine.provenance(argv),
        "num_phases_done": 0,
        "num_tokens": 0,
        "phases": [],
    }


def write_state(out: Path, state: dict[str, Any]) -> None:
    (out / STATE).write_text(dump_strict(state, indent=1, where=STATE) + "\n", encoding="utf-8")


def plan_of(options: argparse.Namespace, target: Path, phase: int) -> TrainPlan:
    """The plan of a phase: prompts of its own, the head of the phase before."""
    before = options.work / f"phase-{phase - 1}/head"
    first = options.head or (None if options.rehearse else HEAD_FOLDER)
    init = before if before.is_dir() else first
    sizes: dict[str, Any] = {
        "num_tokens": options.tokens_per_phase,
        "generate_batch_size": 1024,
        "batch_tokens": 16384,
        "eval_samples": 128,
        "device": "cuda",
    }
    if options.rehearse:
        sizes = {
            "num_tokens": options.tokens_per_phase,
            "generate_batch_size": 4,
            "batch_tokens": 128,
            "max_answer_tokens": 12,
            "max_prompt_tokens": 48,
            "draft_vocab_size": 49,
            "holdout_every": 4,
            "eval_samples": 4,
            "ttt_steps": 2,
            "epochs": 1,
            "device": "cpu",
            "dtype": "float32",
        }
    rate = TrainPlan.__dataclass_fields__["lr"].default
    return TrainPlan(
        target=target,
        output_dir=options.work / f"phase-{phase}",
        seed=1000 + phase,
        lr=rate if phase == 0 and init is None else rate * LATER_RATE,
        init_from=init,
        **sizes,
    )


def keep(
    options: argparse.Namespace, state: dict[str, Any], plan: TrainPlan, result: Any, seconds: float
) -> None:
    """State, and the head in pieces, before the next phase begins; the corpus and its features go."""
    rows = (plan.output_dir / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    tokens = sum(len(json.loads(row)["output_ids"]) for row in rows)
    state["num_phases_done"] += 1
    state["num_tokens"] += tokens
    state["phases"].append(
        {
            "seed": plan.seed,
            "num_tokens": tokens,
            "seconds": seconds,
            "init_from": None if plan.init_from is None else plan.init_from.name,
            "held_out": None if result.held_out is None else asdict(result.held_out),
        }
    )
    for stale in options.out.glob("model.safetensors.*"):
        stale.unlink()
    split(result.head_dir / "model.safetensors", options.out, PIECE_BYTES)
    shutil.copyfile(result.head_dir / "config.json", options.out / "config.json")
    write_state(options.out, state)
    write_state(options.work, state)
    shutil.rmtree(plan.output_dir / "features", ignore_errors=True)
    (plan.output_dir / "train-state.pt").unlink(missing_ok=True)


@contextmanager
def until(ends_s: float) -> Iterator[None]:
    """KeyboardInterrupt when the time is up: every stage of the training saves what it has then."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, ends_s - time.monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def toy_target(folder: Path) -> Path:
    """A random target with a letter a token and a chat template, for rehearsals."""
    from tests.support.toys import save_target

    save_target(folder, eos_token_id=0)
    template = {"chat_template": "Q{{ messages[0]['content'] }}~"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template), encoding="utf-8")
    return folder


def say_event(event: TrainEvent) -> None:
    done = "" if event.done is None or event.total is None else f"{event.done:g} of {event.total:g} "
    say(f"{event.stage}: {done}{event.unit} {event.message}".rstrip())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
