"""The end of a server's log and its exit code become a cause, the line that says so and what to do."""

from __future__ import annotations

import pytest

from spectune.backend.server_failures import Cause, diagnose
from spectune.errors import EngineFailure, OutOfMemory

# Ends of logs as vLLM 0.32 writes them; the reason is never the last line.
LOGS = {
    "unknown flag": (
        "                     [model_tag]\napi_server.py: error: unrecognized arguments: --nonsense",
        2,
        Cause.BAD_FLAG,
        "unrecognized arguments: --nonsense",
    ),
    "no model": (
        "(APIServer pid=7) Traceback (most recent call last):\n"
        '  File "hub.py", line 595, in cached_files\n    raise OSError(f"{e}") from e\n'
        "OSError: Repo id must be in the form 'repo_name': '/nowhere'.\nnanobind: leaked 4 instances!",
        1,
        Cause.NO_MODEL,
        "/nowhere",
    ),
    "no memory at start": (
        "(EngineCore pid=9) ValueError: No available memory for the cache blocks. Try increasing.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.",
        1,
        Cause.NO_MEMORY,
        "No available memory for the cache blocks",
    ),
    "no memory under load": (
        "\x1b[1;36m(Worker pid=9)\x1b[0;0m torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\nShutting down",
        1,
        Cause.NO_MEMORY,
        "CUDA out of memory",
    ),
    "port taken": (
        "OSError: [Errno 98] error while attempting to bind: address already in use",
        1,
        Cause.PORT_TAKEN,
        "address already in use",
    ),
    "refused combination": (
        "(APIServer pid=7) pydantic_core.ValidationError: 1 validation error for SpeculativeConfig: \n"
        "  Value error, num_speculative_tokens must be greater than zero\n"
        "    For further information visit https://errors.pydantic.dev",
        1,
        Cause.BAD_FLAG,
        "num_speculative_tokens must be greater than zero",
    ),
    "anything else": ("loading\nbang", 3, Cause.DIED, "bang"),
}


@pytest.mark.parametrize("name", LOGS)
def test_diagnose_names_the_cause_and_quotes_the_line(name: str) -> None:
    """Each way to fail is told apart, and the log's own words say why."""
    tail, code, cause, quoted = LOGS[name]

    found = diagnose(tail, code, log="server.log")

    assert found.cause is cause
    assert quoted in found.evidence
    assert "server.log" in found.hint


def test_diagnose_killed_from_outside_is_told() -> None:
    """A process that a signal ended says nothing itself; the signal does."""
    found = diagnose("INFO all is well", -9, log="server.log")

    assert found.cause is Cause.DIED
    assert "killed by a signal" in found.evidence


def test_diagnosis_error_is_out_of_memory_only_for_memory() -> None:
    """Memory has a failure of its own, because a smaller share may help."""
    memory = diagnose("torch.OutOfMemoryError: CUDA out of memory", 1, log="x").error("it died")
    other = diagnose("bang", 1, log="x").error("it died")

    assert isinstance(memory, OutOfMemory)
    assert type(other) is EngineFailure
    assert "it died: died: bang (exit code 1)" == other.message


def test_diagnose_silence() -> None:
    """A log without a word is said to be one; a server that still runs has no exit code."""
    assert diagnose("", 1, log="x").evidence == "it said nothing (exit code 1)"
    assert diagnose("", None, log="x").evidence == "it said nothing"
