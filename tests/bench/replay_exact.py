"""Replay against live decoding: accepted counts and rounds of a grid of configurations, on real prompts.

    python tests/bench/replay_exact.py --log reports/replay-exact/float32.log
    python tests/bench/replay_exact.py --dtype bfloat16 --log reports/replay-exact/bfloat16.log

One pass of plain decoding is traced; then every configuration decodes the same requests live, and each
request's steps are compared with the replayed ones. A request may differ only from a step at which the
trace lists two draft scores closer than 1e-5. Exit status 1 if another differs, or more than 1 in 200.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from spectune.backend.heads import head_folder
from spectune.backend.reference import ReferenceBackend
from spectune.draft.along_text import HeadAlongText
from spectune.draft.checkpoint import load_head
from spectune.draft.ngram import NgramDrafter
from spectune.engine.scheduler import Engine
from spectune.engine.trace_path import TraceSpace
from spectune.engine.trace_record import HeadRecorder, LookupRecorder, trace_group
from spectune.metrics.acceptance import acceptance_length, pooled_steps
from spectune.records import Request, RequestRecord, Sampling, SpecConfig
from spectune.replay.rounds import replay
from spectune.store.trace_file import Trace, write_trace
from spectune.workload import load_workload
from tests.support.replay import TIE, Difference, compare

LONGEST_PROMPT = 96
SHIPPED = "smollm2-135m-eagle3"
SPACE = TraceSpace(topks=(1, 2, 3, 4, 5, 6, 7, 8), max_steps=8, max_draft_tokens=32)
NGRAM = (("prompt_lookup_max", 5), ("prompt_lookup_min", 1))
SHAPES = [  # num_steps, topk, num_draft_tokens
    *[(1, 2, 3), (1, 3, 4), (1, 4, 3), (1, 5, 6), (1, 8, 2), (1, 8, 9)],
    *[(2, 2, 4), (2, 2, 7), (2, 3, 8), (2, 4, 8), (2, 4, 16), (2, 6, 12), (2, 8, 8), (2, 8, 32)],
    *[(3, 2, 4), (3, 2, 8), (3, 3, 12), (3, 4, 8), (3, 4, 16), (3, 4, 32), (3, 7, 20), (3, 8, 16)],
    *[(4, 2, 6), (4, 2, 12), (4, 3, 16), (4, 4, 8), (4, 5, 24), (4, 6, 32), (4, 8, 5), (4, 8, 24)],
    *[(5, 2, 8), (5, 2, 16), (5, 3, 8), (5, 4, 16), (5, 4, 32), (5, 6, 16), (5, 7, 32), (5, 8, 32)],
    *[(6, 2, 7), (6, 2, 22), (6, 3, 20), (6, 4, 10), (6, 5, 16), (6, 8, 16), (6, 8, 32)],
    *[(7, 2, 8), (7, 2, 26), (7, 3, 12), (7, 4, 16), (7, 6, 24), (7, 8, 12)],
    *[(8, 2, 9), (8, 2, 16), (8, 3, 24), (8, 4, 12), (8, 4, 32), (8, 5, 32), (8, 7, 16), (8, 8, 32)],
]
CONFIGS = [
    *[SpecConfig.chain("eagle3", k) for k in range(1, 9)],
    *[SpecConfig(method="eagle3", num_steps=d, topk=k, num_draft_tokens=n) for d, k, n in SHAPES],
    *[SpecConfig.chain("ngram", k, options=NGRAM) for k in (1, 4, 8)],
]
SAMPLINGS: dict[str, dict[str, Any]] = {"T=0": {}, "T=1": {"temperature": 1.0, "seed": 1}}


class Bench:
    """One target with its drafters, and the requests of one sampling."""

    def __init__(self, dtype: str, batch_size: int) -> None:
        self.backend = ReferenceBackend(draft_model=SHIPPED, dtype=dtype)
        self.batch_size = batch_size
        self.drafter = self.backend.drafter("eagle3")
        head = load_head(head_folder(SHIPPED), self.backend.target.config)
        self.head = HeadAlongText(head, self.backend.target, num_children=max(SPACE.topks) + 1)

    def engine(self, config: SpecConfig) -> Engine:
        drafter = NgramDrafter(self.backend.target.device) if config.method == "ngram" else self.drafter
        target, tokenizer = self.backend.target, self.backend.tokenizer
        return Engine(target, tokenizer, drafter=drafter, batch_size=self.batch_size)

    def requests(self, num_prompts: int, sampling: Sampling) -> list[Request]:
        """The first prompts, categories in turn, that are short enough to be asked so many times."""
        encoded = [(p, self.backend.encode(p, "", 0)) for p in load_workload(None).prompts]
        short = [(prompt, ids) for prompt, ids in encoded if len(ids) <= LONGEST_PROMPT]
        return [
            Request(
                request_id=f"{prompt.digest[:12]}-0",
                prompt_ids=ids,
                category=prompt.category,
                sampling=sampling,
            )
            for prompt, ids in short[:num_prompts]
        ]

    def trace(self, requests: list[Request]) -> Trace:
        recorders = [
            HeadRecorder(self.head, SPACE, method="eagle3", draft_model=SHIPPED),
            LookupRecorder(
                NgramDrafter(self.backend.target.device), method="ngram", options=NGRAM, max_steps=8
            ),
        ]
        about: dict[str, dict[str, Any]] = {
            name: {} for name in ("fingerprint", "workload", "sampling", "provenance")
        }
        return trace_group(self.engine(SpecConfig.off()), requests, recorders, about)


def same_steps(live: tuple[RequestRecord, ...], differences: list[Difference]) -> int:
    """Requests whose steps are all the replayed ones."""
    return len(live) - len({difference.request_id for difference in differences})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sampling", choices=list(SAMPLINGS), default=None, help="one of the two only")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th configuration, from the i-th on")
    parser.add_argument("--log", type=Path, default=None)
    args = parser.parse_args()
    if args.log is not None:
        args.log.parent.mkdir(parents=True, exist_ok=True)
    with open(args.log or "/dev/null", "w", encoding="utf-8") as log:
        return run(args, log)


def run(args: argparse.Namespace, log: TextIO) -> int:
    def tell(text: str) -> None:
        print(text, flush=True)
        print(text, file=log, flush=True)

    bench = Bench(args.dtype, args.batch_size)
    part, of = (int(number) for number in args.part.split("/"))
    configs = CONFIGS[part - 1 :: of]
    tell(
        f"{args.dtype}, torch {torch.__version__}, {len(configs)} configurations, {args.num_prompts} prompts"
    )
    num_compared = num_same = num_unlisted = num_listed = num_texts = 0
    replayed_sum = lived_sum = 0
    chosen = SAMPLINGS if args.sampling is None else {args.sampling: SAMPLINGS[args.sampling]}
    for name, changes in chosen.items():
        requests = bench.requests(args.num_prompts, Sampling(max_tokens=args.max_tokens, **changes))
        begin, calls = time.perf_counter(), bench.head.num_calls
        trace = bench.trace(requests)
        spent = time.perf_counter() - begin
        calls = bench.head.num_calls - calls
        by_position = trace.num_positions * sum(SPACE.max_steps - 1 for _ in SPACE.topks)
        tell(
            f"{name}: traced {trace.num_positions} positions in {spent:.1f} s (decoding included), "
            f"{calls} passes of the head; position by position and topk by topk: {by_position}"
        )
        if args.log is not None:
            file = Path(f"/tmp/replay-exact-{args.dtype}-{name}.npz")
            write_trace(file, trace)
            tell(f"{name}: {file.stat().st_size / max(1, trace.num_positions):.1f} bytes a position")
            file.unlink()
        for config in configs:
            begin = time.perf_counter()
            live = bench.engine(config).generate(requests, config).requests
            differences = compare(trace, config, live)
            counts = replay(trace, [config])
            own, lived = counts.acceptance_length(0), acceptance_length(pooled_steps(live))
            num_compared += len(live)
            num_same += same_steps(live, differences)
            num_texts += sum(d.is_text for d in differences)
            num_listed += sum(d.is_listed for d in differences)
            num_unlisted += sum(not d.is_listed and not d.is_text for d in differences)
            replayed_sum += int(counts.num_accepted.sum())
            lived_sum += sum(step.num_accepted for record in live for step in record.steps)
            tell(
                f"{name}  {config.label:<22} {same_steps(live, differences)}/{len(live)} equal  "
                f"AL replayed {own:.4f} live {lived:.4f}  ({time.perf_counter() - begin:.1f} s)"
            )
            for difference in differences:
                tell(f"    {difference}")
    tell(
        f"{num_same} of {num_compared} requests equal in every step; {num_listed} differ at a listed tie "
        f"below {TIE:g}, {num_unlisted} elsewhere, {num_texts} texts left the traced one; "
        f"accepted drafts: {replayed_sum} replayed, {lived_sum} live"
    )
    return 1 if num_unlisted or num_listed * 200 > num_compared else 0


if __name__ == "__main__":
    sys.exit(main())
