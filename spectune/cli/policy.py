"""`spectune policy ...`: look at an on/off policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from spectune.cli.console import print_json
from spectune.errors import UsageError

POLICY_FILE = "policy.json"

app = typer.Typer(no_args_is_help=True, help="On/off policies over load.")


@app.callback()
def policy() -> None:
    """On/off policies over load."""


@app.command(epilog="Example: spectune policy show runs/2026-11-30-101500")
def show(
    source: Annotated[Path, typer.Argument(help="Run directory or policy.json.", metavar="RUN|FILE")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the policy as JSON.")] = False,
) -> None:
    """Print which configuration runs at which load."""
    from spectune.cli.tables import print_policy

    document = read_policy(source)
    if as_json:
        print_json(document)
    else:
        print_policy(document)


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
