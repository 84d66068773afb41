"""The tables that decide: what to run in each cell, by category, and the policy file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectune.errors import SpectuneError
from spectune.policy.comparison import ArmSummary, CellComparison, RunSummary
from spectune.records import SpecConfig
from spectune.report.grid import Row, chip, numbers, table, words
from spectune.report.tables import NO_ROUNDS, interval_unit, why_absent
from spectune.report.text import (
    TIMES,
    Html,
    Missing,
    Value,
    config_html,
    escape,
    is_number,
    milliseconds,
    number,
    speedup,
)


def decision_table(cells: Sequence[CellComparison]) -> Html:
    """What to run in every cell, and why."""
    rows = []
    for item in cells:
        decision = item.decision
        why = "plain decoding was chosen" if decision.chosen.is_off else "no interval was computed"
        runner_up = config_html(decision.runner_up, "no other arm was compared")
        if decision.runner_up_reason and not isinstance(runner_up, Missing):
            runner_up = Html(f"{escape(runner_up)}<small>{escape(decision.runner_up_reason)}</small>")
        no_data = decision.verdict == "no data"
        chosen = Missing(reason=decision.reason) if no_data else config_html(decision.chosen)
        rows.append(
            Row(
                cells=(
                    str(item.cell.batch_size),
                    Html(f"{item.cell.context_tokens}&nbsp;tokens<small>T={item.cell.temperature:g}</small>"),
                    chip(decision.verdict),
                    chosen,
                    speedup(decision.speedup, decision.reason if no_data else why),
                    runner_up,
                    decision.reason,
                )
            )
        )
    columns = (
        numbers("Batch"), words("Context"), words("Speculate?"), words("Run this"),
        numbers("Speedup", interval_unit(cells)), words("Runner-up"), words("Reason"),
    )  # fmt: skip
    return table(columns, rows, empty="No cell has a result.")


def category_table(summary: RunSummary) -> Html:
    """Plain and speculative decoding by category with the number of requests, then the pooled total.

    The speculative arm is the same in all rows of a batch size: the chosen one, else the fastest.
    """
    columns = (
        numbers("Batch"), words("Category"), numbers("Base n", "requests"), numbers("Base time per token", "ms"),
        words("Speculative arm"), numbers("Spec n", "requests"), numbers("Spec time per token", "ms"),
        numbers("Acceptance length"), numbers("Speedup", interval_unit(summary.categories)),
        words("Speculate?"),
    )  # fmt: skip
    rows: list[Row] = []
    for item in summary.cells:
        own = [part for part in summary.categories if part.cell == item.cell]
        config = representative_arm(item)
        rows += [_category_row(part, config, part.scope, "") for part in own]
        if own:
            rows.append(_category_row(item, config, "all (pooled)", "total"))
    return table(columns, rows, empty="No category was measured on its own.")


def representative_arm(item: CellComparison) -> SpecConfig | None:
    """The speculative arm that stands for a cell: the chosen one, else the fastest, else the first."""
    if not item.decision.chosen.is_off:
        return item.decision.chosen
    spec = [arm for arm in item.arms if not arm.config.is_off]
    timed = [(arm.speedup.value, arm) for arm in spec if arm.speedup is not None]
    if timed:
        return max(timed, key=lambda pair: pair[0])[1].config
    return spec[0].config if spec else None


def _category_row(item: CellComparison, config: SpecConfig | None, name: str, kind: str) -> Row:
    base = next((arm for arm in item.arms if arm.config.is_off), None)
    spec = next((arm for arm in item.arms if arm.config == config), None)
    no_spec = "no speculative arm in this category"
    own = spec.acceptance if spec else None
    why_no_length = no_spec
    if spec is not None:
        why_no_length = why_absent(spec, (own.reason if own else None) or "no steps were recorded")
    chosen = item.decision.chosen
    verdict = chip(item.decision.verdict)
    if item.decision.verdict == "on":
        verdict = Html(f"{verdict}<small>{config_html(chosen)}</small>")
    return Row(
        kind=kind,
        group=item.cell.label,
        cells=(
            str(item.cell.batch_size),
            name,
            *_time_cells(base, "no plain arm in this category"),
            config_html(config, no_spec),
            *_time_cells(spec, no_spec),
            number(own.acceptance_length if own else None, why_no_length),
            _speedup_and_basis(spec, no_spec),
            verdict,
        ),
    )


def _speedup_and_basis(arm: ArmSummary | None, why: str) -> Value:
    """The speedup with, in small print, what was compared to get it."""
    if arm is None:
        return Missing(reason=why)
    text = speedup(arm.speedup, why_absent(arm, "no speedup was computed"))
    if isinstance(text, Missing) or arm.speedup_basis is None:
        return text
    return Html(f"{text}<small>{escape(arm.speedup_basis)}</small>")


def _time_cells(arm: ArmSummary | None, why: str) -> tuple[Value, Value]:
    """Number of requests and time per token in decode rounds, the one that the speedup compares."""
    if arm is None:
        return Missing(reason=why), Missing(reason=why)
    seconds = arm.rounds.round_tpot_s if arm.rounds else None
    return str(arm.num_requests), milliseconds(seconds, why_absent(arm, NO_ROUNDS))


def policy_table(policy: Mapping[str, Any]) -> Html:
    """The cells of the policy file."""
    columns = (
        words("Batch"), words("Context"), words("Category"), words("Temperature"), words("Run"),
        numbers("Speedup"), numbers("Steps behind it"), words("Source"),
    )  # fmt: skip
    rows = []
    for cell in policy.get("cells") or ():
        value, interval = cell.get("speedup"), cell.get("speedup_ci")
        text = str(value) if isinstance(value, str) else number(value, "plain decoding is the base")
        if not isinstance(text, Missing):
            bounds = [bound for bound in interval or () if is_number(bound)]
            text = f"{text}{TIMES}" + (f" ({bounds[0]:.2f} to {bounds[1]:.2f})" if len(bounds) == 2 else "")
        steps, source = cell.get("num_steps"), cell.get("source")
        rows.append(
            Row(
                cells=(
                    _range(cell.get("batch")), _range(cell.get("context_tokens")),
                    str(cell.get("category") or "any"), _range(cell.get("temperature")),
                    _policy_config(cell.get("config")), text,
                    Missing(reason="not recorded") if steps is None else f"{steps:,}",
                    Missing(reason="not recorded") if source is None else str(source),
                )
            )
        )  # fmt: skip
    return table(columns, rows, empty="The policy has no cells: the fallback applies everywhere.")


def _range(bounds: Any) -> str:
    if not isinstance(bounds, list | tuple):
        return "any" if bounds is None else str(bounds)
    nbsp = "\N{NO-BREAK SPACE}"
    low, high = (("" if bound is None else f"{bound:g}") if is_number(bound) or bound is None else str(bound)
                 for bound in (bounds[0], bounds[-1]))  # fmt: skip
    if low == high:
        return low or "any"
    text = f"{low} to {high}" if low and high else f"{low} and up" if low else f"up to {high}"
    return text.replace(" ", nbsp)


def _policy_config(config: Any) -> Value:
    if isinstance(config, Mapping):
        try:
            return config_html(SpecConfig.from_dict(dict(config)))
        except (
            SpectuneError,
            TypeError,
            AttributeError,
            ValueError,
        ):  # of another version: shown as it stands
            return str(dict(config))
    return config_html(SpecConfig.off()) if config in ("off", None) else str(config)
