"""Settings as command-line words, and the user's own launcher around them; knows no engine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from spectune.errors import UsageError


def render(flags: Mapping[str, str | bool]) -> list[str]:
    """Command-line words of settings; False is left out, True has no value."""
    words = []
    for name, value in flags.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if value is not True:
            words.append(value)
    return words


def launcher(server_cmd: str, arguments: Sequence[str], port: int) -> list[str]:
    """The user's own launcher: a word `{args}` becomes all arguments, `{port}` inside a word the port."""
    words = shlex.split(server_cmd)
    if "{args}" not in words:
        raise UsageError(
            f"--server-cmd {server_cmd!r} has no word {{args}}",
            hint="for example --server-cmd 'my-launcher IMAGE {args}'",
        )
    argv: list[str] = []
    for word in words:
        argv += arguments if word == "{args}" else [word.replace("{port}", str(port))]
    return argv
