"""Replay of 1,000 configurations over 10,000 positions: time and memory of one call.

    python tests/bench/replay_speed.py --log reports/replay-exact/speed.log

The trace is random numbers in the shape of a real one, 100 texts of 101 tokens; the work does not depend
on what they say. Exit status 1 above 1 s or 500 MB.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from spectune.records import SpecConfig
from spectune.replay.rounds import by_category
from spectune.store.trace_file import Trace
from tests.support.traces import chain_drafter, toy_trace

TOPKS, DEPTH, NODES = (1, 2, 3, 4, 6, 8), 8, 64
SECONDS, BYTES = 1.0, 500e6


def random_trace(num_texts: int, num_outputs: int) -> Trace:
    """Paths and ranks of random numbers."""
    rng = np.random.default_rng(0)
    left = np.tile(np.arange(num_outputs - 1, 0, -1), num_texts)
    path = np.minimum(rng.geometric(0.45, (len(left), len(TOPKS))) - 1, np.minimum(DEPTH, left)[:, None])
    ranks = []
    for column, topk in enumerate(TOPKS):
        size = 0 if topk == 1 else int((path[:, column] * (2 * DEPTH + 1 - path[:, column]) // 2).sum())
        ranks.append(rng.integers(0, NODES, size).astype(np.uint8))
    drafter = replace(
        chain_drafter([], max_steps=DEPTH, topks=TOPKS, max_draft_tokens=NODES),
        path=path.astype(np.uint8),
        ranks=tuple(ranks),
    )
    return toy_trace([num_outputs] * num_texts, drafter)


def configurations(count: int) -> list[SpecConfig]:
    chains = [SpecConfig.chain("eagle3", k) for k in range(1, DEPTH + 1)]
    trees = [
        SpecConfig(method="eagle3", num_steps=d, topk=k, num_draft_tokens=n)
        for k in TOPKS[1:]
        for d in range(1, DEPTH + 1)
        for n in range(2, NODES + 1)
        if n - 1 <= k + (d - 1) * k * k
    ]
    return [*chains, *trees][:count]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", type=int, default=1000)
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--output-len", type=int, default=101)
    parser.add_argument("--log", type=Path, default=None)
    args = parser.parse_args()
    trace, configs = random_trace(args.texts, args.output_len), configurations(args.configs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    times, cpu_s = [], time.process_time()
    for _ in range(5):
        begin = time.perf_counter()
        counts = by_category(trace, configs)
        times.append(time.perf_counter() - begin)
    cpu_s = (time.process_time() - cpu_s) / len(times)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = (
        f"{len(configs)} configurations x {trace.num_positions} positions, {int(counts.num_steps.sum())} steps, "
        f"by category: first {times[0]:.2f} s, median of 5 {sorted(times)[2]:.2f} s, CPU {cpu_s:.2f} s each; "
        f"peak of the whole process {peak / 1e6:.0f} MB, {(peak - before) / 1e6:.0f} MB of it for the replay"
    )
    print(text)
    if args.log is not None:
        args.log.parent.mkdir(parents=True, exist_ok=True)
        args.log.write_text(text + "\n", encoding="utf-8")
    return 1 if times[0] > SECONDS or peak > BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
