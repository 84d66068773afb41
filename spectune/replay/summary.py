"""A trace as a table: acceptance of every configuration, overall, by category and by context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spectune.metrics.acceptance import NO_DRAFTS, conditional_acceptance
from spectune.records import SpecConfig
from spectune.replay.rounds import ReplayCounts, by_category, by_context, tied_positions
from spectune.replay.sampled import sampled_chain
from spectune.store.trace_file import Trace

CONTEXT_EDGES = (128, 512, 2048, 8192)
TIE = 1e-5


def summarize_trace(
    trace: Trace, configs: Sequence[SpecConfig], context_edges: Sequence[int] = CONTEXT_EDGES
) -> dict[str, Any]:
    """Plain JSON values: what was traced, and one row a configuration, plain decoding included.

    Acceptance is averaged over the steps that a configuration makes, never over positions. It ranks
    nothing: which configuration is fastest also needs times.
    """
    category, context = by_category(trace, configs), by_context(trace, configs, context_edges)
    whole = category.pooled()
    return {
        "definitions": {
            "acceptance_length": "1 + accepted drafts / steps, the target's own token included",
            "survival": "share of steps that accept at least j+1 drafts",
            "conditional_acceptance": "survival[j] / survival[j-1]: the one to compare between different K",
            "num_steps": "rounds of a batch of one after the first token",
        },
        "num_requests": trace.num_requests,
        "num_positions": trace.num_positions,
        "num_output_tokens": int(trace.num_outputs.sum()),
        "by_category": {name: trace.categories.count(name) for name in sorted(set(trace.categories))},
        "configs": [
            _row(trace, config, index, whole, category, context) for index, config in enumerate(configs)
        ],
        "sampled_chains": _sampled(trace, configs),
    }


def _row(
    trace: Trace,
    config: SpecConfig,
    index: int,
    whole: ReplayCounts,
    category: ReplayCounts,
    context: ReplayCounts,
) -> dict[str, Any]:
    length, survival = whole.acceptance_length(index), whole.survival(index)
    return {
        "label": config.label,
        "config": config.to_dict(),
        "acceptance_length": length,
        "reason": NO_DRAFTS if length is None else None,
        "num_steps": int(whole.num_steps[index, 0]),
        "num_accepted": int(whole.num_accepted[index, 0]),
        "num_verified": int(whole.num_verified[index, 0]),
        "survival": list(survival),
        "conditional_acceptance": list(conditional_acceptance(survival)),
        "zero_accept_share": whole.zero_accept_share(index),
        "by_category": _groups(category, index),
        "by_context_tokens": _groups(context, index),
        "num_near_ties": len(tied_positions(trace, config, TIE)),
    }


def _groups(counts: ReplayCounts, index: int) -> dict[str, Any]:
    """Acceptance length and the steps behind it, of groups that have steps."""
    return {
        name: {
            "acceptance_length": counts.acceptance_length(index, group),
            "num_steps": int(counts.num_steps[index, group]),
        }
        for group, name in enumerate(counts.groups)
        if counts.num_steps[index, group]
    }


def _sampled(trace: Trace, configs: Sequence[SpecConfig]) -> list[dict[str, Any]]:
    """Expected acceptance of the heads' chains if their drafts were sampled; empty for greedy traces."""
    rows = []
    for config in configs:
        if config.is_off or not config.is_chain or trace.drafter_of(config).sampled is None:
            continue
        chain = sampled_chain(trace, config.num_steps, config.method)
        rows.append(
            {
                "label": f"{config.label} draft_sampling=probabilistic",
                "acceptance_length": chain.acceptance_length,
                "expected_steps": float(chain.num_steps.sum()),
                "kind": "expected value over draft sampling, given the traced text",
            }
        )
    return rows
