"""The tables with one row an arm: speedup, acceptance, prediction, rounds, break-even, floor, latency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from spectune.policy.comparison import ArmSummary, CellComparison, RunSummary, Spread
from spectune.records import Interval, SpecConfig, Status
from spectune.replay.estimate import ChainEstimate, estimates_of
from spectune.report.grid import Row, chip, numbers, share_bar, table, words
from spectune.report.text import (
    DASH,
    TIMES,
    Html,
    Missing,
    Value,
    config_html,
    escape,
    is_number,
    milliseconds,
    number,
    percent,
    speedup,
)

NO_DRAFTS = "plain decoding proposes no drafts"
IS_BASE = "the plain arm is what speedups are measured against"
NO_PARTS = "a server tells the time of a step, not its parts"
NO_ROUNDS = "no full-batch decode rounds were recorded"
NO_LATENCY = "no latency was recorded"
NO_LENGTH = "no draft was ever proposed"


def why_absent(arm: ArmSummary, otherwise: str) -> str:
    """The reason of an absent value: the arm's own status first."""
    if arm.status != Status.OK:
        return f"{arm.status.value}: {(arm.reason or 'no reason recorded').splitlines()[0]}"
    return otherwise


def interval_unit(cells: Sequence[CellComparison]) -> str:
    """`95% interval`, from the levels in use."""
    levels = {arm.speedup.level for item in cells for arm in item.arms if arm.speedup}
    levels |= {item.decision.speedup.level for item in cells if item.decision.speedup}
    return f"{' / '.join(f'{level * 100:g}%' for level in sorted(levels) or [0.95])} interval"


def arm_table(cells: Sequence[CellComparison]) -> Html:
    """Every arm with its speedup and on what the speedup rests."""
    columns = (
        numbers("Batch"), words("Arm"), numbers("Speedup", interval_unit(cells)), words("Basis"),
        numbers("Requests", "failed in brackets"), numbers("Reached batch"), words("Status"),
    )  # fmt: skip
    rows = [
        arm_row(
            item,
            arm,
            speedup(arm.speedup, IS_BASE if arm.config.is_off else why_absent(arm, "not enough blocks")),
            arm.speedup_basis
            or Missing(reason=IS_BASE if arm.config.is_off else why_absent(arm, "no speedup")),
            f"{arm.num_requests}" + (f" ({arm.num_failed})" if arm.num_failed else ""),
            number(arm.reached_batch, why_absent(arm, "the backend did not report it"), digits=1),
            chip(arm.status.value),
        )
        for item, arm in each_arm(cells)
    ]
    return table(columns, rows, empty="No arm was measured.")


def acceptance_table(cells: Sequence[CellComparison]) -> Html:
    """Acceptance of every arm, pooled over steps, with both ways to read it by position."""
    columns = (
        numbers("Batch"), words("Arm"), numbers("Acceptance length", "pooled over steps"),
        numbers("Mean of requests", "not used to decide"), numbers("Accepted / verified"),
        numbers("Steps that accept nothing"), words("Survival by position"), words("Conditional by position"),
        numbers("Steps"),
    )  # fmt: skip
    rows = []
    for item, arm in each_arm(cells):
        got = arm.acceptance
        why = (
            NO_DRAFTS
            if arm.config.is_off
            else why_absent(arm, (got.reason if got else None) or "no steps were recorded")
        )
        rows.append(
            arm_row(
                item,
                arm,
                number(got.acceptance_length if got else None, why),
                number(got.acceptance_length_per_request if got else None, why),
                percent(got.draft_acceptance_rate if got else None, why),
                percent(got.zero_accept_share if got else None, why),
                _shares(got.survival if got else (), why),
                _shares(got.conditional_acceptance if got else (), why),
                f"{got.num_steps:,}" if got else Missing(reason=why),
            )
        )
    return table(columns, rows, empty="No steps were recorded.")


