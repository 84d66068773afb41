"""A policy's batch axis in, the parts that every engine's text is made of out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectune.errors import UsageError
from spectune.policy.ranges import Choice, Segment
from spectune.policy.table import choose
from spectune.records import SpecConfig

Ladder = tuple[Segment, ...]
"""Gap-free batch ranges from 1, with what an engine runs in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitOptions:
    """What of a deployment the policy does not say. An unknown engine version is None."""

    max_batch_size: int | None = None
    engine_version: str | None = None
    data_parallel_size: int = 1
    runner: str | None = None  # vLLM's model runner, v1 or v2


def version_of(text: str, *, engine: str, known: str) -> tuple[int, int]:
    """Major and minor number; UsageError naming the versions whose words are known."""
    found = re.search(r"(\d+)\.(\d+)", text)
    if found is None:
        raise UsageError(f"--engine-version {text}: not a version of {engine}", hint=f"known are {known}")
    return int(found[1]), int(found[2])


def ladder(policy: Mapping[str, Any], top: int | None = None) -> Ladder:
    """The batch axis of a policy alone: at each batch size the smallest speculation that any measured
    context or temperature chose. Adjacent ranges that agree are joined. Ranges beyond `top`, the most
    requests that a server runs together, are left out."""
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
    return tuple(rung for rung in rungs if top is None or rung.low <= top)


def _closed(segment: Segment, high: int) -> Segment:
    return Segment(low=segment.low, high=high, choice=segment.choice)


def text_of(notes: Sequence[str], command: str) -> str:
    return "\n".join([*(f"# {note}" for note in notes), command])


def target_of(policy: Mapping[str, Any]) -> str:
    validity = policy["validity"]
    return shlex.quote("TARGET" if validity["is_simulated"] else validity["target"] or "TARGET")


def max_batch(policy: Mapping[str, Any], asked: int | None) -> int:
    """The largest batch to serve: what was asked for, else the largest measured one."""
    return asked or int(policy["validity"]["batch"][1])


def notes_of(policy: Mapping[str, Any], engine: str) -> list[str]:
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


def lead_of(rungs: Sequence[Segment], runs: Callable[[SpecConfig], bool]) -> SpecConfig | None:
    """The configuration of the lowest range that the engine can speculate in."""
    configs = [rung.choice.config for rung in rungs]
    return next((config for config in configs if not config.is_off and runs(config)), None)


def same_drafter(config: SpecConfig, lead: SpecConfig) -> bool:
    return (config.method, config.draft_model, config.options) == (
        lead.method, lead.draft_model, lead.options,
    )  # fmt: skip


def other_drafters(rungs: Sequence[Segment], lead: SpecConfig, engine: str) -> list[str]:
    others = {
        rung.choice.config.label
        for rung in rungs
        if not rung.choice.config.is_off
        and not rung.choice.config.is_tree
        and not same_drafter(rung.choice.config, lead)
    }
    if not others:
        return []
    return [f"{engine} loads one drafter, {lead.method}; ranges of {', '.join(sorted(others))} are off"]


def spans_of(rungs: Sequence[Segment], config: SpecConfig) -> str:
    spans = [
        f"{rung.low}" if rung.high == rung.low else f"{rung.low} to {rung.high or 'the maximum'}"
        for rung in rungs
        if rung.choice.config == config
    ]
    return f"batch {', '.join(spans)}"
