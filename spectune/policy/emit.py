"""A policy in, what a serving engine executes out, as text to paste.

Each engine executes a part of a policy only. What it cannot execute is taken as the smaller
speculation or as off, never as more, and said in a comment above the command.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spectune.errors import UsageError
from spectune.policy.emit_parts import (
    ladder,
    lead_of,
    max_batch,
    notes_of,
    other_drafters,
    same_drafter,
    target_of,
    text_of,
)
from spectune.policy.emit_sglang import emit_sglang
from spectune.policy.ranges import Segment
from spectune.records import Method, SpecConfig


def emit(policy: Mapping[str, Any], engine: str, *, max_batch_size: int | None = None) -> str:
    """The text for one engine; raises UsageError for an engine that spectune cannot write for."""
    if engine not in EMITTERS:
        raise UsageError(f"--engine {engine}: cannot emit for it", hint=f"one of {', '.join(EMITTERS)}")
    return EMITTERS[engine](policy, max_batch_size)


def emit_all(policy: Mapping[str, Any], *, max_batch_size: int | None = None) -> dict[str, str]:
    """The text for every engine, by its name."""
    return {engine: emitter(policy, max_batch_size) for engine, emitter in EMITTERS.items()}


# vLLM ---------------------------------------------------------------------------------------------


def vllm_schedule(
    rungs: Sequence[Segment], max_batch_size: int, *, runs: Callable[[SpecConfig], bool]
) -> list[tuple[int, int, int]]:
    """`[start, end, K]` triples, inclusive, gap-free and disjoint, from 1 to `max_batch_size`.

    A configuration that `runs` refuses becomes K=0.
    """
    triples: list[tuple[int, int, int]] = []
    for rung in rungs:
        if rung.low > max_batch_size:
            break
        high = max_batch_size if rung.high is None else min(rung.high, max_batch_size)
        depth = rung.choice.config.num_steps if runs(rung.choice.config) else 0
        if triples and triples[-1][2] == depth:
            triples[-1] = (triples[-1][0], high, depth)
        else:
            triples.append((rung.low, high, depth))
    if triples and triples[-1][1] < max_batch_size:
        start, _, depth = triples[-1]
        triples[-1] = (start, max_batch_size, depth)
    return triples


def vllm_lookup(schedule: Sequence[Sequence[int]], batch_size: int, *, num_speculative_tokens: int) -> int:
    """K that vLLM runs at a batch size under a schedule.

    Inclusive ranges; a gap and everything above the last range inherit the K before them; K is
    clamped to `num_speculative_tokens`. Raises UsageError for a schedule that vLLM refuses.
    """
    ordered = sorted(tuple(entry) for entry in schedule)
    _check_schedule(ordered)
    depth = 0
    for start, _, value in ordered:
        if batch_size < start:
            break
        depth = value
    return min(depth, num_speculative_tokens)


def _check_schedule(ordered: Sequence[tuple[int, ...]]) -> None:
    shown = [list(entry) for entry in ordered]
    if not ordered or ordered[0][0] != 1:
        raise UsageError(f"num_speculative_tokens_per_batch_size {shown}: the first range starts at 1")
    last = 0
    for entry in ordered:
        start, end, depth = entry
        if start <= last or end < start or depth < 0:
            raise UsageError(
                f"num_speculative_tokens_per_batch_size {shown}: {list(entry)} overlaps, is reversed or "
                f"is negative"
            )
        last = end


def emit_vllm(policy: Mapping[str, Any], max_batch_size: int | None = None) -> str:
    """`vllm serve` with `--speculative-config` and the schedule by batch size."""
    rungs = ladder(policy)
    notes = notes_of(policy, "vLLM")
    target = target_of(policy)
    lead = lead_of(rungs, lambda config: not config.is_tree)
    if trees := sorted({rung.choice.config.label for rung in rungs if rung.choice.config.is_tree}):
        notes.append(
            f"vLLM drafts chains only, so the tree {', '.join(trees)} cannot be run there: off instead; "
            "sweep with --topk 1 for its best chain"
        )
    if lead is None:
        notes.append("do not speculate: leave --speculative-config out")
        return text_of(notes, f"vllm serve {target}")

    def runs(config: SpecConfig) -> bool:
        return not config.is_tree and same_drafter(config, lead)

    notes += other_drafters(rungs, lead, "vLLM")
    top = max_batch(policy, max_batch_size)
    schedule = vllm_schedule(rungs, top, runs=runs)
    depth = max(entry[2] for entry in schedule)
    config: dict[str, Any] = {"method": lead.method}
    if lead.draft_model is not None or lead.method != Method.NGRAM:
        config["model"] = lead.draft_model or policy["validity"]["draft"] or "DRAFT_HEAD"
    config["num_speculative_tokens"] = depth
    config.update(_ngram_window(lead))
    if len(schedule) > 1:
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
        notes.append(
            "vLLM ignores the schedule with data parallelism; K=0 there still runs the drafter once a step, "
            "so plain serving is faster where everything is off"
        )
    command = (
        f"vllm serve {target} --max-num-seqs {top} --speculative-config {shlex.quote(json.dumps(config))}"
    )
    return text_of(notes, command)


def _ngram_window(config: SpecConfig) -> dict[str, Any]:
    """Window of n-gram matching in vLLM's words."""
    if config.method != Method.NGRAM:
        return {}
    names = ("prompt_lookup_max", "prompt_lookup_min")
    window = {name: config.option(name) for name in names}
    return {name: value for name, value in window.items() if value is not None}


EMITTERS: dict[str, Callable[[Mapping[str, Any], int | None], str]] = {
    "vllm": emit_vllm,
    "sglang": emit_sglang,
}
