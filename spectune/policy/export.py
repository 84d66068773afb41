"""A run summary in, summary.json and summary.csv out: strict JSON, empty cells for what is unknown.

vLLM's field names stand beside ours with vLLM's units (milliseconds, percent, drafting steps only), so
that readers of its benchmark files read these; `definitions` says which is which.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from spectune.policy.comparison import ArmSummary, CellComparison, RunSummary, Spread
from spectune.records import Cell
from spectune.store import dump_strict

NUM_POSITIONS = 8
"""Columns a list by position has in the CSV; summary.json holds all."""

_BY_POSITION = ("survival", "conditional_acceptance")
_JSON_ONLY = ("spec_decode_per_position_acceptance_rates", "spec_decode_conditional_acceptance_rates")


def to_dict(summary: RunSummary) -> dict[str, Any]:
    """The whole summary as plain JSON values, with `results` as flat rows in vLLM's names too.

    Raises StoreError on a number that is not finite: unknown is null with a reason, never NaN.
    """
    data: dict[str, Any] = json.loads(
        dump_strict({**asdict(summary), "results": rows(summary)}, where="summary")
    )
    return data


def rows(summary: RunSummary) -> list[dict[str, Any]]:
    """One flat row for each arm of each cell and category."""
    return [
        _row(summary, comparison, arm)
        for comparison in (*summary.cells, *summary.categories, *summary.rates)
        for arm in comparison.arms
    ]


def to_csv(summary: RunSummary) -> str:
    """The rows as CSV with a header; unknown values are empty cells."""
    found = rows(summary)
    depth = min(NUM_POSITIONS, max((len(row["survival"]) for row in found), default=0))
    table = [_flat(row, depth) for row in found]
    columns = list(dict.fromkeys(name for row in table for name in row)) or ["run_name"]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in table)
    return stream.getvalue()


def _row(summary: RunSummary, comparison: CellComparison, arm: ArmSummary) -> dict[str, Any]:
    config = arm.config
    return {
        "run_name": summary.run_name,
        "scope": arm.scope,
        "batch_size": comparison.cell.batch_size,
        "context_tokens": comparison.cell.context_tokens,
        "temperature": comparison.cell.temperature,
        "config": config.label,
        "method": config.method,
        "num_steps": config.num_steps,
        "topk": config.topk,
        "num_draft_tokens": config.num_draft_tokens,
        "is_chosen": comparison.decision.verdict != "no data" and comparison.decision.chosen == config,
        "status": arm.status.value,
        "reason": arm.reason,
        **_measured(arm),
        **_theory(arm),
        **_vllm(summary, comparison, arm),
    }


def _measured(arm: ArmSummary) -> dict[str, Any]:
    speedup, told, rounds = arm.speedup, arm.acceptance, arm.rounds
    has_interval = speedup is not None and speedup.low is not None
    return {
        "speedup": None if speedup is None else speedup.value,
        "speedup_ci": [speedup.low, speedup.high] if speedup is not None and has_interval else None,
        "speedup_n": None if speedup is None else speedup.n,
        "speedup_basis": arm.speedup_basis,
        "acceptance_length": None if told is None else told.acceptance_length,
        "acceptance_reason": None if told is None else told.reason,
        "acceptance_length_per_request": None if told is None else told.acceptance_length_per_request,
        "depth_acceptance_rate": None if told is None else told.depth_acceptance_rate,
        "draft_acceptance_rate": None if told is None else told.draft_acceptance_rate,
        "proposed_per_step": None if told is None else told.proposed_per_step,
        "zero_accept_share": None if told is None else told.zero_accept_share,
        "alpha": None if told is None else told.alpha,
        "num_steps_measured": None if told is None else told.num_steps,
        "survival": [] if told is None else list(told.survival),
        "conditional_acceptance": [] if told is None else list(told.conditional_acceptance),
        "round_tpot_s": None if rounds is None else rounds.round_tpot_s,
        "draft_s": None if rounds is None else rounds.draft_s,
        "verify_s": None if rounds is None else rounds.verify_s,
        "other_s": None if rounds is None else rounds.other_s,
        "num_rounds": None if rounds is None else rounds.num_rounds,
        "output_tokens_per_s": arm.output_tokens_per_s,
        "reached_batch": arm.reached_batch,
        "peak_memory_bytes": arm.peak_memory_bytes,
        "kv_capacity_tokens": arm.kv_capacity_tokens,
    }


def _theory(arm: ArmSummary) -> dict[str, Any]:
    told = arm.prediction
    names = (
        "predicted_tpot_s",
        "measured_tpot_s",
        "residual_fraction",
        "predicted_speedup",
        "ideal_speedup",
        "draft_cost_ratio",
        "break_even_acceptance_length",
        "floor_tpot_s",
        "floor_share",
    )
    return {name: None if told is None else getattr(told, name) for name in names}


def _vllm(summary: RunSummary, comparison: CellComparison, arm: ArmSummary) -> dict[str, Any]:
    """vLLM's benchmark fields, in vLLM's units."""
    told, latency = arm.acceptance, arm.latency
    drafting = 0 if told is None else told.num_drafting_steps
    per_position = (
        [share * told.num_steps / drafting for share in told.survival]
        if told is not None and drafting
        else None
    )
    spreads = {
        "ttft": None if latency is None else latency.ttft_s,
        "tpot": None if latency is None else latency.tpot_s,
        "itl": None if latency is None else latency.inter_chunk_s,
        "e2el": None if latency is None else latency.e2e_s,
    }
    throughput, tokens = arm.output_tokens_per_s, arm.output_tokens
    completed = arm.num_requests - arm.num_failed
    duration_s = tokens / throughput if throughput else None
    model = None if summary.fingerprint is None else summary.fingerprint.target
    return {
        "date": summary.provenance.get("date"),
        "backend": None if summary.fingerprint is None else summary.fingerprint.backend,
        "label": arm.config.label,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": arm.num_requests,
        # a closed loop: a request waits only for a free slot
        "request_rate": comparison.cell.request_rate or "inf",
        "burstiness": _burstiness(comparison.cell),
        "max_concurrency": None if comparison.cell.is_open_loop else comparison.cell.batch_size,
        "duration": duration_s,
        "completed": completed,
        "failed": arm.num_failed,
        "total_input_tokens": arm.input_tokens,
        "total_output_tokens": tokens,
        "request_throughput": completed / duration_s if duration_s else None,
        "output_throughput": throughput,
        "max_output_tokens_per_s": None,  # the densest second of stream events: they are not tokens
        "total_token_throughput": (arm.input_tokens + tokens) / duration_s if duration_s else None,
        **{name: value for key, spread in spreads.items() for name, value in _millis(key, spread).items()},
        **_load(arm),
        "spec_decode_num_drafts": drafting if drafting else None,
        "spec_decode_draft_tokens": told.num_verified if told is not None and drafting else None,
        "spec_decode_accepted_tokens": told.num_accepted if told is not None and drafting else None,
        "spec_decode_acceptance_length": 1 + told.num_accepted / drafting if told and drafting else None,
        "spec_decode_acceptance_rate": (
            100 * told.num_accepted / told.num_verified if told is not None and told.num_verified else None
        ),
        "spec_decode_per_position_acceptance_rates": per_position,
        "spec_decode_conditional_acceptance_rates": (
            list(told.conditional_acceptance) if told is not None and drafting else None
        ),
        "spec_decode_acceptance_length_per_request": (
            told.acceptance_length_per_request if told is not None and drafting else None
        ),
        "spec_decode_num_spec_steps": drafting if drafting else None,
    }


def _burstiness(cell: Cell) -> float | None:
    """vLLM's: 1 is a Poisson process; None for a closed loop, a grid or a trace."""
    return 1.0 if cell.arrivals == "poisson" else cell.burstiness


