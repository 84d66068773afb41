"""Reading the user's own arguments for a server: names in any spelling, values after a space or an equals sign."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def plain_name(word: str) -> str:
    """`max_model-len=5`, after any dashes, is `max-model-len`."""
    return word.lstrip("-").split("=")[0].replace("_", "-")


def extra_value(extra: Sequence[str], *names: str, name_of: Callable[[str], str] = plain_name) -> str | None:
    """Value of a flag that is called one of `names`; the last one, as argparse has it. None if it is not there."""
    found = None
    for index, word in enumerate(extra):
        if not word.startswith("-") or name_of(word) not in names:
            continue
        _, equals, value = word.partition("=")
        if equals:
            found = value
        elif index + 1 < len(extra) and not extra[index + 1].startswith("--"):
            found = extra[index + 1]
    return found
