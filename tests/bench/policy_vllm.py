"""vLLM served with an emitted schedule, at its edges, against off and static configurations.

    spectune sweep --backend vllm --method eagle3 --num-tokens 1,3 --topk 1 --batch-size 1,2,4,8 -o runs/v
    python tests/bench/policy_vllm.py runs/v --output-dir runs/served --max-seconds 200
    python tests/bench/policy_vllm.py runs/v --output-dir runs/thrash --thrash 3 --max-seconds 200

The command can be repeated until it says that everything is there. `--thrash K` serves, in place of the
policy of the run, one that speculates where it loses and switches at every batch size: the verifier has
to withdraw it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectune.cli.policy_serve import emitted_document, serve_vllm
from spectune.cli.policy_tables import print_verification
from spectune.cli.policy_verify import conclude
from spectune.policy.build import build_from_runs
from spectune.policy.file import config_of, load_policy
from spectune.policy.verify_loads import steady
from spectune.records import SpecConfig
from spectune.store import RunStore


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="sweeps of vLLM that the policy is built from")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--engine-python")
    parser.add_argument("--thrash", type=int, help="serve a schedule that switches at every size to this K")
    parser.add_argument("--num-runs", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-batch-size", type=int)
    parser.add_argument("--sizes", help="only steady loads of these sizes, and plain decoding started once")
    parser.add_argument("--max-seconds", type=float)
    arguments = parser.parse_args()
    policy = policy_of(arguments)
    samples, is_complete = serve_vllm(
        policy,
        arguments.output_dir,
        model=None,
        draft_model=None,
        engine_python=arguments.engine_python,
        max_batch_size=arguments.max_batch_size,
        batch_sizes=(),
        num_runs=arguments.num_runs,
        max_tokens=arguments.max_tokens,
        max_seconds=arguments.max_seconds,
        loads=[steady(int(size), arguments.max_tokens) for size in arguments.sizes.split(",")]
        if arguments.sizes
        else None,
        is_bracketed=not arguments.sizes,
    )
    found = conclude(policy, samples, arguments.output_dir, backend="vllm")
    print(f"schedule: {json.dumps(emitted_document(policy, arguments.max_batch_size or top_of(policy)))}")
    print_verification(found, is_simulated=False)
    if not is_complete:
        print("not all runs are done: the same command goes on")
        return 4
    expected = "withdrawn" if arguments.thrash else "kept"
    print(f"expected {expected}: {'holds' if found.verdict == expected else 'FAILS'}")
    return int(found.verdict != expected)


def policy_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The policy of the first call: one verification serves one policy."""
    file = arguments.output_dir / "served.json"
    if not file.exists():
        policy = build_from_runs([RunStore.open(run) for run in arguments.runs], max_loss=0.02)
        if arguments.thrash:
            policy = thrashing(policy, arguments.thrash, arguments.max_batch_size or top_of(policy))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(policy, indent=1) + "\n", encoding="utf-8")
    return load_policy(json.loads(file.read_text(encoding="utf-8")), origin=str(file))


def top_of(policy: dict[str, Any]) -> int:
    return int(policy["validity"]["batch"][1])


def thrashing(policy: dict[str, Any], depth: int, top: int) -> dict[str, Any]:
    """Off at odd batch sizes, K at even ones, and K at the largest: every request that comes or goes switches."""
    known = [config_of(cell["config"]) for cell in policy["cells"] if cell["config"] != "off"]
    base = known[0] if known else SpecConfig.chain("eagle3", depth, draft_model=policy["validity"]["draft"])
    config = replace(base, num_steps=depth, topk=1, num_draft_tokens=depth + 1).to_dict()
    own = next(cell for cell in policy["cells"] if cell["category"] is None)
    ends = [(size, size) for size in range(1, 5)] + [(5, None)]
    cells = [
        {
            **own,
            "batch": [low, high],
            "config": "off" if low % 2 and high is not None else config,
            "speedup": None,
            "speedup_ci": None,
            "num_steps": 0,
            "source": "written by hand: what a policy must not be",
        }
        for low, high in ends
        if low <= top
    ]
    return {**policy, "cells": cells, "source_run": "a schedule that thrashes"}


if __name__ == "__main__":
    sys.exit(main())
