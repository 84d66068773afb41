"""How long a sample of 1,000 prompts out of a 1 GB JSONL file of a million rows takes, and its peak memory.

    python tests/bench/read_million.py SCRATCH [--rows 1000000] [--num-prompts 1000]

Writes the file into SCRATCH, reads it in a process of its own, deletes it. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

READ = """
import json, resource, sys, time
from spectune.workload import load_workload
start = time.perf_counter()
workload = load_workload(sys.argv[1], num_prompts=int(sys.argv[2]))
print(json.dumps({
    "seconds": round(time.perf_counter() - start, 2),
    "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    "rows": workload.num_rows, "used": len(workload.prompts), "categories": workload.categories,
}))
"""
WORDS = [
    "the",
    "of",
    "and",
    "round",
    "cache",
    "token",
    "draft",
    "verify",
    "target",
    "accept",
    "tree",
    "batch",
    "load",
    "time",
    "memory",
    "read",
]


def write(path: Path, rows: int) -> None:
    """Prompts of about 1,000 bytes in eight categories, each different."""
    generator = random.Random(0)
    pieces = [" ".join(generator.choices(WORDS, k=160)) for _ in range(997)]
    with path.open("w", encoding="utf-8") as file:
        for index in range(rows):
            text = f"{index}: {pieces[index % 997]} {pieces[index * 7 % 997][:80]}"
            row = {"question_id": index, "category": f"c{index % 8}", "turns": [text], "output_tokens": 128}
            file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--num-prompts", type=int, default=1000)
    arguments = parser.parse_args()
    path = arguments.scratch / "million.jsonl"
    try:
        start = time.perf_counter()
        write(path, arguments.rows)
        written = {"bytes": path.stat().st_size, "write_s": round(time.perf_counter() - start, 1)}
        done = subprocess.run(
            [sys.executable, "-c", READ, str(path), str(arguments.num_prompts)],
            capture_output=True,
            text=True,
            check=True,
        )
        print(json.dumps({**written, **json.loads(done.stdout)}))
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
