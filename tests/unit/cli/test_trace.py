"""`spectune trace`: what it plans, what it shows of a trace on disk, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spectune.cli.app import run
from spectune.store.trace_file import read_trace, write_trace
from tests.support.traces import chain_drafter, toy_trace


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """A folder with a trace of EAGLE-3 chains and of an n-gram that never matched."""
    silent = chain_drafter(
        [0] * 8,
        method="ngram",
        draft_model=None,
        options=(("prompt_lookup_max", 5), ("prompt_lookup_min", 1)),
        drafted=np.zeros(8, np.uint8),
    )
    write_trace(tmp_path / "trace.npz", toy_trace([5, 5], chain_drafter([3, 2, 1, 0, 0, 0, 2, 1]), silent))
    return tmp_path


def test_show_replays_every_configuration_that_the_trace_answers(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """K=3: steps 3 | 0, 0, 2 accept 5 in 4 steps: 2.25; marginal and conditional rates stand together."""
    assert 0 == run(["trace", "--show", str(traced), "--json"])

    shown = json.loads(capsys.readouterr().out)
    rows = {row["label"]: row for row in shown["configs"]}
    assert 2.25 == rows["eagle3 K=3"]["acceptance_length"]
    assert 4 == rows["eagle3 K=3"]["num_steps"]
    assert [0.5, 0.5, 0.25] == rows["eagle3 K=3"]["survival"]
    assert [0.5, 1.0, 0.5] == rows["eagle3 K=3"]["conditional_acceptance"]
    assert {"a": 4.0, "b": 1 + 2 / 3} == {
        name: group["acceptance_length"] for name, group in rows["eagle3 K=3"]["by_category"].items()
    }
    assert {"< 128": {"acceptance_length": 2.25, "num_steps": 4}} == rows["eagle3 K=3"]["by_context_tokens"]
    assert rows["off"]["acceptance_length"] is None
    assert rows["ngram K=3 n=1-5"]["acceptance_length"] is None
    assert "no draft steps observed" == rows["ngram K=3 n=1-5"]["reason"]
    assert not any(" k=" in label for label in rows)  # trees were not traced
    assert shown["bytes_per_position"] == pytest.approx(shown["bytes"] / 8)


def test_the_table_says_that_acceptance_is_not_speed(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """People see lengths with the steps behind them, and that times decide."""
    assert 0 == run(["trace", "--show", str(traced / "trace.npz")])

    out = capsys.readouterr().out
    assert "eagle3 K=3" in out
    assert "acceptance is not speed" in out
    assert "no draft steps observed: ngram K=1" in out


def test_showing_needs_no_torch(traced: Path) -> None:
    """A machine without the engine replays a trace."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from spectune.cli.app import run\n"
        f"sys.exit(run(['trace', '--show', {str(traced)!r}]))"
    )

    assert 0 == subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode


def test_a_configuration_outside_the_trace_is_a_usage_error(
    traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asking for a depth that was not traced ends with 2 and names both depths."""
    assert 2 == run(
        ["trace", "--show", str(traced), "--method", "eagle3", "--topk", "1", "--num-tokens", "9"]
    )

    assert "num-tokens 9 is deeper than the traced 8" in capsys.readouterr().err


def test_show_refuses_what_it_cannot_change(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The temperature of a trace is what it is."""
    assert 2 == run(["trace", "--show", str(traced), "--temperature", "1"])

    assert "--temperature cannot change it" in capsys.readouterr().err


def test_a_missing_trace_ends_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file: exit 1, the path, and the command that makes one."""
    assert 1 == run(["trace", "--show", str(tmp_path)])

    assert str(tmp_path) in capsys.readouterr().err


def test_dry_run_counts_prompts_and_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is printed without an engine: 3 chains each, and trees of depth 3 with 4 or 8 tokens."""
    argv = ["trace", "--dry-run", "--json", "--num-prompts", "4"]

    assert 0 == run([*argv, "--num-tokens", "1,2,3", "--topk", "1,4", "--num-draft-tokens", "8"])

    plan = json.loads(capsys.readouterr().out)
    # off, 3 + 3 chains, trees D=2 and D=3 (D=1 drafts 4 nodes at most)
    assert {"prompts": 4, "max_tokens": 128, "drafters": ["eagle3", "ngram"], "configurations": 9} == plan


def test_a_folder_with_a_trace_is_not_overwritten(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --resume an existing trace stops the command; with it, it is complete and shown."""
    assert 2 == run(["trace", "--output-dir", str(traced)])
    assert "holds a trace already" in capsys.readouterr().err

    argv = ["trace", "--output-dir", str(traced), "--resume", "--topk", "1", "--num-tokens", "3"]
    assert 0 == run(argv)
    assert "is complete" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [("--temperature", "1"), ("--model", "another-model")], ids=lambda f: f[0])
def test_a_finished_trace_is_not_shown_as_one_of_other_settings(
    flag: tuple[str, str], traced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of a greedy trace of one model, resumed with another temperature or model: what differs is named."""
    made = read_trace(traced)
    made = replace(made, sampling={"temperature": 0.0}, fingerprint={**made.fingerprint, "target": "toy"})
    write_trace(traced / "trace.npz", made)

    assert 2 == run(["trace", "--output-dir", str(traced), "--resume", *flag])

    told = capsys.readouterr().err
    assert "holds a finished trace with" in told
    assert flag[1] in told
