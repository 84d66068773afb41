"""Sweeps over SGLang servers, end to end on a stand-in: plan, trees, refusals, failures, verdict, report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectune.store import RunStore

STAND_IN = Path(__file__).parents[1] / "support" / "mock_sglang.py"
WORKLOAD = "\n".join(
    json.dumps({"prompt": f"Tell me about the number {i} in a few words.", "category": "facts"})
    for i in range(8)
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups are read from /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the config and the tokenizer of a model, and no weights."""
    import tokenizers

    folder = tmp_path_factory.mktemp("model")
    config = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "model_type": "other"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    vocab = {chr(code): code - 32 for code in range(32, 127)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """A small sweep; `truth` and `words` go to the stand-in."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(WORKLOAD + "\n", encoding="utf-8")

    def build(*more: str, truth: dict[str, Any] | None = None, words: str = "") -> list[str]:
        declared = json.dumps({"output_tokens": 12, "step_s": 0.002} | (truth or {}), separators=(",", ":"))
        launcher = f"{sys.executable} {STAND_IN} --truth '{declared}' {words} {{args}}"
        return [
            "sweep", "--backend", "sglang", "--server-cmd", launcher, "--model", str(model),
            "--method", "ngram", "--num-tokens", "3", "--topk", "1", "--max-concurrency", "2",
            "--dataset-path", str(prompts), "--num-prompts", "8", "--min-blocks", "2", "--max-tokens", "12",
            "--output-dir", str(tmp_path / "run"), *more,
        ]  # fmt: skip

    return build


def spectune(*argv: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "spectune", *argv], capture_output=True, text=True, check=False
    )


def test_sweep_measures_chains_and_trees_and_reports(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """off, a chain, a tree, off: acceptance of both by their own counts, a verdict, a report."""
    flags = arguments("--json", "--topk", "1,2", "--num-draft-tokens", "6", truth={"acceptance": [1.0]})
    done = spectune(*flags)

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["is_simulated"]  # the stand-in says that it is none
    assert re.findall("starting sglang for (.*)", done.stderr) == [
        "off", "ngram K=3", "ngram D=3 k=2 N=6", "off",
    ]  # fmt: skip
    arms = {arm["config"]["topk"]: arm for arm in summary["cells"][0]["arms"]}
    # 1 + 11 tokens are rounds of 4, 4 and 3: all drafts accepted, the last round's own token cut
    assert arms[1]["acceptance"]["num_steps"] == 8 * 3
    assert arms[1]["acceptance"]["acceptance_length"] == 4.0
    assert arms[2]["acceptance"]["acceptance_length"] == 4.0
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_fingerprint_holds_what_the_servers_resolved(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Limits, cache and attention backend as the servers told them, and the run resumes under them."""
    truth = {"server_info": {"attention_backend": "fa3", "page_size": 1}}
    done = spectune(*arguments(truth=truth))
    assert done.returncode == 0, done.stderr

    settings = RunStore.open(tmp_path / "run").manifest["fingerprint"]["settings"]

    assert settings["resolved_attention_backend"] == "fa3"
    assert settings["resolved_disable_radix_cache"] is True
    assert settings["resolved_max_running_requests"] == 16
    assert settings["chunked_prefill_size"] == 2048
    again = spectune("sweep", "--resume", str(tmp_path / "run"))
    assert again.returncode == 0, again.stderr
    assert "starting sglang" not in again.stderr


def test_dry_run_prints_launches_reasons_and_exact_commands(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """What would start stands there whole; what cannot run stands beside it with the reason."""
    done = spectune(
        *arguments("--dry-run", "--topk", "1,2", "--num-draft-tokens", "6,40"),
        "--extra-server-args",
        "--attention-backend triton --page-size 16",
    )

    assert done.returncode == 0, done.stderr
    assert re.findall(r"^start \d+: (.*)$", done.stdout, flags=re.MULTILINE) == ["off", "ngram K=3", "off"]
    assert "ngram D=3 k=2 N=6: topk 2 with page size 16 runs on flashinfer, not on triton" in done.stdout
    assert "ngram D=3 k=2 N=40: needs 39 drafted nodes, depth 3 with topk 2 drafts 10" in done.stdout
    assert (
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in done.stdout
    )
    assert done.stdout.count("--max-running-requests 16") == 3
    assert not (tmp_path / "run").exists()


def test_dry_run_needs_no_sglang(arguments: Callable[..., list[str]], model: Path) -> None:
    """Plan and commands can be read on a machine that cannot serve."""
    flags = arguments("--dry-run")
    cut = flags.index("--server-cmd")
    done = spectune(*flags[:cut], *flags[cut + 2 :])

    assert done.returncode == 0, done.stderr
    assert "-m sglang.launch_server --model-path" in done.stdout


def test_standby_of_a_head_is_an_adaptive_file(arguments: Callable[..., list[str]], model: Path) -> None:
    """Launched for its depth and kept at none: the flags name the file that says so."""
    done = spectune(*arguments("--dry-run", "--method", "draft_model", "--draft-model", str(model)))

    assert done.returncode == 0, done.stderr
    assert "--speculative-algorithm STANDALONE" in done.stdout
    assert "EAGLE3 chains only, not for STANDALONE" in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--misbehave bad_flag", "unrecognized arguments: --nonsense"),
        ("--misbehave no_memory", "out of memory"),
        ("--misbehave wrong_name", "serves somebody-else, not spectune-"),
        ("--misbehave other_steps", "with speculative_num_steps 3 and runs with 4"),
    ],
)
def test_server_that_is_not_what_was_started_fails_its_points_and_says_why(
    arguments: Callable[..., list[str]], words: str, text: str
) -> None:
    """Another model, another depth, no start: a status with the reason, no number."""
    done = spectune(*arguments(words=words))

    assert text in done.stdout + done.stderr
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


