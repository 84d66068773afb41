"""Process groups that leave nothing behind: what a command started, found and ended by id.

A server's workers may outlive it, be re-parented or rename themselves, but they keep its session. Only
processes of a session that was started here are ever signalled.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

PROC = Path("/proc")
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

TERM_S = 15.0
"""Time to end by itself after SIGTERM."""
KILL_S = 10.0
"""Time to disappear after SIGKILL."""

ORPHAN_S = 10.0
"""Time that a session has to end by itself after we died; the kernel has sent its leader SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process of a session: its id, the moment it started (ids are used again) and its name."""

    pid: int
    started: str
    name: str


def start_group(
    argv: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes], orphan_s: float = ORPHAN_S
) -> subprocess.Popen[bytes]:
    """Start a command as the leader of a session of its own.

    On Linux the whole session ends when we die, however we die: its leader gets SIGTERM from the kernel,
    and what still lives `orphan_s` later is killed by a guard.
    """
    command = list(argv)
    if sys.platform == "linux":  # this file as a script: see run_tied
        command = [sys.executable, "-I", __file__, str(os.getpid()), str(orphan_s), *command]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=child_environment(environment),
        start_new_session=True,
    )


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Our environment without what would change the engine: our modules, our number of threads."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    return {**kept, **own}


def session_members(session: int, *, proc: Path = PROC) -> list[Member]:
    """Living processes of a session; empty where the system does not tell (another one than Linux)."""
    members = []
    for folder in proc.glob("[0-9]*"):
        fields = _stat(folder)
        if fields is not None and fields["session"] == str(session) and fields["state"] not in "ZX":
            members.append(Member(pid=int(folder.name), started=fields["started"], name=fields["name"]))
    return sorted(members, key=lambda member: member.pid)


def stop_group(
    leader: subprocess.Popen[bytes],
    *,
    term_s: float = TERM_S,
    kill_s: float = KILL_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Member]:
    """End the whole session of `leader`; returns what could not be ended, which is nearly never anything.

    SIGTERM first; what still lives after `term_s` is killed.
    """
    session = leader.pid
    _signal_group(session, signal.SIGTERM)
    if not _wait_gone(leader, session, term_s, clock, sleep):
        _signal_group(session, signal.SIGKILL)
        for member in session_members(session):  # those that left the group but not the session
            _signal_member(member)
        _wait_gone(leader, session, kill_s, clock, sleep)
    return session_members(session)


def _wait_gone(
    leader: subprocess.Popen[bytes],
    session: int,
    limit_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> bool:
    end = clock() + limit_s
    while True:
        ended = leader.poll() is not None  # also takes away its zombie
        if ended and not session_members(session):
            return True
        if clock() >= end:
            return False
        sleep(0.05)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return  # nobody is left in it


def _signal_member(member: Member) -> None:
    """Kill one process if it still is the one that was seen."""
    fields = _stat(PROC / str(member.pid))
    if fields is None or fields["started"] != member.started:
        return
    try:
        os.kill(member.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # it has just ended, or became another user's


def _stat(folder: Path) -> dict[str, str] | None:
    """Name, state, session and start time of /proc/<pid>/stat; None if the process is gone.

    The name may hold spaces and brackets: the fields begin after the last bracket (proc(5)).
    """
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    return {
        "name": head.partition("(")[2],
        "state": fields[0],
        "session": fields[3],
        "started": fields[19],
    }


def run_tied(parent: int, orphan_s: float, command: Sequence[str]) -> NoReturn:
    """Become `command`, after a guard is told to end our session when `parent` dies.

    SIGTERM alone is not enough: a server that is still starting may wait for a worker that waits for it.
    """
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    leader = os.getpid()
    watched: tuple[int, int] | None = None
    with contextlib.suppress(AttributeError, OSError):  # Linux before 5.3, or a Python built for one
        watched = os.pidfd_open(parent), os.pidfd_open(leader)
    if os.getppid() != parent:
        sys.exit(1)
    if watched is not None:
        _leave_guard(*watched, leader, orphan_s)
    os.execvpe(command[0], list(command), os.environ)


def _leave_guard(parent: int, first: int, leader: int, orphan_s: float) -> None:
    """Fork the guard twice, so that the command has no child that it does not know; best effort."""
    try:
        child = os.fork()
    except OSError:
        return  # no room for one more process: the server may still start
    if child == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _guard(parent, first, leader, orphan_s)
        finally:
            os._exit(0)
    with contextlib.suppress(ChildProcessError):  # nobody waits for children where SIGCHLD is ignored
        os.waitpid(child, 0)
    os.close(parent)
    os.close(first)


def _guard(parent: int, first: int, leader: int, orphan_s: float) -> None:
    """Wait until the session of `leader` is empty, or until the parent dies and the session had its time.

    What is left of the session then is killed. parent, first: pidfds of the parent and of the leader.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # meant for the server, whose words we bear
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    waiting = select.poll()
    waiting.register(parent, select.POLLIN)
    waiting.register(first, select.POLLIN)
    timeout: int | None = None  # asleep while both live: a look around would cost what is measured beside us
    while parent not in (ended := [descriptor for descriptor, _ in waiting.poll(timeout)]):
        if first in ended:
            waiting.unregister(first)
            timeout = 1000  # ms
        if not session_members(leader):
            return
    end = time.monotonic() + orphan_s
    while (members := session_members(leader)) and time.monotonic() < end + KILL_S:
        if time.monotonic() >= end:
            for member in members:
                _signal_member(member)
        time.sleep(0.1)


if __name__ == "__main__":
    run_tied(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
