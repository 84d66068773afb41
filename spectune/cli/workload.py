"""`spectune workload ...`: look at a prompt file, draw a sample from it, make a synthetic one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spectune.cli.console import percent, print_json, say
from spectune.cli.outputs import write_text
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.workload.profile import Profile

app = typer.Typer(no_args_is_help=True, help="Prompts: look at them, sample them, make synthetic ones.")

Format = Annotated[
    str, typer.Option("--dataset-format", help="Kind of file, shape of its rows, or both: csv,gsm8k.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first row that cannot be asked.")]
Subset = Annotated[str | None, typer.Option("--hf-subset", help="Subset of a data set on the hub.")]
Split = Annotated[str | None, typer.Option("--hf-split", help="Split of a data set on the hub.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.callback()
def workload() -> None:
    """Prompts: look at them, sample them, make synthetic ones."""


@app.command(epilog="Example: spectune workload inspect question.jsonl --html profile.html")
def inspect(
    file: Annotated[str, typer.Argument(help="File, folder, hub id or built-in set.", metavar="FILE")],
    dataset_format: Format = "",
    strict: Strict = False,
    hf_subset: Subset = None,
    hf_split: Split = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Count lengths in the tokens of this model, else in words.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the picture as an HTML page.")] = None,
    as_json: Json = False,
) -> None:
    """Show categories, lengths, duplicates and looping answers of a prompt file."""
    from spectune.workload.profile import profile_workload

    measure, unit = _length_in(model)
    found = profile_workload(
        file, formats=_formats(dataset_format), strict=strict, subset=hf_subset, split=hf_split,
        length=measure, unit=unit,
    )  # fmt: skip
    if html is not None:
        from spectune.cli.workload_page import profile_page

        write_text(html, profile_page(found), "--html")
        say(f"page: {html}")
    if as_json:
        print_json(found.document())
    else:
        _show(found)


@app.command(epilog="Example: spectune workload sample question.jsonl --num-prompts 40 --parts 2 -o samples")
def sample(
    file: Annotated[str, typer.Argument(help="File, folder, hub id or built-in set.", metavar="FILE")],
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="Prompts of each part.")],
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Where part-1.jsonl and so on are written.")
    ],
    parts: Annotated[
        int, typer.Option("--parts", min=1, help="Parts that share no prompt, one for each point.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the draw.")] = 0,
    categories: Annotated[str, typer.Option("--categories", help="Only these, comma separated.")] = "",
    dataset_format: Format = "",
    strict: Strict = False,
    hf_subset: Subset = None,
    hf_split: Split = None,
    as_json: Json = False,
) -> None:
    """Draw prompts evenly over the categories, in disjoint parts, the same for the same seed."""
    from spectune.workload.read import load_workload
    from spectune.workload.write import deal, write_prompts

    drawn = load_workload(
        file,
        categories=[name.strip() for name in categories.split(",")] if categories else None,
        num_prompts=num_prompts * parts,
        seed=seed,
        formats=_formats(dataset_format),
        strict=strict,
        subset=hf_subset,
        split=hf_split,
    )
    say(drawn.accounting)
    hands = deal(drawn.prompts, parts=parts, size=num_prompts)
    written = []
    for number, hand in enumerate(hands, start=1):
        path = output_dir / f"part-{number}.jsonl"
        digest = write_prompts(path, hand, is_synthetic=drawn.is_synthetic)
        written.append({"file": str(path), "prompts": len(hand), "digest": digest})
    if as_json:
        print_json({"accounting": drawn.account(), "seed": seed, "parts": written})
    else:
        for entry in written:
            print(f"{entry['file']}: {entry['prompts']} prompts, {str(entry['digest'])[:12]}")


@app.command(epilog="Example: spectune workload synth synthetic.jsonl --num-prompts 64 --words 50,400")
def synth(
    file: Annotated[Path, typer.Argument(help="File to write.", metavar="FILE")],
    num_prompts: Annotated[int, typer.Option("--num-prompts", min=1, help="How many.")] = 64,
    words: Annotated[str, typer.Option("--words", help="Lengths to draw from, in words.")] = "100",
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", min=1, help="Output limit of every prompt.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the words.")] = 0,
    as_json: Json = False,
) -> None:
    """Write SYNTHETIC prompts of meaningless words, labelled so in every row.

    They are for lengths and costs. What a draft gets right on them says nothing about real text, so
    decisions and policies refuse them.
    """
    from spectune.workload.synthetic import synthetic_rows

    lengths = _numbers(words, "--words")
    rows = list(synthetic_rows(num_prompts, words=lengths, output_tokens=output_tokens, seed=seed))
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows), "FILE")
    if as_json:
        print_json({"file": str(file), "prompts": len(rows), "is_synthetic": True, "seed": seed})
    else:
        print(f"{file}: {len(rows)} SYNTHETIC prompts")


def _show(found: Profile) -> None:
    label = "SYNTHETIC prompts: " if found.is_synthetic else ""
    print(f"{label}{found.name}: {found.num_available} of {found.num_rows} rows can be asked")
    for reason, count in sorted(found.num_dropped_by_reason.items()):
        print(f"  left out: {count} ({reason})")
    for place in found.places[:5]:
        print(f"    {place}")
    if found.ignored_keys:
        print(f"  columns not read: {', '.join(found.ignored_keys)}")
    turns = f", {found.num_multi_turn} with several turns" if found.num_multi_turn else ""
    print(f"  {found.num_limited} with an output limit of their own{turns}")
    if found.num_replies:
        share = percent(found.num_loops / found.num_replies)
        print(f"  recorded answers: {found.num_replies}, looping: {found.num_loops} ({share})")
    width = max((len(name) for name in found.lengths), default=8)
    print(f"\n  {'category':<{width}}  prompts  length in {found.unit}: median, p90, largest")
    for name, lengths in found.lengths.items():
        print(f"  {name:<{width}}  {len(lengths):>7}  {found.text_of(name)}")
    print()
    for line in found.histogram_lines():
        print(f"  {line}")


def _length_in(model: str | None) -> tuple[Any, str]:
    """How to measure a text, and the unit."""
    if model is None:
        return (lambda text: len(text.split())), "words"
    from spectune.engine.resolve import resolve_model
    from spectune.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(resolve_model(model, progress=say))
    return (lambda text: len(tokenizer.encode(text))), "tokens"


def _formats(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _numbers(text: str, flag: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{flag}: {text!r} is not a list of whole numbers") from error
    if min(numbers) < 1:
        raise UsageError(f"{flag}: {min(numbers)} is below 1")
    return numbers