def _load(arm: ArmSummary) -> dict[str, Any]:
    """What a server's load tells beyond latency, under vLLM's names where it has some."""
    told = arm.load
    return {
        "request_goodput": None if told is None else told.goodput_per_s,
        "max_concurrent_requests": None if told is None else told.max_in_flight,
        "client_share": None if told is None else told.client_share,
        "prefix_hit_rate": None if told is None else told.prefix_hit_rate,
        **_millis("e2el_including_client_queue", None if told is None else told.scheduled_e2e_s),
        "mean_client_queue_time_ms": None
        if told is None or told.dispatch_delay_s is None
        else told.dispatch_delay_s * 1e3,
        "mean_output_tokens": None if arm.output_lengths is None else arm.output_lengths.mean,
    }


def _millis(key: str, spread: Spread | None) -> dict[str, float | None]:
    names = {"mean": "mean", "median": "p50", "std": "std", "p50": "p50", "p90": "p90", "p99": "p99"}
    values = {vllm: None if spread is None else getattr(spread, ours) for vllm, ours in names.items()}
    return {f"{vllm}_{key}_ms": None if value is None else value * 1e3 for vllm, value in values.items()}


def _flat(row: Mapping[str, Any], depth: int) -> dict[str, Any]:
    """Lists by position as `depth` columns of their own; those in vLLM's names are left to the JSON."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "speedup_ci":
            flat["speedup_low"], flat["speedup_high"] = value or (None, None)
        elif name in _BY_POSITION:
            flat.update({f"{name}_{j + 1}": value[j] if j < len(value) else None for j in range(depth)})
        elif name not in _JSON_ONLY:
            flat[name] = value
    return flat
