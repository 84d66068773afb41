"""The reference engine with a policy, at batch 1 to 32 and over a ramp 1-32-1, against off and statics.

    spectune sweep --method eagle3 --num-tokens 1,2,3 --topk 1 --batch-size 1,2,4,8,16 --output-dir runs/a
    python tests/bench/policy_ramp.py runs/a --output-dir runs/ramp --max-seconds 200

The command can be repeated until it says that everything is there. It asks: at each batch size the
policy runs at 0.98 of plain decoding or more (upper 95% at least 1.0) and within 3% of the best static
configuration; over the ramp no static interval lies above the policy's; in the rounds of at most four
sequences the policy beats both off and the configuration that is best over the whole ramp.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from spectune.cli.policy_verify import conclude, serve_here, table_of
from spectune.policy.build import build_from_runs
from spectune.policy.file import load_policy
from spectune.policy.verification import LoadVerdict, Times, Verification, speed_over, times_by_load
from spectune.policy.verify_loads import ramp, steady, steady_sizes
from spectune.records.policy_load import POLICY
from spectune.store import RunStore

SIZES = (1, 2, 4, 8, 16, 32)
WITHIN = 0.97
FLOOR = 0.98


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="sweeps that the policy is built from")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--num-runs", type=int, default=5)
    parser.add_argument("--num-tokens", default="", help="further chains that are served throughout as well")
    parser.add_argument("--categories", help="only prompts of these; short ones leave more time to decode")
    parser.add_argument("--ramp-tokens", type=int, default=16, help="tokens of every request of the ramp")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument("--switch-cost-rounds", type=float)
    arguments = parser.parse_args()
    policy = policy_of(arguments)
    samples, is_complete = serve_here(
        policy,
        arguments.output_dir,
        backend="reference",
        model=None,
        draft_model=None,
        further=[int(part) for part in arguments.num_tokens.split(",") if part],
        batch_sizes=(),
        max_batch_size=max(SIZES),
        num_runs=arguments.num_runs,
        max_tokens=arguments.max_tokens,
        max_seconds=arguments.max_seconds,
        simulated_truth=None,
        switch_rounds=0.0,
        chooser=table_of(policy),
        loads=[
            *(steady(size, arguments.max_tokens) for size in steady_sizes(policy, max(SIZES), SIZES)),
            ramp(max(SIZES), arguments.ramp_tokens),
        ],
        categories=arguments.categories.split(",") if arguments.categories else None,
    )
    found = conclude(policy, samples, arguments.output_dir, backend="reference")
    wrong = tell(found, times_by_load(samples, parts_up_to=4))
    if not is_complete:
        print("not all runs are done: the same command goes on")
        return 4
    print("holds" if not wrong else "FAILS: " + "; ".join(wrong))
    return int(bool(wrong))


def policy_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The policy of the first call: one verification serves one policy."""
    file = arguments.output_dir / "served.json"
    if not file.exists():
        runs = [RunStore.open(run) for run in arguments.runs]
        policy = build_from_runs(runs, max_loss=0.02, switch_cost_rounds=arguments.switch_cost_rounds)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(policy, indent=1) + "\n", encoding="utf-8")
    return load_policy(json.loads(file.read_text(encoding="utf-8")), origin=str(file))


def tell(found: Verification, times: dict[str, Times]) -> list[str]:
    """Prints all loads; returns what does not hold."""
    wrong: list[str] = []
    for load in found.loads:
        over_off, over_best = load.over_off, load.over_best
        if over_off is None or over_best is None:
            continue
        statics = ", ".join(f"{name} {ratio.value:.3f}" for name, ratio in load.statics)
        print(
            f"{load.load}: over off {text(over_off)}, over {load.best_static} {text(over_best)}, "
            f"{load.num_runs} runs ({statics})"
        )
        if load.load.startswith("batch"):
            if over_off.value < FLOOR or (over_off.high or 0.0) < 1.0:
                wrong.append(f"{load.load}: {text(over_off)} of off")
            if over_best.value < WITHIN:
                wrong.append(f"{load.load}: {text(over_best)} of {load.best_static}")
    return wrong + ramp_faults(found, times)


def ramp_faults(found: Verification, times: dict[str, Times]) -> list[str]:
    """What the ramp contradicts."""
    ramps = [load for load in found.loads if load.load.startswith("ramp")]
    if len(ramps) < 2:
        return ["no ramp was served"]
    whole, low = ramps[0], ramps[1]
    faults = []
    assert whole.over_off is not None
    for name, ratio in whole.statics:
        if ratio.low is not None and whole.over_off.high is not None and ratio.low > whole.over_off.high:
            faults.append(
                f"{whole.load}: {name} {text(ratio)} lies above the policy's {text(whole.over_off)}"
            )
    best = max(whole.statics, key=lambda pair: pair[1].value)[0]
    return faults + low_faults(low, best, times[low.load])


def low_faults(low: LoadVerdict, best: str, times: Times) -> list[str]:
    """In the half of small batches the policy has to beat off and what is best over the whole ramp."""
    over_static = speed_over(times[best], times[POLICY])
    assert low.over_off is not None
    assert over_static is not None
    print(
        f"{low.load}: over {best}, the best over the whole ramp that always speculates, {text(over_static)}"
    )
    rivals = ((low.over_off, "off"), (over_static, best))
    return [f"{low.load}: {text(ratio)} of {name}" for ratio, name in rivals if ratio.value <= 1.0]


def text(ratio: Any) -> str:
    return f"{ratio.value:.3f} ({ratio.low or 0:.3f} to {ratio.high or 0:.3f})"


if __name__ == "__main__":
    sys.exit(main())
