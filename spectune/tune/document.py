"""tuning.json: what a tuning predicted, measured and left out, as plain values for report and programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spectune.policy.arms import ArmData, pool_rounds
from spectune.records import Cell, Interval, SpecConfig, Status
from spectune.replay.summary import summarize_trace
from spectune.store import RunStore
from spectune.tune.objective import expected_goodput, pareto
from spectune.tune.predict import ALL, Forecast
from spectune.tune.race import Challenger, RaceResult
from spectune.tune.tuning import Tuning

TUNING_FILE = "tuning.json"
TUNING_VERSION = 1


def document(tuning: Tuning, store: RunStore, knobs: Any = None) -> dict[str, Any]:
    """Everything, with what is not known yet left out."""
    job, forecasts = tuning.job, tuning.forecasts
    plan = job.plan
    races = {race.cell: race for race in tuning.races}
    return {
        "tuning_version": TUNING_VERSION,
        "objective": {
            "kind": job.objective.kind,
            "max_tpot_s": job.objective.max_tpot_s,
            "max_memory_bytes": job.objective.max_memory_bytes,
        },
        "epsilon": job.rules.epsilon,
        "seconds": dict(tuning.seconds),
        "space": {
            "num_configs": len(plan.configs),
            "num_cells": len(plan.cells),
            "num_predicted": sum(row.category == ALL for row in forecasts.rows),
            "pruned": [list(entry) for entry in plan.pruned],
            "refused": [list(entry) for entry in forecasts.refused],
            "excluded": [list(entry) for entry in tuning.excluded],
        },
        "surface": {
            "num_points": len(tuning.surface.points),
            "held_out": tuning.surface.held_out,
            "drift": tuning.surface.drift,
            "duration_s": tuning.surface.duration_s,
            "source": tuning.surface.source,
        },
        "traces": [
            {"context_tokens": context, "temperature": temperature, **_trace(trace, plan.configs)}
            for (context, temperature), trace in tuning.traces.items()
        ],
        "operating_point": _operating_point(tuning),
        "cells": [_cell(tuning, cell, races.get(cell), store) for cell in plan.cells],
        "pareto": [
            {"cell": row.cell, "label": row.config.label, **_speeds(row)}
            for row in pareto(forecasts, plan.cells)
        ],
        "knobs": knobs,
    }


def _operating_point(tuning: Tuning) -> dict[str, Any] | None:
    """The load and configuration that the objective asks for, of those that were measured.

    Most tokens (or kept promises) a second among the winners within the limits; None where each load is
    judged by itself.
    """
    objective = tuning.job.objective
    limit = objective.max_tpot_s
    fit = [
        race for race in tuning.races if race.tpot_s is not None and (limit is None or race.tpot_s <= limit)
    ]
    if objective.kind == "tpot" or not fit:
        return None

    def worth(race: RaceResult) -> float:
        assert race.tpot_s is not None
        tokens_per_s = race.cell.batch_size / race.tpot_s
        row = tuning.forecasts.find(race.winner, race.cell)
        if objective.kind != "goodput" or objective.promises is None or row is None:
            return tokens_per_s
        return expected_goodput(row, objective.promises) or 0.0

    best = max(fit, key=worth)
    assert best.tpot_s is not None
    return {
        "cell": best.cell,
        "label": best.winner.label,
        "tpot_s": best.tpot_s,
        "tokens_per_s": best.cell.batch_size / best.tpot_s,
    }


def _trace(trace: Any, configs: Sequence[SpecConfig]) -> dict[str, Any]:
    """Counts of the trace, and the acceptance of the longest chain by category and by context."""
    kept = [config for config in configs if config.is_off or _answers(trace, config)]
    chains = [config for config in kept if not config.is_off and config.is_chain]
    longest = {config.method: config for config in sorted(chains, key=lambda config: config.num_steps)}
    summary = summarize_trace(trace, tuple(longest.values()))
    names = ("label", "acceptance_length", "by_category", "by_context_tokens")
    return {
        "num_requests": summary["num_requests"],
        "num_positions": summary["num_positions"],
        "acceptance": [{name: row[name] for name in names} for row in summary["configs"]],
    }


def _answers(trace: Any, config: SpecConfig) -> bool:
    return any(drafter.refusal(config) is None for drafter in trace.drafters)


def _cell(tuning: Tuning, cell: Cell, race: RaceResult | None, store: RunStore) -> dict[str, Any]:
    forecasts, objective = tuning.forecasts, tuning.job.objective
    rows = forecasts.of(cell)
    plain = forecasts.find(SpecConfig.off(), cell)
    measured = {} if race is None else measured_arms(tuning, cell, store)
    told = {
        "cell": cell,
        "predicted": [
            {
                "label": row.config.label,
                "config": row.config.to_dict(),
                **_speeds(row),
                "acceptance_length": row.acceptance_length,
                "tokens_per_step": row.tokens_per_step,
                "num_steps": row.num_steps,
                "survival": row.survival,
                "conditional_acceptance": row.conditional_acceptance,
                "zero_accept_share": row.zero_accept_share,
                "break_even_acceptance_length": row.break_even_acceptance_length,
                "limit": row.limit,
                "draft_s": row.times.draft_s,
                "verify_s": row.times.verify_s,
                "other_s": row.times.other_s,
                "acceptance_error": row.acceptance_error,
                "time_error": row.time_error,
                "goodput_per_s": None
                if objective.promises is None
                else expected_goodput(row, objective.promises),
                "is_finalist": row.config in tuning.finalists.get(cell, ()),
            }
            for row in rows
        ],
        "categories": [
            _category(forecasts.of(cell, category)) for category in forecasts.categories if category != ALL
        ],
    }
    if race is None or plain is None:
        return told
    checks = [_check(row, measured[row.config]) for row in rows if row.config in measured]
    return told | {
        "measured": checks,
        "race": {
            "winner": race.winner.to_dict(),
            "winner_label": race.winner.label,
            "fastest_label": race.fastest.label,
            "reason": race.reason,
            "end": race.end,
            "seconds": race.seconds,
            "tpot_s": race.tpot_s,
            "speedup": race.speedup,
            "failed": [list(entry) for entry in race.failed],
            "stages": [
                {
                    "number": stage.number,
                    "num_blocks": stage.num_blocks,
                    "challengers": [_challenger(one) for one in stage.challengers],
                }
                for stage in race.stages
            ],
        },
        "waterfall": _waterfall(race, plain, rows),
        "not_tried": _not_tried(race, rows, measured),
    }


def _speeds(row: Forecast) -> dict[str, Any]:
    return {"tpot_s": row.tpot_s, "throughput_per_s": row.throughput_per_s, "speedup": row.speedup}


def _category(rows: Sequence[Forecast]) -> dict[str, Any] | None:
    """The best of a category, with the steps behind it."""
    if not rows:
        return None
    best = rows[0]
    gains = best.speedup is not None and best.speedup.low is not None and best.speedup.low > 1
    return {
        "category": best.category,
        "label": best.config.label,
        "speedup": best.speedup,
        "num_steps": best.num_steps,
        "acceptance_length": best.acceptance_length,
        "is_gain": gains,
    }


def _challenger(one: Challenger) -> dict[str, Any]:
    return {
        "label": one.config.label,
        "expected": one.expected,
        "speedup": one.speedup,
        "against": one.against,
        "estimate": one.estimate,
        "status": one.status,
        "reason": one.reason,
    }


def measured_arms(tuning: Tuning, cell: Cell, store: RunStore) -> dict[SpecConfig, float]:
    """Measured seconds per token of every arm that ran in a cell."""
    blocks: dict[SpecConfig, ArmData] = {}
    for outcome in store.outcomes().values():
        point = outcome.point
        if point.cell != cell or outcome.status is not Status.OK:
            continue
        known = blocks.get(point.config) or ArmData(config=point.config, cell=cell)
        own = {(point.repeat, i): block for i, block in store.blocks(point.point_id).items()}
        blocks[point.config] = ArmData(config=point.config, cell=cell, blocks={**known.blocks, **own})
    rounds = {config: pool_rounds(arm) for config, arm in blocks.items()}
    return {config: found.round_tpot_s for config, found in rounds.items() if found is not None}


def _check(row: Forecast, measured_s: float) -> dict[str, Any]:
    return {
        "label": row.config.label,
        "predicted_tpot_s": row.tpot_s,
        "measured_tpot_s": measured_s,
        "residual": measured_s / row.tpot_s.value - 1,
    }


def _waterfall(race: RaceResult, plain: Forecast, rows: Sequence[Forecast]) -> dict[str, float] | None:
    """Why the winner won: logarithmic gains, and what the prediction leaves unexplained."""
    row = next((row for row in rows if row.config == race.winner), None)
    if row is None or row.config.is_off:
        return None
    measured = race.speedup.value if race.speedup is not None else None
    return dict(row.waterfall(plain, measured))


def _not_tried(
    race: RaceResult, rows: Sequence[Forecast], measured: dict[SpecConfig, float]
) -> dict[str, Any]:
    """What nobody measured, and how much better than the winner the best of it could be at most."""
    left = [row for row in rows if row.config not in measured]
    known = race.speedup.value if race.speedup is not None else 1.0
    bounds = [(_high(row.speedup), row.config.label) for row in left if row.speedup is not None]
    bound, label = max(bounds, default=(None, None))
    return {
        "num": len(left),
        "labels": [row.config.label for row in left],
        "best_label": label,
        "could_be_better_by": None if bound is None else max(0.0, bound / known - 1),
    }


def _high(interval: Interval) -> float:
    return interval.value if interval.high is None else interval.high
