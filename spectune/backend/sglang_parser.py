"""Asks SGLang's own code, in an environment of its own, what it makes of arguments and adaptive files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from spectune.backend.environments import find_parser
from spectune.backend.recipes import PROBE
from spectune.errors import RunError

TIMEOUT_S = 300.0


def ask_sglang(
    *,
    arguments: Sequence[Sequence[str]] = (),
    policies: Sequence[Mapping[str, Any]] = (),
    python: str | None = None,
) -> dict[str, Any]:
    """`version`, and an answer for each command line and each policy, in their order; see sglang_probe.

    Args:
        arguments: words after `python -m sglang.launch_server`.
        policies: config, initial_steps, captured, events (pairs of batch size and accepted drafts).
        python: interpreter of an environment with SGLang; the installed parser if None.

    Raises BackendMissing where there is no such environment, RunError with its last words where the
    package does not load.
    """
    interpreter = python or find_parser("sglang").python
    asked = {"arguments": [list(words) for words in arguments], "policies": list(policies)}
    done = subprocess.run(
        [interpreter, "-I", str(PROBE)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunError(
            f"sglang of {interpreter} does not load: {words}",
            hint="spectune engines remove sglang --parser-only, then install it again",
        )
    told: dict[str, Any] = json.loads(lines[-1])
    return told
