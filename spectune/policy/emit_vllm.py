"""A policy in, `vllm serve` with its schedule by batch size out. Source: vLLM 0.32 and 0.33,
config/speculative.py, v1/spec_decode/dynamic/utils.py, v1/core/sched/scheduler.py."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
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

OLDEST, NEWEST = (0, 32), (0, 33)
KNOWN = "0.32 and 0.33"
SCHEDULED = frozenset({Method.NGRAM.value, Method.EAGLE3.value, Method.DRAFT_MODEL.value})
"""Methods whose schedule by batch size the V1 runner executes; for others it warns and drafts K always."""

WITHOUT_MODEL = frozenset({Method.NGRAM.value, Method.SUFFIX.value})


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


def emit_vllm(policy: Mapping[str, Any], options: EmitOptions) -> str:
    """`vllm serve` with `--speculative-config` and the schedule by batch size."""
    _check_version(options.engine_version)
    notes = notes_of(policy, "vLLM")
    top = max_batch(policy, options.max_batch_size)
    rungs = ladder(policy, top)
    command = f"{_program(policy)} {target_of(policy)}"
    lead = lead_of(rungs, lambda config: not config.is_tree)
    if trees := sorted({rung.choice.config.label for rung in rungs if rung.choice.config.is_tree}):
        notes.append(
            f"vLLM drafts chains only, so the tree {', '.join(trees)} cannot be run there: off instead; "
            "sweep with --topk 1 for its best chain"
        )
    if lead is None:
        notes.append("do not speculate: leave --speculative-config out")
        return text_of(notes, command)

    def runs(config: SpecConfig) -> bool:
        return not config.is_tree and same_drafter(config, lead)

    notes += other_drafters(rungs, lead, "vLLM")
    schedule = vllm_schedule(rungs, top, runs=runs)
    if len(schedule) > 1:
        notes += _schedule_notes(policy, lead, options)
    document = spec_document(policy, lead, schedule)
    words = [
        command,
        f"--max-num-seqs {top}",
        "--per-request-spec-decode-metrics summary",
        *([f"--data-parallel-size {options.data_parallel_size}"] if options.data_parallel_size > 1 else []),
        f"--speculative-config {shlex.quote(json.dumps(document))}",
    ]
    return text_of(notes, " ".join(words))


def spec_document(
    policy: Mapping[str, Any], lead: SpecConfig, schedule: Sequence[tuple[int, int, int]]
) -> dict[str, Any]:
    """vLLM's speculative_config of a drafter and a schedule; never the batch switch of old versions, which
    newer ones accept and ignore."""
    document: dict[str, Any] = {"method": lead.method}
    if lead.method not in WITHOUT_MODEL:
        document["model"] = lead.draft_model or policy["validity"]["draft"] or "DRAFT_HEAD"
    document["num_speculative_tokens"] = max(entry[2] for entry in schedule)
    document.update(_ngram_window(lead))
    if len(schedule) > 1:
        document["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in schedule]
    return document


def _check_version(text: str | None) -> None:
    if text is None:
        return
    if not OLDEST <= version_of(text, engine="vLLM", known=KNOWN) <= NEWEST:
        raise UsageError(
            f"--engine-version {text}: unsupported version of vLLM, its schedule may be read differently",
            hint=f"known are {KNOWN}",
        )


def _schedule_notes(policy: Mapping[str, Any], lead: SpecConfig, options: EmitOptions) -> list[str]:
    """What vLLM does with a schedule without saying so; UsageError where it would ignore it."""
    static = "--engine router gives two deployments and the rule between them"
    if options.data_parallel_size > 1:
        raise UsageError(
            f"--data-parallel-size {options.data_parallel_size}: vLLM ignores a schedule by batch size then, "
            "with a warning, and drafts at every load",
            hint=static,
        )
    if lead.method not in SCHEDULED:
        raise UsageError(
            f"vLLM ignores a schedule by batch size for method {lead.method} and drafts at every load",
            hint=static,
        )
    notes = [
        "vLLM ignores the schedule with data parallelism; K=0 there still runs the drafter once a step, "
        "so plain serving is faster where everything is off",
        "its batch size counts every request of a step, prefills too: verify with spectune policy verify",
    ]
    if costs := policy.get("standby"):
        shown = ", ".join(f"{one['cost']:.2f}x at batch {one['batch']}" for one in costs)
        notes.append(f"measured time per token at K=0 over that of a server without speculation: {shown}")
    is_v1 = options.runner == "v1" or policy["validity"]["device"] == "cpu"
    if options.runner == "v2" and lead.method == Method.DRAFT_MODEL:
        notes.append("runner v2 cuts the drafts of a draft model to K but still drafts all of them")
    if is_v1 and policy["validity"]["device"] != "cpu":
        notes.append("runner v1 falls back to piecewise graphs with a schedule: a single stream gets slower")
    return notes


def _program(policy: Mapping[str, Any]) -> str:
    """The console script of the CPU build does not find its own version."""
    is_cpu = policy["validity"]["device"] == "cpu" and policy["validity"]["engine"] == "vllm"
    return "python -m vllm.entrypoints.openai.api_server --model" if is_cpu else "vllm serve"


def _ngram_window(config: SpecConfig) -> dict[str, Any]:
    """Window of n-gram matching in vLLM's words."""
    if config.method != Method.NGRAM:
        return {}
    names = ("prompt_lookup_max", "prompt_lookup_min")
    window = {name: config.option(name) for name in names}
    return {name: value for name, value in window.items() if value is not None}
