"""`spectune sweep` and what reads its run, on the simulated backend."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spectune as spectune_package
from spectune.cli.inputs import open_backend, plan_of, read_workload, work_s
from spectune.cli.options import parse_settings, settings_of
from spectune.cli.sweep_options import QUICK, SweepOptions
from spectune.report import html
from spectune.tune import sweep as tune_sweep

FILES = {
    "manifest.json",
    "points.jsonl",
    "requests",
    "summary.json",
    "summary.csv",
    "policy.json",
    "report.html",
}

Spectune = Callable[..., Any]

TINY = (
    *("sweep", "--backend", "simulated", "--num-tokens", "1,3", "--topk", "1", "--method", "eagle3"),
    *("--batch-size", "1", "--num-prompts", "8", "--max-tokens", "16"),
)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; copy it before changing it."""
    from spectune.cli.app import run

    path = tmp_path_factory.mktemp("runs") / "finished"
    assert 0 == run([*TINY, "--output-dir", str(path)])
    return path


def test_sweep_simulated_leaves_a_whole_run(finished: Path) -> None:
    """A sweep leaves counts, summary, table, policy and page in its directory."""
    assert set() == FILES - {path.name for path in finished.iterdir()}


def test_sweep_manifest_holds_the_typed_command_and_no_place_of_this_machine(spectune: Spectune) -> None:
    """A run can be published as it is: flags as typed, no interpreter, checkout or working folder."""
    spectune(*TINY, "--output-dir", "run")

    text = Path("run/manifest.json").read_text(encoding="utf-8")
    assert ["spectune", *TINY, "--output-dir", "run"] == json.loads(text)["argv"]
    places = (sys.prefix, str(Path(spectune_package.__file__).parent), str(Path.cwd()))
    assert [] == [place for place in places if place in text]


def test_sweep_prints_the_verdict_on_stdout_and_the_rest_on_stderr(spectune: Spectune) -> None:
    """The verdict table is data; prompts, progress and the report's path are not."""
    answer = spectune(*TINY, "--output-dir", "run")

    assert 0 == answer.code
    assert "decision" in answer.out
    assert "SIMULATED" in answer.out
    assert "report: run/report.html" in answer.err
    assert "[3/3]" in answer.err


def test_sweep_json_is_the_stored_summary(spectune: Spectune) -> None:
    """With --json standard output is one document, the one in the run directory."""
    answer = spectune(*TINY, "--output-dir", "run", "--json")

    assert json.loads(Path("run/summary.json").read_text(encoding="utf-8")) == answer.document


def test_sweep_without_output_dir_makes_one_below_runs(spectune: Spectune) -> None:
    """A run that is not named is kept under runs/."""
    assert 0 == spectune(*TINY).code

    [run] = Path("runs").iterdir()
    assert (run / "report.html").is_file()