def test_server_that_admits_less_than_was_asked_is_not_measured(arguments: Callable[..., list[str]]) -> None:
    """48 requests of 64: the high batch would be queueing, not decoding."""
    done = spectune(*arguments("--max-num-seqs", "64", words="--misbehave forty_eight"))

    assert done.returncode == 1
    assert "max_running_requests 64 and runs with 48" in done.stdout + done.stderr


def test_server_that_queues_is_capped(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """A server that says 16 and runs one request at a time is measured at another load."""
    says = {"max_running_requests": 16, "internal_states": []}
    spectune(*arguments(truth={"max_num_seqs": 1, "server_info": says}))

    statuses = {outcome.status.value for outcome in RunStore.open(tmp_path / "run").outcomes().values()}
    assert statuses == {"capped"}


def test_taken_port_is_refused_before_anything_starts(arguments: Callable[..., list[str]]) -> None:
    """Whoever answers there would be measured instead."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = spectune(*arguments("--port", str(taken.getsockname()[1])))

    assert done.returncode != 0
    assert "is taken by another program" in done.stdout + done.stderr


def test_production_arm_says_what_cache_and_chunks_change(
    arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The longest chain once more with the cache and chunks of production, beside itself."""
    done = spectune(*arguments("--production", "--json"))

    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run" / "servers").glob("*production*.log")
    text = next(log).read_text(encoding="utf-8")
    assert "--disable-radix-cache" not in text
    assert "--chunked-prefill-size 512" in text


def test_head_that_accepts_nothing_is_called_ineffective(arguments: Callable[..., list[str]]) -> None:
    """312 rounds without one accepted draft: not slow, but likely misconfigured."""
    done = spectune(*arguments("--max-tokens", "40", truth={"acceptance": [0.0], "output_tokens": 40}))

    told = " ".join(done.stdout.split())
    assert "acceptance length 1.00: the draft is hardly ever accepted" in told
    assert "check that draft and target belong together" in told


def test_sweep_goes_on_without_what_cannot_run(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    """A tree that the attention backend does not take is listed with the reason; the chain is measured."""
    done = spectune(
        *arguments("--topk", "1,2", "--num-draft-tokens", "6"),
        "--extra-server-args",
        "--attention-backend triton --page-size 16",
    )

    assert done.returncode == 0, done.stderr
    store = RunStore.open(tmp_path / "run")
    assert {outcome.point.config.label for outcome in store.outcomes().values()} == {"off", "ngram K=3"}
    assert store.manifest["pruned"] == [
        ["ngram D=3 k=2 N=6", "topk 2 with page size 16 runs on flashinfer, not on triton"]
    ]