def estimate_table(cells: Sequence[CellComparison]) -> Html | None:
    """Chains that did not run, told by the longest chain that did; None where there are none."""
    columns = (
        numbers("Batch"), words("Chain"), numbers("Acceptance length", "estimated"),
        words("From"), numbers("Steps"),
    )  # fmt: skip
    rows = [
        Row(
            group=item.cell.label,
            cells=(
                f"{item.cell.batch_size}",
                config_html(chain_of(arm.config, told.num_tokens)),
                number(told.acceptance_length, NO_LENGTH),
                f"K={arm.config.num_steps}",
                f"{told.num_steps:,}",
            ),
        )
        for item in cells
        for arm in longest_chains(item)
        for told in smaller_chains(arm, item)
    ]
    return table(columns, rows, empty="") if rows else None


def longest_chains(item: CellComparison) -> list[ArmSummary]:
    """The longest chain of every drafter that proposed something in the cell."""
    longest: dict[SpecConfig, ArmSummary] = {}
    for arm in sorted(item.arms, key=lambda arm: arm.config.num_steps):
        if arm.config.is_chain and arm.acceptance is not None and arm.acceptance.survival:
            longest[chain_of(arm.config, 1)] = arm
    return list(longest.values())


def chain_of(config: SpecConfig, num_tokens: int) -> SpecConfig:
    """The chain of another length by the same drafter."""
    return replace(config, num_steps=num_tokens, num_draft_tokens=num_tokens + 1)


def smaller_chains(arm: ArmSummary, item: CellComparison) -> list[ChainEstimate]:
    """What `arm` tells of the chains below it that did not run in the cell."""
    assert arm.acceptance is not None, "the longest chain proposed something"
    told = estimates_of(arm.acceptance.survival, num_steps=arm.acceptance.num_steps)
    ran = {other.config for other in item.arms}
    return [estimate for estimate in told if chain_of(arm.config, estimate.num_tokens) not in ran]


def _shares(values: Sequence[float | None], why: str) -> Value:
    if not values:
        return Missing(reason=why)
    texts = (percent(value, "never reached") for value in values)
    shares = (DASH if isinstance(text, Missing) else escape(text) for text in texts)
    return Html(f'<span class="list-of">{"&ensp;".join(shares)}</span>')


def prediction_table(cells: Sequence[CellComparison]) -> Html:
    """Theory beside measurement, with the residual."""
    columns = (
        numbers("Batch"), words("Arm"), numbers("Predicted time per token", "ms"),
        numbers("Measured time per token", "ms"), numbers("Residual", "measured over predicted"),
        numbers("Predicted speedup"), numbers("Predicted break-even", "acceptance length"),
        numbers("Ideal speedup", "free verification"), numbers("Draft cost ratio c"),
    )  # fmt: skip
    rows = []
    for item, arm in each_arm(cells):
        got = arm.prediction
        why = why_absent(arm, (got.reason if got else None) or "no prediction was made")
        of_spec = IS_BASE if arm.config.is_off else why
        of_chain = why_absent(arm, "the formula is for chains, not trees") if arm.config.is_tree else of_spec
        rows.append(
            arm_row(
                item,
                arm,
                milliseconds(got.predicted_tpot_s if got else None, why),
                milliseconds(got.measured_tpot_s if got else None, why),
                percent(got.residual_fraction if got else None, why, digits=1, signed=True),
                number(got.predicted_speedup if got else None, of_spec, suffix=TIMES),
                number(got.break_even_acceptance_length if got else None, of_spec),
                number(got.ideal_speedup if got else None, of_chain, suffix=TIMES),
                number(got.draft_cost_ratio if got else None, of_spec, digits=3),
            )
        )
    return table(columns, rows, empty="No prediction was made.")


