"""An engine in another process and another environment: JSON lines over its standard input and output.

`COMMAND` is `python -m spectune.cli.worker` of that environment. Every `open` starts a process, so a
start is a real one. Blocks travel in the layout of a run's request files.
"""

from __future__ import annotations

import base64
import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

from spectune.errors import EngineFailure, UsageError
from spectune.records import (
    BlockResult,
    Capabilities,
    Fingerprint,
    Gap,
    Launch,
    Point,
    Prompt,
    Request,
    Session,
)
from spectune.store.codec import unpack_blocks

STOP_S = 30.0


class WorkerBackend:
    """The backend that `settings` name, in a process of `command`.

    Args:
        command: what starts the worker, as a list of words.
        settings: those of spectune sweep.
        side: base or head, for messages and for the noise of a simulated engine.
    """

    def __init__(self, command: Sequence[str], settings: Mapping[str, Any], *, side: str) -> None:
        if not command:
            raise UsageError(f"--{side}-cmd is empty")
        self._command, self._settings, self._side = list(command), dict(settings), side
        self._num_starts = 0
        self._described: dict[str, Any] | None = None

    def capabilities(self) -> Capabilities:
        return Capabilities(**{**self._describe()["capabilities"], "methods": tuple(self._methods)})

    @property
    def _methods(self) -> Sequence[str]:
        methods: Sequence[str] = self._describe()["capabilities"]["methods"]
        return methods

    def plan(self, points: Sequence[Point]) -> list[Launch]:
        return [Launch(points=tuple(points))] if points else []

    def open(self, launch: Launch) -> AbstractContextManager[Session]:
        return self._open()

    @contextmanager
    def _open(self) -> Iterator[Session]:
        with self._process() as worker:
            self._described = worker.ask({"do": "open"})
            yield worker

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(**self._describe()["fingerprint"])

    def encode(self, prompt: Prompt, context_text: str, context_tokens: int) -> tuple[int, ...]:
        """Prompts are encoded once, by the side that is here."""
        raise UsageError(f"the {self._side} side encodes no prompts")

    def _describe(self) -> dict[str, Any]:
        if self._described is None:
            with self._process() as worker:
                self._described = worker.ask({"do": "open"})
        return self._described

    @contextmanager
    def _process(self) -> Iterator[_Worker]:
        self._num_starts += 1
        flag = f"--{self._side}-cmd"
        try:
            process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise UsageError(f"{flag} {self._command[0]} cannot be started: {error.strerror}") from error
        worker = _Worker(process, flag)
        try:
            worker.ask({"do": "settings", "settings": self._settings, "side": self._side,
                        "start": self._num_starts})  # fmt: skip
            yield worker
        finally:
            worker.stop()


class _Worker:
    """One process: a question a line, an answer a line."""

    def __init__(self, process: subprocess.Popen[str], flag: str) -> None:
        self._process, self._flag = process, flag

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended: what it said before tells more
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError as error:
            raise EngineFailure(f"{self._flag}: the worker has gone: {error.strerror}") from error
        try:
            answer = json.loads(line)
        except ValueError as error:
            said = line.strip()[:200] or f"nothing (exit code {self._process.poll()})"
            raise EngineFailure(
                f"{self._flag} answered {said!r}, which is no JSON",
                hint="the command must start `python -m spectune.cli.worker` and keep its standard output clean",
            ) from error
        if "error" in answer:
            raise EngineFailure(f"{self._flag}: {answer['error']}")
        found: dict[str, Any] = answer
        return found

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult:
        answer = self.ask(
            {"do": "run", "point": point.canonical, "requests": [asdict(request) for request in requests]}
        )
        blocks = unpack_blocks(base64.b64decode(answer["block"]), where=self._flag)
        return blocks[0]

    def gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        return None

    def stop(self) -> None:
        """Ask the process to end; end it if it does not."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
