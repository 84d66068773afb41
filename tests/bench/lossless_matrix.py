"""Losslessness of the engine over the whole matrix of drafts, batches and temperatures, on real prompts.

    python tests/bench/lossless_matrix.py --log matrix.log            # hours on two cores
    python tests/bench/lossless_matrix.py --quick --log quick.log     # corners, minutes

Every text is compared token by token with plain decoding under the same seed. A text that leaves it
where the two best tokens were closer than 1e-3 is a near tie (another summation order picked the other
one); any other is lossy. Exit status 1 if a text is lossy, 0 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from spectune.backend.heads import head_folder, shipped_heads
from spectune.backend.reference import ReferenceBackend
from spectune.engine.resolve import resolve_model
from spectune.engine.scheduler import Engine
from spectune.engine.target_config import TargetConfig
from spectune.metrics.acceptance import acceptance_length, pooled_steps
from spectune.records import Prompt, Request, RequestRecord, Sampling, SpecConfig
from spectune.workload import load_workload
from tests.support.lossless import divergences
from tests.support.toys import head_config, head_tensors, save_head

CHAINS = range(1, 8)
TREES = [  # num_steps, topk, num_draft_tokens: each topk with 8, 16 and 32 verified tokens
    *[(3, 2, 8), (5, 2, 16), (9, 2, 32)],
    *[(3, 4, 8), (5, 4, 16), (5, 4, 32)],
    *[(3, 8, 8), (3, 8, 16), (5, 8, 32)],
]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=0": {},
    "T=0.7": {"temperature": 0.7, "seed": 1},
    "T=1 p=.95": {"temperature": 1.0, "top_p": 0.95, "seed": 2},
}
QUICK_CHAINS, QUICK_TREES = (1, 3, 7), [(3, 2, 8), (5, 4, 16), (5, 8, 32)]


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration at one batch size and temperature."""

    config: SpecConfig
    batch_size: int
    sampling: str

    @property
    def label(self) -> str:
        return f"{self.config.label:<20} batch {self.batch_size}  {self.sampling:<9}"


@dataclass(slots=True)
class Totals:
    """What the cases add up to."""

    num_cases: int = 0
    num_texts: int = 0
    num_tokens: int = 0
    num_near_ties: int = 0
    lossy: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Plain:
    """Requests of one sampling with plain decoding's records and margins."""

    requests: list[Request]
    records: tuple[RequestRecord, ...]
    margins: dict[str, list[float]]


def main() -> int:
    options = parsed()
    if options.threads:
        torch.set_num_threads(options.threads)
    with open(options.log, "a", encoding="utf-8") as log, tempfile.TemporaryDirectory() as scratch:
        backend = backend_of(options, Path(scratch), log)
        plains = {name: plain_of(backend, name, options, log) for name in SAMPLINGS}
        wanted = [case for case in cases(options.quick) if options.only in case.label]
        totals = Totals()
        for number, case in enumerate(wanted, 1):
            run(case, f"{number:>3}/{len(wanted)}", backend, plains[case.sampling], totals, log)
        say(
            f"SUMMARY {totals.num_cases} cases, {totals.num_texts} texts, {totals.num_tokens} tokens: "
            f"{totals.num_texts - totals.num_near_ties - len(totals.lossy)} equal, "
            f"{totals.num_near_ties} near ties, {len(totals.lossy)} lossy",
            log,
        )
    return 1 if totals.lossy else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", required=True, help="file that every line is added to")
    parser.add_argument("--quick", action="store_true", help="corners only: 6 drafts, 8 prompts, 16 tokens")
    parser.add_argument("--model", help="target (default: the default target)")
    parser.add_argument("--draft-model", help="head (default: the shipped one, else an untrained one)")
    parser.add_argument("--prompts", type=int, help="number of real prompts (default 24, quick 8)")
    parser.add_argument("--tokens", type=int, help="most output tokens of a text (default 32, quick 16)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--only", default="", help="cases whose line holds this text, such as 'batch 3'")
    options = parser.parse_args()
    options.prompts = options.prompts or (8 if options.quick else 24)
    options.tokens = options.tokens or (16 if options.quick else 32)
    return options