def test_sweep_dry_run_plans_and_runs_nothing(spectune: Spectune) -> None:
    """--dry-run tells arms, cells and what was pruned, and leaves no run."""
    answer = spectune(
        *("sweep", "--backend", "simulated", "--method", "eagle3", "--num-tokens", "1,3", "--topk", "1,4"),
        *("--num-draft-tokens", "8", "--batch-size", "1,4", "--dry-run", "--json"),
    )

    plan = answer.document
    assert ["off", "eagle3 K=1", "eagle3 K=3", "eagle3 D=3 k=4 N=8"] == plan["arms"]
    assert 8 == plan["points"]
    assert ["eagle3 D=1 k=4 N=8"] == [entry["point"] for entry in plan["pruned"]]
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-speculative-tokens", "2,4", "--speculative-eagle-topk", "1", "--max-concurrency", "2"],
        ["--speculative-num-steps", "2,4", "--eagle-topk", "1", "--batch-size", "2"],
        ["--num-steps", "2,4", "--topk", "1", "--batch-size", "2"],
    ],
    ids=["vllm", "sglang", "ours"],
)
def test_sweep_engine_spellings_give_the_same_plan(spectune: Spectune, argv: list[str]) -> None:
    """The spellings of the engines plan the same sweep."""
    answer = spectune("sweep", "--backend", "simulated", "--method", "eagle3", *argv, "--dry-run", "--json")

    assert ["off", "eagle3 K=2", "eagle3 K=4"] == answer.document["arms"]
    assert ["batch 2, context 0, T=0"] == answer.document["cells"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param([], ["eagle3 K=2"], id="file-over-default"),
        pytest.param(["--num-tokens", "4"], ["eagle3 K=4"], id="flag-over-file"),
        pytest.param(["--quick"], ["eagle3 K=1", "eagle3 K=3"], id="quick-over-file"),
        pytest.param(["--quick", "--num-tokens", "4"], ["eagle3 K=4"], id="flag-over-quick"),
    ],
)
def test_sweep_settings_have_an_order(spectune: Spectune, argv: list[str], expected: list[str]) -> None:
    """Flags win over --quick, that over the file, that over the defaults."""
    Path("spectune.yaml").write_text(
        "backend: {backend: simulated}\nsearch: {method: eagle3, num_tokens: 2}\n", encoding="utf-8"
    )

    answer = spectune("sweep", "--config", "spectune.yaml", "--topk", "1", *argv, "--dry-run", "--json")

    assert ["off", *expected] == answer.document["arms"]


def test_sweep_quick_has_two_blocks_of_each_category_and_takes_minutes() -> None:
    """At batch 1 every category has a block to predict from and one to measure; all within six minutes
    on two cores."""
    options = parse_settings(SweepOptions, QUICK, {"backend": "simulated"})
    workload = read_workload(options)
    plan = plan_of(options, workload, open_backend(options))

    assert plan.num_blocks(plan.cells[0]) == 2 * len({prompt.category for prompt in workload.prompts})
    assert work_s(plan) < 6 * 60


def test_sweep_of_pruned_trees_alone_says_why(spectune: Spectune) -> None:
    """A grid of which nothing can be built is an error, not a run of plain decoding."""
    answer = spectune(
        *("sweep", "--backend", "simulated", "--method", "eagle3", "--num-tokens", "1", "--topk", "4"),
        *("--num-draft-tokens", "32", "--dry-run"),
    )

    assert answer.code == 2
    assert "every candidate was pruned: eagle3 D=1 k=4 N=32: needs 31 drafted nodes" in answer.err


def test_sweep_offers_the_load_formats_that_the_engine_knows() -> None:
    """A choice of --load-format is never refused later, when the model is loaded."""
    checkpoint = pytest.importorskip("spectune.engine.checkpoint")

    assert set(settings_of(SweepOptions)["load_format"].choices) == set(checkpoint.LOAD_FORMATS)


def test_sweep_bad_value_in_a_file_names_the_place(spectune: Spectune) -> None:
    """An error in the file names file, section and key, not a flag nobody typed."""
    Path("spectune.yaml").write_text("search: {num_tokens: [0]}\n", encoding="utf-8")

    answer = spectune("sweep", "--config", "spectune.yaml")

    assert (2, "error: spectune.yaml: search.num_tokens: 0 is below the minimum of 1\n") == (
        answer.code,
        answer.err,
    )


