"""`spectune policy`: build, show, emit, verify on the simulated engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spectune.backend.simulated import SimulatedBackend
from spectune.cli.policy_verify import learner_of
from spectune.errors import UsageError
from spectune.policy.summary import summarize
from spectune.records import Sampling, SpecConfig
from spectune.tune.plan import plan_sweep
from spectune.tune.sweep import run_sweep, start_run
from spectune.workload import load_workload
from tests.unit.cli.conftest import Answer

Spectune = Callable[..., Answer]

TRUTH = {"noise_sd": 0.002, "verify_s_per_token": 0.004, "plain_s_by_batch": {1: 0.026, 16: 0.041}}
"""Costs under which K=1 pays up to about batch 4 and clearly loses at 16."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the simulated engine that measured both sides of its edge, and its declared costs."""
    folder = tmp_path_factory.mktemp("policy")
    (folder / "truth.json").write_text(json.dumps(TRUTH))
    backend = SimulatedBackend(truth=folder / "truth.json")
    plan = plan_sweep(
        backend,
        load_workload(None, num_prompts=64),
        (SpecConfig.off(), SpecConfig.chain("eagle3", 1)),
        batch_sizes=[1, 2, 3, 4, 5, 6, 7, 8, 16],
        sampling=Sampling(max_tokens=24),
        num_prompts=32,
    )
    store = start_run(folder / "run", plan, backend)
    run_sweep(plan, backend, store)
    policy = summarize(store).policy
    assert policy is not None
    store.write_json("policy.json", policy)
    return folder


@pytest.fixture
def swept(spectune: Spectune, measured: Path) -> Path:
    """The run and the declared costs in the folder of the test."""
    shutil.copytree(measured, ".", dirs_exist_ok=True)
    return Path("run")


def test_build_writes_a_policy_that_show_reads(spectune: Spectune, swept: Path) -> None:
    """What build prints, show prints again from the file."""
    built = spectune("policy", "build", str(swept), "--output", "policy.json")
    shown = spectune("policy", "show", "policy.json")

    assert (built.code, shown.code) == (0, 0)
    assert built.out == shown.out
    assert "SIMULATED" in shown.out
    assert "not verified" in shown.out
    assert "switches wait: " in shown.out


def test_build_of_runs_of_different_engines_is_exit_5(spectune: Spectune, swept: Path) -> None:
    """Policies measured on one deployment are refused for another."""
    manifest = json.loads((swept / "manifest.json").read_text())
    other = Path("other")
    shutil.copytree(swept, other)
    manifest["fingerprint"]["device"] = "gpu"
    (other / "manifest.json").write_text(json.dumps(manifest))

    answer = spectune("policy", "build", str(swept), str(other))

    assert answer.code == 5
    assert "device 'simulated' against 'gpu'" in answer.err


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp", "reference", "router"])
def test_emit_prints_the_text_of_an_engine(spectune: Spectune, swept: Path, engine: str) -> None:
    """Plain on stdout, whole in JSON with --json."""
    plain = spectune("policy", "emit", str(swept), "--engine", engine)
    told = spectune("policy", "emit", str(swept), "--engine", engine, "--json")

    assert plain.code == 0, plain.err
    assert told.document["text"] == plain.out.removesuffix("\n")


def test_emit_writes_an_executable_script(spectune: Spectune, swept: Path) -> None:
    """serve.sh can be run as it is."""
    spectune("policy", "emit", str(swept), "--engine", "vllm", "--format", "serve.sh", "-o", "serve.sh")

    assert Path("serve.sh").stat().st_mode & 0o111
    assert Path("serve.sh").read_text().startswith("#!/usr/bin/env bash\n")


def test_emit_of_what_vllm_would_ignore_is_exit_2(spectune: Spectune, swept: Path) -> None:
    """A schedule with data parallelism is refused, with the way out."""
    answer = spectune("policy", "emit", str(swept), "--engine", "vllm", "--data-parallel-size", "2")

    assert answer.code == 2
    assert "--data-parallel-size 2: vLLM ignores a schedule" in answer.err
    assert "hint: --engine router" in answer.err


def verify(spectune: Spectune, *more: str) -> Answer:
    return spectune(
        "policy", "verify", "policy.json", "--backend", "simulated", "--simulated-truth", "truth.json",
        "--num-runs", "3", "--max-tokens", "16", "-o", "served", *more,
    )  # fmt: skip


