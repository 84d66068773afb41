"""vLLM's own texts, replayed through spectune's drafter: the acceptance length has to be vLLM's.

    python tests/bench/vllm_replay.py --engine-python /path/to/venv/bin/python

Greedy, --ignore-eos, every K at a server of its own. vLLM returns its output token ids and, for each
request, what each step drafted and accepted. The same ids are forced on the reference engine with the
same head, so both walk the same text, and a drafter that is pure in its prefix has to be right at the
same places. The last step of every request is dropped on both sides: the token limit cuts it. Printed
are both lengths pooled over all steps, their ratio, and how many requests agree in every step; then
each engine's own text for comparison, where near ties of bfloat16 may go either way. At the end the
smaller chains are estimated from the steps of the largest one alone, and held against their own runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from spectune.backend.reference import ReferenceBackend
from spectune.backend.vllm import VllmBackend
from spectune.engine.trace import replay_text
from spectune.records import Cell, Interval, Point, Request, RequestRecord, Sampling, SpecConfig, StepRecord
from spectune.replay.estimate import chain_estimates
from spectune.stats import hierarchical_ratio_interval
from spectune.workload import load_workload

HEAD = "smollm2-135m-eagle3"
TOLERANCE = 0.01
ESTIMATE_TOLERANCE = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-python", help="interpreter that has vllm; the installed one if not given")
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--num-tokens", default="1,3,5")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--served", type=Path, help="write vLLM's records here, or read them if it exists")
    parser.add_argument("--only-serve", action="store_true", help="stop after vLLM's part")
    arguments = parser.parse_args()
    depths = [int(value) for value in arguments.num_tokens.split(",")]
    sampling = Sampling(max_tokens=arguments.max_tokens, ignore_eos=True)
    vllm = VllmBackend(
        draft_model=HEAD, engine_python=arguments.engine_python, dtype=arguments.dtype, progress=print
    )
    prompts = load_workload(None, num_prompts=arguments.num_prompts).prompts
    requests = [
        Request(
            request_id=prompt.prompt_id,
            prompt_ids=vllm.encode(prompt, "", 0),
            category=prompt.category,
            sampling=sampling,
        )
        for prompt in prompts
    ]
    known = read_served(arguments.served)
    for depth in depths:
        if depth not in known:
            known[depth] = serve_all(vllm, requests, depth, arguments.concurrency)
            write_served(arguments.served, known)
    if arguments.only_serve:
        return 0
    reference = ReferenceBackend(draft_model=HEAD, dtype=arguments.dtype, progress=print)
    worst = 0.0
    for depth in depths:
        ours = replay_all(reference, requests, known[depth], depth, arguments.concurrency)
        worst = max(worst, tell(depth, known[depth], ours))
    print(f"largest gap {worst:.2%}, limit {TOLERANCE:.0%}: {'holds' if worst <= TOLERANCE else 'FAILS'}")
    estimate_gap = tell_estimates({depth: known[depth] for depth in depths})
    return int(worst > TOLERANCE or estimate_gap > ESTIMATE_TOLERANCE)


def tell_estimates(served: dict[int, list[Any]]) -> float:
    """Smaller chains told by the largest one, against their own runs; the largest relative gap."""
    largest = max(served)
    steps = [
        StepRecord(num_proposed=drafted, num_verified=drafted, num_accepted=kept, num_emitted=kept + 1)
        for _, _, pairs in served[largest]
        for drafted, kept in pairs[:-1]
    ]
    worst = 0.0
    for told in chain_estimates(steps, largest)[:-1]:
        if told.num_tokens in served:
            live = length([pairs[:-1] for _, _, pairs in served[told.num_tokens]]).value
            gap = told.acceptance_length / live - 1
            worst = max(worst, abs(gap))
            print(
                f"K={told.num_tokens} {told.label}: {told.acceptance_length:.4f}, live {live:.4f}: {gap:+.2%}"
            )
    limit = "holds" if worst <= ESTIMATE_TOLERANCE else "FAILS"
    print(f"largest gap of an estimate {worst:.2%}, limit {ESTIMATE_TOLERANCE:.0%}: {limit}")
    return worst


def point_of(depth: int, concurrency: int, sampling: Sampling) -> Point:
    return Point(
        config=SpecConfig.chain("eagle3", depth, draft_model=HEAD),
        cell=Cell(batch_size=concurrency, context_tokens=0, temperature=0.0),
        workload_hash="bench",
        sampling=sampling,
    )


def serve_all(vllm: VllmBackend, requests: list[Request], depth: int, concurrency: int) -> list[Any]:
    """Every request at a server with `depth` drafts: (id, output ids, [verified, accepted] of each step)."""
    point = point_of(depth, concurrency, requests[0].sampling)
    with vllm.open(vllm.plan([point])[0]) as session:
        result = session.run(point, requests)
    if failed := [record for record in result.requests if record.error is not None]:
        sys.exit(f"{len(failed)} requests failed: {failed[0].error}")
    return [[record.request_id, list(record.output_ids), step_pairs(record)] for record in result.requests]


def replay_all(
    reference: ReferenceBackend, requests: list[Request], served: list[Any], depth: int, concurrency: int
) -> dict[str, tuple[list[list[int]], list[list[int]], bool]]:
    """By request: steps along vLLM's text, steps along our own, and whether the two texts are equal."""
    config = SpecConfig.chain("eagle3", depth, draft_model=HEAD)
    texts = {name: ids for name, ids, _ in served}
    forced = replay_text(reference.engine(config, concurrency), requests, texts, config).requests
    free = reference.engine(config, concurrency).generate(requests, config).requests
    return {
        along.request_id: (step_pairs(along), step_pairs(own), list(own.output_ids) == texts[own.request_id])
        for along, own in zip(forced, free, strict=True)
    }


