"""`spectune gate`, `compare` and `verify` from end to end on the simulated backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spectune.gate.file import read_gate

SWEEP = [
    "sweep",
    "--backend",
    "simulated",
    "--simulated-truth",
    "truth.yaml",
    "--method",
    "eagle3",
    "--num-tokens",
    "3",
    "--topk",
    "1",
    "--batch-size",
    "1",
    "--num-prompts",
    "12",
    "--max-tokens",
    "48",
    "--seed",
    "3",
    "--output-dir",
]


@pytest.fixture
def run(spectune) -> Path:
    """A stored run of eagle3 K=3 on a noisy simulated machine."""
    Path("truth.yaml").write_text("boot_noise_sd: 0.005\nrequest_noise_sd: 0.01\nnoise_sd: 0.03\n")
    assert 0 == spectune(*SWEEP, "run").code
    return Path("run")


@pytest.fixture
def gate(spectune, run) -> Path:
    """A calibrated gate of it."""
    answer = spectune("gate", "init", str(run), "--output", "gate.yaml", "--calibration-starts", "6")
    assert (0, True) == (answer.code, Path("gate.baseline.jsonl.gz").exists()), answer.err
    return Path("gate.yaml")


def test_a_gate_checks_the_run_it_was_made_from(spectune, run, gate):
    """Stored acceptance and speed pass; JSON, JUnit and step summary carry the verdict."""
    answer = spectune("gate", "check", str(gate), str(run), "--junit", "j.xml", "--summary", "s.md", "--json")

    assert 0 == answer.code
    assert "passed" == answer.document["outcome"]
    assert answer.document["is_simulated"]
    assert 'failures="0"' in Path("j.xml").read_text()
    assert "SIMULATED" in Path("s.md").read_text()


def test_base_against_head_of_equal_settings_passes(spectune, gate):
    """A/A through the command."""
    answer = spectune("gate", "check", str(gate), "--base", "seed=3", "--json")

    assert 0 == answer.code, answer.out
    assert "base against head" == answer.document["mode"]


def test_a_slower_head_fails_with_code_3_and_names_the_part(spectune, gate, monkeypatch):
    """Another declared engine as head: 15% dearer verification."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "step.md")
    Path("slow.yaml").write_text(
        Path("truth.yaml").read_text() + "plain_s_by_batch: {1: 0.030}\nverify_s_per_token: 1.4e-3\n"
    )
    answer = spectune(
        "gate", "check", str(gate), "--base", "seed=3", "--head", "simulated-truth=slow.yaml", "--json"
    )

    assert 3 == answer.code
    assert "verify" == answer.document["culprit"]
    assert answer.document["was_repeated"]
    assert "regression" in Path("step.md").read_text()


def test_each_side_may_run_in_an_environment_of_its_own(spectune, gate):
    """Base and head as processes of their own, as two virtual environments would be."""
    command = f"{sys.executable} -m spectune.cli.worker"
    answer = spectune(
        "gate",
        "check",
        str(gate),
        "--base-cmd",
        command,
        "--head-cmd",
        command,
        "--only",
        "acceptance",
        "--json",
    )

    assert 0 == answer.code, answer.err
    assert all("one process" not in note for note in answer.document["notes"])


def test_a_command_that_is_no_worker_is_named(spectune, gate):
    """What the command said is in the message."""
    answer = spectune("gate", "check", str(gate), "--base-cmd", "echo hello", "--head", "seed=3")

    assert 1 == answer.code
    assert "--base-cmd answered 'hello'" in answer.err


def test_acceptance_is_checked_by_replay_without_a_run(spectune, gate):
    """The head replays the baseline's text: equal counts to the last one."""
    answer = spectune("gate", "check", str(gate), "--only", "acceptance", "--json")
    length = answer.document["checks"][0]

    assert (0, "replay of the baseline's text") == (answer.code, answer.document["mode"])
    assert length["value"] == length["reference"]


def test_head_against_the_stored_baseline_measures_plain_decoding_beside_it(spectune, gate):
    """Without base and run the head is started with plain decoding and compared with the baseline's runs."""
    answer = spectune("gate", "check", str(gate), "--json")

    assert 0 == answer.code, answer.out
    assert {"speedup", "speedup floor"} <= {check["name"] for check in answer.document["checks"]}


def test_a_run_of_another_temperature_is_refused_with_code_5(spectune, run, gate):
    """Greedy baseline, sampled run."""
    assert 0 == spectune(*SWEEP, "warm", "--temperature", "0.6").code

    answer = spectune("gate", "check", str(gate), "warm")

    assert 5 == answer.code
    assert "sampling.temperature" in answer.out


