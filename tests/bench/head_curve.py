"""Acceptance length over corpus size: heads trained on shares of one corpus, judged on the same texts.

    python tests/bench/head_curve.py --corpus runs/head --shares 0.25,0.5,1 --work runs/curve \
        --workload mt_bench.jsonl [--epochs 1] [--init-from smollm2-135m-eagle3] [--legs-from 0.5]
        [--output curve.json]

--corpus is the output directory of a `spectune train eagle3` with a finished corpus, made with the default
settings of texts; texts and features are read where they lie. Every head starts from the same weights, sees
every row of its share --epochs times and is judged with its draft vocabulary uncut. With --legs-from, heads
of more than that share go on from the head of the share before, with the rows that it has not seen. A
finished head is not trained again. Printed are the lengths with intervals over texts, the paired ratio of
each size over the one before, and what one more doubling gives if the last one is a guide.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from spectune.backend.heads import head_folder
from spectune.engine.resolve import resolve_model
from spectune.records import Judgement
from spectune.train import pipeline
from spectune.train.corpus import read_corpus, summarize_corpus
from spectune.train.judge import JudgePlan, judge
from spectune.train.plan import TrainEvent, TrainPlan
from spectune.workload import load_workload


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shares", default="0.25,0.5,1")
    parser.add_argument(
        "--workload", action="append", help="prompts to judge on; the built-in ones if not given"
    )
    parser.add_argument("--apart-from", action="append", default=[])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--init-from")
    parser.add_argument("--legs-from", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()

    summary = summarize_corpus(read_corpus(arguments.corpus / "corpus.jsonl"))
    print(f"corpus: {summary.text}")
    shares = sorted(float(share) for share in arguments.shares.split(","))
    target = resolve_model(None)
    heads: dict[str, Path] = {}
    last = ""
    before, start = 0.0, None if arguments.init_from is None else head_folder(arguments.init_from)
    for share in shares:
        tokens = round(share * summary.num_answer_tokens)
        is_leg = before > 0 and share > arguments.legs_from
        plan = TrainPlan(
            target=target,
            output_dir=beside(arguments.corpus, arguments.work / f"{'leg' if is_leg else 'share'}-{share:g}"),
            num_tokens=summary.num_answer_tokens,
            draft_vocab_size=arguments.draft_vocab_size,
            epochs=arguments.epochs,
            lr=arguments.lr,
            corpus_share=share,
            apart_from=tuple(arguments.apart_from),
            corpus_skip=before if is_leg else 0.0,
            init_from=heads[last] if is_leg else start,
        )
        print(f"training on {tokens} answer tokens{f', {last} of them before' if is_leg else ''}", flush=True)
        last, before = f"{tokens}", share
        heads[last] = pipeline.run(plan, say).head_dir
    results = {}
    for name in arguments.workload or [None]:
        prompts = load_workload(name)
        judged = judge(
            JudgePlan(
                target=target,
                heads=tuple(heads.items())[::-1],
                prompts=prompts.prompts,
                workload=(prompts.name, prompts.digest),
                max_tokens=arguments.max_tokens,
            ),
            say,
        )
        results[prompts.name] = curve_of(judged)
        print("\n".join(lines_of(prompts.name, results[prompts.name])), flush=True)
    if arguments.output is not None:
        document = {"corpus": asdict(summary), "epochs": arguments.epochs, "curves": results}
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def beside(corpus: Path, directory: Path) -> Path:
    """A run directory with the corpus of another one: its texts are copied, its features linked."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("corpus.jsonl", "run.json"):
        shutil.copyfile(corpus / name, directory / name)
    (directory / "features").mkdir(exist_ok=True)
    for shard in (corpus / "features").glob("shard-*.safetensors"):
        link = directory / "features" / shard.name
        if not link.exists():
            link.symlink_to(shard.resolve())  # one that had to be made again would take the link's place
    return directory


def say(event: TrainEvent) -> None:
    if event.message:
        print(f"  {event.stage}: {event.message}", flush=True)


def curve_of(judged: Judgement) -> dict[str, Any]:
    """Points by size, the ratio of each size over the one before on the same texts, and what a doubling gives.

    The heads were judged from the largest to the smallest, so that every pair says larger over smaller.
    """
    ratios = {(pair.head, pair.base): pair.ratio for pair in judged.pairs}
    reports = judged.reports[::-1]
    points, steps = [], []
    for report in reports:
        length = report.overall.acceptance_length
        assert length is not None
        points.append(
            {
                "num_tokens": int(report.name),
                "acceptance_length": asdict(length),
                "conditional": report.overall.conditional,
                "coverage": report.coverage,
            }
        )
    for small, large in pairwise(reports):
        ratio = ratios[large.name, small.name]
        doublings = math.log2(int(large.name) / int(small.name))
        steps.append(
            {
                "from": int(small.name),
                "to": int(large.name),
                "ratio": asdict(ratio),
                "gain_per_doubling": ratio.value ** (1 / doublings) - 1,
            }
        )
    return {"points": points, "steps": steps, "num_texts": reports[0].overall.num_texts}


def lines_of(name: str, curve: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {curve['num_texts']} texts without a loop"]
    for point in curve["points"]:
        length = point["acceptance_length"]
        shown = ", ".join("-" if value is None else f"{value:.1%}" for value in point["conditional"])
        lines.append(
            f"  {point['num_tokens']:>9} tokens: {length['value']:.3f} "
            f"({length['low']:.3f} to {length['high']:.3f}), accepted in turn {shown}"
        )
    for step in curve["steps"]:
        lines.append(
            f"  {step['from']} to {step['to']}: {step['ratio']['value']:.3f} ({step['ratio']['low']:.3f} to "
            f"{step['ratio']['high']:.3f}), {step['gain_per_doubling']:+.1%} a doubling"
        )
    if curve["steps"]:
        last, largest = curve["steps"][-1], curve["points"][-1]
        expected = largest["acceptance_length"]["value"] * (1 + last["gain_per_doubling"])
        lines.append(
            f"  one more doubling, to {2 * largest['num_tokens']}, would give {expected:.3f} if the last is a guide"
        )
    return lines


if __name__ == "__main__":
    main()