def step_pairs(record: RequestRecord) -> list[list[int]]:
    return [[step.num_verified, step.num_accepted] for step in record.steps]


def tell(depth: int, served: list[Any], ours: dict[str, tuple[Any, Any, bool]]) -> float:
    """Print one line a comparison; the relative gap along the same text."""
    theirs = [steps[:-1] for _, _, steps in served]
    along = [ours[name][0][:-1] for name, _, _ in served]
    free = [ours[name][1][:-1] for name, _, _ in served]
    equal = sum(a == b for a, b in zip(theirs, along, strict=True))
    same_text = sum(ours[name][2] for name, _, _ in served)
    gap = length(along).value / length(theirs).value - 1
    print(
        f"K={depth}: vllm {show(length(theirs))}, the same text through our drafter {show(length(along))}: "
        f"{gap:+.2%}; {equal} of {len(theirs)} requests agree in every step"
    )
    for name, wanted, got in zip([row[0] for row in served], theirs, along, strict=True):
        if wanted != got:
            where = next(
                (i for i, pair in enumerate(zip(wanted, got, strict=False)) if pair[0] != pair[1]), None
            )
            print(f"   {name}: step {where}: vllm {wanted[where or 0]}, ours {got[where or 0]}")
    print(f"     running free {show(length(free))}; {same_text} of {len(served)} texts are vLLM's")
    return abs(gap)


def length(requests: list[Any]) -> Interval:
    """1 + accepted / steps, pooled, with an interval over requests."""
    steps = [[(1.0 + accepted, 1.0) for _, accepted in request] for request in requests]
    return hierarchical_ratio_interval([steps])


def show(interval: Interval) -> str:
    return f"{interval.value:.4f} ({interval.low:.3f} to {interval.high:.3f})"


def read_served(path: Path | None) -> dict[int, list[Any]]:
    if path is None or not path.exists():
        return {}
    return {int(depth): rows for depth, rows in json.loads(path.read_text(encoding="utf-8")).items()}


def write_served(path: Path | None, known: dict[int, list[Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps(known), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
