"""The page of what was measured on a device: checks, bandwidth, round costs, surface, crossover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from spectune.report.gpu_charts import MARK, crossover_charts, mbu_chart, waterfall_charts
from spectune.report.gpu_rows import RoundFacts, break_even, facts_of
from spectune.report.grid import Row, numbers, table, words
from spectune.report.page import bullets, details, page, section
from spectune.report.text import Html, Value, escape, flatten, milliseconds, number, percent
from spectune.store.gpu_run import CheckRow, GpuDocument, RoundRow

NOT_MEASURED = "not measured"


def render_gpu(document: GpuDocument, name: str) -> str:
    """The whole page of a document; `name` is that of its run."""
    facts = facts_of(document)
    rehearsal = document.is_rehearsal
    chart = mbu_chart(facts, is_rehearsal=rehearsal)
    body = (
        f"{_banner(document)}{_header(document, name)}<main>{_verdict(document, facts)}"
        + section("checks", "Equal results", "Two ways to one result; near ties are within rounding.", checks_table(document))
        + section("mbu", "Bandwidth", "Plain decoding reads all weights for every token.", chart or "", mbu_table(facts))
        + section(
            "rounds", "Round costs", "Medians of whole rounds, all configurations in turn.",
            *waterfall_charts(facts, is_rehearsal=rehearsal), rounds_table(facts, "rounds"),
        )
        + section(
            "crossover", "Where speculation stops paying",
            "Acceptance is forced: costs are measured, what a head would have accepted is not.",
            *crossover_charts(facts, is_rehearsal=rehearsal), break_even_table(facts),
            details("all rows", rounds_table(facts, "crossover")),
        )
        + section(
            "surface", "Time surface", "Draft, verification and the rest over batch, tokens and context.",
            details("all rows", rounds_table(facts, "surface")),
        )
        + section("missing", "What is missing", "", bullets(missing(document), "Nothing is missing."))
        + section("provenance", "Provenance", "", _provenance(document))
        + "<footer>spectune report</footer></main>"
    )  # fmt: skip
    mark = f"{MARK}: " if rehearsal else ""
    return page(title=f"{mark}{name}: {document.device.name}", body=body, is_simulated=rehearsal)


def missing(document: GpuDocument) -> list[str]:
    """What was planned and is not there, by reason."""
    found = [
        f"{name}: {state.num_done} of {state.num_planned} rows. {state.reason or ''}".strip()
        for name, state in document.parts.items()
        if not state.is_whole
    ]
    rows: list[CheckRow | RoundRow] = [*document.checks.values(), *document.rounds.values()]
    reasons: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.status != "ok":
            key = (row.part, row.status, row.reason or "")
            reasons[key] = reasons.get(key, 0) + 1
    return found + [f"{part}, {count} rows {status}: {why}" for (part, status, why), count in reasons.items()]


def _banner(document: GpuDocument) -> Html:
    if not document.is_rehearsal:
        return Html("")
    return Html(
        f'<div class="sim-banner" role="alert">{MARK}: toy models on a CPU, no GPU was run'
        "<span>The page shows that the measurement runs to its end. None of its numbers says anything about "
        "a device.</span></div>"
    )


def _header(document: GpuDocument, name: str) -> Html:
    device = document.device
    facts = [device.name, f"torch {device.torch}"]
    facts += [f"CUDA {device.cuda}"] if device.cuda else []
    facts += [f"driver {device.driver}"] if device.driver else []
    about = escape(" \N{MIDDLE DOT} ".join(facts))
    return Html(
        f'<header class="top"><h1>spectune on a device: {escape(name)}</h1>'
        f'<span class="meta">{about}</span></header>'
    )


def _verdict(document: GpuDocument, facts: Sequence[RoundFacts]) -> Html:
    """What the checks say, and the three figures that the engine is judged by."""
    unsound = [row for row in document.checks.values() if not row.is_sound]
    sound = sum(row.is_sound for row in document.checks.values())
    says = [
        f"{sound} of {len(document.checks)} checks hold"
        + (f"; {len(unsound)} do not, so nothing below counts" if unsound else "")
        + "."
    ]
    alone = [
        one for one in facts
        if one.row.part == "mbu" and one.row.batch_size == 1 and not one.row.is_pass_alone and one.impossible is None
    ]  # fmt: skip
    for one in alone:
        share, of = (one.mbu, "data sheet") if one.mbu is not None else (one.read_share, "measured read")
        if share is not None:
            says.append(
                f"{one.row.model} ({one.row.weights} weights) alone at context {one.row.context_tokens}: "
                f"{share:.0%} of the {of} bandwidth."
            )
    others = [one.other_share for one in facts if one.row.part == "rounds" and one.other_share is not None]
    if others:
        says.append(f"Neither draft nor verification: {min(others):.1%} to {max(others):.1%} of a round.")
    kind = "bad" if unsound else "dep"
    return Html(
        f'<div class="verdict {kind}"><p class="word">{escape(document.device.name)}</p>'
        + "".join(f'<p class="more">{escape(text)}</p>' for text in says)
        + "</div>"
    )


def checks_table(document: GpuDocument) -> Html:
    """One line a check."""
    columns = [
        words("check"), words("model"), words("weights"), words("format"), numbers("compared"),
        numbers("different"), numbers("near ties"), numbers("largest difference", "of the largest value"),
        words("result"),
    ]  # fmt: skip
    return table(columns, [_check(row) for row in document.checks.values()], empty="No check was made.")


def _check(row: CheckRow) -> Row:
    result = "holds" if row.is_sound else row.status if row.status != "ok" else "DOES NOT HOLD"
    difference: Value = "" if row.max_difference is None else f"{row.max_difference:.1e}"
    return Row(
        cells=[
            row.what, row.model, row.weights, row.dtype, str(row.num_compared), str(row.num_different),
            str(row.num_near_ties), difference, result,
        ],
        group=row.part,
    )  # fmt: skip


def mbu_table(facts: Sequence[RoundFacts]) -> Html:
    """Plain decoding by model, batch and context."""
    columns = [
        words("model"), words("weights"), numbers("batch"), numbers("context"), words("what"),
        numbers("round", "ms"), numbers("other"), numbers("MBU", "data sheet"), numbers("MBU", "measured"),
        numbers("tokens/s"), numbers("peak memory", "GB"), numbers("rounds"),
    ]  # fmt: skip
    rows = [
        Row(
            cells=[
                one.row.model, one.row.weights, str(one.row.batch_size), str(one.row.context_tokens),
                one.label, milliseconds(one.row.round_s, why(one)), percent(one.other_share, why(one), digits=1),
                percent(one.mbu, why(one, "no data sheet of this device is known")),
                percent(one.read_share, why(one)), number(one.row.tokens_per_s, why(one), digits=0),
                _gigabytes(one), str(one.row.num_rounds),
            ],
            group=one.row.model,
        )
        for one in facts
        if one.row.part == "mbu"
    ]  # fmt: skip
    return table(columns, rows, empty=NOT_MEASURED)


def rounds_table(facts: Sequence[RoundFacts], part: str) -> Html:
    """Parts of a round, acceptance and speedup, of one part of the call."""
    columns = [
        words("model"), words("weights"), numbers("batch"), numbers("context"), words("configuration"),
        numbers("draft", "ms"), numbers("verify", "ms"), numbers("other", "ms"), numbers("round", "ms"),
        numbers("other"), numbers("AL"), numbers("speedup"), numbers("predicted"), numbers("peak memory", "GB"),
    ]  # fmt: skip
    rows = [
        Row(
            cells=[
                one.row.model, one.row.weights, str(one.row.batch_size),
                str(one.row.context_tokens) if one.row.context_tokens else "prompts", one.label,
                milliseconds(one.row.draft_s, why(one)), milliseconds(one.row.verify_s, why(one)),
                milliseconds(one.row.other_s, why(one)), milliseconds(one.row.round_s, why(one)),
                percent(one.other_share, why(one), digits=1),
                number(one.row.acceptance_length, why(one, "plain decoding drafts nothing")),
                number(one.speedup, why(one, "plain decoding is what others are compared with")),
                number(one.predicted_speedup, why(one, "plain decoding is what others are compared with")),
                _gigabytes(one),
            ],
            kind="base" if one.row.config.is_off else "",
            group=f"{one.row.model} {one.row.batch_size} {one.row.context_tokens}",
        )
        for one in facts
        if one.row.part == part
    ]  # fmt: skip
    return table(columns, rows, empty=NOT_MEASURED)


def break_even_table(facts: Sequence[RoundFacts]) -> Html:
    """Up to which batch speculation pays, by context."""
    columns = [words("model"), words("configuration"), numbers("context"), words("pays up to batch")]
    rows = [
        Row(
            cells=[
                model, label, str(context),
                "none" if last is None else f"{last}" if loses else f"{last}, the largest measured",
            ],
            group=f"{model} {label}",
        )
        for model, label, context, last, loses in break_even(facts)
    ]  # fmt: skip
    return table(columns, rows, empty=NOT_MEASURED)


def _gigabytes(one: RoundFacts) -> Value:
    peak = one.row.peak_memory_bytes
    return number(None if peak is None else peak / 1e9, why(one), digits=2)


def why(one: RoundFacts, otherwise: str = NOT_MEASURED) -> str:
    """Why a value of a row is absent."""
    if one.impossible is not None:
        return f"suspect: {one.impossible}"
    return f"{one.row.status}: {one.row.reason}" if one.row.status != "ok" else otherwise


def _provenance(document: GpuDocument) -> Html:
    rows = flatten({"device": asdict(document.device), **dict(document.provenance)})
    pairs = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text or 'unknown')}</dd>" for key, text in rows)
    return Html(f'<div class="box"><dl>{pairs}</dl></div>')
