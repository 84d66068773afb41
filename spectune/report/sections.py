"""The sections of a report in reading order; every one is there for every run, with or without data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from spectune.policy.comparison import RunSummary
from spectune.replay.estimate import LABEL
from spectune.report import charts, panels, served, tables, verdicts
from spectune.report.grid import Row, chip, table, words
from spectune.report.page import bullets, copyable, details, section
from spectune.report.svg import Styles
from spectune.report.text import TIMES, Html, Missing, config_html, escape, flatten, strict_json

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "spectune": "spectune", "reference": "Reference engine"}
_OUTCOMES = {
    "speculate": ("Speculate.", "on"),
    "do not speculate": ("Do not speculate.", "off"),
    "depends on load": ("It depends on the load.", "dep"),
    "depends on workload": ("It depends on the workload.", "dep"),
    "no data": ("No verdict: nothing could be measured.", "bad"),
}


def verdict(summary: RunSummary) -> Html:
    """The answer in one big sentence, then one tile a cell."""
    word, kind = _OUTCOMES.get(summary.outcome, (summary.outcome.capitalize() + ".", "dep"))
    tiles = []
    for item in summary.cells:
        decision = item.decision
        value = decision.verdict
        detail = escape(config_html(decision.chosen))
        if decision.verdict == "on" and decision.speedup is not None:
            value = f"{decision.speedup.value:.2f}{TIMES}"
        elif decision.verdict == "off":
            value, detail = "off", escape("plain decoding")
        elif decision.verdict == "no data":
            value, detail = "no data", escape(decision.reason)
        tiles.append(
            f'<div class="tile"><div class="k">{escape(item.cell.label)}</div>'
            f'<div class="v">{escape(value)}</div><div class="d">{detail}</div></div>'
        )
    # The word stands above already; what the numbers are over comes after them in smaller print.
    said = summary.verdict.removeprefix(f"{word.rstrip('.')}: ")
    first, stop, rest = said.partition(". ")
    more = f'<p class="more">{escape(rest)}</p>' if rest else ""
    return Html(
        f'<div class="verdict {kind}" id="verdict" role="status"><p class="word">{escape(word)}</p>'
        f'<p class="say">{escape(first + stop.rstrip())}</p>{more}</div><div class="tiles">{"".join(tiles)}</div>'
    )


def what_to_do(summary: RunSummary) -> Html:
    commands = [
        copyable(f"command-{index}", ENGINES.get(engine, engine), text)
        for index, (engine, text) in enumerate(summary.commands.items())
    ]
    none = '<p>No commands: the run gives nothing to launch. "Cautions" and "Failed" say why.</p>'
    return section("what-to-do", "What to do", "", f'<div class="box">{"".join(commands) or none}</div>')


def decisions(summary: RunSummary) -> Html:
    return section(
        "decisions",
        "Decision by batch size",
        "Plain decoding is the default: an arm must beat it by more than the noise; ties go to the smaller.",
        verdicts.decision_table(summary.cells),
        details("All arms", tables.arm_table(summary.cells)),
    )


def cautions(summary: RunSummary) -> Html:
    lines = list(dict.fromkeys(summary.cautions))
    body = bullets(lines, "No caution was raised by the checks of this run.")
    return section(
        "cautions", "Cautions", "Doubts that the checks raised about these numbers.",
        f'<div class="caution">{body}</div>' if lines else body,
    )  # fmt: skip


def advice(summary: RunSummary) -> Html:
    return section("advice", "Advice", "", bullets(list(summary.advice), "No advice beyond the decision."))


def speedup_section(summary: RunSummary, styles: Styles) -> Html:
    drawn = charts.speedup_charts(summary.cells, styles, is_simulated=summary.is_simulated)
    lead = (
        "Plain time over speculative time on the same engine, machine, prompts and load. Above 1.0 is faster."
    )
    return section(
        "speedup", "Speedup against batch size", lead, *(drawn or [_no_chart("no arm has a speedup")])
    )


def acceptance(summary: RunSummary, styles: Styles) -> Html:
    drawn = [
        (item.cell.label, chart)
        for index, item in enumerate(summary.cells)
        if (
            chart := charts.acceptance_chart(
                item, styles, f"acceptance-{index}", is_simulated=summary.is_simulated
            )
        )
    ]
    first = drawn[0][1] if drawn else _no_chart("no draft was ever proposed")
    told = tables.estimate_table(summary.cells)
    return section(
        "acceptance",
        "Acceptance by position",
        "Left, how often the target keeps at least this many drafts; right, how often it keeps this one "
        "given the one before it.",
        first,
        *(details(f"The same at {label}", chart) for label, chart in drawn[1:]),
        tables.acceptance_table(summary.cells),
        *(
            [
                details(
                    "Chains that did not run",
                    f'<p class="lead">{escape(LABEL[0].upper() + LABEL[1:])}.</p>',
                    told,
                )
            ]
            if told
            else []
        ),
    )


def prediction(summary: RunSummary, styles: Styles) -> Html:
    chart = charts.prediction_chart(summary.cells, styles, is_simulated=summary.is_simulated)
    return section(
        "prediction",
        "Predicted against measured",
        "Times come from calibration prompts and acceptance from one half of the blocks; the "
        "measurement is the other half.",
        chart or _no_chart("no arm has both a prediction and a measurement"),
        tables.prediction_table(summary.cells),
        "<h3>Speedup by cause</h3>",
        '<p class="lead">What each part multiplies the speed by; below 1 it costs.</p>',
        tables.waterfall_table(summary.cells),
    )


def rounds(summary: RunSummary) -> Html:
    chart = panels.round_chart(summary.cells, is_simulated=summary.is_simulated)
    return section(
        "rounds",
        "Where the time of a round goes",
        "A speculative round costs more than a plain one and yields more tokens.",
        chart or _no_chart("no full-batch decode rounds were recorded"),
        details("The same as numbers", tables.round_table(summary.cells)),
    )


def break_even(summary: RunSummary) -> Html:
    chart = panels.break_even_chart(summary.cells, is_simulated=summary.is_simulated)
    return section(
        "break-even",
        "Break-even",
        "Speculation pays where a step emits more tokens than its round costs in plain rounds, both measured. "
        "Emitted tokens are a little below the acceptance length: the end of a request cuts its last step.",
        chart or _no_chart("no speculative arm has both numbers"),
        tables.break_even_table(summary.cells),
    )


def floor(summary: RunSummary) -> Html:
    return section(
        "floor",
        "Share of the physical floor",
        "The floor is the time to read the bytes of a round at the measured bandwidth, per token. "
        "100% cannot be beaten.",
        tables.floor_table(summary.cells),
    )


def categories(summary: RunSummary, styles: Styles) -> Html:
    chart = panels.category_chart(summary.categories, styles, is_simulated=summary.is_simulated)
    return section(
        "categories",
        "By category",
        "Base is plain decoding. The total row is pooled over the raw counts of all requests, "
        "never a mean of the rows. Time per token is that of decode rounds, which the speedup compares.",
        chart or _no_chart("no category has a speedup of its own"),
        verdicts.category_table(summary),
    )


def latency(summary: RunSummary) -> Html:
    return section(
        "latency",
        "Latency and throughput",
        "TPOT is time per output token after the first, TTFT time to the first token. The inter-chunk gap is "
        "the time between stream events; a chunk may hold several tokens, so it is not a time per token. At "
        "batch above 1 TPOT and gaps contain the prefill of requests admitted meanwhile; speedups do not.",
        tables.latency_table(summary.cells),
        details("How long the answers were", served.output_table(summary.cells)),
    )


def policy(summary: RunSummary) -> Html:
    if summary.policy is None:
        body = [Html('<p class="empty">No policy was written: the run decided nothing.</p>')]
    else:
        fallback = summary.policy.get("fallback")
        say = strict_json(fallback) if isinstance(fallback, dict | list) else str(fallback)
        body = [
            verdicts.policy_table(summary.policy),
            Html(f"<p>Fallback outside these cells: <code>{escape(say)}</code></p>")
            if fallback
            else Html(""),
            details("policy.json", copyable("policy-json", "policy.json", strict_json(summary.policy))),
        ]
    return section("policy", "Policy", "Which configuration to run in which range of load.", *body)


def failures(summary: RunSummary) -> Html:
    points = [(item.label, item.status, item.reason) for item in summary.failures] + tables.problem_arms(
        summary
    )
    rows = []
    for label, status, reason in points:
        head, _, tail = reason.strip().partition("\n")
        text: Html | Missing | str = head or Missing(reason="the point left no message")
        if tail:
            text = Html(
                f"{escape(head)}{details('end of the log', f'<pre>{escape(tail)}</pre>', is_open=True)}"
            )
        rows.append(Row(cells=(label, chip(status.value), text)))
    pruned = [Row(cells=(label, reason)) for label, reason in summary.pruned]
    return section(
        "failures",
        "Failed and pruned points",
        "A failed point is never a result: it has no latency and cannot be chosen.",
        "<h3>Failed</h3>",
        table((words("Point"), words("Status"), words("Reason")), rows, empty="No point failed."),
        "<h3>Pruned before launch</h3>",
        table((words("Point"), words("Reason")), pruned, empty="No point was pruned."),
    )


def definitions(summary: RunSummary) -> Html:
    entries = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in summary.definitions.items()
    )
    body = f'<div class="box"><dl>{entries}</dl></div>' if entries else '<p class="empty">No definitions.</p>'
    return section("definitions", "Definitions", "", body)


def provenance(summary: RunSummary) -> Html:
    workload = flatten(summary.workload)
    fingerprint = flatten(asdict(summary.fingerprint)) if summary.fingerprint else []
    return section(
        "provenance",
        "Provenance",
        "What has to be equal for another run to be comparable, and how this one was made.",
        "<h3>Engine, models, device</h3>",
        facts_table(fingerprint, "No engine ever started, so nothing is known about it."),
        "<h3>Workload</h3>",
        facts_table(workload, "No workload was recorded."),
        "<h3>Machine, versions, command line</h3>",
        facts_table(flatten(summary.provenance), "No provenance was recorded."),
    )


def facts_table(facts: Sequence[tuple[str, str | None]], empty: str = "Nothing was recorded.") -> Html:
    """Named facts, one a row."""
    rows = [
        Row(cells=(name, Missing(reason="not recorded") if text is None else text))
        for name, text in facts
        if name
    ]
    return table((words("What"), words("Value")), rows, empty=empty)


def _no_chart(reason: str) -> Html:
    return Html(f'<p class="empty">No chart: {escape(reason)}.</p>')
