"""Runs in, one policy out: each place from the run that measured it best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spectune.errors import NotComparable, UsageError
from spectune.policy.comparison import CellComparison, RunSummary
from spectune.policy.file import COMPARABLE_KEYS, identity_of
from spectune.policy.summary import summarize
from spectune.policy.table import build_policy
from spectune.records import Cell
from spectune.store import RunStore


def build_from_runs(
    runs: Sequence[RunStore], *, max_loss: float = 0.0, switch_cost_rounds: float | None = None
) -> dict[str, Any]:
    """The policy of several runs of one deployment.

    A place that several runs measured is taken from the one with the most requests there. Raises
    NotComparable where engine, models, device or parallelism differ, UsageError where nothing was
    decided.
    """
    if not runs:
        raise UsageError("no run is given", hint="spectune policy build RUN ...")
    summaries = [summarize(run) for run in runs]
    _check_one_deployment(summaries)
    refused = [summary for summary in summaries if summary.policy is None]
    if len(refused) == len(summaries):
        raise UsageError(
            f"{refused[0].run_name} decides nothing: {refused[0].verdict}",
            hint="a policy needs plain decoding and at least one candidate in one cell",
        )
    usable = [index for index, summary in enumerate(summaries) if summary.policy is not None]
    best = _best_runs([summaries[index] for index in usable])
    cells = [comparison for comparison, _ in best.values()]
    categories = [
        comparison
        for index in usable
        for comparison in summaries[index].categories
        if best[comparison.cell][1] == summaries[index].run_name
    ]
    contexts: dict[Cell, tuple[int, int]] = {}
    for index in usable:
        contexts |= seen_contexts(
            runs[index], [cell for cell, (_, name) in best.items() if name == summaries[index].run_name]
        )
    first = summaries[usable[0]]
    policy = build_policy(
        cells,
        categories,
        run_name=", ".join(dict.fromkeys(summaries[index].run_name for index in usable)),
        fingerprint=first.fingerprint,
        contexts=contexts,
        workload=_workload([summaries[index] for index in usable]),
        sources={cell: name for cell, (_, name) in best.items()},
        max_loss=max_loss,
        switch_cost_rounds=switch_cost_rounds,
    )
    assert policy is not None, "a usable run decided something"
    return policy


def _check_one_deployment(summaries: Sequence[RunSummary]) -> None:
    """Policies of one deployment say nothing of another: TP, head, device and the rest must be equal."""
    known = [(one.run_name, identity_of(one.fingerprint)) for one in summaries if one.fingerprint is not None]
    if len({name for name, _ in known}) < len(known):
        raise UsageError("two runs have the same name", hint="their folders must be named apart")
    for name, identity in known[1:]:
        differing = [
            f"{key} {known[0][1][key]!r} against {identity[key]!r}"
            for key in COMPARABLE_KEYS
            if known[0][1][key] != identity[key]
        ]
        if differing:
            raise NotComparable(
                f"{known[0][0]} and {name} measured different deployments: {'; '.join(differing)}",
                hint="build a policy for each",
            )


def _best_runs(summaries: Sequence[RunSummary]) -> dict[Cell, tuple[CellComparison, str]]:
    best: dict[Cell, tuple[CellComparison, str]] = {}
    for summary in summaries:
        for comparison in summary.cells:
            known = best.get(comparison.cell)
            if known is None or _num_requests(comparison) > _num_requests(known[0]):
                best[comparison.cell] = (comparison, summary.run_name)
    return best


def _num_requests(comparison: CellComparison) -> int:
    if comparison.decision.verdict == "no data":
        return 0
    return max((arm.num_requests for arm in comparison.arms), default=0)


def _workload(summaries: Sequence[RunSummary]) -> Mapping[str, Any]:
    """The workload that all runs share; its name alone where their choice of prompts differs."""
    first = summaries[0].workload
    if all(one.workload.get("digest") == first.get("digest") for one in summaries):
        return first
    names = dict.fromkeys(str(one.workload.get("name")) for one in summaries)
    return {"name": ", ".join(names), "digest": None}


def seen_contexts(run: RunStore, cells: Sequence[Cell]) -> dict[Cell, tuple[int, int]]:
    """Tokens per sequence (shortest prompt, longest prompt with its output) of some cells of a run."""
    seen: dict[Cell, tuple[int, int]] = {}
    for outcome in run.outcomes().values():
        cell = outcome.point.cell
        if cell not in cells:
            continue
        for block in run.blocks(outcome.point.point_id).values():
            for request in block.requests:
                if request.error is not None:
                    continue
                low, high = seen.get(cell, (request.num_prompt_tokens, 0))
                end = request.num_prompt_tokens + request.num_output_tokens
                seen[cell] = (min(low, request.num_prompt_tokens), max(high, end))
    return seen
