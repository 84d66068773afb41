"""Kills a sweep over real vLLM servers outright, resumes it, and compares the table with an unbroken run.

    python tests/bench/vllm_kill_resume.py --engine-python /path/to/venv/bin/python --work DIR

The unbroken run is made first and kept in DIR. Each repetition kills spectune with SIGKILL at another
place: in a start, in the middle of a load, after a point, a little later each time. `--only 3,5` runs these
alone; a second stream may share DIR on a core of its own (VLLM_CPU_OMP_THREADS_BIND), no time counts here. After every kill no process of its servers may
be left; after --resume every point must have the outcome, the requests, the texts and the steps of the
unbroken run (one request at a time, greedy: nothing is left to chance), and no finished point may be run
again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from spectune.backend.processes import PROC
from spectune.store import RunStore
from tests.support.served_sweep import counts, left_over

PLACES: tuple[tuple[str, str, int, float, float], ...] = (
    ("in the second start", "starting vllm", 2, 2.0, 3.0),
    ("in the middle of a load", "server ready", 2, 0.5, 0.4),
    ("after the second point", "[2/", 1, 0.1, 0.5),
)
"""Name, what is said, how often, the seconds from then to the kill, and by how much each next one is later."""
REPETITIONS = 20
GONE_S = 30.0
TABLE = ("num_requests", "num_failed", "input_tokens", "output_tokens", "status")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine-python", help="interpreter that has vllm; the installed one if not given")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", help="the repetitions to run, from 0, comma separated; all if not given")
    arguments = parser.parse_args()
    whole = arguments.work / "whole"
    if not is_finished(whole):
        shutil.rmtree(whole, ignore_errors=True)
        start = time.monotonic()
        code = spectune(words(arguments.engine_python, whole), arguments.work / "whole.out")
        if code != 0:
            sys.exit(f"the unbroken run ended with exit code {code}")
        print(f"unbroken run: {time.monotonic() - start:.0f} s", flush=True)
    expected = counts(whole)
    numbers = range(REPETITIONS) if arguments.only is None else [int(n) for n in arguments.only.split(",")]
    return max(repeat(number, arguments.engine_python, arguments.work, expected) for number in numbers)


def words(engine_python: str | None, run: Path) -> list[str]:
    """Two arms, three starts, four prompts."""
    python = [] if engine_python is None else ["--engine-python", engine_python]
    return [
        "sweep", "--backend", "vllm", *python, "--method", "ngram", "--num-tokens", "3", "--topk", "1",
        "--max-concurrency", "1", "--num-prompts", "4", "--min-blocks", "2", "--max-tokens", "32",
        "--output-dir", str(run),
    ]  # fmt: skip


def repeat(number: int, engine_python: str | None, work: Path, expected: dict[str, Any]) -> int:
    """One kill and the resumption; 0 if everything is as in the unbroken run."""
    name, mark, times, first_s, later_s = PLACES[number % len(PLACES)]
    wait_s = first_s + later_s * (number // len(PLACES))
    run = work / f"broken-{number}"
    shutil.rmtree(run, ignore_errors=True)
    family = kill_at(command(words(engine_python, run)), mark, times, wait_s)
    left, waited_s = wait_gone(run, family)
    done = {point: outcome.status for point, outcome in RunStore.open(run).outcomes().items()}
    lines = (run / "points.jsonl").read_text(encoding="utf-8") if done else ""
    code = spectune(["sweep", "--resume", str(run)], work / f"broken-{number}.out")
    found = counts(run)
    after = (run / "points.jsonl").read_text(encoding="utf-8")
    verdicts = {
        "no process left": not left,
        "finished points kept": after.startswith(lines),
        "exit code 0": code == 0,
        "same outcomes": {p: row[0] for p, row in found.items()} == {p: r[0] for p, r in expected.items()},
        "same requests, texts and steps": found == expected,
        "same summary": table(run) == table(work / "whole"),
    }
    told = ", ".join(f"{text}: {'yes' if holds else 'NO'}" for text, holds in verdicts.items())
    print(f"repetition {number}, killed {name}, {wait_s:.1f} s after it began ({len(done)} of {len(expected)} points done, its {len(family)} processes gone "
          f"after {waited_s:.1f} s): {told}", flush=True)  # fmt: skip
    return int(not all(verdicts.values()))


def table(run: Path) -> list[tuple[Any, ...]]:
    """The columns of the summary that are no times, one row an arm."""
    rows = RunStore.open(run).read_json("summary.json")["cells"]
    return [
        (arm["config"]["method"], *(arm[name] for name in TABLE), (arm["acceptance"] or {}).get("num_steps"),
         (arm["acceptance"] or {}).get("acceptance_length"))
        for cell in rows for arm in cell["arms"]
    ]  # fmt: skip


def kill_at(argv: list[str], mark: str, times: int, wait_s: float) -> set[tuple[int, str]]:
    """SIGKILL `wait_s` after `mark` was said for the last of `times` times; returns who descended from it."""
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    seen = 0
    for line in process.stderr:
        seen += mark in line
        if seen == times:
            time.sleep(wait_s)
            break
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.stderr.close()
    process.wait()
    return family


def descendants(ancestor: int) -> set[tuple[int, str]]:
    """(id, start time) of all that `ancestor` started, and they in turn: the engine's workers too."""
    parents = {pid: fields for pid in living() if (fields := stat_of(pid)) is not None}
    found = {ancestor}
    while more := {pid for pid, (parent, _) in parents.items() if parent in found} - found:
        found |= more
    return {(pid, parents[pid][1]) for pid in found - {ancestor}}


def living() -> list[int]:
    return [int(folder.name) for folder in PROC.glob("[0-9]*")]


def stat_of(pid: int) -> tuple[int, str] | None:
    """Parent and start time of a process that lives and is no zombie."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else (int(fields[1]), fields[19])


def wait_gone(run: Path, family: set[tuple[int, str]]) -> tuple[list[str], float]:
    """Servers and workers of the run that still live after GONE_S at most, and the seconds until none did."""
    start = time.monotonic()
    while True:
        alive = [str(pid) for pid, born in family if (fields := stat_of(pid)) and fields[1] == born]
        left = [*left_over(run), *alive]
        if not left or time.monotonic() - start > GONE_S:
            return left, time.monotonic() - start
        time.sleep(0.5)


def is_finished(run: Path) -> bool:
    return (run / "summary.json").is_file()


def spectune(words: list[str], log: Path) -> int:
    """Run it with what it says in a file; the exit code."""
    with log.open("ab") as output:
        return subprocess.run(command(words), stdout=output, stderr=output, check=False).returncode


def command(words: list[str]) -> list[str]:
    return [sys.executable, "-m", "spectune", *words]


if __name__ == "__main__":
    sys.exit(main())
