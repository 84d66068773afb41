"""`spectune policy ...`: build, look at, emit, serve and simulate on/off policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from spectune.cli import policy_simulate, policy_verify
from spectune.cli.console import print_json, say
from spectune.cli.outputs import write_text
from spectune.errors import UsageError

POLICY_FILE = "policy.json"
ENGINES = "vllm, sglang, tensorrt-llm, llama.cpp, reference, router"

app = typer.Typer(no_args_is_help=True, help="On/off policies over load.")


@app.callback()
def policy() -> None:
    """On/off policies over load."""


@app.command(epilog="Example: spectune policy build runs/demo --max-loss 0.02 --output policy.json")
def build(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of one deployment.", metavar="RUN...")],
    max_loss: Annotated[
        float,
        typer.Option("--max-loss", min=0, max=0.5, help="Share of a speedup to give up for fewer edges."),
    ] = 0.02,
    switch_cost: Annotated[
        float | None,
        typer.Option(
            "--switch-cost-rounds", min=0, help="Plain rounds that a switch costs, as policy verify told."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the policy is written.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the policy as JSON.")] = False,
) -> None:
    """Decide on or off per load from one or more sweeps, with the fewest edges that lose little.

    Off wins unless it is beaten by more than the noise, ties go to the smaller configuration, and what
    was not measured is off and says so.
    """
    from spectune.cli.policy_tables import print_policy
    from spectune.policy.build import build_from_runs
    from spectune.store import RunStore

    document = build_from_runs(
        [RunStore.open(run) for run in runs], max_loss=max_loss, switch_cost_rounds=switch_cost
    )
    if output is not None:
        write_text(output, json.dumps(document, indent=1, allow_nan=False) + "\n", "--output")
        say(f"policy: {output}")
    if as_json:
        print_json(document)
    else:
        print_policy(document)


@app.command(epilog="Example: spectune policy show runs/2026-11-30-101500")
def show(
    source: Annotated[Path, typer.Argument(help="Run directory or policy.json.", metavar="RUN|FILE")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the policy as JSON.")] = False,
) -> None:
    """Print which configuration runs at which load, and what that rests on."""
    from spectune.cli.policy_tables import print_policy

    document = read_policy(source)
    if as_json:
        print_json(document)
    else:
        print_policy(document)


@app.command(epilog="Example: spectune policy emit runs/demo --engine vllm --format serve.sh")
def emit(
    source: Annotated[Path, typer.Argument(help="Run directory or policy.json.", metavar="RUN|FILE")],
    engine: Annotated[str, typer.Option("--engine", help=f"What executes it: {ENGINES}.")],
    form: Annotated[
        str, typer.Option("--format", help="text (to paste), serve.sh, or kubernetes (container arguments).")
    ] = "text",
    engine_version: Annotated[
        str | None,
        typer.Option("--engine-version", help="Version of the engine; its words differ by version."),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            "--max-batch-size", "--max-num-seqs", min=1, help="Largest load; the largest measured one."
        ),
    ] = None,
    data_parallel_size: Annotated[
        int, typer.Option("--data-parallel-size", min=1, help="Replicas inside the engine.")
    ] = 1,
    runner: Annotated[str | None, typer.Option("--runner", help="Model runner of vLLM: v1 or v2.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the text inside a JSON object.")] = False,
) -> None:
    """Write a policy as what a serving engine executes; refuse what it would silently ignore.

    What an engine cannot execute becomes less speculation, never more, with the reason in a comment;
    --engine router gives the rules for two deployments instead.
    """
    from spectune.policy.emit import emit as write
    from spectune.policy.emit_parts import EmitOptions

    if runner not in (None, "v1", "v2"):
        raise UsageError(f"--runner {runner} is not one of v1, v2")
    options = EmitOptions(
        max_batch_size=max_batch_size,
        engine_version=engine_version,
        data_parallel_size=data_parallel_size,
        runner=runner,
    )
    text = write(read_policy(source), engine, options, form=form)
    if output is not None:
        write_text(output, text + "\n", "--output")
        output.chmod(0o755 if form == "serve.sh" else 0o644)
        say(f"written: {output}")
    if as_json:
        print_json({"schema_version": 1, "engine": engine, "format": form, "text": text})
    elif output is None:
        print(text)


app.command(epilog="Example: spectune policy verify runs/demo --backend simulated --num-runs 3")(
    policy_verify.verify
)
app.command(
    epilog="Example: spectune policy simulate runs/demo --mix chat=.6,code=.4 --request-rate 2 --usd-per-gpu-hour 2.5"
)(policy_simulate.simulate)


def read_policy(source: Path) -> dict[str, Any]:
    """The checked policy of a run directory or a file."""
    from spectune.policy.file import load_policy

    path = source / POLICY_FILE if source.is_dir() else source
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"{path} does not exist",
            hint="give a run of spectune sweep that reached a decision, or its policy.json",
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a policy: {error}") from error
    return load_policy(document, origin=str(path))
