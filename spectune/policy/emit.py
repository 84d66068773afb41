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
from spectune.policy.ranges import Choice, Segment
from spectune.policy.table import choose
from spectune.records import Method, SpecConfig

Ladder = tuple[Segment, ...]
"""Gap-free batch ranges from 1, with what an engine runs in each."""

SGLANG_ALGORITHMS = {Method.EAGLE3.value: "EAGLE3", Method.NGRAM.value: "NGRAM"}


def emit(policy: Mapping[str, Any], engine: str, *, max_batch_size: int | None = None) -> str:
    """The text for one engine; raises UsageError for an engine that spectune cannot write for."""
    if engine not in EMITTERS:
        raise UsageError(f"--engine {engine}: cannot emit for it", hint=f"one of {', '.join(EMITTERS)}")
    return EMITTERS[engine](policy, max_batch_size)


def emit_all(policy: Mapping[str, Any], *, max_batch_size: int | None = None) -> dict[str, str]:
    """The text for every engine, by its name."""
    return {engine: emitter(policy, max_batch_size) for engine, emitter in EMITTERS.items()}


def ladder(policy: Mapping[str, Any]) -> Ladder:
    """The batch axis of a policy alone: at each batch size the smallest speculation that any measured
    context or temperature chose. Adjacent ranges that agree are joined."""
    cells = [cell for cell in policy["cells"] if cell["category"] is None]
    starts = {1, *(cell["batch"][0] for cell in cells)}
    starts |= {cell["batch"][1] + 1 for cell in cells if cell["batch"][1] is not None}
    rungs: list[Segment] = []
    for low in sorted(starts):
        config = choose(policy, low)
        if rungs and rungs[-1].choice.config == config:
            continue
        if rungs:
            rungs[-1] = _closed(rungs[-1], low - 1)
        rungs.append(Segment(low=low, high=None, choice=Choice(config=config, source="")))
    return tuple(rungs)


def _closed(segment: Segment, high: int) -> Segment:
    return Segment(low=segment.low, high=high, choice=segment.choice)


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
    notes = _notes(policy, "vLLM")
    target = _target(policy)
    lead = _lead(rungs, lambda config: not config.is_tree)
    if trees := sorted({rung.choice.config.label for rung in rungs if rung.choice.config.is_tree}):
        notes.append(
            f"vLLM drafts chains only, so the tree {', '.join(trees)} cannot be run there: off instead; "
            "sweep with --topk 1 for its best chain"
        )
    if lead is None:
        notes.append("do not speculate: leave --speculative-config out")
        return _text(notes, f"vllm serve {target}")

    def runs(config: SpecConfig) -> bool:
        return not config.is_tree and _same_drafter(config, lead)

    notes += _other_drafters(rungs, lead, "vLLM")
    top = _max_batch(policy, max_batch_size)
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
    return _text(notes, command)


def _ngram_window(config: SpecConfig) -> dict[str, Any]:
    """Window of n-gram matching in vLLM's words."""
    if config.method != Method.NGRAM:
        return {}
    names = ("prompt_lookup_max", "prompt_lookup_min")
    window = {name: config.option(name) for name in names}
    return {name: value for name, value in window.items() if value is not None}


# SGLang -------------------------------------------------------------------------------------------


def sglang_adaptive(
    rungs: Sequence[Segment], *, runs: Callable[[SpecConfig], bool]
) -> dict[str, dict[str, list[int]]]:
    """`--speculative-adaptive-config`: the smallest batch size of each range -> one step count.

    SGLang looks up the largest key that is not above the captured batch size; 0 steps is off.
    """
    steps = [(rung.low, rung.choice.config.num_steps if runs(rung.choice.config) else 0) for rung in rungs]
    kept = [pair for index, pair in enumerate(steps) if index == 0 or steps[index - 1][1] != pair[1]]
    return {str(low): {"candidate_steps": [depth]} for low, depth in kept}


