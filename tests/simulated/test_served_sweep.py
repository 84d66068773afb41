"""Sweeps over servers, end to end on a stand-in for vLLM: plan, starts, failures, kill and resume."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spectune.store import RunStore
from tests.support.served_sweep import counts, left_over, spectune

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups are read from /proc")


def test_sweep_measures_between_two_starts_of_plain_decoding(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """off, candidate, off: three starts, a verdict, a report, and no process left."""
    done = spectune(*arguments("--json"))

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["is_simulated"]  # the stand-in says that it is none
    assert [arm["config"]["method"] for arm in summary["cells"][0]["arms"]] == ["off", "ngram"]
    assert summary["cells"][0]["last_start"]["n"] == 8  # one pair a prompt
    assert re.findall("starting vllm for (.*)", done.stderr) == ["off", "ngram K=3 n=1-5", "off"]
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert left_over(tmp_path / "run") == []


def test_sweep_recovers_the_declared_acceptance(arguments: Callable[..., list[str]]) -> None:
    """With every draft right a step emits four tokens: 1 + 11 tokens are steps of 4, 4 and 3."""
    done = spectune(*arguments("--json", truth={"acceptance": [1.0]}))

    arm = json.loads(done.stdout)["cells"][0]["arms"][1]
    assert arm["acceptance"]["num_steps"] == 8 * 3
    assert arm["acceptance"]["acceptance_length"] == pytest.approx(1 + (3 + 3 + 2) / 3, abs=0.35)


def test_dry_run_prints_the_command_of_every_start(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """What would be started stands there whole, and nothing is."""
    done = spectune(*arguments("--dry-run"))

    assert done.returncode == 0
    starts = re.findall(r"^start \d+: (.*)$", done.stdout, flags=re.MULTILINE)
    assert starts == ["off", "ngram K=3 n=1-5", "off"]
    assert "3 starts of about" in done.stdout
    assert '"num_speculative_tokens":3' in done.stdout
    assert not (tmp_path / "run").exists()


def test_dry_run_of_a_draft_model_and_a_tree(arguments: Callable[..., list[str]], bare_model: Path) -> None:
    """A small model drafts chains and gets a standby start; trees are refused with the reason."""
    done = spectune(
        *arguments("--dry-run", "--topk", "1,4", "--num-draft-tokens", "8", "--draft-model", str(bare_model)),
        "--method",
        "draft_model",
    )

    assert '"method":"draft_model"' in done.stdout
    assert '"num_speculative_tokens_per_batch_size":[[1,16,0]]' in done.stdout
    assert "draft_model drafts chains only" in done.stdout


def test_verify_leaves_out_the_server_that_drafts_nothing(
    arguments: Callable[..., list[str]], bare_model: Path
) -> None:
    """A standby start has nothing to verify: one finding for the arm that drafts, and exit code 0."""
    words = arguments("--json", "--draft-model", str(bare_model), "--temperature", "0")
    words[words.index("ngram")] = "draft_model"
    del words[words.index("--output-dir") : words.index("--output-dir") + 2]

    done = spectune("verify", *words[1:])

    assert done.returncode == 0, done.stderr
    assert "standby" not in done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert [(row["label"], row["verdict"]) for row in findings] == [("draft_model K=3", "lossless")]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--misbehave bad_flag", 1, "unrecognized arguments: --nonsense"),
        ("--misbehave no_model", 1, "missing model"),
        ("--misbehave no_memory", 1, "out of memory"),
        ("--misbehave wrong_name", 1, "somebody-else"),
    ],
)
def test_server_that_cannot_start_fails_its_points_and_says_why(
    arguments: Callable[..., list[str]], words: str, code: int, text: str, tmp_path: Path
) -> None:
    """Every point gets a status with the server's own words; nothing usable is exit code 1."""
    done = spectune(*arguments(words=words))

    assert done.returncode == code
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert left_over(tmp_path / "run") == []


