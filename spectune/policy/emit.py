"""A policy in, what a serving engine executes out, as text to paste.

Each engine executes a part of a policy only. What it cannot execute is taken as the smaller
speculation or as off, never as more, and said in a comment above the command; what it would silently
ignore is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spectune.errors import UsageError
from spectune.policy.emit_llama_cpp import emit_llama_cpp
from spectune.policy.emit_parts import EmitOptions
from spectune.policy.emit_reference import emit_reference
from spectune.policy.emit_router import emit_router
from spectune.policy.emit_sglang import emit_sglang, emit_sglang_acceptance, emit_sglang_yaml
from spectune.policy.emit_tensorrt_llm import emit_tensorrt_llm
from spectune.policy.emit_vllm import emit_vllm
from spectune.policy.forms import FORMS, as_kubernetes, as_script

Emitter = Callable[[Mapping[str, Any], EmitOptions], str]

ROUTER = "router"
REPORTED = ("vllm", "sglang")
"""Engines whose commands stand in every report."""


def _sglang(policy: Mapping[str, Any], options: EmitOptions) -> str:
    return emit_sglang(policy, options.max_batch_size)


def _sglang_yaml(policy: Mapping[str, Any], options: EmitOptions) -> str:
    return emit_sglang_yaml(policy, options.max_batch_size)


def _sglang_acceptance(policy: Mapping[str, Any], options: EmitOptions) -> str:
    return emit_sglang_acceptance(policy, options.max_batch_size)


EMITTERS: dict[str, Emitter] = {
    "vllm": emit_vllm,
    "sglang": _sglang,
    "sglang-yaml": _sglang_yaml,
    "sglang-acceptance": _sglang_acceptance,
    "tensorrt-llm": emit_tensorrt_llm,
    "llama.cpp": emit_llama_cpp,
    "reference": emit_reference,
    ROUTER: emit_router,
}


def emit(
    policy: Mapping[str, Any], engine: str, options: EmitOptions | None = None, *, form: str = "text"
) -> str:
    """The text for one engine, as a script or for a container.

    Raises UsageError for an engine or form that spectune cannot write, for what the engine would
    silently ignore, and for a policy that lost when it was served.
    """
    if engine not in EMITTERS:
        raise UsageError(f"--engine {engine}: cannot emit for it", hint=f"one of {', '.join(EMITTERS)}")
    if form not in FORMS:
        raise UsageError(f"--format {form} is not known", hint=f"one of {', '.join(FORMS)}")
    if form != "text" and engine == ROUTER:
        raise UsageError(f"--format {form}: a router table is data, not a command", hint="--format text")
    if form == "kubernetes" and engine == "sglang-yaml":
        raise UsageError(
            "--format kubernetes: sglang.yaml would name adaptive.json where it is not",
            hint="--engine sglang",
        )
    check_not_withdrawn(policy, is_router=engine == ROUTER)
    text = EMITTERS[engine](policy, options or EmitOptions())
    writers: dict[str, Callable[[str], str]] = {"serve.sh": as_script, "kubernetes": as_kubernetes}
    return writers[form](text) if form in writers else text


def emit_all(policy: Mapping[str, Any], *, max_batch_size: int | None = None) -> dict[str, str]:
    """The texts that a report shows, by engine; the reason in place of what cannot be written."""
    options = EmitOptions(max_batch_size=max_batch_size)
    found = {}
    for engine in REPORTED:
        try:
            found[engine] = emit(policy, engine, options)
        except UsageError as error:
            found[engine] = f"# cannot be written: {error.message}\n# {error.hint}"
    return found


def check_not_withdrawn(policy: Mapping[str, Any], *, is_router: bool) -> None:
    """UsageError, with the advice that replaces it, for a policy that was served and lost.

    A router stays possible where only the plain decoding of a server that can speculate lost.
    """
    told = policy.get("verification") or {}
    if told.get("verdict") == "withdrawn" and not (is_router and told.get("behind_router")):
        raise UsageError(
            f"the policy of {policy['source_run']} is withdrawn: {'; '.join(told['reasons'])}",
            hint=told["advice"],
        )