def emit_sglang(policy: Mapping[str, Any], max_batch_size: int | None = None) -> str:
    """`sglang.launch_server` flags, and the adaptive file where the depth depends on the batch size."""
    rungs = ladder(policy)
    notes = _notes(policy, "SGLang")
    top = _max_batch(policy, max_batch_size)
    base = f"python -m sglang.launch_server --model-path {_target(policy)} --max-running-requests {top}"
    lead = _lead(rungs, lambda config: config.method in SGLANG_ALGORITHMS)
    if lead is None:
        notes.append("do not speculate: no --speculative flags")
        return _text(notes, base)
    notes += _other_drafters(rungs, lead, "SGLang")
    flags = [base, f"--speculative-algorithm {SGLANG_ALGORITHMS[lead.method]}"]
    if lead.method != Method.NGRAM:
        head = lead.draft_model or policy["validity"]["draft"] or "DRAFT_HEAD"
        flags.append(f"--speculative-draft-model-path {shlex.quote(head)}")
        flags.append(f"--speculative-num-steps {lead.num_steps} --speculative-eagle-topk {lead.topk}")
    else:
        flags.append("--speculative-ngram-max-bfs-breadth 1")
    flags.append(f"--speculative-num-draft-tokens {lead.num_draft_tokens}")

    def runs(config: SpecConfig) -> bool:
        return config.is_chain and _same_drafter(config, lead)

    within = [rung for rung in rungs if rung.low <= top]
    if len({rung.choice.config for rung in within}) == 1:
        return _text(notes, " ".join(flags))
    if lead.method != Method.EAGLE3 or not lead.is_chain:
        notes.append(
            f"SGLang switches by batch size for EAGLE chains only, so {lead.label} is static here: serve "
            f"{_spans(within, lead)} with it and put a plain deployment behind a router for the rest"
        )
        return _text(notes, " ".join(flags))
    adaptive = json.dumps(sglang_adaptive(within, runs=runs))
    flags.append("--speculative-adaptive --speculative-adaptive-config adaptive.json")
    notes.append("SGLang pads a batch to its captured graph sizes before the lookup; 0 steps is off")
    return _text(notes, f"cat > adaptive.json <<'EOF'\n{adaptive}\nEOF\n{' '.join(flags)}")


EMITTERS: dict[str, Callable[[Mapping[str, Any], int | None], str]] = {
    "vllm": emit_vllm,
    "sglang": emit_sglang,
}


# Shared -------------------------------------------------------------------------------------------


def _text(notes: Sequence[str], command: str) -> str:
    return "\n".join([*(f"# {note}" for note in notes), command])


def _target(policy: Mapping[str, Any]) -> str:
    validity = policy["validity"]
    return shlex.quote("TARGET" if validity["is_simulated"] else validity["target"] or "TARGET")


def _max_batch(policy: Mapping[str, Any], asked: int | None) -> int:
    """The largest batch to serve: what was asked for, else the largest measured one."""
    return asked or int(policy["validity"]["batch"][1])


def _notes(policy: Mapping[str, Any], engine: str) -> list[str]:
    """What of a policy no engine executes, and what the numbers are worth."""
    validity = policy["validity"]
    notes = []
    if validity["is_simulated"]:
        notes.append("from a simulated run: for trying the tool, not for deployment")
    elif validity["engine"] != engine.lower():
        notes.append(
            f"measured on the {validity['engine']} engine, not on {engine}: measure there before you deploy"
        )
    contexts = {tuple(cell["context_tokens"]) for cell in policy["cells"] if cell["context_tokens"]}
    if len(contexts) > 1 or len(validity["temperatures"]) > 1:
        notes.append(
            f"{engine} does not switch by context or temperature: each batch size runs the smallest "
            "speculation that any of them chose"
        )
    if categories := sorted({cell["category"] for cell in policy["cells"] if cell["category"]}):
        notes.append(
            f"{engine} does not switch by category; decided otherwise: {', '.join(categories)}; "
            "for that put two deployments behind a router"
        )
    heads = {cell["config"]["draft_model"] for cell in policy["cells"] if cell["config"] != "off"}
    names = [name for name in (validity["target"], *sorted(heads - {None})) if name and "/" not in name]
    if names and not validity["is_simulated"]:
        notes.append(f"put your folders or hub ids in place of the names {', '.join(names)}")
    high = validity["context_tokens"][1]
    notes.append(f"measured up to {high} tokens per sequence; longer contexts are not covered")
    return notes


def _lead(rungs: Sequence[Segment], runs: Callable[[SpecConfig], bool]) -> SpecConfig | None:
    """The configuration of the lowest range that the engine can speculate in."""
    configs = [rung.choice.config for rung in rungs]
    return next((config for config in configs if not config.is_off and runs(config)), None)


def _same_drafter(config: SpecConfig, lead: SpecConfig) -> bool:
    return (config.method, config.draft_model, config.options) == (
        lead.method, lead.draft_model, lead.options,
    )  # fmt: skip


def _other_drafters(rungs: Sequence[Segment], lead: SpecConfig, engine: str) -> list[str]:
    others = {
        rung.choice.config.label
        for rung in rungs
        if not rung.choice.config.is_off
        and not rung.choice.config.is_tree
        and not _same_drafter(rung.choice.config, lead)
    }
    if not others:
        return []
    return [f"{engine} loads one drafter, {lead.method}; ranges of {', '.join(sorted(others))} are off"]


def _spans(rungs: Sequence[Segment], config: SpecConfig) -> str:
    spans = [
        f"{rung.low}" if rung.high == rung.low else f"{rung.low} to {rung.high or 'the maximum'}"
        for rung in rungs
        if rung.choice.config == config
    ]
    return f"batch {', '.join(spans)}"