def backend_of(options: argparse.Namespace, scratch: Path, log: TextIO) -> ReferenceBackend:
    head = options.draft_model
    if head is None and options.model is None and shipped_heads():
        head = str(head_folder(shipped_heads()[0]))
    if head is None:
        target = TargetConfig.from_dir(resolve_model(options.model))
        config = head_config(target, min(4096, target.vocab_size))
        head = str(save_head(scratch / "untrained-head", config, head_tensors(config, target)))
    backend = ReferenceBackend(
        model=options.model, draft_model=head, device=options.device, dtype=options.dtype
    )
    say(
        f"START target {backend.model_path.name}, head {Path(head).name}, {options.dtype} on {options.device}, "
        f"{backend.target.kernels} passes, "
        f"{options.prompts} prompts, up to {options.tokens} tokens, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
        log,
    )
    return backend


def prompts(count: int) -> list[Prompt]:
    """Real prompts, category by category in turn."""
    workload = load_workload(None)
    by_category: dict[str, list[Prompt]] = {}
    for prompt in workload.prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    turns = max(len(group) for group in by_category.values())
    ordered = [group[i] for i in range(turns) for group in by_category.values() if i < len(group)]
    if len(ordered) < count:
        raise SystemExit(f"--prompts {count}: the workloads hold {len(ordered)}")
    return ordered[:count]


def plain_of(backend: ReferenceBackend, name: str, options: argparse.Namespace, log: TextIO) -> Plain:
    """Plain decoding one text at a time; output limits differ, so that batches become ragged."""
    asks = [
        Request(
            request_id=prompt.prompt_id,
            category=prompt.category,
            prompt_ids=backend.encode(prompt, "", 0),
            sampling=Sampling(max_tokens=max(4, options.tokens - (5 * i) % 11), **SAMPLINGS[name]),
        )
        for i, prompt in enumerate(prompts(options.prompts))
    ]
    engine = Engine(backend.target, backend.tokenizer, batch_size=1)
    start_s = time.perf_counter()
    records = engine.generate(asks, wants_margins=True).requests
    tokens = sum(record.num_output_tokens for record in records)
    say(f"plain   {name:<9} {len(asks)} texts {tokens} tokens {time.perf_counter() - start_s:.0f} s", log)
    return Plain(asks, records, engine.margins)


def cases(is_quick: bool) -> Iterator[Case]:
    chains, trees = (QUICK_CHAINS, QUICK_TREES) if is_quick else (CHAINS, TREES)
    configs = [SpecConfig.chain("eagle3", k) for k in chains] + [
        SpecConfig(method="eagle3", num_steps=depth, topk=topk, num_draft_tokens=nodes)
        for depth, topk, nodes in trees
    ]
    for batch_size in (3,) if is_quick else (1, 3, 8):
        for sampling in SAMPLINGS:
            for config in configs:
                yield Case(config, batch_size, sampling)


def run(
    case: Case, number: str, backend: ReferenceBackend, plain: Plain, totals: Totals, log: TextIO
) -> None:
    """Decode one case, compare it and add its line."""
    start_s = time.perf_counter()
    records = backend.engine(case.config, case.batch_size).generate(plain.requests, case.config).requests
    found = divergences(plain.records, records, plain.margins)
    broken = [record.request_id for record in records if record.broken_identity() is not None]
    lossy = [d for d in found if not d.is_near_tie]
    totals.num_cases += 1
    totals.num_texts += len(records)
    totals.num_tokens += sum(record.num_output_tokens for record in records)
    totals.num_near_ties += len(found) - len(lossy)
    totals.lossy += [d.request_id for d in lossy] + broken
    length = acceptance_length(pooled_steps(records)) or 1.0
    say(
        f"{number} {case.label} equal {len(records) - len(found)}/{len(records)}  "
        f"near ties {len(found) - len(lossy)}  lossy {len(lossy)}  acceptance length {length:.3f}  "
        f"{time.perf_counter() - start_s:.0f} s",
        log,
    )
    for divergence in found:
        kind = "near tie" if divergence.is_near_tie else "LOSSY"
        say(
            f"        {kind}: {divergence.request_id} at token {divergence.index}, "
            f"margin {divergence.margin:.2e}",
            log,
        )
    for name in broken:
        say(f"        COUNTS DO NOT ADD UP: {name}", log)


def say(line: str, log: TextIO) -> None:
    """A line on the terminal and in the log at once, so that a long run can be watched."""
    print(line, flush=True)
    log.write(line + "\n")
    log.flush()


if __name__ == "__main__":
    sys.exit(main())
