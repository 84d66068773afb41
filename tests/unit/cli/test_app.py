"""The door: help is light, failures are text and an exit code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectune.errors import (
    CheckFailed,
    Inconclusive,
    MetricMissing,
    NotComparable,
    RunError,
    SpectuneError,
    UsageError,
)

HEAVY = {"torch", "pandas", "matplotlib", "optuna", "scipy", "numpy"}

Spectune = Callable[..., Any]


@pytest.mark.parametrize("argv", [["--help"], ["sweep", "--help"], ["theory", "speedup", "--help"]], ids=str)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    """Help never waits for torch, pandas, matplotlib or optuna."""
    probe = (
        "import sys\n"
        "from spectune.cli.app import run\n"
        f"code = run({argv!r})\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)\n"
        "sys.exit(code)\n"
    )

    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)

    assert set() == HEAVY & set(done.stderr.split())


def test_python_dash_m_is_the_command() -> None:
    """`python -m spectune` answers like `spectune`."""
    done = subprocess.run(
        [sys.executable, "-m", "spectune", "--version"], capture_output=True, text=True, check=True
    )

    assert "spectune 0.1.0\n" == done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["sweep", "--bogus"], "no such option: --bogus", id="unknown-flag"),
        pytest.param(["swep"], "no such command 'swep'", id="unknown-command"),
        pytest.param(["sweep", "--num-tokens"], "option '--num-tokens' requires an argument", id="no-value"),
        pytest.param(["sweep", "--num-tokens", "0"], "--num-tokens: 0 is below the minimum of 1", id="value"),
        pytest.param(["sweep", "--backend", "gpu"], "--backend gpu is not known", id="backend"),
        pytest.param(["report", "nowhere"], "nowhere", id="no-run"),
    ],
)
def test_wrong_command_line_is_an_error_without_traceback(
    spectune: Spectune, argv: list[str], message: str
) -> None:
    """A wrong command line says what is wrong on stderr and leaves stdout empty."""
    answer = spectune(*argv)

    assert "" == answer.out
    assert "error: " in answer.err
    assert message in answer.err.lower()
    assert "Traceback" not in answer.err
    assert answer.code in (1, 2)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RunError, 1),
        (UsageError, 2),
        (CheckFailed, 3),
        (Inconclusive, 4),
        (NotComparable, 5),
        (MetricMissing, 6),
    ],
)
def test_named_failure_becomes_its_exit_code(
    spectune: Spectune, monkeypatch: pytest.MonkeyPatch, failure: type[SpectuneError], code: int
) -> None:
    """Every named failure ends with its own exit code, its message and its hint."""

    def fail(*_: object) -> None:
        raise failure("file x is wrong", hint="mend it")

    monkeypatch.setattr("spectune.cli.policy.read_policy", fail)

    answer = spectune("policy", "show", "x")

    assert (code, "", "error: file x is wrong\nhint: mend it\n") == (answer.code, answer.out, answer.err)


def test_unexpected_failure_is_short_and_its_traceback_in_a_file(
    spectune: Spectune, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A failure nobody foresaw is one line, and the file that it names holds the traceback."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(*_: object) -> None:
        raise ZeroDivisionError("by hand")

    monkeypatch.setattr("spectune.cli.policy.read_policy", fail)

    answer = spectune("policy", "show", "x")

    [log] = tmp_path.glob("spectune-error-*.log")
    assert (1, f"error: unexpected ZeroDivisionError: by hand\nhint: the traceback is in {log}\n") == (
        answer.code,
        answer.err,
    )
    assert "Traceback" in log.read_text(encoding="utf-8")


def test_missing_engine_package_says_what_to_install(tmp_path: Path) -> None:
    """Without the engine extra, what needs it says how to get it."""
    probe = (
        "import sys; sys.modules['torch'] = None\n"
        "from spectune.cli.app import run\n"
        "sys.exit(run(['train', 'eagle3', '--output-dir', 'head']))"
    )

    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (2, "error: this needs the package torch\nhint: pip install 'spectune[engine]'\n") == (
        done.returncode,
        done.stderr,
    )


def test_train_into_a_used_folder_needs_resume(spectune: Spectune) -> None:
    """Training never mixes with what a folder holds unless it is told to go on there."""
    Path("head").mkdir()
    Path("head/corpus.jsonl").touch()

    answer = spectune("train", "eagle3", "--output-dir", "head")

    assert 2 == answer.code
    assert "error: --output-dir head is not empty" in answer.err


def test_group_without_command_prints_its_help(spectune: Spectune) -> None:
    """A bare group is a usage error that shows what it can do."""
    answer = spectune("theory")

    assert 2 == answer.code
    assert "break-even" in answer.out
