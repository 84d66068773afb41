"""`spectune tune` and `spectune profile` on the simulated engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Spectune = Callable[..., Any]

TINY = (
    *("tune", "--backend", "simulated", "--method", "eagle3", "--num-tokens", "1,2,3", "--topk", "1"),
    *("--batch-size", "1", "--max-tokens", "24", "--finalists", "2", "--profile-seconds", "0"),
    *("--trace-prompts", "16"),
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tuning; copy it before changing it."""
    from spectune.cli.app import run

    path = tmp_path_factory.mktemp("runs") / "tuned"
    assert 0 == run([*TINY, "--output-dir", str(path)])
    return path


def test_tune_leaves_evidence_verdict_and_commands(finished: Path) -> None:
    """Trace, surface, tuning, summary, policy and a page that tells how it was tuned."""
    names = {path.name for path in finished.iterdir()}
    page = (finished / "report.html").read_text(encoding="utf-8")

    assert {"trace.npz", "time-surface.json", "tuning.json", "summary.json", "policy.json"} <= names
    assert 'id="tuning"' in page
    assert "SIMULATED" in page
    assert "chart-tuning-scatter" in page
    assert "not measured" in page


def test_tune_prints_prediction_measurement_break_even_and_what_was_left_out(spectune: Spectune) -> None:
    """One table a load with both numbers side by side, then the verdict and the commands to copy."""
    done = spectune(*TINY, "--output-dir", "run")

    assert done.code == 0
    for words in (
        "predicted speedup", "AL to break even", "kept none", "not measured: 1 configurations",
        "acceptance length of eagle3 K=3", "steps)", "SIMULATED", "vllm serve",
    ):  # fmt: skip
        assert words in " ".join(done.out.split())


def test_tune_json_is_one_document(spectune: Spectune) -> None:
    """Tuning and summary on stdout, everything else on stderr."""
    done = spectune(*TINY, "--output-dir", "run", "--json")

    told = json.loads(done.out)
    assert {"tuning", "summary"} == set(told)
    row = told["tuning"]["cells"][0]["predicted"][0]
    assert {"survival", "conditional_acceptance", "zero_accept_share"} <= set(row)


def test_dry_run_runs_nothing(spectune: Spectune) -> None:
    """The plan with its counts; no directory is made."""
    done = spectune(*TINY, "--dry-run", "--json")

    told = json.loads(done.out)
    assert (4, 2) == (told["predicted"], told["finalists_per_cell"])
    assert not Path("runs").exists()


def test_settings_come_from_a_file_and_flags_win(spectune: Spectune) -> None:
    """The file of a sweep: its batch sizes are taken, the flag's chain lengths win over its own."""
    Path("spectune.yaml").write_text("search: {num_tokens: [1, 2, 3, 4]}\nload: {batch_size: [1, 2]}\n")
    where = TINY.index("--batch-size")
    words = (*TINY[:where], *TINY[where + 2 :])

    done = spectune(*words, "--config", "spectune.yaml", "--dry-run", "--json")

    told = json.loads(done.out)
    assert 2 == len(told["cells"])
    assert ["off", "eagle3 K=1", "eagle3 K=2", "eagle3 K=3"] == told["configs"]


def test_resume_of_a_finished_tuning_measures_nothing(finished: Path, spectune: Spectune) -> None:
    """Same winner, same points, exit code 0."""
    shutil.copytree(finished, "run")
    before = Path("run/points.jsonl").read_text()

    done = spectune("tune", "--resume", "run", "--json")

    assert done.code == 0
    assert before == Path("run/points.jsonl").read_text()
    winners = [cell["race"]["winner_label"] for cell in json.loads(done.out)["tuning"]["cells"]]
    assert winners == [
        cell["race"]["winner_label"] for cell in json.loads((finished / "tuning.json").read_text())["cells"]
    ]


def test_resume_with_another_flag_is_refused(finished: Path, spectune: Spectune) -> None:
    """Other settings would be another run; the flag is named."""
    done = spectune("tune", "--resume", str(finished), "--finalists", "3")

    assert done.code == 2
    assert "--finalists" in done.err


def test_report_draws_a_tuned_run_again(finished: Path, spectune: Spectune) -> None:
    """From files alone, with the section on tuning."""
    done = spectune("report", str(finished), "--output", "page.html")

    assert done.code == 0
    assert 'id="tuning"' in Path("page.html").read_text(encoding="utf-8")


