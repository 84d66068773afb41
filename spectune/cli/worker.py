"""`python -m spectune.cli.worker`: the engine of this environment for a gate that runs in another one.

Reads questions from standard input, a JSON object a line, and answers the same way; everything else goes
to standard error. Ends with its input.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spectune.records import Backend, Request, Session


def serve(questions: Iterable[str], answers: IO[str]) -> None:
    """Answer until the questions end."""
    with contextlib.ExitStack() as stack:
        worker = _Worker(stack)
        for line in questions:
            try:
                answer = worker.answer(json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


class _Worker:
    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._backend: Backend | None = None
        self._session: Session | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["do"] == "settings":
            self._backend = _backend(question)
            return {}
        assert self._backend is not None, "settings come first"
        if question["do"] == "open":
            return {
                "capabilities": asdict(self._backend.capabilities()),
                "fingerprint": asdict(self._backend.fingerprint()),
            }
        return {"block": self._run(self._backend, question)}

    def _run(self, backend: Backend, question: dict[str, Any]) -> str:
        from spectune.records import Launch, Point
        from spectune.store.codec import pack_block

        point = Point.from_dict(question["point"])
        if self._session is None:
            self._session = self._stack.enter_context(backend.open(Launch(points=(point,))))
        block = self._session.run(point, [_request(row) for row in question["requests"]])
        return base64.b64encode(pack_block(0, block)).decode()


def _backend(question: dict[str, Any]) -> Backend:
    from spectune.cli.gate_inputs import NOISE_SEEDS, settings_with
    from spectune.cli.inputs import open_backend

    backend = open_backend(settings_with(question["settings"], (), "--base-cmd"))
    if backend.capabilities().is_simulated and hasattr(backend, "noise_seed"):
        # every process is the first start of its engine
        backend.noise_seed = 1000 * NOISE_SEEDS[question["side"]] + question["start"]
    return backend


def _request(row: dict[str, Any]) -> Request:
    from spectune.records import Request, Sampling

    sampling = {**row["sampling"], "stop": tuple(row["sampling"]["stop"])}
    return Request(**{**row, "prompt_ids": tuple(row["prompt_ids"]), "sampling": Sampling(**sampling)})


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
