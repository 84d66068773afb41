"""A mock server that listens: in a thread, in a process of its own, or until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spectune.backend.mock_server.http import serve
from spectune.backend.mock_server.settings import MockSettings
from spectune.backend.mock_server.sglang_face import SglangFace
from spectune.backend.mock_server.vllm_face import VllmFace
from spectune.errors import RunError, UsageError

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MockServer:
    """Where a mock server listens."""

    url: str
    model: str


def face_of(settings: MockSettings) -> VllmFace:
    """Whose protocol the settings declare."""
    return {"vllm": VllmFace, "sglang": SglangFace}[settings.face](settings)


async def listen(
    settings: MockSettings, host: str, port: int, *, started: Callable[[MockServer], None]
) -> None:
    """Serve until cancelled. `started` is called once requests are answered."""
    try:
        server = await serve(face_of(settings).answer, host, port)
    except OSError as error:
        raise UsageError(
            f"--port {port} cannot be used: {error.strerror}", hint="0 takes a free one"
        ) from error
    own_port = server.sockets[0].getsockname()[1]
    started(MockServer(url=f"http://{host}:{own_port}", model=settings.model))
    async with server:
        await server.serve_forever()


@contextmanager
def mock_thread(settings: MockSettings) -> Iterator[MockServer]:
    """In a thread of this process: starts at once, shares the interpreter with its client."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    found: list[MockServer] = []

    def started(server: MockServer) -> None:
        found.append(server)
        ready.set()

    task = loop.create_task(listen(settings, HOST, 0, started=started))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        for rest in asyncio.all_tasks(loop):
            rest.cancel()
        loop.run_until_complete(_settled(loop))
        loop.close()

    thread = threading.Thread(target=run, name="mock-server", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


async def _settled(loop: asyncio.AbstractEventLoop) -> None:
    own = asyncio.current_task()
    await asyncio.gather(
        *(task for task in asyncio.all_tasks(loop) if task is not own), return_exceptions=True
    )


@contextmanager
def mock_process(settings: MockSettings) -> Iterator[MockServer]:
    """In a process of its own, ended when the block is left."""
    argv = [sys.executable, "-m", "spectune.backend.mock_server", json.dumps(settings.to_dict())]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            if not line:
                raise RunError(f"the mock server ended with exit code {process.wait()} before it listened")
            yield MockServer(url=json.loads(line)["url"], model=settings.model)
        finally:
            process.terminate()


def announce(server: MockServer) -> None:
    """One JSON line on stdout for whoever started the process."""
    print(json.dumps({"url": server.url, "model": server.model, "is_simulated": True}), flush=True)
