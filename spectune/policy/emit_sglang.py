"""A policy in, SGLang's launch line and adaptive file out. Source: SGLang 0.5.23."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
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
from spectune.records import Method, SpecConfig

SGLANG_ALGORITHMS = {Method.EAGLE3.value: "EAGLE3", Method.NGRAM.value: "NGRAM"}


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
    notes = notes_of(policy, "SGLang")
    top = max_batch(policy, max_batch_size)
    base = f"python -m sglang.launch_server --model-path {target_of(policy)} --max-running-requests {top}"
    lead = lead_of(rungs, lambda config: config.method in SGLANG_ALGORITHMS)
    if lead is None:
        notes.append("do not speculate: no --speculative flags")
        return text_of(notes, base)
    notes += other_drafters(rungs, lead, "SGLang")
    flags = [base, f"--speculative-algorithm {SGLANG_ALGORITHMS[lead.method]}"]
    if lead.method != Method.NGRAM:
        head = lead.draft_model or policy["validity"]["draft"] or "DRAFT_HEAD"
        flags.append(f"--speculative-draft-model-path {shlex.quote(head)}")
        flags.append(f"--speculative-num-steps {lead.num_steps} --speculative-eagle-topk {lead.topk}")
    else:
        flags.append("--speculative-ngram-max-bfs-breadth 1")
    flags.append(f"--speculative-num-draft-tokens {lead.num_draft_tokens}")

    def runs(config: SpecConfig) -> bool:
        return config.is_chain and same_drafter(config, lead)

    within = [rung for rung in rungs if rung.low <= top]
    if len({rung.choice.config for rung in within}) == 1:
        return text_of(notes, " ".join(flags))
    if lead.method != Method.EAGLE3 or not lead.is_chain:
        notes.append(
            f"SGLang switches by batch size for EAGLE chains only, so {lead.label} is static here: serve "
            f"{spans_of(within, lead)} with it and put a plain deployment behind a router for the rest"
        )
        return text_of(notes, " ".join(flags))
    adaptive = json.dumps(sglang_adaptive(within, runs=runs))
    flags.append("--speculative-adaptive --speculative-adaptive-config adaptive.json")
    notes.append("SGLang pads a batch to its captured graph sizes before the lookup; 0 steps is off")
    return text_of(notes, f"cat > adaptive.json <<'EOF'\n{adaptive}\nEOF\n{' '.join(flags)}")