def test_sound_policy_is_kept(spectune: Spectune, swept: Path) -> None:
    """Served at every edge it is nowhere behind: exit 0, and the policy carries the verdict."""
    spectune("policy", "build", str(swept), "--output", "policy.json")

    answer = verify(spectune, "--json")

    assert answer.code == 0, answer.out
    assert answer.document["verdict"] == "kept"
    assert {"batch 1", "batch 16", "mixed", "ramp 1-16-1"} <= {
        row["load"] for row in answer.document["loads"]
    }
    assert json.loads(Path("served/policy.json").read_text())["verification"]["verdict"] == "kept"


def test_policy_whose_switches_cost_is_withdrawn_and_not_emitted(spectune: Spectune, swept: Path) -> None:
    """An engine that thrashes at the edge: exit 3 with advice, and emit refuses the file."""
    spectune("policy", "build", str(swept), "--switch-cost-rounds", "0", "--output", "policy.json")

    answer = verify(spectune, "--switch-rounds", "40", "--json")
    emitted = spectune("policy", "emit", "served/policy.json", "--engine", "vllm")

    assert answer.code == 3, answer.out
    assert answer.document["verdict"] == "withdrawn"
    assert answer.document["advice"].startswith("serve ")
    assert emitted.code == 2
    assert "is withdrawn" in emitted.err


def test_learning_chooser_needs_the_reference_engine_and_a_run(spectune: Spectune, swept: Path) -> None:
    """Declared times have a clock of their own, and a policy file holds no times to start from."""
    spectune("policy", "build", str(swept), "--output", "policy.json")

    simulated = verify(spectune, "--online")
    with pytest.raises(UsageError, match="--online needs the run directory"):
        learner_of(Path("policy.json"), {})

    assert simulated.code == 2
    assert "--online runs in the reference engine" in simulated.err


def test_verification_goes_on_where_it_stopped(spectune: Spectune, swept: Path) -> None:
    """Samples on disk are kept; the same command adds what is missing and reaches a verdict."""
    spectune("policy", "build", str(swept), "--output", "policy.json")
    verify(spectune)
    lines = Path("served/samples.jsonl").read_text().splitlines()
    Path("served/samples.jsonl").write_text("\n".join(lines[:5]) + "\n")

    answer = verify(spectune)

    assert answer.code == 0, answer.out
    assert Path("served/samples.jsonl").read_text().splitlines() == lines


def test_verify_on_another_engine_is_exit_5(spectune: Spectune, swept: Path) -> None:
    """A policy of declared costs says nothing about other declared costs."""
    spectune("policy", "build", str(swept), "--output", "policy.json")
    document = json.loads(Path("policy.json").read_text())
    document["validity"]["tensor_parallel_size"] = 4
    Path("policy.json").write_text(json.dumps(document))

    answer = verify(spectune)

    assert answer.code == 5
    assert "tensor_parallel_size 4 against 1" in answer.err


def test_simulate_says_what_a_mix_saves(spectune: Spectune, swept: Path) -> None:
    """Off first, the oracle last and never beaten; money only at a price that is given."""
    answer = spectune(
        "policy", "simulate", str(swept), "--mix", "chat=.6,code=.4", "--request-rate", "0.5",
        "--num-prompts", "100", "--usd-per-gpu-hour", "2", "--json",
    )  # fmt: skip
    served = answer.document["served"]

    assert answer.code == 0, answer.err
    assert (served[0]["name"], served[-1]["name"]) == ("off", "oracle")
    assert min(one["busy_s"] for one in served) == served[-1]["busy_s"]
    assert answer.document["money"]["usd_per_mtok_policy"] < answer.document["money"]["usd_per_mtok_plain"]
    assert answer.document["is_simulated_engine"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "give --mix with --request-rate, or --arrivals"),
        (("--mix", "chat=1"), "--mix needs --request-rate"),
        (("--mix", "chat=2", "--request-rate", "1"), "the shares add up to 2"),
    ],
)
def test_simulate_without_traffic_is_exit_2(
    spectune: Spectune, swept: Path, flags: tuple[str, ...], words: str
) -> None:
    """The error names what is missing."""
    answer = spectune("policy", "simulate", str(swept), *flags)

    assert answer.code == 2
    assert words in answer.err


