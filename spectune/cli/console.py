"""What is said and where: data on stdout, everything else on stderr; milliseconds and percent only here."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spectune.errors import RunError, SpectuneError


def say(text: str) -> None:
    """A sentence for the person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def say_error(message: str, hint: str | None = None) -> None:
    """`error: ...` and, after it, `hint: ...`, on stderr."""
    say(f"error: {message}")
    if hint is not None:
        say(f"hint: {hint}")


def print_json(value: Any) -> None:
    """The one JSON document of a command, on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def write_log(error: BaseException, directory: Path | None = None) -> Path:
    """The traceback in a file, in `directory` or the system's place for temporary files."""
    text = "".join(traceback.format_exception(error))
    if directory is not None:
        log = directory / "error.log"
        with log.open("a", encoding="utf-8") as run_log:
            run_log.write(text)
        return log
    with tempfile.NamedTemporaryFile(
        "w", prefix="spectune-error-", suffix=".log", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    return Path(file.name)


@contextmanager
def keep_log_in(directory: Path, *, go_on: str) -> Iterator[None]:
    """An unexpected failure or an interrupt inside leaves a short message and the command to go on.

    The traceback is kept in `directory`.
    """
    try:
        yield
    except SpectuneError:
        raise
    except KeyboardInterrupt:
        say(f"everything done so far is in {directory}")
        say(f"go on with: {go_on}")
        raise
    except Exception as error:
        log = write_log(error, directory)
        raise RunError(
            f"unexpected {type(error).__name__}: {error}",
            hint=f"the traceback is in {log}; go on with: {go_on}",
        ) from error


def ms(seconds: float | None) -> str:
    """Seconds as milliseconds, `-` where nothing was observed."""
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def percent(fraction: float | None) -> str:
    """A fraction as percent, `-` where nothing was observed."""
    return "-" if fraction is None else f"{fraction:.0%}"


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
