"""Why a server did not start or died: the end of its log and its exit code in, a named failure out."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import StrEnum

from spectune.errors import EngineFailure, OutOfMemory, RunError

TAIL_LINES = 400
QUOTED_LENGTH = 300


class Cause(StrEnum):
    """What went wrong with a server."""

    BAD_FLAG = "bad flag"
    NO_MODEL = "missing model"
    NO_MEMORY = "out of memory"
    PORT_TAKEN = "port taken"
    TIMEOUT = "not ready in time"
    DIED = "died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Cause, the line of the log that says so, and what to do."""

    cause: Cause
    evidence: str
    hint: str

    def error(self, what: str) -> RunError:
        """The failure to raise; `what` says which server did what."""
        message = f"{what}: {self.cause}" + (f": {self.evidence}" if self.evidence else "")
        kind = OutOfMemory if self.cause is Cause.NO_MEMORY else EngineFailure
        return kind(message, hint=self.hint)


# The first pattern that a line of the log matches decides; the last such line is quoted.
_PATTERNS: tuple[tuple[Cause, re.Pattern[str], str], ...] = (
    (
        Cause.BAD_FLAG,
        re.compile(
            r"error: (unrecognized arguments|argument |invalid choice|ambiguous option)|no such option|"
            r"unexpected keyword argument",
            re.I,
        ),
        "the engine does not know the argument: compare with the help of its own version",
    ),
    (
        Cause.NO_MEMORY,
        re.compile(
            r"out of memory|OutOfMemoryError|cannot allocate memory|can't allocate memory|MemoryError|"
            r"No available memory for the cache blocks|not enough memory|"
            r"(larger than|exceeds) the available (KV cache )?memory|Free memory on device",
            re.I,
        ),
        "a smaller share of memory, a shorter maximum length or fewer sequences",
    ),
    (
        Cause.PORT_TAKEN,
        re.compile(r"address already in use|\[Errno 98\]", re.I),
        "another program took the port between the check and the start: try again",
    ),
    (
        Cause.NO_MODEL,
        re.compile(
            r"is not a local folder and is not a valid model identifier|Repository Not Found|"
            r"Can't load the configuration of|does not appear to have a file named|"
            r"couldn't connect to .* to load the files|HFValidationError|Invalid repository ID|"
            r"No such file or directory: .*config\.json|outgoing traffic has been disabled|"
            r"Cannot find any model weights|Repo id must be in the form",
            re.I,
        ),
        "check the path or name of the target and of the draft",
    ),
    (
        Cause.BAD_FLAG,
        re.compile(r"(ValidationError|ValueError|NotImplementedError|AssertionError): ", re.I),
        "the engine refuses this combination of settings",
    ),
)
_NEUTRAL = re.compile(r"^\s*(File |Traceback|raise |return |\^+|~+|For further information)")


def diagnose(tail: str, returncode: int | None, *, log: str) -> Diagnosis:
    """What the end of a log means; `log` is where the whole of it lies."""
    code = f" (exit code {returncode})" if returncode is not None and returncode > 0 else ""
    lines = [_bare(line) for line in tail.splitlines() if line.strip() and not _NEUTRAL.match(_bare(line))]
    for cause, pattern, advice in _PATTERNS:
        matching = [i for i, line in enumerate(lines) if pattern.search(line)]
        if matching:
            # pydantic puts the reason on the line after the heading
            quoted = (
                " ".join(lines[matching[-1] : matching[-1] + 3])
                if cause is Cause.BAD_FLAG
                else lines[matching[-1]]
            )
            return Diagnosis(cause=cause, evidence=_short(quoted) + code, hint=f"{advice}; whole log: {log}")
    if returncode == -signal.SIGKILL:
        return Diagnosis(
            cause=Cause.NO_MEMORY if "killed" in tail.lower() else Cause.DIED,
            evidence="killed by a signal from outside (the system kills what exhausts its memory)",
            hint=f"watch the memory of the machine; whole log: {log}",
        )
    last = lines[-1] if lines else "it said nothing"
    return Diagnosis(cause=Cause.DIED, evidence=_short(last) + code, hint=f"whole log: {log}")


def _bare(line: str) -> str:
    """A log line without the process prefix and colours that engines put before it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", line).strip()
    return re.sub(r"^\([\w:]+ pid=\d+\)\s*", "", text)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= QUOTED_LENGTH else f"{line[:QUOTED_LENGTH]}..."