def test_sweep_interrupted_says_how_to_go_on_and_resume_completes(
    spectune: Spectune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends with 130 and the resume command; that command ends with exactly the planned points."""
    kept = tune_sweep.run_sweep

    def interrupted(*args: Any, **kwargs: Any) -> None:
        progress = args[3]
        done = progress.point_done

        def stop_after_first(outcome: Any) -> None:
            done(outcome)
            raise KeyboardInterrupt

        progress.point_done = stop_after_first
        kept(*args, **kwargs)

    monkeypatch.setattr(tune_sweep, "run_sweep", interrupted)
    first = spectune(*TINY, "--output-dir", "run")
    monkeypatch.setattr(tune_sweep, "run_sweep", kept)
    second = spectune("sweep", "--resume", "run")

    lines = Path("run/points.jsonl").read_text(encoding="utf-8").splitlines()
    assert (130, 0) == (first.code, second.code)
    assert "go on with: spectune sweep --resume run" in first.err
    assert 3 == len({json.dumps(json.loads(line)["point"], sort_keys=True) for line in lines})


def test_sweep_resume_with_another_setting_is_refused(spectune: Spectune, finished: Path) -> None:
    """A resumed run keeps its settings; a flag that would change one is named."""
    answer = spectune("sweep", "--resume", str(finished), "--seed", "3")

    assert 2 == answer.code
    assert "--seed cannot change them" in answer.err


def test_sweep_unexpected_failure_leaves_the_traceback_in_the_run(
    spectune: Spectune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure after measuring loses nothing: the run says where the log is and how to go on."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("drawing failed")

    monkeypatch.setattr("spectune.report.html.write_report", fail)

    answer = spectune(*TINY, "--output-dir", "run")

    assert 1 == answer.code
    assert "error: unexpected RuntimeError: drawing failed" in answer.err
    assert "Traceback" in Path("run/error.log").read_text(encoding="utf-8")
    assert Path("run/points.jsonl").is_file()


def test_sweep_of_which_every_point_failed_still_leaves_a_report(
    spectune: Spectune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing usable is exit 1 with a page that leads with the failures and strict JSON beside it."""
    monkeypatch.setattr("spectune.backend.simulated.SimulatedBackend.failure", lambda self, point: "engine")

    answer = spectune(*TINY, "--output-dir", "run")

    page = Path("run/report.html").read_text(encoding="utf-8")
    summary = json.loads(Path("run/summary.json").read_text(encoding="utf-8"))
    assert 1 == answer.code
    assert "no data" == summary["outcome"]
    assert 3 == len(summary["failures"])
    assert "No verdict: nothing could be measured." in page


def test_sweep_eagle3_without_a_head_is_refused_before_anything_runs(spectune: Spectune) -> None:
    """eagle3 on an own target needs a head: the error comes before any model is loaded."""
    answer = spectune("sweep", "--model", "somewhere", "--method", "eagle3", "--output-dir", "run")

    assert 2 == answer.code
    assert "needs --draft-model" in answer.err
    assert not Path("run").exists()


def test_sweep_without_the_engine_packages_names_what_to_install(
    spectune: Spectune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch is missing the sweep ends with the pip command, before any download or folder."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "spectune.backend.reference", raising=False)
    monkeypatch.delattr("spectune.backend.reference", raising=False)

    answer = spectune("sweep", "--method", "ngram", "--quick", "--output-dir", "run")

    assert 2 == answer.code
    assert "error: backend reference needs the package torch" in answer.err
    assert "hint: pip install 'spectune[engine]'" in answer.err
    assert not Path("run").exists()


def test_report_draws_the_page_again(spectune: Spectune, finished: Path) -> None:
    """`report` needs only the raw counts of a run."""
    run = Path(shutil.copytree(finished, "copy"))
    for name in ("report.html", "summary.json", "policy.json"):
        (run / name).unlink()

    answer = spectune("report", "copy")

    assert (0, "report: copy/report.html\n") == (answer.code, answer.err)
    assert "<html" in (run / "report.html").read_text(encoding="utf-8")


def test_report_of_a_run_that_may_only_be_read_is_written_here(
    spectune: Spectune, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on a read-only disk, without its summary, still gets its page, in the working folder."""
    shutil.copytree(finished, "kept/copy")
    Path("kept/copy/summary.json").unlink()
    real = html.write_page

    def write(text: str, path: Path) -> None:
        if Path("kept/copy").resolve() in path.resolve().parents:
            raise OSError(errno.EROFS, "Read-only file system")
        real(text, path)

    monkeypatch.setattr(html, "write_page", write)

    answer = spectune("report", "kept/copy")

    assert 0 == answer.code
    assert answer.err == (
        "note: kept/copy cannot be written to (Read-only file system)\nreport: copy-report.html\n"
    )
    assert "<html" in Path("copy-report.html").read_text(encoding="utf-8")


def test_report_to_a_place_that_cannot_be_written_is_refused(spectune: Spectune, finished: Path) -> None:
    """A page that was asked for somewhere goes nowhere else."""
    Path("file").write_text("", encoding="utf-8")

    answer = spectune("report", str(finished), "--output", "file/page.html")

    assert 2 == answer.code
    assert "error: file/page.html cannot be written" in answer.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("absent", "RUN absent does not exist", id="nothing-there"),
        pytest.param("notes.txt", "RUN notes.txt is a file", id="a-file"),
        pytest.param(".", "RUN . holds no manifest.json", id="another-folder"),
    ],
)
def test_report_of_what_is_no_run_says_so(spectune: Spectune, name: str, words: str) -> None:
    """The error names what was given and what to give."""
    Path("notes.txt").write_text("", encoding="utf-8")

    answer = spectune("report", name)

    assert 2 == answer.code
    assert words in answer.err
    assert "hint: give the" in answer.err


def test_policy_show_prints_a_row_for_each_cell(spectune: Spectune, finished: Path) -> None:
    """`policy show` reads a run directory and its policy.json alike."""
    from_run = spectune("policy", "show", str(finished))
    from_file = spectune("policy", "show", str(finished / "policy.json"))

    assert from_run == from_file
    assert "anywhere else: off" in from_run.out


def test_policy_show_file_that_is_no_policy_is_refused(spectune: Spectune) -> None:
    """Any other JSON is named as not being a policy."""
    Path("x.json").write_text('{"a": 1}', encoding="utf-8")

    answer = spectune("policy", "show", "x.json")

    assert 2 == answer.code
    assert "x.json: not a spectune policy" in answer.err


def test_sweep_large_batch_takes_new_prompts_before_it_repeats_any(spectune: Spectune) -> None:
    """Blocks of a large batch hold prompts that no other block held, while there are any."""
    answer = spectune(*TINY, "--batch-size", "1,8", "--min-blocks", "4", "--output-dir", "run")

    manifest = json.loads(Path("run/manifest.json").read_text(encoding="utf-8"))
    assert 0 == answer.code
    assert 32 == manifest["workload"]["num_prompts"]


def test_sweep_on_synthetic_prompts_decides_nothing_from_end_to_end(spectune: Spectune) -> None:
    """Drawn words: the page says so in its title, policy and emit refuse the run, forced they do not."""
    assert 0 == spectune("workload", "synth", "drawn.jsonl", "--num-prompts", "40").code

    swept = spectune(*TINY, "--dataset-path", "drawn.jsonl", "--output-dir", "plain")
    refused = spectune("policy", "build", "plain", "--output", "refused.json")
    forced = spectune(*TINY, "--dataset-path", "drawn.jsonl", "--output-dir", "forced", "--allow-synthetic")
    built = spectune("policy", "build", "forced", "--output", "built.json")

    assert swept.code == 0
    title = Path("plain/report.html").read_text(encoding="utf-8").split("<title>")[1].split("</title>")[0]
    assert "SYNTHETIC" in title
    assert not Path("plain/policy.json").exists()
    assert refused.code != 0
    assert "synthetic" in refused.err.lower()
    assert not Path("refused.json").exists()
    assert (0, 0) == (forced.code, built.code)
    assert Path("forced/policy.json").exists()


def test_report_says_what_limits_a_speedup_and_quotes_no_paper(finished: Path) -> None:
    """What acceptance gives, what drafts, verification and the rest take, is the measured speedup; no published one."""
    page = (finished / "report.html").read_text(encoding="utf-8")
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))

    factors = re.search(r"eagle3 K=3 ((?:[\d.]+\N{MULTIPLICATION SIGN} ){6})", text)
    assert factors is not None
    *parts, measured = [float(value.rstrip("\N{MULTIPLICATION SIGN}")) for value in factors[1].split()]
    assert len(parts) == 5
    assert parts[0] > 1.0 > max(parts[1], parts[2])  # acceptance gives, drafts and verification take
    assert math.prod(parts) == pytest.approx(measured, rel=0.03)  # each factor is printed to 1%
    for word in ("paper", "arxiv"):
        assert word not in page.lower()