def waterfall_table(cells: Sequence[CellComparison]) -> Html:
    """The speedup as a product of factors, one a cause."""
    entries = [(item, arm, dict(arm.prediction.waterfall)) for item, arm in each_arm(cells) if arm.prediction]
    entries = [entry for entry in entries if entry[2]]
    parts = list(dict.fromkeys(part for *_, factors in entries for part in factors))
    rows = [
        arm_row(
            item,
            arm,
            *(
                number(_exp(factors.get(part)), "not part of this arm's account", suffix=TIMES)
                for part in parts
            ),
            number(_exp(sum(part for part in factors.values())), "a factor is missing", suffix=TIMES),
            speedup(arm.speedup, why_absent(arm, "no speedup was computed")),
        )
        for item, arm, factors in entries
    ]
    columns = (
        numbers("Batch"), words("Arm"), *(numbers(part.capitalize(), "factor") for part in parts),
        numbers("Product"), numbers("Speedup", "all blocks"),
    )  # fmt: skip
    return table(columns, rows, empty="No account of the speedup by cause: it needs predictions.")


def _exp(value: float | None) -> float | None:
    return None if value is None or not is_number(value) else math.exp(min(value, 700.0))


def round_table(cells: Sequence[CellComparison]) -> Html:
    """Mean time of a full-batch decode round by part, and what a sequence gets from a round."""
    columns = (
        numbers("Batch"), words("Arm"), numbers("Draft", "ms"), numbers("Verify", "ms"),
        numbers("Other", "ms"), numbers("Round", "ms"), numbers("Tokens per sequence"),
        numbers("Time per token", "ms"), numbers("Rounds"),
    )  # fmt: skip
    rows = []
    for item, arm in each_arm(cells):
        got, why = arm.rounds, why_absent(arm, NO_ROUNDS if arm.rounds is None else NO_PARTS)
        draft = (
            Missing(reason=NO_DRAFTS)
            if arm.config.is_off
            else milliseconds(got.draft_s if got else None, why)
        )
        rows.append(
            arm_row(
                item,
                arm,
                draft,
                milliseconds(got.verify_s if got else None, why),
                milliseconds(got.other_s if got else None, why),
                milliseconds(got.total_s if got else None, why),
                number(got.tokens_per_sequence if got else None, why),
                milliseconds(got.round_tpot_s if got else None, why),
                f"{got.num_rounds:,}" if got else Missing(reason=why),
            )
        )
    return table(columns, rows, empty="No rounds were recorded.")


def break_even_table(cells: Sequence[CellComparison]) -> Html:
    """Tokens a step has to emit and emits; the acceptance length beside them."""
    columns = (
        numbers("Batch"), words("Arm"), numbers("Break-even", "tokens per step"),
        numbers("Emitted", "tokens per step"), numbers("Margin"), words("Above break-even"),
        numbers("Acceptance length"),
    )  # fmt: skip
    rows = []
    for item, arm in each_arm(cells):
        if arm.config.is_off:
            continue
        need, have = item.break_even(arm), arm.rounds.tokens_per_sequence if arm.rounds else None
        length = arm.acceptance.acceptance_length if arm.acceptance else None
        why = why_absent(arm, f"{NO_ROUNDS} of this arm or of plain decoding")
        margin = have - need if need is not None and have is not None else None
        signed: Value = number(margin, why)
        if margin is not None and not isinstance(signed, Missing):
            signed = f"{margin:+.2f}".replace("-", "\N{MINUS SIGN}")
        rows.append(
            arm_row(item, arm, number(need, why), number(have, why), signed,
                    _is_above(margin, arm.speedup, why), number(length, why_absent(arm, NO_LENGTH)))
        )  # fmt: skip
    return table(columns, rows, empty="No speculative arm has both numbers.")


def _is_above(margin: float | None, gain: Interval | None, why: str) -> Value:
    """Whether the margin is positive, and that it is noise where pairing by blocks says the opposite."""
    if margin is None or not is_number(margin):
        return number(margin, why)
    if gain is not None and (gain.value > 1) != (margin > 0):
        return "about even"
    return "yes" if margin > 0 else "no"


