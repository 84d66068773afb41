"""`spectune train export`: a draft head in the layout that another program loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spectune.cli.console import print_json, say
from spectune.errors import UsageError


def export(
    head: Annotated[str, typer.Argument(help="Folder or name of a draft head, in any known layout.")],
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="New folder for the head.")],
    layout: Annotated[
        str, typer.Option("--format", help="classic (vLLM and SGLang), speculators or safeailab.")
    ] = "classic",
    model: Annotated[
        str | None, typer.Option("--model", "--model-path", help="Target (default SmolLM2-135M-Instruct).")
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option("--verifier", help="Target's name inside a Speculators head (default --model)."),
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option("--draft-vocab-size", help="Keep the lowest draft tokens only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print folder and layout as JSON.")] = False,
) -> None:
    """Write a draft head in another layout; what the layout cannot express is refused.

    Heads in the classic, Speculators and SafeAILab layouts are read.
    """
    from spectune.backend.heads import head_folder
    from spectune.draft.checkpoint import load_head
    from spectune.draft.formats import cut_draft_vocab, write_head
    from spectune.engine.checkpoint import TargetConfig
    from spectune.engine.resolve import resolve_model
    from spectune.engine.target_config import read_json

    if output_dir.is_dir() and any(output_dir.iterdir()):
        raise UsageError(f"--output-dir {output_dir} is not empty", hint="give another folder")
    folder = resolve_model(model, progress=say)
    target = TargetConfig.from_dir(folder)
    loaded = load_head(head_folder(head), target)
    if draft_vocab_size is not None:
        loaded = cut_draft_vocab(loaded, draft_vocab_size, target.eos_token_ids)
    extra = read_json(loaded.path / "config.json").get("spectune")
    name = verifier or (model if model is not None and not Path(model).exists() else folder.name)
    write_head(loaded, output_dir, target, layout, verifier=name, extra=extra)
    if as_json:
        print_json({"head_dir": str(output_dir), "format": layout})
    say(f"head: {output_dir} ({layout})")