def test_synthetic_prompts_are_refused_unless_forced(spectune: Spectune) -> None:
    """Acceptance on drawn words decides nothing; forced, the page carries the label in its title."""
    assert 0 == spectune("workload", "synth", "drawn.jsonl", "--num-prompts", "40").code

    refused = spectune(*TINY, "--dataset-path", "drawn.jsonl", "--output-dir", "one")
    forced = spectune(*TINY, "--dataset-path", "drawn.jsonl", "--output-dir", "two", "--allow-synthetic")

    assert refused.code == 5
    assert "synthetic" in refused.err
    assert forced.code == 0
    title = Path("two/report.html").read_text(encoding="utf-8").split("<title>")[1].split("</title>")[0]
    assert "SYNTHETIC" in title


def test_own_prompts_have_acceptance_by_category_and_length_with_counts(spectune: Spectune) -> None:
    """A file of one's own traffic, short and long prompts: each group stands with its steps."""
    lines = [
        {
            "prompt": f"case {i}: " + "word " * (2400 if i % 2 else 20),
            "category": "support" if i % 3 else "sales",
        }
        for i in range(48)
    ]
    Path("traffic.jsonl").write_text("\n".join(map(json.dumps, lines)))

    done = spectune(*TINY, "--dataset-path", "traffic.jsonl", "--output-dir", "run", "--json")

    told = json.loads(done.out)["tuning"]["traces"][0]["acceptance"][0]
    assert {"support", "sales"} == set(told["by_category"])
    assert {"< 128", "2048..8191"} <= set(told["by_context_tokens"])
    groups = [*told["by_category"].values(), *told["by_context_tokens"].values()]
    assert all(group["num_steps"] > 0 for group in groups)


def test_knobs_are_searched_from_the_winner_and_kept_in_storage(spectune: Spectune) -> None:
    """Every combination once; the storage file is there for other workers."""
    knob = ("--knob", "has_trees=true:false", "--storage", "sqlite:///study.db")

    done = spectune(*TINY, "--output-dir", "run", *knob, "--json")

    told = json.loads(done.out)["tuning"]["knobs"]
    assert (2, "exhausted") == (len(told["tried"]), told["end"])
    assert Path("study.db").is_file()


def test_throughput_within_a_limit_picks_the_largest_load_that_keeps_it(spectune: Spectune) -> None:
    """A batch of 8 gives more tokens than one of 1 or 2, but no token within 30 ms."""
    limit = ("--objective", "throughput", "--max-tpot-ms", "30", "--batch-size", "1,2,8")

    done = spectune(*TINY, *limit, "--output-dir", "run", "--json")

    told = json.loads(done.out)["tuning"]
    by_batch = {c["cell"]["batch_size"]: c["race"]["tpot_s"] for c in told["cells"]}
    assert by_batch[1] < by_batch[2] < 0.030 < by_batch[8]
    assert told["operating_point"]["cell"]["batch_size"] == 2
    assert told["operating_point"]["tokens_per_s"] == pytest.approx(2 / by_batch[2])


def test_goodput_needs_its_promises(spectune: Spectune) -> None:
    """The objective without a limit is a usage error that shows one."""
    done = spectune(*TINY, "--objective", "goodput")

    assert done.code == 2
    assert "--goodput" in done.err


def test_profile_saves_a_surface_that_tune_takes(spectune: Spectune) -> None:
    """Then nothing is profiled again."""
    shared = TINY[1:11]
    made = spectune(
        "profile", *shared, "--max-tokens", "24", "--profile-seconds", "0", "--output-dir", "surface"
    )
    again = spectune(
        *(
            "profile",
            *shared,
            "--max-tokens",
            "24",
            "--profile-seconds",
            "0",
            "--against",
            "surface",
            "--json",
        )
    )

    done = spectune(*TINY, "--surface", "surface", "--output-dir", "run")

    assert (0, 0, 0) == (made.code, again.code, done.code)
    assert "held-out error" in made.out
    assert json.loads(again.out)["repeatability"][1] < 0.03
    assert not Path("run/time-surface.json").exists()


def test_profile_takes_step_times_from_a_run(spectune: Spectune) -> None:
    """For engines that cannot time rounds: a step of the stored requests at each load."""
    sweep = (
        *("sweep", "--backend", "simulated", "--method", "eagle3", "--num-tokens", "1,3", "--topk", "1"),
        *("--batch-size", "1", "--num-prompts", "8", "--max-tokens", "16", "--output-dir", "run"),
    )
    assert 0 == spectune(*sweep).code

    told = json.loads(spectune("profile", "--run", "run", "--json").out)["surface"]

    assert told["source"] == "steps"
    steps = {point["config"]["num_steps"]: point["verify_s"] for point in told["points"]}
    assert steps[0] < steps[1] < steps[3]


def test_profile_dry_run_counts_points(spectune: Spectune) -> None:
    """Shapes and loads; nothing is timed."""
    done = spectune("profile", "--backend", "simulated", "--dry-run", "--json")

    assert json.loads(done.out)["points"] >= 70
