"""A serving engine as a process of ours: started, watched, asked whether it is ready, stopped whole.

Knows HTTP and processes; knows nothing of any engine's flags or metrics.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spectune.backend import server_api
from spectune.backend.payload import Dialect
from spectune.backend.processes import TERM_S, Member, session_members, start_group, stop_group
from spectune.backend.server_api import probe, served_models
from spectune.backend.server_failures import TAIL_LINES, Cause, Diagnosis, diagnose
from spectune.errors import EngineFailure, RunError, UsageError

HOST = "127.0.0.1"
WATCH_S = 1.0
PROBE_DEATH_CHECKS = 3
"""How often a starting server is asked, and its process looked at."""
READY_TIMEOUT_S = 900.0
HELD_LIMIT_BYTES = 512 * 1024 * 1024
RELEASE_CHECKS = 15
PROBE_TIMEOUT_S = 120.0
"""The first token of a cold engine may have to compile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """What is started. `served_model` is the name that only this server answers to."""

    argv: tuple[str, ...]
    port: int
    served_model: str
    environment: Mapping[str, str] = field(default_factory=dict)
    dialect: Dialect = Dialect.VLLM

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


class Server:
    """A server that we started and that was ready once."""

    def __init__(self, command: ServerCommand, process: subprocess.Popen[bytes], log: Path) -> None:
        self.command = command
        self.log = log
        self._process = process

    @property
    def url(self) -> str:
        return self.command.url

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def members(self) -> list[Member]:
        """All processes that belong to it."""
        return session_members(self.pid)

    def resident_bytes(self) -> int | None:
        """Memory of all its processes, shared pages shared out; None where the system does not tell."""
        sizes = [_proportional_bytes(member.pid) for member in self.members()]
        known = [size for size in sizes if size is not None]
        return sum(known) if known else None

    def diagnosis(self) -> Diagnosis:
        """What the end of its log says."""
        return diagnose(log_tail(self.log), self._process.poll(), log=str(self.log))

    def is_healthy(self, *, timeout_s: float = 10.0) -> bool:
        """Whether the process lives and its engine answers; a dead engine leaves the HTTP part up."""
        return self.is_alive and server_api.is_healthy(self.url, timeout_s=timeout_s)

    def stop(self, *, term_s: float = TERM_S) -> list[Member]:
        """End all its processes, `term_s` after the polite signal by force; returns those that would not."""
        return stop_group(self._process, term_s=term_s)


@contextlib.contextmanager
def serve(
    command: ServerCommand,
    *,
    log: Path,
    ready_timeout_s: float = READY_TIMEOUT_S,
    term_s: float = TERM_S,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Server]:
    """A ready server for the time of the block; ended afterwards, whatever happened.

    Ready means that /health answers, that it serves our name, and that one token comes back. Raises
    OutOfMemory or EngineFailure with the end of the log within seconds of the process's death.
    """
    check_port_free(command.port)
    if shutil.which(command.argv[0]) is None:
        raise UsageError(f"{command.argv[0]} cannot be started: there is no such program")
    held_before = device_memory_bytes()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command.argv)}\n".encode())
        output.flush()
        try:
            process = start_group(command.argv, environment=command.environment, output=output)
        except OSError as error:
            raise UsageError(f"{command.argv[0]} cannot be started: {error.strerror}") from error
    server = Server(command, process, log)
    try:
        started = clock()
        _wait_ready(server, ready_timeout_s, clock, sleep)
        say(f"server ready after {clock() - started:.0f} s")
        yield server
    finally:
        _report_left(server.stop(term_s=term_s), held_before, say)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port_free(port: int) -> None:
    """UsageError where somebody answers on the port: that server would be measured instead of ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UsageError(
                f"--port {port} is taken by another program", hint="another --port, or none for a free one"
            ) from error


def log_tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of the last start in a log, for people and for `diagnose`."""
    try:
        data = log.read_bytes()[-100_000:]
    except OSError:
        return ""
    told = data.decode(errors="replace").splitlines()
    starts = [index for index, line in enumerate(told) if line.startswith("$ ")]
    return "\n".join(told[starts[-1] + 1 if starts else 0 :][-lines:])


def device_memory_bytes() -> int | None:
    """Memory in use on all NVIDIA devices; None where there are none."""
    told = _ask_driver("query-gpu", "memory.used")
    if told is None:
        return None
    return sum(int(line) for line in told if line.isdigit()) * 1024 * 1024


def _ask_driver(query: str, fields: str) -> list[str] | None:
    """Lines of nvidia-smi; None where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(
        ["nvidia-smi", f"--{query}={fields}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else None
    )


def _wait_ready(
    server: Server, limit_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    end = clock() + limit_s
    while not server.is_healthy(timeout_s=WATCH_S * 2):
        if not server.is_alive:
            raise server.diagnosis().error("the server did not start")
        if clock() >= end:
            diagnosis = Diagnosis(
                cause=Cause.TIMEOUT,
                evidence=f"no answer from /health within {limit_s:.0f} s",
                hint=f"a larger --server-ready-timeout; its log: {server.log}",
            )
            raise diagnosis.error("the server did not start")
        sleep(WATCH_S)
    try:
        check_ready(server.url, server.command.served_model, server.command.dialect)
    except EngineFailure as error:
        for _ in range(PROBE_DEATH_CHECKS):  # it may be about to die, and then its log knows why
            if not server.is_alive:
                raise server.diagnosis().error("the server did not start") from error
            sleep(WATCH_S)
        raise
    if not server.is_alive:
        raise server.diagnosis().error("the server did not start")


def check_ready(url: str, served_model: str, dialect: Dialect = Dialect.VLLM) -> None:
    """The server answers to our name and its engine gives a token; EngineFailure otherwise."""
    names = served_models(url)
    if served_model not in names:
        raise EngineFailure(
            f"the server at {url} serves {', '.join(names)}, not {served_model}: "
            "it is not the one that was started"
        )
    token = probe(url, served_model, timeout_s=PROBE_TIMEOUT_S, dialect=dialect)
    if not token.is_success:
        raise EngineFailure(f"the server at {url} gives no first token: {token.error}")


def _report_left(
    left: list[Member],
    held_before: int | None,
    say: Callable[[str], None],
    *,
    read_held: Callable[[], int | None] = device_memory_bytes,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """RunError naming processes that would not end, or whoever still holds the device's memory: the
    next start would find it taken. Drivers give memory back with some delay."""
    if left:
        names = ", ".join(f"{member.pid} ({member.name})" for member in left)
        say(f"processes of the server would not end: {names}")
        raise RunError(
            f"processes of the server would not end: {names}", hint="end them by hand, then resume"
        )
    if held_before is None:
        return
    more = 0
    for _ in range(RELEASE_CHECKS):
        more = (read_held() or 0) - held_before
        if more <= HELD_LIMIT_BYTES:
            return
        sleep(WATCH_S)
    raise RunError(
        f"the device holds {more / 2**30:.1f} GiB more than before the server was started: "
        f"{_device_holders() or 'the driver names nobody'}",
        hint="end what holds it, then resume",
    )


def _device_holders() -> str:
    return "; ".join(
        f"{line} MiB" for line in _ask_driver("query-compute-apps", "pid,name,used_memory") or ()
    )


def _proportional_bytes(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return None
