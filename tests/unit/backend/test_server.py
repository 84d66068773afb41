"""Servers as processes: ready in two steps, watched, and gone afterwards with everything they started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spectune.backend import server as server_module
from spectune.backend.mock_server import MockSettings, mock_thread
from spectune.backend.processes import session_members
from spectune.backend.server import Server, ServerCommand, check_port_free, free_port, serve
from spectune.backend.server_api import is_healthy
from spectune.errors import EngineFailure, OutOfMemory, RunError, UsageError

STAND_IN = Path(__file__).parents[2] / "support" / "mock_vllm.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups are read from /proc")


def command(*more: str, truth: dict[str, Any] | None = None, port: int | None = None) -> ServerCommand:
    port = port or free_port()
    argv = (sys.executable, str(STAND_IN), "--truth", json.dumps(truth or {}), *more)
    return ServerCommand(
        argv=(*argv, "--served-model-name", "ours", "--port", str(port)), port=port, served_model="ours"
    )


@contextlib.contextmanager
def running(tmp_path: Path, *more: str, **options: Any) -> Iterator[Server]:
    with serve(command(*more, **options), log=tmp_path / "server.log", term_s=0.5) as server:
        yield server


def test_serve_gives_a_ready_server_and_leaves_nothing(tmp_path: Path) -> None:
    """The server answers inside the block; after it no process of its session is left."""
    with running(tmp_path) as server:
        assert server.is_healthy()
        session = server.pid

    assert session_members(session) == []


def test_serve_ends_workers_that_ignore_the_signal_or_lost_their_parent(tmp_path: Path) -> None:
    """Workers deaf to SIGTERM, one of them re-parented, end with their server."""
    with running(tmp_path, "--misbehave", "workers") as server:
        session = server.pid
        assert len(session_members(session)) == 3
        server._process.send_signal(signal.SIGKILL)  # the front end dies first, as users saw it

    assert session_members(session) == []


def test_serve_stops_the_server_after_an_error_in_the_block(tmp_path: Path) -> None:
    """Whatever goes wrong while a server is used, it is ended."""
    sessions = []

    def interrupted() -> None:
        with running(tmp_path) as server:
            sessions.append(server.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert session_members(sessions[0]) == []


def test_serve_ends_nobody_elses_server(tmp_path: Path) -> None:
    """Another server of the same program, started by somebody else, lives on when ours is ended."""
    other = command()
    with subprocess.Popen(other.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as stranger:
        try:
            with running(tmp_path) as server:
                own = server.pid
            assert session_members(own) == []
            assert stranger.poll() is None
        finally:
            stranger.terminate()


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("bad_flag", EngineFailure, "bad flag: .*unrecognized arguments: --nonsense"),
        ("no_model", EngineFailure, "missing model: .*'/nowhere'"),
        ("no_memory", OutOfMemory, "out of memory: .*CUDA out of memory"),
    ],
)
def test_serve_a_server_that_dies_at_its_start_is_told_with_its_own_words(
    kind: str, error: type[Exception], text: str, tmp_path: Path
) -> None:
    """The child is watched: its end is noticed within seconds and long before the time-out, with the line
    that says why and the code that it ended with."""
    began_s = time.monotonic()
    with pytest.raises(error, match=rf"{text}.*\(exit code [12]\)"), running(tmp_path, "--misbehave", kind):
        pass
    assert time.monotonic() - began_s < 10


def test_serve_not_ready_in_time_names_the_flag_and_ends_it(tmp_path: Path) -> None:
    """A server that never answers is ended after the limit, which the user can raise."""
    now = iter(range(10_000))
    serving = serve(
        command("--misbehave", "never_ready"),
        log=tmp_path / "server.log",
        ready_timeout_s=20,
        clock=lambda: float(next(now)) * 10,
        sleep=lambda seconds: None,
    )

    with pytest.raises(
        EngineFailure, match="not ready in time: no answer from /health within 20 s"
    ) as caught:
        serving.__enter__()

    assert "--server-ready-timeout" in str(caught.value.hint)


def test_serve_another_server_behind_the_port_is_never_measured(tmp_path: Path) -> None:
    """A server that answers under another name is not the one that was started."""
    with (
        pytest.raises(EngineFailure, match="serves somebody-else, not ours"),
        running(tmp_path, "--misbehave", "wrong_name"),
    ):
        pass


def test_serve_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """The program on the port is left alone: a message, no start, no signal."""
    with mock_thread(MockSettings()) as other:
        port = int(other.url.rsplit(":", 1)[1])
        with pytest.raises(UsageError, match=f"--port {port} is taken"), running(tmp_path, port=port):
            pass
        assert is_healthy(other.url)  # it still answers

    assert not (tmp_path / "server.log").exists()


def test_serve_a_program_that_does_not_exist_is_told(tmp_path: Path) -> None:
    """A wrong interpreter or launcher ends in a message that names it."""
    missing = ServerCommand(argv=("/nowhere/launcher",), port=free_port(), served_model="ours")

    with (
        pytest.raises(UsageError, match="/nowhere/launcher cannot be started"),
        serve(missing, log=tmp_path / "server.log"),
    ):
        pass


def test_free_port_is_free() -> None:
    """What is offered can be listened on."""
    check_port_free(free_port())


def test_server_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """A measuring process that is killed outright leaves no server behind."""
    script = (
        "import sys, time; from pathlib import Path\n"
        "from spectune.backend.server import ServerCommand, serve\n"
        "argv = tuple(sys.argv[3:])\n"
        "one = ServerCommand(argv=argv, port=int(sys.argv[2]), served_model='ours')\n"
        "with serve(one, log=Path(sys.argv[1])) as server:\n"
        "    print(server.pid, flush=True); time.sleep(600)\n"
    )
    own = command()
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "log"), str(own.port), *own.argv],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    session = int(parent.stdout.readline())
    watch = os.pidfd_open(session)

    parent.kill()
    parent.wait()
    parent.stdout.close()

    import select

    assert select.select([watch], [], [], 60)[0] == [watch]  # readable once the process has ended
    os.close(watch)


@pytest.mark.parametrize(
    ("readings", "is_held"), [([10**10, 10**6], False), ([10**10], True)], ids=["given back late", "kept"]
)
def test_device_memory_that_is_not_given_back_stops_the_run(
    readings: list[int], is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver may take a moment; what stays held is told with who holds it, before another start fails."""
    monkeypatch.setattr(server_module, "_device_holders", lambda: "4711, VLLM::EngineCore, 9000 MiB")
    told = iter(readings + readings[-1:] * 99)

    def report() -> None:
        server_module._report_left(
            [], 10**6, lambda text: None, read_held=lambda: next(told), sleep=lambda seconds: None
        )

    if not is_held:
        report()
        return
    with pytest.raises(RunError, match=r"9\.3 GiB more than before .*4711, VLLM::EngineCore"):
        report()


def test_log_tail_is_of_the_last_start(tmp_path: Path) -> None:
    """A log that holds two starts: the first one's lack of memory does not explain the second one's end."""
    log = tmp_path / "server.log"
    log.write_text("$ vllm serve a\nCUDA out of memory\n$ vllm serve a\nunrecognized arguments: --x\n")

    assert server_module.log_tail(log) == "unrecognized arguments: --x"


def test_death_while_the_first_token_is_asked_for_is_told_with_the_servers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/health answered, then the engine ran out of memory at its first pass: an OutOfMemory, not a failed probe."""

    def dies(url: str, served_model: str, dialect: object) -> None:
        os.killpg(os.getpgid(pids[0]), signal.SIGKILL)
        raise EngineFailure("connection lost")

    pids: list[int] = []
    start = server_module.start_group

    def started(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*words, **options)
        pids.append(process.pid)
        with (tmp_path / "server.log").open("a") as log:
            log.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
        return process

    monkeypatch.setattr(server_module, "start_group", started)
    monkeypatch.setattr(server_module, "check_ready", dies)

    with pytest.raises(OutOfMemory), running(tmp_path):
        pass
