"""Sessions end with whoever started them, however that one ended and whatever they are doing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spectune.backend import processes
from spectune.backend.processes import session_members, start_group, stop_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sessions are read from /proc")
needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this Python was built without pidfd")

# two processes that wait for each other and hear no SIGTERM: a server that hangs in its start
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.fork()
print("deaf", flush=True)
time.sleep(600)
"""
STARTER = """
import sys, time
from pathlib import Path
from spectune.backend.processes import start_group
with open(sys.argv[1], "wb") as log:
    leader = start_group([sys.executable, "-c", sys.argv[2]], environment={}, output=log, orphan_s=0.5)
print(leader.pid, flush=True)
time.sleep(600)
"""


def until(holds: Callable[[], bool], limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def guards(leader: int) -> list[str]:
    """Living processes outside the session that run the launcher's file for this leader."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            links = [os.readlink(link) for link in (folder / "fd").iterdir()]
            watched = [(folder / "fdinfo" / link.name).read_text() for link in (folder / "fd").iterdir()]
        except OSError:
            continue
        if processes.__file__.encode() in words and any("pidfd" in link for link in links):
            found += [folder.name for text in watched if f"Pid:\t{leader}\n" in text]
    return found


@needs_pidfd
def test_session_deaf_to_signals_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    """Two processes that ignore SIGTERM are gone soon after SIGKILL of the process that started them."""
    log = tmp_path / "log"
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(log), DEAF], stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    session = int(starter.stdout.readline())
    assert until(lambda: log.read_bytes().count(b"deaf") == 2)
    assert len(session_members(session)) == 2

    starter.kill()
    starter.wait()
    starter.stdout.close()

    assert until(lambda: session_members(session) == [])
    assert until(lambda: guards(session) == [])


@needs_pidfd
def test_session_that_is_stopped_leaves_no_guard(tmp_path: Path) -> None:
    """While the session lives one guard watches it; after stop_group neither is left."""
    with (tmp_path / "log").open("wb") as log:
        leader = start_group([sys.executable, "-c", DEAF], environment={}, output=log)
    assert until(lambda: (tmp_path / "log").read_bytes().count(b"deaf") == 2)
    assert until(lambda: len(guards(leader.pid)) == 1)

    left = stop_group(leader, term_s=0.2)

    assert left == []
    assert until(lambda: guards(leader.pid) == [])


@needs_pidfd
def test_session_keeps_running_after_its_leader_while_we_live(tmp_path: Path) -> None:
    """A worker that outlives its leader is not killed by the guard: it is ours to stop."""
    worker = "import os, time\nif os.fork() == 0:\n    print('up', flush=True)\n    time.sleep(600)\n"
    with (tmp_path / "log").open("wb") as log:
        leader = start_group([sys.executable, "-c", worker], environment={}, output=log, orphan_s=0.1)
    leader.wait()
    assert until(lambda: b"up" in (tmp_path / "log").read_bytes())
    time.sleep(1.5)  # longer than the guard's look around and its patience together

    assert len(session_members(leader.pid)) == 1
    assert stop_group(leader, term_s=5.0) == []
    assert until(lambda: guards(leader.pid) == [])


def test_command_starts_where_python_has_no_pidfd(tmp_path: Path) -> None:
    """Without pidfd_open there is no guard, and the command runs all the same."""
    bare = (
        "import os, sys; del os.pidfd_open; sys.argv[:] = sys.argv[1:]; " if hasattr(os, "pidfd_open") else ""
    )
    launcher = (
        f"{bare or 'import sys; sys.argv[:] = sys.argv[1:]; '}"
        f"exec(compile(open({processes.__file__!r}).read(), {processes.__file__!r}, 'exec'))"
    )
    words = [str(os.getpid()), "1.0", sys.executable, "-c", "print('up')"]

    done = subprocess.run(
        [sys.executable, "-c", launcher, processes.__file__, *words],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "up\n"), done.stderr


@needs_pidfd
def test_command_that_ignores_its_children_still_gets_a_guard(tmp_path: Path) -> None:
    """SIGCHLD ignored, as a shell may hand it down: the command starts and its guard lives."""
    starter = STARTER.replace(
        "import sys, time", "import signal, sys, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    )
    log = tmp_path / "log"
    process = subprocess.Popen(
        [sys.executable, "-c", starter, str(log), DEAF], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    session = int(process.stdout.readline())
    assert until(lambda: log.read_bytes().count(b"deaf") == 2)
    assert until(lambda: len(guards(session)) == 1)

    process.kill()
    process.wait()
    process.stdout.close()

    assert until(lambda: session_members(session) == [])
