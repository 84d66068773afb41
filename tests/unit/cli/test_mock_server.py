"""`spectune mock-server`: flags become settings, the address is told, mistakes are told before it listens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from spectune.backend.client import run_requests
from spectune.backend.server_api import engine_version
from spectune.workload.arrivals import ClosedLoop
from tests.support.served import asked


def test_server_started_from_the_command_line_answers() -> None:
    """One line of JSON tells the address; vLLM's own flag for speculation is understood."""
    config = json.dumps({"method": "ngram", "num_speculative_tokens": 2})
    argv = [sys.executable, "-m", "spectune", "mock-server", "--port", "0", "--json"]
    argv += ["--served-model-name", "name", "--speculative-config", config, "--acceptance", "1.0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = json.loads(process.stdout.readline())  # type: ignore[union-attr]
            record = run_requests(address["url"], "name", [asked(max_tokens=7)], ClosedLoop(concurrency=1))[0]
            version = engine_version(address["url"])
        finally:
            process.terminate()

    assert address["is_simulated"]
    assert version["is_simulated"]
    assert [3, 3] == [step.num_emitted for step in record.steps or ()]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--fail", "explode"], "--fail explode is not known"),
        (["--acceptance", "high"], "--acceptance high is not a list of fractions"),
        (["--acceptance", "1.5"], "is not a list of fractions 0..1"),
        (["--quirk", "odd"], "--quirk odd is not known"),
        (["--num-tokens", "-1"], "--num-tokens -1 is below 0"),
        (["--speculative-config", "{}"], "--speculative-config {} cannot be read"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_flags_are_usage_errors(spectune: Callable[..., Any], flags: list[str], error: str) -> None:
    """The flag and its value are quoted."""
    answer = spectune("mock-server", "--port", "0", *flags)

    assert 2 == answer.code
    assert error in answer.err
