"""The page of an import: what another tool measured, arm by arm, and what its files do not say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectune.records import SpecConfig
from spectune.report.grid import Row, chip, numbers, table, words
from spectune.report.page import bullets, page, section
from spectune.report.sections import facts_table
from spectune.report.text import (
    Html,
    Missing,
    Value,
    escape,
    flatten,
    milliseconds,
    number,
    percent,
    speedup_text,
)

Rows = Sequence[Mapping[str, Any]]


def render_import(name: str, rows: Rows, manifest: Mapping[str, Any]) -> str:
    """One HTML document from the rows of policy.imported and the manifest of the import."""
    cautions = list(dict.fromkeys(text for row in rows for text in row["cautions"]))
    models = ", ".join(dict.fromkeys(str(row["model_id"]) for row in rows if row["model_id"])) or "not told"
    parts = (
        section(
            "measurements",
            "Measurements",
            "In the units of vllm bench serve, as the files hold them. Speedup is plain time per token over the "
            "arm's at the same load, over runs that were made one after the other: what changed between them is "
            "in no interval.",
            _measurements(rows),
        ),
        section(
            "acceptance",
            "Acceptance",
            "From the server's own counters, over steps that drafted; a step without a draft is not counted.",
            _acceptance(rows),
        ),
        section("cautions", "Cautions", "", bullets(cautions, "Nothing is doubted.")),
        section(
            "provenance",
            "Provenance",
            "Where the files came from and who read them.",
            facts_table(
                flatten({key: manifest[key] for key in ("sources", "provenance") if key in manifest})
            ),
        ),
    )
    header = (
        f'<header class="top"><h1>spectune import: {escape(name)}</h1><span class="meta">{escape(models)}'
        "</span></header>"
    )
    body = f"{header}<main>{_headline(rows)}{''.join(parts)}</main>"
    return page(title=f"{name}: imported measurements", body=body, is_simulated=False)


def _headline(rows: Rows) -> Html:
    fast = [row for row in rows if row["speedup"] is not None]
    word = f"{len(rows)} imported measurements."
    if fast:
        best = max(fast, key=lambda row: float(row["speedup"]))
        say = f"Fastest over plain decoding: {best['config']} at {load_text(best)}, {best['speedup']:.2f}x."
    else:
        say = "No arm can be compared with plain decoding: the files hold no plain run at the same load."
    return Html(
        f'<div class="verdict dep" id="verdict" role="status"><p class="word">{escape(word)}</p>'
        f'<p class="say">{escape(say)} Nothing was measured here, so nothing is decided.</p></div>'
    )


def _measurements(rows: Rows) -> Html:
    columns = (
        words("Arm"), words("Load"), numbers("Run"), numbers("Speedup"), numbers("TPOT mean", "ms"),
        numbers("TTFT mean", "ms"), numbers("TTFT p99", "ms"), numbers("Throughput", "tokens/s"),
        numbers("Requests", "done of asked"), words("Status"),
    )  # fmt: skip
    cells = [
        Row(
            group=load_text(row),
            kind="base" if row["config"] == SpecConfig.off().label else "",
            cells=(
                row["config"] or row["label"] or Missing(reason="the file does not say how it speculated"),
                load_text(row),
                Missing(reason="a single run") if row["run_number"] is None else str(row["run_number"]),
                speedup_text(
                    row["speedup"], row["speedup_ci"], "no plain run at this load, or the plain run"
                ),
                *(
                    milliseconds(_seconds(row.get(name)), row["reason"] or "not in the file")
                    for name in ("mean_tpot_ms", "mean_ttft_ms", "p99_ttft_ms")
                ),
                number(row.get("output_throughput"), row["reason"] or "not in the file", digits=1),
                f"{row.get('completed', 0)} of {row.get('num_prompts', 0)}",
                chip(row["status"]),
            ),
        )
        for row in rows
    ]
    return table(columns, cells, empty="The files hold no measurement.")


def _acceptance(rows: Rows) -> Html:
    columns = (
        words("Arm"), words("Load"), numbers("Run"), numbers("Acceptance length", "drafting steps"),
        numbers("Accepted / drafted"), numbers("Drafting steps"), words("Doubt"),
    )  # fmt: skip
    cells = []
    for row in rows:
        if row["drafting_acceptance_length"] is None:
            continue
        rate = row.get("spec_decode_acceptance_rate")
        doubt: Value = row["acceptance_doubt"] or Missing(reason="the counts add up")
        cells.append(
            Row(
                group=load_text(row),
                cells=(
                    row["config"] or row["label"] or Missing(reason="not told"),
                    load_text(row),
                    Missing(reason="a single run") if row["run_number"] is None else str(row["run_number"]),
                    number(row["drafting_acceptance_length"], "no draft was counted"),
                    percent(None if rate is None else rate / 100, "no draft was counted"),
                    number(row.get("spec_decode_num_drafts"), "not in the file", digits=0),
                    doubt,
                ),
            )
        )
    return table(columns, cells, empty="No file counts drafts.")


def load_text(row: Mapping[str, Any]) -> str:
    """`4 users`, `2/s`, `2/s, at most 4 users` or `unlimited`."""
    rate, users = row.get("request_rate"), row.get("max_concurrency")
    parts = [] if rate in (None, "inf") else [f"{rate:g}/s"]
    parts += [] if users is None else [f"{users} users" if not parts else f"at most {users} users"]
    return ", ".join(parts) or "unlimited"


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1e3
