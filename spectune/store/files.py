"""Files written whole or not at all, and what the system says against a file, by its name."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spectune.errors import StoreError


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary path beside `file` to write to; renamed to `file` once it is on disk.

    Readers see the old file or the whole new one, and what breaks off leaves the old one. Folders that
    are missing are made. OSError as the system raises it.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    finally:
        with contextlib.suppress(OSError):  # its folder may be what is wrong
            temporary.unlink(missing_ok=True)


@contextmanager
def naming_errors(file: Path, done: str = "written") -> Iterator[None]:
    """OSError as a StoreError that names the file and what could not be `done` with it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"no space left on the disk of {file}", hint="free some space, then --resume the run"
            ) from error
        raise StoreError(f"{file} cannot be {done}: {error.strerror or error}") from error
