"""`spectune train eagle3`: teach a draft head from the target's own text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spectune.cli.console import duration, keep_log_in, print_json, say
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.train.plan import TrainEvent

app = typer.Typer(no_args_is_help=True, help="Train a draft head.")


@app.callback()
def train() -> None:
    """Train a draft head."""


@app.command(epilog="Example: spectune train eagle3 --output-dir heads/mine --epochs 3")
def eagle3(
    output_dir: Annotated[
        Path, typer.Option("--output-dir", "-o", help="Corpus, checkpoints and the exported head.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", "--model-path", help="Target (default SmolLM2-135M-Instruct).")
    ] = None,
    num_tokens_target: Annotated[
        int,
        typer.Option("--num-tokens-target", min=1, help="Tokens of the target's own answers to learn from."),
    ] = 200_000,
    ttt_steps: Annotated[
        int, typer.Option("--ttt-steps", min=1, help="Draft steps unrolled in training.")
    ] = 4,
    draft_vocab_size: Annotated[
        int, typer.Option("--draft-vocab-size", min=1, help="Most frequent tokens that the head can draft.")
    ] = 8192,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the corpus.")] = 3,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate.")] = 8e-4,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in --output-dir.")] = False,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of corpus, order and weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the evaluation as JSON on stdout.")] = False,
) -> None:
    """Train an EAGLE-3 head on the target's own answers and export it in the classic layout.

    vLLM, SGLang and spectune load the exported head.
    """
    from spectune.engine.resolve import resolve_model
    from spectune.train import pipeline
    from spectune.train.plan import TrainPlan

    if not resume and output_dir.is_dir() and any(output_dir.iterdir()):
        raise UsageError(
            f"--output-dir {output_dir} is not empty", hint="--resume goes on there, or give another folder"
        )
    plan = TrainPlan(
        target=resolve_model(model, progress=say),
        output_dir=output_dir,
        num_tokens=num_tokens_target,
        ttt_steps=ttt_steps,
        draft_vocab_size=draft_vocab_size,
        epochs=epochs,
        lr=lr,
        device=device,
        seed=seed,
    )
    output_dir.mkdir(parents=True, exist_ok=True)
    go_on = "the same command and --resume"
    with keep_log_in(output_dir, go_on=go_on):
        result = pipeline.run(plan, _say_event)
    if as_json:
        held_out = None if result.held_out is None else asdict(result.held_out)
        print_json({"head_dir": str(result.head_dir), "held_out": held_out})
    say(f"head: {result.head_dir}")


def _say_event(event: TrainEvent) -> None:
    """One line of progress."""
    parts = [f"{event.stage}:"]
    if event.done is not None and event.total is not None:
        parts.append(f"{event.done:g} of {event.total:g} {event.unit}".rstrip())
    if event.message:
        parts.append(event.message)
    if event.tokens_per_s is not None:
        parts.append(f"{event.tokens_per_s:.0f} tokens/s")
    if event.seconds_left is not None:
        parts.append(f"about {duration(event.seconds_left)} left")
    say(" ".join(parts))
