"""A policy in, SGLang's launch line, YAML and adaptive file out. Source: SGLang 0.5.23.

All three of steps, topk and draft tokens are always written, and the number of requests that run together:
SGLang takes 48 where it speculates and nothing was said.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spectune.policy.emit_parts import (
    ladder,
    lead_of,
    max_batch,
    notes_of,
    other_drafters,
    same_drafter,
    spans_of,
    target_of,
    text_of,
)
from spectune.policy.ranges import Segment
from spectune.policy.sglang_adaptive import captured_sizes
from spectune.records import Method, SpecConfig

SGLANG_ALGORITHMS = {
    Method.EAGLE3.value: "EAGLE3",
    Method.NGRAM.value: "NGRAM",
    Method.DRAFT_MODEL.value: "STANDALONE",
}
ADAPTIVE_FILE = "adaptive.json"
YAML_FILE = "sglang.yaml"
HYSTERESIS = 0.25
"""Accepted drafts between the mean at which a depth is left and that at which it is taken again, each side."""

Adaptive = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLaunch:
    """What is started, before it is text: flags in their order, the adaptive file if any, and notes.

    A flag without a value is None.
    """

    flags: tuple[tuple[str, str | None], ...]
    adaptive: Adaptive | None
    notes: tuple[str, ...]

    @property
    def command(self) -> str:
        """The line to paste."""
        words = [
            f"--{name}" if value is None else f"--{name} {shlex.quote(value)}" for name, value in self.flags
        ]
        return " ".join(["python -m sglang.launch_server", *words])

    @property
    def text(self) -> str:
        """Notes, the adaptive file, the line."""
        return text_of(self.notes, f"{self._file}{self.command}")

    @property
    def yaml(self) -> str:
        """Notes, the adaptive file, the settings as a file for --config, and the line that reads it."""
        rows = [f"{name}: {json.dumps(_typed(value))}" for name, value in self.flags]
        settings = "\n".join(rows)
        body = (
            f"cat > {YAML_FILE} <<'EOF'\n{settings}\nEOF\npython -m sglang.launch_server --config {YAML_FILE}"
        )
        return text_of(self.notes, f"{self._file}{body}")

    @property
    def _file(self) -> str:
        if self.adaptive is None:
            return ""
        return f"cat > {ADAPTIVE_FILE} <<'EOF'\n{json.dumps(self.adaptive)}\nEOF\n"


def emit_sglang(policy: Mapping[str, Any], max_batch_size: int | None = None) -> str:
    """`sglang.launch_server` flags, and the adaptive file where the depth depends on the batch size."""
    return sglang_launch(policy, max_batch_size).text


def emit_sglang_yaml(policy: Mapping[str, Any], max_batch_size: int | None = None) -> str:
    """The same as a file for --config."""
    return sglang_launch(policy, max_batch_size).yaml


def emit_sglang_acceptance(policy: Mapping[str, Any], max_batch_size: int | None = None) -> str:
    """The policy by batch size, and below it SGLang's own choice by acceptance, down to no drafts."""
    return sglang_launch(policy, max_batch_size, by_acceptance=True).text


def _capped(
    policy: Mapping[str, Any],
    rungs: Sequence[Segment],
    lead: SpecConfig,
    base: tuple[tuple[str, str], ...],
    notes: list[str],
) -> SglangLaunch:
    """A drafter that SGLang cannot switch by batch size: no more requests together than it was decided for."""
    first = rungs[0]
    if first.choice.config != lead or first.high is None:
        notes.append(
            f"SGLang switches by batch size for EAGLE chains only and {lead.label} pays above batch "
            f"{first.high} only: no --speculative flags; serve {spans_of(rungs, lead)} behind a router "
            "(--engine router)"
        )
        return SglangLaunch(flags=base, adaptive=None, notes=tuple(notes))
    notes.append(
        f"SGLang switches by batch size for EAGLE chains only, so {lead.label} is static here: no more than "
        f"{first.high} run together; a plain deployment behind a router takes the rest (--engine router)"
    )
    flags = (base[0], ("max-running-requests", str(first.high)), *_spec_flags(lead, policy))
    return SglangLaunch(flags=flags, adaptive=None, notes=tuple(notes))


