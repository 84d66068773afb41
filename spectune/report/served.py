"""What only servers have: loads at a request rate, the client's own ceiling, prefix cache and chunks."""

from __future__ import annotations

from collections.abc import Sequence

from spectune.policy.comparison import ArmSummary, CellComparison, RunSummary, ServedLoad
from spectune.report.grid import Row, chip, numbers, table, words
from spectune.report.page import section
from spectune.report.tables import (
    IS_BASE,
    NO_LATENCY,
    NO_LENGTH,
    arm_row,
    each_arm,
    spread_cells,
    why_absent,
)
from spectune.report.text import (
    Html,
    Missing,
    Value,
    config_html,
    escape,
    milliseconds,
    number,
    percent,
    speedup,
)

NO_PROMISE = "nothing was promised: --goodput ttft:200,tpot:20"
SAFE_SHARE = 0.5


def has_servers(summary: RunSummary) -> bool:
    """Whether any arm was measured at a server."""
    return any(arm.load is not None for _, arm in each_arm((*summary.cells, *summary.rates)))


def rates(summary: RunSummary) -> Html:
    """Arms under requests that arrive by the clock."""
    columns = (
        words("Load"), words("Arm"), numbers("First token p50", "ms, from the arrival"), numbers("p99", "ms"),
        numbers("TPOT p50", "ms"), numbers("p99", "ms"), numbers("Whole answer p50", "ms, from the arrival"),
        numbers("p99", "ms"), numbers("Waited in the client", "ms, mean"), numbers("Finished", "requests/s"),
        numbers("Goodput", "requests/s"), numbers("Promises kept"), numbers("In flight", "mean (most)"),
        numbers("TPOT of plain over this"), words("Status"),
    )  # fmt: skip
    rows = [_rate_row(item, arm) for item, arm in each_arm(summary.rates)]
    return section(
        "rates",
        "At a request rate",
        "Requests arrive by the clock, whether or not the server keeps up; every arm meets the same arrivals. "
        "Waiting counts from the arrival, the client's own queue included. These loads inform and decide "
        "nothing: decisions and the policy come from fixed batch sizes.",
        table(columns, rows, empty="No request rate was measured: --request-rate 1,2 adds some."),
    )


def _rate_row(item: CellComparison, arm: ArmSummary) -> Row:
    why = why_absent(arm, NO_LATENCY)
    load = arm.load
    first, whole = (load.scheduled_ttft_s, load.scheduled_e2e_s) if load else (None, None)
    tpot = arm.latency.tpot_s if arm.latency else None
    return Row(
        group=item.cell.label,
        kind="base" if arm.config.is_off else "",
        cells=(
            item.cell.label.split(", context")[0],
            config_html(arm.config),
            *spread_cells(first, why, "p50", "p99"),
            *spread_cells(tpot, why, "p50", "p99"),
            *spread_cells(whole, why, "p50", "p99"),
            milliseconds(load.dispatch_delay_s if load else None, why),
            number(load.requests_per_s if load else None, why),
            number(load.goodput_per_s if load else None, NO_PROMISE if load else why),
            percent(load.share_kept if load else None, NO_PROMISE if load else why),
            _in_flight(arm, load, why),
            speedup(arm.speedup, IS_BASE if arm.config.is_off else why_absent(arm, "no speedup")),
            chip(arm.status.value),
        ),
    )


def _in_flight(arm: ArmSummary, load: ServedLoad | None, why: str) -> Value:
    mean = number(arm.reached_batch, why, digits=1)
    if isinstance(mean, Missing) or load is None or load.max_in_flight is None:
        return mean
    return f"{mean} ({load.max_in_flight})"


def client(summary: RunSummary) -> Html:
    """What the measuring client can take itself, and how near the loads came to it."""
    columns = (
        words("Load"), words("Arm"), numbers("Client can take", "requests/s"), numbers("Client can take", "events/s"),
        numbers("Share that the load needed"), numbers("Most in flight"), numbers("Prompt tokens from the cache"),
        numbers("Preemptions"), words("Times are"),
    )  # fmt: skip
    rows = []
    for item, arm in each_arm((*summary.cells, *summary.rates)):
        load = arm.load
        why = why_absent(arm, "the client's ceiling could not be measured")
        share = load.client_share if load else None
        verdict: Value = Missing(reason=why)
        if share is not None:
            verdict = "the server's" if share <= SAFE_SHARE else "partly the client's"
        rows.append(
            Row(
                group=item.cell.label,
                kind="base" if arm.config.is_off else "",
                cells=(
                    item.cell.label.split(", context")[0],
                    config_html(arm.config),
                    number(load.client_requests_per_s if load else None, why, digits=0),
                    number(load.client_events_per_s if load else None, why, digits=0),
                    percent(share, why, digits=1),
                    number(load.max_in_flight if load else None, why, digits=0),
                    percent(load.prefix_hit_rate if load else None, "the server counts none", digits=0),
                    number(load.num_preemptions if load else None, "the server counts none", digits=0),
                    verdict,
                ),
            )
        )
    return section(
        "client",
        "The client's own ceiling",
        "Before a load is measured the client is measured against a server that needs no time, at the same "
        "concurrency. A load that needs more than half of what the client can take measures the client too.",
        table(columns, rows, empty="No server was measured."),
    )


