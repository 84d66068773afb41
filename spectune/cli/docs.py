"""Writes what is derived from the code: the table in README.md, the published schemas of config and gate.

`python -m spectune.cli.docs` rewrites them; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from spectune.cli.app import app
from spectune.cli.config import SCHEMA_FILE, schema_text
from spectune.gate import file as gate_file

BEGIN = "<!-- commands: written by `make docs` -->"
END = "<!-- commands end -->"


def walk() -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its full name: `theory speedup`."""
    yield from _walk(typer.main.get_command(app), "")


def _walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child, below in children.items():
        yield from _walk(below, f"{name} {child}".strip())


def commands_table() -> str:
    """One row a command: name, first sentence of its help, its example."""
    rows = ["| command | what it does | example |", "| --- | --- | --- |"]
    for name, command in walk():
        summary = " ".join(command.help.split("\n\n")[0].split()).rstrip(".")
        rows.append(f"| `spectune {name}` | {summary} | `{example_of(command)}` |")
    return "\n".join(rows)


def example_of(command: Any) -> str:
    """The command line of the help's example."""
    return str(command.epilog or "").removeprefix("Example: ")


def with_table(readme: str) -> str:
    """The README with the table of the commands as they are."""
    head, rest = readme.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n\n{commands_table()}\n\n{END}{tail}"


def main() -> None:
    """Rewrite README.md and the schema of the checkout."""
    package = Path(__file__).parent
    readme = package.parent.parent / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (package / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")
    (package.parent / "gate" / gate_file.SCHEMA_FILE).write_text(gate_file.schema_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