def test_replacing_the_baseline_asks_for_the_reason_and_keeps_it(spectune, run, gate):
    """Without a reason it is refused; with one the file remembers both baselines."""
    refused = spectune("gate", "check", str(gate), str(run), "--update-baseline")
    answer = spectune("gate", "check", str(gate), str(run), "--update-baseline", "--reason", "a better head")
    made = read_gate(gate)

    assert 2 == refused.code
    assert "--reason" in refused.err
    assert 0 == answer.code, answer.err
    assert "a better head" == made.origin.reason
    assert 1 == len(made.origin.previous)


def test_a_threshold_inside_the_noise_is_refused_with_code_4(spectune, run):
    """0.2% cannot be guarded on this machine, and the message says what it would take."""
    answer = spectune("gate", "init", str(run), "--max-slowdown", "0.002", "--calibration-starts", "5")

    assert 4 == answer.code
    assert "inside the noise" in answer.err
    assert "--num-starts" in answer.err
    assert not Path("gate.yaml").exists()


def test_a_gate_of_acceptance_alone_starts_no_engine(spectune, run):
    """No calibration, a floor and a ceiling for acceptance."""
    assert 0 == spectune("gate", "init", str(run), "--only", "acceptance", "--output", "a.yaml").code

    document = yaml.safe_load(Path("a.yaml").read_text())
    assert (True, False) == (document["acceptance"]["is_enabled"], document["speed"]["is_enabled"])


def test_a_run_on_synthetic_prompts_guards_nothing_unless_forced(spectune):
    """A gate of meaningless words is refused with code 2; --allow-synthetic makes it."""
    assert 0 == spectune("workload", "synth", "words.jsonl", "--num-prompts", "40").code
    short = ["--num-prompts", "12", "--max-tokens", "48", "--batch-size", "1", "--method", "eagle3"]
    chain = ["--num-tokens", "3", "--topk", "1", "--dataset-path", "words.jsonl", "--output-dir", "words"]
    assert 0 == spectune("sweep", "--backend", "simulated", *short, *chain).code
    make = ("gate", "init", "words", "--only", "acceptance", "--output", "words.yaml")

    refused = spectune(*make)
    assert (2, False) == (refused.code, Path("words.yaml").exists())
    assert "synthetic" in refused.err
    assert (0, True) == (spectune(*make, "--allow-synthetic").code, Path("words.yaml").exists())


def test_stored_acceptance_is_checked_without_torch_numpy_or_scipy(spectune, run, gate):
    """A CI machine needs none of the heavy packages for it."""
    code = (
        "import sys; from spectune.cli.app import run; "
        f"code = run(['gate', 'check', '{gate}', '{run}', '--only', 'acceptance']); "
        "heavy = [n for n in ('torch', 'numpy', 'scipy', 'pandas') if n in sys.modules]; "
        "sys.exit(code or (9 if heavy else 0))"
    )

    assert 0 == subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode


def test_gate_schema_prints_the_published_one(spectune):
    """The schema is one JSON document."""
    assert "spectune gate" == spectune("gate", "schema").document["title"]


def test_compare_of_equal_runs_says_what_could_have_been_seen(spectune, run):
    """No difference is an answer, with its resolution, per category too."""
    assert 0 == spectune(*SWEEP, "again").code
    answer = spectune("compare", "run", "again", "--json")
    rows = answer.document["rows"]

    assert 0 == answer.code
    assert not any(row["is_significant"] for row in rows)
    assert len({row["scope"] for row in rows}) > 2
    assert "could have seen" in rows[0]["text"]


def test_compare_refuses_unlike_runs_unless_forced_and_says_so(spectune, run):
    """Another seed is another engine here: code 5, or a line that cannot be missed."""
    assert 0 == spectune(*[w if w != "3" or i < 8 else "4" for i, w in enumerate(SWEEP)], "other").code

    assert 5 == spectune("compare", "run", "other").code
    forced = spectune("compare", "run", "other", "--force")
    assert 0 == forced.code
    assert "NOT COMPARABLE, forced" in forced.out


def test_verify_on_the_simulated_backend_says_that_nothing_real_was_verified(spectune):
    """Declared texts are equal by declaration: the output says so."""
    answer = spectune(
        *[
            "verify",
            "--backend",
            "simulated",
            "--method",
            "eagle3",
            "--temperature",
            "0",
            "--num-prompts",
            "8",
            "--max-tokens",
            "24",
        ]
    )

    assert 0 == answer.code, answer.err
    assert "SIMULATED" in answer.out
    assert "lossless" in answer.out
