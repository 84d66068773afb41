"""The page of judged draft heads: which is ahead, where, and how far its confidence can be trusted."""

from __future__ import annotations

from collections.abc import Mapping

from spectune.records import Acceptance, HeadReport, Interval, Judgement
from spectune.report.grid import Row, numbers, table, words
from spectune.report.head_charts import category_chart, head_styles, position_chart, reliability_chart
from spectune.report.page import details, page, section
from spectune.report.sections import facts_table
from spectune.report.text import Html, Missing, Value, escape, flatten, percent

NO_ROUND = "no round falls here"


def render_heads(judgement: Judgement) -> str:
    """The whole page of a judgement."""
    reports = judgement.reports
    styles = head_styles(reports)
    num_loops = sum(text.had_loop for text in judgement.texts)
    names = ", ".join(report.name for report in reports)
    body = (
        f'<header class="top"><h1>spectune train eval: {escape(names)}</h1>'
        f'<span class="meta">{escape(_about(judgement))}</span></header><main>'
        f'<div class="verdict dep"><p class="word">{escape(judgement.verdict)}</p>'
        f'<p class="more">{len(judgement.texts) - num_loops} texts of the target without a loop, '
        f"{num_loops} with one; all heads drafted along the same texts.</p></div>"
        + section(
            "heads", "Heads", "Pooled over rounds; intervals over texts. Looping texts flatter every head.",
            heads_table(judgement), pairs_table(judgement),
        )
        + section(
            "positions", "Draft by draft", f"A chain of {judgement.num_tokens}.",
            position_chart(reports, styles) or "",
        )
        + section(
            "categories", "Where it helps",
            "In the tables, below each length: drafts accepted given that those before were.",
            category_chart(reports, styles) or "",
            details("by category", cut_table(judgement, "category", "by_category")),
            details("by context", cut_table(judgement, "context, tokens", "by_context")),
            details("by place in the output", cut_table(judgement, "output token", "by_position")),
            details("by temperature", cut_table(judgement, "temperature", "by_temperature")),
        )
        + section(
            "confidence", "What confidence is worth", "All drafts that were reached, in tenths of confidence.",
            reliability_chart(reports, styles) or "", details("all tenths", bins_table(judgement)),
        )
        + section(
            "vocabulary", "Draft vocabulary",
            "A smaller vocabulary drafts faster and can say less. Cut after training: the first tokens are kept.",
            vocabulary_table(judgement),
        )
        + section("provenance", "Provenance", "", facts_table(flatten(judgement.settings)))
        + "<footer>spectune train eval</footer></main>"
    )  # fmt: skip
    return page(title=f"Draft heads: {names}", body=body, is_simulated=False)


def _about(judgement: Judgement) -> str:
    settings = judgement.settings
    facts = [str(settings[key]) for key in ("target", "workload", "device") if settings.get(key)]
    return " \N{MIDDLE DOT} ".join(facts)


def heads_table(judgement: Judgement) -> Html:
    """One line a head."""
    columns = [
        words("head"), numbers("acceptance length"), numbers("with looping texts"),
        *(numbers(f"draft {place}", "accepted") for place in range(1, judgement.num_tokens + 1)),
        numbers("vocabulary covers"), numbers("confidence gap"), numbers("rounds"), numbers("texts"),
    ]  # fmt: skip
    return table(columns, [_head(report, judgement.num_tokens) for report in judgement.reports])


def _head(report: HeadReport, num_tokens: int) -> Row:
    found = [*report.overall.conditional, *[None] * num_tokens][:num_tokens]
    return Row(
        cells=[
            report.name, length(report.overall), length(report.with_loops),
            *(percent(value, "this draft was never reached", digits=1) for value in found),
            percent(report.coverage, NO_ROUND, digits=1), percent(report.calibration_error, NO_ROUND, digits=1),
            str(report.overall.num_rounds), str(report.overall.num_texts),
        ]
    )  # fmt: skip


def pairs_table(judgement: Judgement) -> Html:
    """Every pair of heads on the same texts."""
    if not judgement.pairs:
        return Html("")
    columns = [words("head"), words("over"), numbers("ratio of acceptance lengths"), numbers("texts")]
    rows = [
        Row(cells=[pair.head, pair.base, _interval(pair.ratio), str(pair.ratio.n)])
        for pair in judgement.pairs
    ]
    return Html(f"<h3>Pairs, on the same texts</h3>{table(columns, rows)}")


def cut_table(judgement: Judgement, title: str, cut: str) -> Html:
    """Acceptance length of every head by one cut."""
    cuts: list[Mapping[str, Acceptance]] = [getattr(report, cut) for report in judgement.reports]
    labels = dict.fromkeys(label for found in cuts for label in found)
    columns = [words(title), *(numbers(report.name) for report in judgement.reports), numbers("texts")]
    rows = [
        Row(
            cells=[
                label, *(_with_drafts(found.get(label)) for found in cuts),
                str(max(found[label].num_texts for found in cuts if label in found)),
            ]
        )
        for label in labels
    ]  # fmt: skip
    return table(columns, rows, empty=NO_ROUND)


def _with_drafts(found: Acceptance | None) -> Value:
    """An acceptance length, and below it the share accepted draft by draft."""
    value = length(found)
    if found is None or isinstance(value, Missing) or not found.conditional:
        return value
    shares = ", ".join("-" if share is None else f"{share:.0%}" for share in found.conditional)
    return Html(f"{escape(value)}<small>{escape(shares)}</small>")


def bins_table(judgement: Judgement) -> Html:
    """Confidence and share of right drafts by tenth."""
    rows = [
        Row(
            cells=[
                report.name, percent(cell.confidence, ""), percent(cell.accepted, ""), str(cell.num_drafts),
            ],
            group=report.name,
        )
        for report in judgement.reports
        for cell in report.calibration
    ]  # fmt: skip
    columns = [words("head"), numbers("mean confidence"), numbers("right"), numbers("drafts")]
    return table(columns, rows, empty=NO_ROUND)


def vocabulary_table(judgement: Judgement) -> Html:
    """Acceptance length by the size to which the draft vocabulary is cut."""
    sizes = sorted({int(size) for report in judgement.reports for size in report.by_draft_vocab})
    columns = [words("head"), *(numbers(str(size), "tokens") for size in sizes), numbers("whole")]
    rows = [
        Row(
            cells=[
                report.name,
                *(
                    length(report.by_draft_vocab.get(str(size)), "the head's vocabulary is not larger")
                    for size in sizes
                ),
                length(report.overall),
            ]
        )
        for report in judgement.reports
    ]
    return table(columns, rows)


def length(found: Acceptance | None, why: str = NO_ROUND) -> Value:
    """An acceptance length with its interval."""
    if found is None:
        return Missing(reason=why)
    if found.acceptance_length is None:
        return Missing(reason=NO_ROUND)
    return _interval(found.acceptance_length)


def _interval(interval: Interval) -> Html:
    if interval.low is None or interval.high is None:
        return escape(f"{interval.value:.3f}")
    return Html(f'{interval.value:.3f} <span class="ci">({interval.low:.3f} to {interval.high:.3f})</span>')
