"""`spectune engines`: serving engines in environments of their own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from spectune.cli.console import print_json, say
from spectune.errors import UsageError

app = typer.Typer(no_args_is_help=True, help="Serving engines in environments of their own.")

Json = Annotated[bool, typer.Option("--json", help="Print the environment as JSON.")]
ParserOnly = Annotated[
    bool,
    typer.Option(
        "--parser-only", help="The engine's argument parser and policies alone: no GPU, for checks (sglang)."
    ),
]
Engine = Annotated[str, typer.Argument(help="Name of the engine: vllm or sglang.", metavar="ENGINE")]


@app.callback()
def engines() -> None:
    """Serving engines in environments of their own."""


@app.command("list", epilog="Example: spectune engines list")
def list_engines(
    as_json: Annotated[bool, typer.Option("--json", help="Print the environments as JSON.")] = False,
) -> None:
    """Print which engines are installed, and which can be."""
    from spectune.backend.environments import engines_dir, installed
    from spectune.backend.recipes import engine_names

    found = installed()
    if as_json:
        print_json([asdict(environment) for environment in found])
        return
    for environment in found:
        kind = " (parser only: it checks, it does not serve)" if environment.is_parser else ""
        print(
            f"{environment.engine}: {environment.package} {environment.version}, {environment.python}{kind}"
        )
    missing = [
        name for name in engine_names() if name not in {one.engine for one in found if not one.is_parser}
    ]
    for name in missing:
        print(f"{name}: not installed (spectune engines install {name})")
    say(f"environments are kept in {engines_dir()}")


@app.command(epilog="Example: spectune engines install vllm")
def install(
    engine: Engine,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cpu|cuda", help="Which build; the machine's own if not given."),
    ] = None,
    base_python: Annotated[
        Path | None, typer.Option("--python", help="Interpreter to make the environment with (3.11 to 3.14).")
    ] = None,
    parser_only: ParserOnly = False,
    as_json: Json = False,
) -> None:
    """Install an engine in an environment of its own; nothing of it is loaded into spectune."""
    from spectune.backend import environments
    from spectune.backend.recipes import PARSER

    if parser_only and device is not None:
        raise UsageError(
            f"--parser-only is for no device, --device {device} is for one", hint="give one of them"
        )
    device = PARSER if parser_only else device
    made = environments.install(
        engine, device=device, python=None if base_python is None else str(base_python), say=say
    )
    if as_json:
        print_json(asdict(made))
    else:
        print(made.python)


@app.command(epilog="Example: spectune engines remove vllm")
def remove(engine: Engine, parser_only: ParserOnly = False, as_json: Json = False) -> None:
    """Delete the environment of an engine that spectune installed."""
    from spectune.backend import environments

    folder = environments.remove(engine, parser_only=parser_only)
    if as_json:
        print_json({"engine": engine, "removed": str(folder)})
    else:
        say(f"removed {folder}")