def production(summary: RunSummary) -> Html:
    """Arms served with a warm prefix cache and chunked prefill, beside themselves without."""
    columns = (
        numbers("Batch"), words("Arm"), numbers("TPOT p50", "ms"), numbers("First token p50", "ms"),
        numbers("Acceptance length"), numbers("Prompt tokens from the cache"), numbers("Speedup over plain"),
    )  # fmt: skip
    rows = []
    for item in summary.cells:
        wanted = {_bare(arm) for arm in item.production}
        for arm in (*(arm for arm in item.arms if _bare(arm) in wanted), *item.production):
            why = why_absent(arm, NO_LATENCY)
            latency = arm.latency
            length = arm.acceptance.acceptance_length if arm.acceptance else None
            rows.append(
                arm_row(
                    item,
                    arm,
                    *spread_cells(latency.tpot_s if latency else None, why, "p50"),
                    *spread_cells(latency.ttft_s if latency else None, why, "p50"),
                    number(length, why_absent(arm, NO_LENGTH)),
                    percent(arm.load.prefix_hit_rate if arm.load else None, "the cache is off", digits=0),
                    speedup(arm.speedup, why_absent(arm, "no speedup")),
                )
            )
    return section(
        "production",
        "Prefix cache and chunked prefill",
        "Measured arms run without a prefix cache, so that every prompt costs what a fresh one costs. Beside them "
        "the same arm as production serves it, its prompts in the cache and prefilled in chunks.",
        table(columns, rows, empty="Not measured: --production adds it for each method's longest chain."),
    )


def _bare(arm: ArmSummary) -> str:
    return arm.config.label.removesuffix(" as in production")


def lengths(summary: RunSummary) -> Html:
    """Acceptance by prompt length, with counts."""
    columns = (
        words("Load"), words("Arm"), numbers("Prompt", "tokens"), numbers("Requests"), numbers("Steps"),
        numbers("Acceptance length", "95% interval over prompts"), words("Within the head's context"),
    )  # fmt: skip
    rows = []
    for item in (*summary.cells, *summary.rates):
        for bucket in item.lengths:
            got = bucket.acceptance_length
            length: Value = Missing(reason=NO_LENGTH)
            if got is not None:
                bounds = (
                    f"no interval, n={got.n}" if got.low is None else f"({got.low:.2f} to {got.high:.2f})"
                )
                length = Html(f'{got.value:.2f} <span class="ci">{escape(bounds)}</span>')
            rows.append(
                Row(
                    group=f"{item.cell.label} {bucket.config.label}",
                    cells=(
                        item.cell.label,
                        config_html(bucket.config),
                        f"{bucket.low:,} to {bucket.high:,}",
                        f"{bucket.num_requests:,}",
                        f"{bucket.num_steps:,}",
                        length,
                        "no: some are beyond it" if bucket.is_beyond_head else "yes",
                    ),
                )
            )
    return section(
        "lengths",
        "Acceptance by prompt length",
        "A head accepts less on texts that are longer than those it was trained on. Few steps say little: read "
        "the interval.",
        table(columns, rows, empty="No arm drafted anything."),
    )


def output_table(cells: Sequence[CellComparison]) -> Html:
    """How long the answers of each arm were: arms whose lengths differ were asked different work."""
    columns = (
        numbers("Batch"), words("Arm"), numbers("Output tokens", "mean"), numbers("p50"), numbers("p90"),
        numbers("p99"), numbers("Answers"),
    )  # fmt: skip
    rows = []
    for item, arm in each_arm(cells):
        why = why_absent(arm, "no answer succeeded")
        got = arm.output_lengths
        rows.append(
            arm_row(
                item,
                arm,
                *(
                    number(getattr(got, name) if got else None, why, digits=1)
                    for name in ("mean", "p50", "p90", "p99")
                ),
                f"{got.n:,}" if got else Missing(reason=why),
            )
        )
    return table(columns, rows, empty="No answer succeeded.")
