"""Docs cannot rot: commands, README and published schemas are compared."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from spectune.cli.app import app
from spectune.cli.docs import example_of, walk, with_table

ROOT = Path(__file__).parent.parent
README = ROOT.joinpath("README.md").read_text(encoding="utf-8")
COMMANDS = dict(walk())
SHELL_BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
COMMAND_LINES = [
    part.strip()
    for block in SHELL_BLOCKS
    for line in block.splitlines()
    for part in line.split("&&")
    if part.strip().startswith(("spectune ", ".venv/bin/spectune "))
]


def parse(command_line: str) -> str:
    """Parse a command line without running it; the command it names, or what a person would get."""
    words = shlex.split(command_line.split(">")[0])[1:]
    command: Any = typer.main.get_command(app)
    context, names = None, []
    while True:
        context = command.make_context(words[0] if words else "spectune", list(words), parent=context)
        if not hasattr(command, "commands"):
            return " ".join(names)
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        names.append(name)


def flags_of_all_commands() -> set[str]:
    """Every flag that some command takes."""
    commands: list[Any] = [typer.main.get_command(app)]
    flags = {"--help"}
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        for parameter in command.params:
            flags |= {*parameter.opts, *parameter.secondary_opts}
    return flags


@pytest.mark.parametrize(
    "stage", ["tune", "measure", "backend", "workload", "engine", "draft", "train", "store"]
)
def test_flags_named_below_the_command_line_exist(stage: str) -> None:
    """An error that tells the user to change a flag names one that there is."""
    words = {
        flag
        for file in (ROOT / "spectune" / stage).rglob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if "pip" not in line and "doctor" not in file.parts  # it speaks of the engines' flags
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
    }

    assert set() == words - flags_of_all_commands()


def test_readme_has_commands_to_check() -> None:
    """The README shows commands, and the search for them finds them."""
    assert len(COMMAND_LINES) > 10


@pytest.mark.parametrize("command_line", COMMAND_LINES)
def test_readme_command_parses(command_line: str) -> None:
    """Every command of the README exists and has the flags that are shown."""
    assert parse(command_line) in COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_help_and_an_example_that_parses(name: str) -> None:
    """Every command explains itself and its options, and its example works."""
    command = COMMANDS[name]

    assert command.help
    assert all(getattr(option, "help", None) for option in command.params)
    assert example_of(command).startswith(f"spectune {name}")
    parse(example_of(command))


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_json_output(name: str) -> None:
    """Every command can answer a program."""
    assert "--json" in {flag for option in COMMANDS[name].params for flag in option.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_is_in_the_readme(name: str) -> None:
    """Every command is in the README."""
    assert f"`spectune {name}`" in README


def test_readme_table_of_commands_is_current() -> None:
    """The table in the README is the one that follows from the commands."""
    assert with_table(README) == README


def test_readme_has_the_two_set_up_commands() -> None:
    """A newcomer needs one line to get a result and one to run the tests."""
    assert (
        "python -m venv .venv && .venv/bin/pip install '.[engine]' && .venv/bin/spectune sweep --quick"
        in README
    )
    assert "python -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/python -m pytest" in README
