"""A run's results: summarised from the raw counts, saved beside them, shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectune.cli.console import print_json, say
from spectune.cli.policy import POLICY_FILE
from spectune.cli.report import REPORT_FILE
from spectune.cli.tables import print_verdict
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.policy.comparison import RunSummary
    from spectune.store import RunStore

TUNING_FILE = "tuning.json"

DONE = 0
NOTHING_USABLE = 1
DONE_WITH_FAILURES = 7


def read_summary(run: Path) -> RunSummary:
    """The summary of a stored run, computed again from its raw counts."""
    from spectune.policy.summary import summarize
    from spectune.store import MANIFEST, RunStore

    if not (run / MANIFEST).exists():
        what = f"holds no {MANIFEST}" if run.is_dir() else "is a file" if run.exists() else "does not exist"
        raise UsageError(f"RUN {run} {what}", hint="give the run directory of a sweep, for example runs/demo")
    return summarize(RunStore.open(run))


def summary_document(summary: RunSummary) -> dict[str, Any]:
    """The summary as strict JSON, vLLM's names beside ours."""
    from spectune.policy.export import to_dict

    return to_dict(summary)


def save_results(store: RunStore, summary: RunSummary) -> Path:
    """summary.json, summary.csv, policy.json and report.html in the run directory; returns the page."""
    from spectune.policy.export import to_csv
    from spectune.report.html import write_report

    store.write_json("summary.json", summary_document(summary))
    store.write_text("summary.csv", to_csv(summary))
    if summary.policy is not None:
        store.write_json(POLICY_FILE, summary.policy)
    page = store.path / REPORT_FILE
    write_report(summary, page, read_tuning(store.path))
    return page


def read_tuning(run: Path) -> dict[str, Any] | None:
    """What a tuning of this run predicted and measured; None for any other run."""
    from spectune.store import RunStore

    if not (run / TUNING_FILE).is_file():
        return None
    told: dict[str, Any] = RunStore(run, {}).read_json(TUNING_FILE)
    return told


def show_results(summary: RunSummary, page: Path, *, as_json: bool) -> None:
    """The verdict table and where the page is; with --json the summary alone on stdout."""
    if as_json:
        print_json(summary_document(summary))
    else:
        print_verdict(summary)
    say_head(summary)
    if summary.policy is not None:
        say(f"policy: {page.with_name(POLICY_FILE)}; commands for vLLM and SGLang: in the report")
    say(f"report: {page}")


def say_head(summary: RunSummary) -> None:
    """Where a shipped head lies on this machine, for whoever copies a command of the report."""
    from spectune.backend.heads import head_folder, shipped_heads

    name = None if summary.fingerprint is None else summary.fingerprint.draft
    if name is not None and name in shipped_heads():
        say(f"draft head {name}: {head_folder(name)}")


def exit_code(summary: RunSummary) -> int:
    """0 done, 1 nothing usable, 7 done with failed points.

    A candidate measured without plain decoding (a lone server) gives no verdict and is usable all the same,
    and so is plain decoding where nothing else was asked for.
    """
    measured = any(
        arm.status == "ok" and (not arm.config.is_off or len(cell.arms) == 1)
        for cell in summary.cells
        for arm in cell.arms
    )
    if summary.outcome == "no data" and not measured:
        return NOTHING_USABLE
    return DONE_WITH_FAILURES if summary.failures else DONE
