"""A policy in, TensorRT-LLM's `speculative_config` out.

`draft_len_schedule` changed its meaning: from 1.3 on keys are inclusive upper bounds with an implied 0
above the last, before that lower bounds with a 1 among them. Without a version only `max_concurrency`,
which means the same in all of them, is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from spectune.errors import UsageError
from spectune.policy.emit_parts import (
    EmitOptions,
    ladder,
    lead_of,
    max_batch,
    notes_of,
    other_drafters,
    same_drafter,
    target_of,
    text_of,
    version_of,
)
from spectune.policy.ranges import Segment
from spectune.records import Method, SpecConfig

TYPES = {Method.EAGLE3.value: "Eagle3", Method.NGRAM.value: "NGram", Method.DRAFT_MODEL.value: "Draft_Target"}
LOWER_BOUNDS, UPPER_BOUNDS = (1, 2), (1, 3)
KNOWN = "1.2 (lower bounds) and 1.3 (upper bounds)"
FILE = "speculation.yaml"


def upper_bounds(steps: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """`{largest batch size: K}` of (start, end, K) steps that never speculate again after an off one."""
    return {end: depth for _, end, depth in steps if depth}


def lower_bounds(steps: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """`{smallest batch size: K}`, 0 for off."""
    return {start: depth for start, _, depth in steps}


def lookup(schedule: Mapping[int, int], batch_size: int, *, has_upper_bounds: bool) -> int:
    """K that TensorRT-LLM drafts at a batch size."""
    if has_upper_bounds:
        return next((schedule[key] for key in sorted(schedule) if batch_size <= key), 0)
    return schedule[max(key for key in schedule if key <= batch_size)]


def emit_tensorrt_llm(policy: Mapping[str, Any], options: EmitOptions) -> str:
    """`trtllm-serve` with its `speculative_config` in a YAML file."""
    version = _version(options.engine_version)
    notes = notes_of(policy, "TensorRT-LLM")
    top = max_batch(policy, options.max_batch_size)
    rungs = ladder(policy, top)
    command = f"trtllm-serve {target_of(policy)} --max_batch_size {top}"
    lead = lead_of(rungs, lambda config: config.method in TYPES)
    if lead is None:
        notes.append("do not speculate: no speculative_config")
        return text_of(notes, command)
    notes += other_drafters(rungs, lead, "TensorRT-LLM")
    if lead.is_tree:
        lines, more = _tree(policy, lead, rungs, top)
    else:
        lines, more = _chain(policy, lead, rungs, top, version)
    if not lines:
        return text_of([*notes, *more], command)
    body = "\n".join(["speculative_config:", *(f"  {line}" for line in lines)])
    return text_of([*notes, *more], f"cat > {FILE} <<'EOF'\n{body}\nEOF\n{command} --config {FILE}")


def falling_steps(
    rungs: Sequence[Segment], lead: SpecConfig, top: int
) -> tuple[list[tuple[int, int, int]], list[str]]:
    """(start, end, K) up to `top` as a schedule can hold them, and what had to be given up.

    The first K is the largest, and after the first off range everything is off.
    """
    notes: list[str] = []
    steps: list[tuple[int, int, int]] = []
    first = 0
    is_over = False
    for rung in rungs:
        if rung.low > top:
            break
        end = top if rung.high is None else min(rung.high, top)
        config = rung.choice.config
        depth = config.num_steps if config.is_chain and same_drafter(config, lead) else 0
        if is_over and depth:
            notes.append(
                f"the schedule cannot speculate again above an off range: batch {rung.low} on is off"
            )
            depth = 0
        if not steps:
            first = depth
        elif depth > first:
            notes.append(f"K={depth} from batch {rung.low} on becomes {first}: the first K is the largest")
            depth = first
        is_over = is_over or depth == 0
        steps.append((rung.low, end, depth))
    joined = [
        (group[0][0], group[-1][1], depth)
        for depth, own in itertools.groupby(steps, key=lambda step: step[2])
        for group in [list(own)]
    ]
    return joined, notes


def _chain(
    policy: Mapping[str, Any],
    lead: SpecConfig,
    rungs: Sequence[Segment],
    top: int,
    version: tuple[int, int] | None,
) -> tuple[list[str], list[str]]:
    steps, notes = falling_steps(rungs, lead, top)
    if not steps or not steps[0][2]:
        notes.append(
            "speculation that begins above batch 1 cannot be scheduled: do not speculate, or --engine router"
        )
        return [], notes
    last_on = max(end for _, end, depth in steps if depth)
    depths = [depth for _, _, depth in steps if depth]
    lines = [f"decoding_type: {TYPES[lead.method]}"]
    schedule: str | None = None
    if len(steps) == 1:
        deepest = depths[0]
    elif version is None:
        deepest = min(depths)
        schedule = f"max_concurrency: {last_on}"
        notes.append(
            "--engine-version is not given: max_concurrency alone, which every version reads alike; with it "
            "draft_len_schedule can change K by batch size"
        )
    else:
        deepest = depths[0]
        table = upper_bounds(steps) if version >= UPPER_BOUNDS else lower_bounds(steps)
        schedule = f"draft_len_schedule: {{{', '.join(f'{key}: {k}' for key, k in table.items())}}}"
    lines.append(f"max_draft_len: {deepest}")
    if lead.method != Method.NGRAM:
        lines.append(f"speculative_model: {lead.draft_model or policy['validity']['draft'] or 'DRAFT_HEAD'}")
    return [*lines, *([schedule] if schedule else [])], notes


def _tree(
    policy: Mapping[str, Any], lead: SpecConfig, rungs: Sequence[Segment], top: int
) -> tuple[list[str], list[str]]:
    """One tree up to the batch size where it ends: trees have no schedule."""
    notes = ["the shape of a tree does not change with the batch size: one tree, off above its range"]
    on = [rung for rung in rungs if rung.choice.config == lead and rung.low <= top]
    if on[0].low != 1:
        notes.append("a tree that begins above batch 1 cannot be switched on there: --engine router")
        return [], notes
    lines = [
        f"decoding_type: {TYPES[lead.method]}",
        f"max_draft_len: {lead.num_steps}",
        f"speculative_model: {lead.draft_model or policy['validity']['draft'] or 'DRAFT_HEAD'}",
        "use_dynamic_tree: true",
        f"dynamic_tree_max_topK: {lead.topk}",
        f"max_total_draft_tokens: {lead.num_draft_tokens}",
    ]
    if on[0].high is not None and on[0].high < top:
        lines.append(f"max_concurrency: {on[0].high}")
    return lines, notes


def _version(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = version_of(text, engine="TensorRT-LLM", known=KNOWN)
    if found < LOWER_BOUNDS or found[0] > UPPER_BOUNDS[0]:
        raise UsageError(
            f"--engine-version {text}: unsupported version of TensorRT-LLM, its keys are not known here",
            hint=f"known are {KNOWN}; without a version max_concurrency alone is written",
        )
    return found
