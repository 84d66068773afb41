"""`spectune train eagle3`: teach a draft head from the target's own text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Train a draft head.")


@app.callback()
def train() -> None:
    """Train a draft head."""