def sglang_launch(
    policy: Mapping[str, Any], max_batch_size: int | None = None, *, by_acceptance: bool = False
) -> SglangLaunch:
    """What SGLang is started with to run a policy."""
    notes = notes_of(policy, "SGLang")
    top = max_batch(policy, max_batch_size)
    rungs = ladder(policy, top)
    # target_of quotes for a shell; here the words are quoted when they become text
    base = (("model-path", shlex.split(target_of(policy))[0]), ("max-running-requests", str(top)))
    lead = lead_of(rungs, lambda config: config.method in SGLANG_ALGORITHMS)
    if lead is None:
        notes.append("do not speculate: no --speculative flags")
        return SglangLaunch(flags=base, adaptive=None, notes=tuple(notes))
    notes += other_drafters(rungs, lead, "SGLang")
    flags = (*base, *_spec_flags(lead, policy))

    def runs(config: SpecConfig) -> bool:
        return config.is_chain and same_drafter(config, lead)

    is_static = len({rung.choice.config for rung in rungs}) == 1
    can_adapt = lead.method == Method.EAGLE3 and lead.is_chain
    if not can_adapt and not is_static:
        return _capped(policy, rungs, lead, base, notes)
    if not can_adapt or (is_static and not by_acceptance):
        return SglangLaunch(flags=flags, adaptive=None, notes=tuple(notes))
    sizes = captured_sizes(top)
    adaptive = sglang_adaptive(rungs, sizes, runs=runs)
    if all(entry["candidate_steps"] == [0] for entry in adaptive.values()):
        notes.append("batch sizes that speculate share captured graphs with such that do not: all are off")
        return SglangLaunch(flags=base, adaptive=None, notes=tuple(notes))
    notes.append(
        "SGLang pads a batch to its captured graph sizes before the lookup, so edges lie between such sizes and "
        "batch sizes of one graph run the smallest speculation that the policy has for any of them; 0 steps is off"
    )
    if by_acceptance:
        adaptive = with_acceptance(adaptive)
        notes.append(
            f"below the depth of the policy SGLang chooses by accepted drafts, with {2 * HYSTERESIS:g} between "
            "down and up; the policy itself was measured without that"
        )
    depths = {depth for entry in adaptive.values() for depth in entry["candidate_steps"]}
    if lead.num_steps not in depths:  # only at batch sizes that share a graph with less speculation
        flags = (
            *base,
            *_spec_flags(
                SpecConfig.chain(lead.method, max(1, *depths), draft_model=lead.draft_model), policy
            ),
        )
    flags = (*flags, ("speculative-adaptive", None), ("speculative-adaptive-config", ADAPTIVE_FILE))
    return SglangLaunch(flags=flags, adaptive=adaptive, notes=tuple(notes))


def _spec_flags(lead: SpecConfig, policy: Mapping[str, Any]) -> tuple[tuple[str, str | None], ...]:
    head = lead.draft_model or policy["validity"]["draft"] or "DRAFT_HEAD"
    has_model = lead.method != Method.NGRAM
    return (
        ("speculative-algorithm", SGLANG_ALGORITHMS[lead.method]),
        *((("speculative-draft-model-path", head),) if has_model else ()),
        ("speculative-num-steps", str(lead.num_steps)),
        ("speculative-eagle-topk", str(lead.topk)),
        ("speculative-num-draft-tokens", str(lead.num_draft_tokens)),
        *(() if has_model else (("speculative-ngram-max-bfs-breadth", str(lead.topk)),)),
    )


def sglang_adaptive(
    rungs: Sequence[Segment], captured: Sequence[int], *, runs: Callable[[SpecConfig], bool]
) -> Adaptive:
    """`--speculative-adaptive-config` of a policy by batch size alone: one step count a key.

    SGLang pads a batch to the next captured size and takes the largest key that is not above it. So the
    batch sizes between two captured ones run alike: the least steps that the policy has for any of them.
    Keys are the first batch size after a captured one, so that a batch that runs without a graph, and is
    not padded, finds the same.
    """
    found: Adaptive = {}
    below = 0
    previous: int | None = None
    for size in captured:
        depth = min(_steps(rungs, batch, runs) for batch in range(below + 1, size + 1))
        if depth != previous:
            found[str(below + 1)] = {"candidate_steps": [depth]}
        below, previous = size, depth
    return found


def with_acceptance(adaptive: Adaptive) -> Adaptive:
    """Each key with the smaller depths of the policy and no drafts below its own; off stays off."""
    depths = sorted({entry["candidate_steps"][0] for entry in adaptive.values()} | {0})
    knobs = {"up_hysteresis": HYSTERESIS, "down_hysteresis": -HYSTERESIS}
    return {
        key: {"candidate_steps": [depth for depth in depths if depth <= entry["candidate_steps"][0]], **knobs}
        for key, entry in adaptive.items()
    }


def _steps(rungs: Sequence[Segment], batch_size: int, runs: Callable[[SpecConfig], bool]) -> int:
    rung = [rung for rung in rungs if rung.low <= batch_size][-1]
    return rung.choice.config.num_steps if runs(rung.choice.config) else 0


def _typed(value: str | None) -> str | int | bool:
    if value is None:
        return True
    return int(value) if value.isdecimal() else value
