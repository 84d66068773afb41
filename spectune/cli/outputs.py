"""Files that the user named on the command line."""

from __future__ import annotations

from pathlib import Path

from spectune.errors import UsageError


def write_text(path: Path, text: str, flag: str) -> None:
    """Written whole or not at all; UsageError that names the flag where that is impossible."""
    from spectune.store.files import replacing

    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written: {error.strerror or error}") from error
