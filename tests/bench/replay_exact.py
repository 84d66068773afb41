"""Replay against live decoding: accepted counts and rounds of a grid of configurations, on real prompts.

    python tests/bench/replay_exact.py --log reports/replay-exact/float32.log
    python tests/bench/replay_exact.py --dtype bfloat16 --log reports/replay-exact/bfloat16.log

One pass of plain decoding is traced; then every configuration decodes the same requests live, and each
request's steps are compared with the replayed ones. A request may differ only from a step at which the
trace lists two draft scores closer than 1e-5. Exit status 1 if another differs, or more than 1 in 200; in
bf16, where scores are often equal, if the accepted drafts of all requests differ by more than 1%.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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


LINE = re.compile(
    r"^(?P<sampling>T=\d)  (?P<label>\S.*?\S) +(?P<same>\d+)/(?P<all>\d+) equal, (?P<listed>\d+) differ at a "
    r"listed tie, (?P<unlisted>\d+) elsewhere, (?P<texts>\d+) other texts; accepted (?P<replayed>\d+) "
    r"replayed, (?P<live>\d+) live"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sampling", choices=list(SAMPLINGS), default=None, help="one of the two only")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--every", type=int, default=1, help="take every n-th configuration")
    parser.add_argument(
        "--log", type=Path, required=True, help="configurations that it holds are not run again"
    )
    args = parser.parse_args()
    args.log.parent.mkdir(parents=True, exist_ok=True)
    run(args)
    return conclude(args.log, is_exact=args.dtype == "float32")


def run(args: argparse.Namespace) -> None:
    """Every configuration that the log does not hold yet, one line each."""
    done = {(m["sampling"], m["label"]) for m in lines_of(args.log)}
    bench = Bench(args.dtype, args.batch_size)
    names = list(SAMPLINGS) if args.sampling is None else [args.sampling]
    for name in names:
        configs = [c for c in CONFIGS[:: args.every] if (name, c.label) not in done]
        if not configs:
            continue
        requests = bench.requests(args.num_prompts, Sampling(max_tokens=args.max_tokens, **SAMPLINGS[name]))
        begin, calls = time.perf_counter(), bench.head.num_calls
        trace = bench.trace(requests)
        spent, calls = time.perf_counter() - begin, bench.head.num_calls - calls
        one_by_one = trace.num_positions * (SPACE.max_steps - 1) * len(SPACE.topks)
        tell(
            args.log,
            f"{name} {args.dtype}, torch {torch.__version__}: traced {len(requests)} prompts of at most "
            f"{args.max_tokens} tokens, {trace.num_positions} positions, {size_of(trace):.1f} bytes each, in "
            f"{spent:.1f} s with decoding; {calls} passes of the head, position by position {one_by_one}",
        )
        for config in configs:
            tell(args.log, line(name, bench, trace, requests, config))


def line(name: str, bench: Bench, trace: Trace, requests: list[Request], config: SpecConfig) -> str:
    """Decode live, compare, and say so; differences on lines of their own."""
    begin = time.perf_counter()
    live = bench.engine(config).generate(requests, config).requests
    found = compare(trace, config, live)
    counts = replay(trace, [config])
    listed, texts = sum(d.is_listed for d in found), sum(d.is_text for d in found)
    lived = sum(step.num_accepted for record in live for step in record.steps)
    own, theirs = counts.acceptance_length(0), acceptance_length(pooled_steps(live))
    head = (
        f"{name}  {config.label:<22} {same_steps(live, found)}/{len(live)} equal, {listed} differ at a listed "
        f"tie, {sum(not d.is_listed and not d.is_text for d in found)} elsewhere, {texts} other texts; accepted "
        f"{int(counts.num_accepted.sum())} replayed, {lived} live; "
        f"AL {own:.4f} and {theirs:.4f} ({time.perf_counter() - begin:.1f} s)"
    )
    return "\n".join([head, *(f"    {difference}" for difference in found)])


def size_of(trace: Trace) -> float:
    """Bytes of the trace file a position."""
    with tempfile.TemporaryDirectory() as folder:
        write_trace(Path(folder) / "trace.npz", trace)
        return (Path(folder) / "trace.npz").stat().st_size / max(1, trace.num_positions)


def tell(log: Path, text: str) -> None:
    print(text, flush=True)
    with log.open("a", encoding="utf-8") as stream:
        stream.write(text + "\n")


def lines_of(log: Path) -> list[re.Match[str]]:
    """The configurations that a log holds."""
    if not log.exists():
        return []
    texts = log.read_text(encoding="utf-8").splitlines()
    return [found for text in texts if (found := LINE.match(text))]


def conclude(log: Path, *, is_exact: bool) -> int:
    """Sums over the whole log; exit status."""
    found = lines_of(log)
    total = {
        key: sum(int(one[key]) for one in found)
        for key in ("same", "all", "listed", "unlisted", "texts", "replayed", "live")
    }
    tell(
        log,
        f"{len(found)} configurations and samplings: {total['same']} of {total['all']} requests equal in every "
        f"step; {total['listed']} differ at a listed tie below {TIE:g}, {total['unlisted']} elsewhere, "
        f"{total['texts']} texts left the traced one; accepted drafts: {total['replayed']} replayed, "
        f"{total['live']} live",
    )
    if not is_exact:  # equal logits are common in bf16, and either order is right
        return 1 if abs(total["replayed"] - total["live"]) * 100 > total["live"] else 0
    return 1 if total["unlisted"] or total["listed"] * 200 > total["all"] else 0


if __name__ == "__main__":
    sys.exit(main())
