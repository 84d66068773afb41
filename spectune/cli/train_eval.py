"""`spectune train eval`: acceptance of draft heads on held-out prompts, several heads on the same texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import percent, print_json, say
from spectune.cli.outputs import write_text
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.records import Acceptance, HeadReport, Interval, Judgement, Pair


def evaluate(
    heads: Annotated[
        list[str] | None, typer.Argument(help="Folders or names of draft heads (default: the shipped one).")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "--model-path", help="Target (default SmolLM2-135M-Instruct).")
    ] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", help="Prompts: a file, a folder or a built-in set.")
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", min=1, help="Prompts drawn (default all).")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Longest answer.")] = 128,
    num_tokens: Annotated[
        int,
        typer.Option(
            "--num-tokens", "--num-speculative-tokens", "--num-steps", min=1, help="Chain length K."
        ),
    ] = 3,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", help="0 is greedy; may be given several times.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of the drawn prompts and of sampling.")
    ] = 0,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", help="Where eval.json and eval.html go (default: nowhere)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON on stdout.")] = False,
) -> None:
    """Judge draft heads: acceptance by position, category, temperature, context and place in the output.

    The target answers each prompt once, every head drafts along the same text, so heads are compared
    in pairs. Texts in which the target repeats itself are left out and shown apart.
    """
    from spectune.backend.heads import DEFAULT_HEAD, head_folder
    from spectune.cli.train import say_event
    from spectune.engine.resolve import resolve_model
    from spectune.train.judge import JudgePlan, judge
    from spectune.workload.read import load_workload

    names = heads or [DEFAULT_HEAD]
    if missing := [name for name in names if not head_folder(name).is_dir()]:
        raise UsageError(f"{missing[0]} is no folder of a draft head and no shipped head")
    asked = load_workload(workload, num_prompts=num_prompts, seed=seed)
    plan = JudgePlan(
        target=resolve_model(model, progress=say),
        heads=tuple((name.rstrip("/"), head_folder(name)) for name in names),
        prompts=asked.prompts,
        workload=(asked.name, asked.digest),
        temperatures=tuple(dict.fromkeys(temperature or [0.0])),
        max_tokens=max_tokens,
        num_tokens=num_tokens,
        seed=seed,
        device=device,
    )
    judgement = judge(plan, say_event)
    result = judgement.to_dict()
    if output_dir is not None:
        from spectune.report.head_page import render_heads

        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        write_text(output_dir / "eval.json", text, "--output-dir")
        write_text(output_dir / "eval.html", render_heads(judgement), "--output-dir")
        say(f"page: {output_dir / 'eval.html'}")
    if as_json:
        print_json(result)
    else:
        print("\n".join(lines_of(judgement)))


def lines_of(judgement: Judgement) -> list[str]:
    """The judgement as text."""
    lines: list[str] = []
    for report in judgement.reports:
        lines += [*_report_lines(report, judgement.num_tokens), ""]
    lines += [_pair_line(pair) for pair in judgement.pairs]
    return [*lines, f"verdict: {judgement.verdict}"]


def _report_lines(report: HeadReport, num_tokens: int) -> list[str]:
    lines = [
        f"{report.name}: chain of {num_tokens}, {report.overall.num_texts} texts without a loop",
        f"  acceptance length {_length(report.overall)}, with looping texts {_length(report.with_loops)}",
        "  accepted given the one before: "
        + " ".join(percent(value) for value in report.overall.conditional),
        f"  the draft vocabulary holds {percent(report.coverage)} of the text",
    ]
    cuts: list[tuple[str, dict[str, Any]]] = [
        ("category", report.by_category),
        ("temperature", report.by_temperature),
        ("context", report.by_context),
        ("place in output", report.by_position),
        ("draft vocabulary", report.by_draft_vocab),
    ]
    for title, cut in cuts:
        lines += [f"  {title} {label}: {_length(found)}{_by_draft(found)}" for label, found in cut.items()]
    for cell in report.calibration:
        lines.append(
            f"  sure {percent(cell.confidence)}: right {percent(cell.accepted)} of {cell.num_drafts} drafts"
        )
    lines.append(f"  mean gap between sure and right: {percent(report.calibration_error)}")
    return lines


def _by_draft(found: Acceptance) -> str:
    """Acceptance draft by draft; nothing for cuts of the vocabulary, which have none."""
    return f", accepted {' '.join(map(percent, found.conditional))}" if found.conditional else ""


def _length(found: Acceptance) -> str:
    return "-" if found.acceptance_length is None else f"{_interval(found.acceptance_length)}"


def _interval(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:.3f}"
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _pair_line(pair: Pair) -> str:
    return f"{pair.head} over {pair.base}: {_interval(pair.ratio)} in acceptance length, {pair.ratio.n} texts"