def floor_table(cells: Sequence[CellComparison]) -> Html:
    """How near each arm is to the time that its bytes need at the measured read bandwidth."""
    columns = (
        numbers("Batch"), words("Arm"), numbers("Floor", "ms per token"), numbers("Measured", "ms per token"),
        words("Share of the floor reached"),
    )  # fmt: skip
    if not any(arm.prediction and arm.prediction.floor_tpot_s is not None for _, arm in each_arm(cells)):
        return table(columns, [], empty="No floor: the read bandwidth or the size of the weights is unknown.")
    rows = []
    for item, arm in each_arm(cells):
        got = arm.prediction
        why = why_absent(arm, (got.reason if got else None) or "bandwidth or weight size is unknown")
        share = got.floor_share if got else None
        bar = percent(share, why)
        if share is not None and not isinstance(bar, Missing):
            bar = share_bar(share, bar)
        rows.append(
            arm_row(item, arm, milliseconds(got.floor_tpot_s if got else None, why),
                    milliseconds(got.measured_tpot_s if got else None, why), bar)
        )  # fmt: skip
    return table(columns, rows, empty="No floor was computed.")


def latency_table(cells: Sequence[CellComparison]) -> Html:
    """Latency of whole requests in ms, throughput and peak memory."""
    columns = (
        numbers("Batch"), words("Arm"), numbers("TPOT mean", "ms"), numbers("TPOT p50", "ms"),
        numbers("TPOT p90", "ms"), numbers("TPOT p99", "ms"), numbers("TTFT p50", "ms"),
        numbers("TTFT p99", "ms"), numbers("Inter-chunk gap p50", "ms"), numbers("Inter-chunk gap p99", "ms"),
        numbers("Throughput", "tokens/s"), numbers("Peak memory", "MiB"), numbers("n", "requests"),
    )  # fmt: skip
    rows = []
    for item, arm in each_arm(cells):
        why = why_absent(arm, NO_LATENCY)
        tpot, ttft, gap = (
            (arm.latency.tpot_s, arm.latency.ttft_s, arm.latency.inter_chunk_s)
            if arm.latency
            else (None,) * 3
        )
        rows.append(
            arm_row(
                item,
                arm,
                *spread_cells(tpot, why, "mean", "p50", "p90", "p99"),
                *spread_cells(ttft, why, "p50", "p99"),
                *spread_cells(gap, why, "p50", "p99"),
                number(arm.output_tokens_per_s, why, digits=1),
                number(
                    None if arm.peak_memory_bytes is None else arm.peak_memory_bytes / 2**20,
                    why_absent(arm, "the backend did not report it"),
                    digits=0,
                ),
                f"{tpot.n:,}" if tpot else Missing(reason=why),
            )
        )
    return table(columns, rows, empty="No latency was measured.")


def spread_cells(spread: Spread | None, why: str, *names: str) -> list[Value]:
    """Statistics of a duration in milliseconds, one cell a name."""
    return [milliseconds(None if spread is None else getattr(spread, name), why) for name in names]


def problem_arms(summary: RunSummary) -> list[tuple[str, Status, str]]:
    """Arms without a result that no failure names yet."""
    named = [failure.label for failure in summary.failures]
    problems: list[tuple[str, Status, str]] = []
    for item, arm in each_arm(summary.cells):
        label = f"{arm.config.label} @ {item.cell.label}"
        if arm.status != Status.OK and not any(name.startswith(label) for name in named):
            problems.append((label, arm.status, arm.reason or "no reason was recorded"))
    return problems


def each_arm(cells: Sequence[CellComparison]) -> list[tuple[CellComparison, ArmSummary]]:
    """All arms of all cells with their cell."""
    return [(item, arm) for item in cells for arm in item.arms]


def arm_row(item: CellComparison, arm: ArmSummary, *cells: Value) -> Row:
    """The row of an arm: batch size and configuration, then its own cells."""
    return Row(
        kind=row_kind(item, arm),
        group=item.cell.label,
        cells=(str(item.cell.batch_size), config_html(arm.config), *cells),
    )


def row_kind(item: CellComparison, arm: ArmSummary) -> str:
    """The CSS class of an arm's row: base for plain decoding, chosen for the arm to run."""
    chosen = item.decision.verdict != "no data" and arm.config == item.decision.chosen
    base = "base" if arm.config.is_off else ""
    return f"{base} chosen".strip() if chosen else base