@pytest.mark.parametrize("command", ["build", "emit"])
def test_a_policy_that_cannot_be_written_is_a_usage_error(spectune, command):
    """A file where a folder is needed: the flag and the file are named, exit code 2."""
    assert 0 == spectune("sweep", "--backend", "simulated", "--quick", "--output-dir", "run").code
    Path("taken").touch()
    engine = ["--engine", "vllm"] if command == "emit" else []

    answer = spectune("policy", command, "run", *engine, "--output", "taken/policy.json")

    assert 2 == answer.code
    assert "error: --output taken/policy.json cannot be written: File exists" in answer.err


def test_verification_of_another_policy_is_not_gone_on_with(spectune: Spectune, swept: Path) -> None:
    """Samples of one table say nothing of another, nor of other lengths: the folder is refused by what differs."""
    words = ("policy", "verify", "--backend", "simulated", "--simulated-truth", "truth.json", "-o", "out")
    words = (*words, "--num-runs", "2", "--max-batch-size", "2")
    assert spectune(*words[:2], str(swept), *words[2:]).code in (0, 4)
    policy = json.loads((swept / "policy.json").read_text())
    policy["cells"][0]["config"] = "off"
    Path("other.json").write_text(json.dumps(policy))

    other = spectune(*words[:2], "other.json", *words[2:])
    longer = spectune(*words[:2], str(swept), *words[2:], "--max-tokens", "33")

    assert (other.code, longer.code) == (2, 2)
    assert "policy differ" in other.err
    assert "max_tokens differ" in longer.err


def test_verification_with_half_a_sample_at_its_end_goes_on(spectune: Spectune, swept: Path) -> None:
    """A kill in the middle of a line: that sample is measured again, the others are kept."""
    words = ("policy", "verify", str(swept), "--backend", "simulated", "--simulated-truth", "truth.json")
    words = (*words, "-o", "out", "--num-runs", "2", "--max-batch-size", "2")
    first = spectune(*words)
    whole = Path("out/samples.jsonl").read_text()
    Path("out/samples.jsonl").write_text(whole[:-20])

    again = spectune(*words)

    assert again.code == first.code
    assert Path("out/samples.jsonl").read_text().count("\n") == whole.count("\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"validity": {}}, "validity"),
        ({"cells": [{"config": None}]}, "cells[0]"),
        ({"fallback": {"num_steps": "3"}}, "fallback"),
        ({"fallback": 7}, "fallback"),
    ],
    ids=["empty validity", "cell without keys", "text for a number", "a number for a configuration"],
)
def test_a_policy_with_wrong_types_is_told_by_its_key(
    spectune: Spectune, swept: Path, change: dict[str, object], words: str
) -> None:
    """What a hand-edited file may hold is a usage error naming the place, for every command that reads it."""
    policy = json.loads((swept / "policy.json").read_text())
    Path("edited.json").write_text(json.dumps({**policy, **change}))

    for command in (("show", "edited.json"), ("emit", "edited.json", "--engine", "vllm")):
        told = spectune("policy", *command)
        assert told.code == 2, told.err
        assert words in told.err


def test_simulate_with_a_mistyped_category_is_exit_2(spectune: Spectune, swept: Path) -> None:
    """A category that the runs do not know would be played as all of them together."""
    told = spectune("policy", "simulate", str(swept), "--mix", "caht=1", "--request-rate", "2")

    assert told.code == 2
    assert "caht is no category" in told.err
    assert "chat" in told.err


def test_folder_of_a_verification_that_measured_nothing_is_free(spectune: Spectune, swept: Path) -> None:
    """Refused for another engine, no sample was taken: the same folder serves the right command."""
    refused = spectune("policy", "verify", str(swept), "--backend", "reference", "-o", "out")
    unknown = spectune("policy", "verify", str(swept), "--backend", "sglang", "-o", "out")
    Path("out").mkdir(exist_ok=True)
    Path("out/verifying.json").write_text('{"backend": "reference"}')  # as a run that broke off leaves it

    words = ("--simulated-truth", "truth.json", "-o", "out", "--num-runs", "2", "--max-batch-size", "2")
    again = spectune("policy", "verify", str(swept), "--backend", "simulated", *words)

    assert (refused.code, unknown.code) == (5, 2)
    assert "engine 'simulated' against 'reference'" in refused.err
    assert again.code in (0, 4), again.err