def test_candidate_that_dies_under_load_fails_alone(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The dead arm is told as failed, plain decoding is measured, the sweep goes on: exit code 7 or 1."""
    truth = {"by_method": {"ngram": {"faults": [{"kind": "die", "first": 5}]}}}
    done = spectune(*arguments(truth=truth))

    store = RunStore.open(tmp_path / "run")
    by_method: dict[str, set[str]] = {}
    for outcome in store.outcomes().values():
        by_method.setdefault(outcome.point.config.method, set()).add(outcome.status.value)
    assert by_method == {"off": {"ok"}, "ngram": {"failed"}}
    assert done.returncode == 1  # without a candidate there is no verdict
    assert "died under load" in done.stdout + done.stderr


def test_candidate_that_runs_out_of_memory_under_load_is_oom(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """It starts, and dies of memory in its load, once more with a smaller share: its points are out of memory,
    plain decoding is measured on both sides of it, and the words of the server are kept."""
    truth = {"by_method": {"ngram": {"faults": [{"kind": "die", "first": 5}]}}}
    done = spectune(*arguments(truth=truth, words="--misbehave no_memory_later"))

    outcomes = list(RunStore.open(tmp_path / "run").outcomes().values())
    assert {(o.point.config.method, o.status.value) for o in outcomes} == {("off", "ok"), ("ngram", "oom")}
    assert sum(o.point.config.is_off for o in outcomes) == 2
    assert "CUDA out of memory" in done.stdout + done.stderr
    assert left_over(tmp_path / "run") == []
    logs = [log.read_text(encoding="utf-8") for log in (tmp_path / "run" / "servers").glob("*.log")]
    starts = [
        line
        for log in logs
        for line in log.split("\n")
        if line.startswith("$ ") and "--speculative-config" in line
    ]
    assert len(starts) == 2


def test_server_that_queues_is_capped(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """A server that runs one request at a time while two are in flight is measured at another load."""
    spectune(*arguments(truth={"max_num_seqs": 1}))

    statuses = {outcome.status.value for outcome in RunStore.open(tmp_path / "run").outcomes().values()}
    assert statuses == {"capped"}


def test_all_requests_refused_gives_no_number(arguments: Callable[..., list[str]]) -> None:
    """Twenty errors are no throughput of zero: nulls, a status, the error once, exit code 1."""
    done = spectune(*arguments("--json", truth={"faults": [{"kind": "http_400"}]}))

    assert done.returncode == 1
    arm = json.loads(done.stdout)["cells"][0]["arms"][0]
    assert (arm["status"], arm["output_tokens_per_s"], arm["latency"]) == ("failed", None, None)
    assert "400" in arm["reason"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--min-p", "0.1"], "min_p=0.1"),
        (["--max-num-seqs", "1"], "--max-num-seqs 1 is below --max-concurrency 2"),
        (["--extra-server-args", "--speculative-model x"], "has no speculative-model any more"),
        (["--num-tokens", "0"], "below the minimum of 1"),
        (["--base-url", "http://127.0.0.1:9", "--server-cmd", "x {args}"], "--server-cmd is decided when"),
        (["--method", "draft_model"], "needs --draft-model"),
    ],
    ids=["min-p", "max-num-seqs", "old-flag", "no-tokens", "relaunch", "no-draft"],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    arguments: Callable[..., list[str]], flags: list[str], text: str, tmp_path: Path
) -> None:
    """Usage errors name the flag and the value, exit code 2, and nothing was started."""
    done = spectune(*arguments(*flags))

    assert done.returncode == 2
    assert text in done.stderr
    assert not (tmp_path / "run" / "servers").exists()


def kill_after(words: list[str], mark: str, number: int) -> None:
    """Run a sweep and kill it outright when `mark` has been said `number` times."""
    process = subprocess.Popen(
        [sys.executable, "-m", "spectune", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    seen = 0
    for line in process.stderr:
        seen += mark in line
        if seen == number:
            os.kill(process.pid, signal.SIGKILL)
            break
    process.stderr.close()
    process.wait()


@pytest.mark.slow
def test_killed_and_resumed_twenty_times_ends_with_the_same_table(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Killed outright at twenty places (in a start, in a load, after a point) and resumed: the same
    texts, steps and outcomes as the run that nobody killed, no point lost and none repeated."""
    flags = arguments("--num-boots", "4", "--num-tokens", "1,3")
    whole = spectune(*flags)
    assert whole.returncode == 0, whole.stderr
    expected = counts(tmp_path / "run")
    broken = tmp_path / "broken"
    flags[flags.index("--output-dir") + 1] = str(broken)

    marks = [("starting vllm", 1), ("server ready", 1), ("[", 1)]
    for attempt in range(20):
        words = flags if attempt == 0 else ["sweep", "--resume", str(broken)]
        done_before = len(RunStore.open(broken).outcomes()) if attempt else 0
        kill_after(words, *marks[attempt % 3])
        assert len(RunStore.open(broken).outcomes()) >= done_before
    last = spectune("sweep", "--resume", str(broken))

    assert last.returncode == 0, last.stderr
    assert counts(broken) == expected
    lines = (broken / "points.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(expected)
    again = spectune("sweep", "--resume", str(broken))
    assert "starting vllm" not in again.stderr
    assert counts(broken) == expected
    assert left_over(tmp_path / "run") + left_over(broken) == []
