"""A policy in, `llama-server` flags out. Source: llama.cpp at build b11000.

llama.cpp has no policy by load: what it executes is one configuration. The batch sizes at which that one
was decided are kept by `--parallel`, the rest needs a second server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spectune.errors import UsageError
from spectune.policy.emit_parts import (
    EmitOptions,
    ladder,
    lead_of,
    max_batch,
    notes_of,
    target_of,
    text_of,
)
from spectune.records import Method, SpecConfig

OLDEST_BUILD = 11000
TYPES = {
    Method.EAGLE3.value: "draft-eagle3",
    Method.DRAFT_MODEL.value: "draft-simple",
    Method.NGRAM.value: "ngram-simple",
}


def emit_llama_cpp(policy: Mapping[str, Any], options: EmitOptions) -> str:
    """`llama-server` with the configuration of the smallest loads, and the load that it holds up to."""
    _check_build(options.engine_version)
    notes = notes_of(policy, "llama.cpp")
    top = max_batch(policy, options.max_batch_size)
    rungs = ladder(policy, top)
    model = target_of(policy)
    lead = lead_of(rungs, _runs)
    if trees := sorted({rung.choice.config.label for rung in rungs if rung.choice.config.is_tree}):
        notes.append(f"the tree {', '.join(trees)} is not run there: its server drafts chains")
    if lead is None or lead != rungs[0].choice.config:
        if lead is not None:
            notes.append(f"{lead.label} pays above batch 1 only: put it behind a router (--engine router)")
        notes.append("do not speculate: --spec-type none")
        return text_of(notes, f"llama-server -m {model} --parallel {top} --spec-type none")
    end = rungs[0].high
    parallel = top if end is None else min(end, top)
    if parallel < top:
        notes.append(
            f"llama.cpp has no policy by load: {lead.label} was decided up to batch {parallel}, so no more run "
            "together here; a server with --spec-type none takes the load above (--engine router)"
        )
    words = [f"llama-server -m {model}", f"--parallel {parallel}", f"--spec-type {TYPES[lead.method]}"]
    if lead.method != Method.NGRAM:
        words.insert(1, f"-md {lead.draft_model or policy['validity']['draft'] or 'DRAFT_HEAD'}")
        notes.append("both models as GGUF: convert_hf_to_gguf.py HEAD --target-model-dir TARGET")
    words.append(f"--spec-draft-n-max {lead.num_steps} --spec-draft-p-min 0.0")
    return text_of(notes, " ".join(words))


def _runs(config: SpecConfig) -> bool:
    return config.is_chain and config.method in TYPES


def _check_build(text: str | None) -> None:
    if text is None:
        return
    found = re.fullmatch(r"b?(\d+)", text)
    if found is None or int(found[1]) < OLDEST_BUILD:
        raise UsageError(
            f"--engine-version {text}: unsupported build of llama.cpp, whose flags have other names",
            hint=f"known from b{OLDEST_BUILD} on (--spec-draft-n-max, once --draft-max)",
        )
