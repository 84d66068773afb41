"""`spectune train`: teach a draft head from the target's own text, and judge heads."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spectune.cli.console import duration, keep_log_in, print_json, say
from spectune.cli.train_eval import evaluate
from spectune.cli.train_export import export
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.train.plan import TrainEvent

app = typer.Typer(no_args_is_help=True, help="Train and judge draft heads.")


@app.callback()
def train() -> None:
    """Train and judge draft heads."""


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
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            help="Your own prompts (file or folder, as sweep reads them), asked first, each once.",
        ),
    ] = None,
    greedy_share: Annotated[
        float, typer.Option("--greedy-share", help="Share of the answers that are greedy (0..1).")
    ] = 0.65,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Temperature of the answers that are not greedy.")
    ] = 0.8,
    self_share: Annotated[
        float,
        typer.Option("--self-share", help="Share of the other prompts that the target writes itself (0..1)."),
    ] = 0.5,
    max_answer_tokens: Annotated[
        int, typer.Option("--max-answer-tokens", min=2, help="Longest answer of the corpus.")
    ] = 256,
    max_prompt_tokens: Annotated[
        int,
        typer.Option("--max-prompt-tokens", min=16, help="Longer prompts lose their middle."),
    ] = 448,
    generate_batch_size: Annotated[
        int, typer.Option("--generate-batch-size", min=1, help="Answers that are decoded together.")
    ] = 128,
    batch_tokens: Annotated[
        int, typer.Option("--batch-tokens", min=1, help="Answer tokens of one training step.")
    ] = 1024,
    ttt_steps: Annotated[
        int, typer.Option("--ttt-steps", min=1, help="Draft steps unrolled in training.")
    ] = 4,
    draft_vocab_size: Annotated[
        int, typer.Option("--draft-vocab-size", min=1, help="Most frequent tokens that the head can draft.")
    ] = 8192,
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="Passes over the corpus.")] = 3,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate.")] = 8e-4,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw or muon.")] = "adamw",
    init_from: Annotated[
        str | None, typer.Option("--init-from", help="Head to go on from (default: the target's last layer).")
    ] = None,
    corpus_share: Annotated[
        float, typer.Option("--corpus-share", help="Train on the first part of the corpus only (0..1).")
    ] = 1.0,
    corpus_skip: Annotated[
        float,
        typer.Option(
            "--corpus-skip",
            help="Leave out the first part of the corpus, which --init-from has learnt (0..1).",
        ),
    ] = 0.0,
    apart_from: Annotated[
        list[str] | None,
        typer.Option("--apart-from", help="Workload whose prompts must not be learnt; several times."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in --output-dir.")] = False,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of corpus, order and weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the evaluation as JSON on stdout.")] = False,
) -> None:
    """Train an EAGLE-3 head on the target's own answers and export it in the classic layout.

    vLLM, SGLang and spectune load the exported head.
    """
    from spectune.backend.heads import head_folder
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
        prompts=prompts,
        greedy_share=greedy_share,
        temperature=temperature,
        self_share=self_share,
        max_answer_tokens=max_answer_tokens,
        max_prompt_tokens=max_prompt_tokens,
        generate_batch_size=generate_batch_size,
        batch_tokens=batch_tokens,
        ttt_steps=ttt_steps,
        draft_vocab_size=draft_vocab_size,
        epochs=epochs,
        lr=lr,
        device=device,
        seed=seed,
        optimizer=optimizer,
        corpus_share=corpus_share,
        corpus_skip=corpus_skip,
        apart_from=tuple(apart_from or ()),
        init_from=None if init_from is None else head_folder(init_from),
    )
    output_dir.mkdir(parents=True, exist_ok=True)
    go_on = "the same command and --resume"
    with keep_log_in(output_dir, go_on=go_on):
        result = pipeline.run(plan, say_event)
    if as_json:
        held_out = None if result.held_out is None else asdict(result.held_out)
        print_json({"head_dir": str(result.head_dir), "held_out": held_out})
    say(f"head: {result.head_dir}")


app.command("eval", epilog="Example: spectune train eval heads/mine smollm2-135m-eagle3 --workload chat")(
    evaluate
)

app.command(
    epilog="Example: spectune train export heads/mine --format speculators --output-dir heads/mine-spec"
)(export)


def say_event(event: TrainEvent) -> None:
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
