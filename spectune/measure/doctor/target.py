"""The target alone: its template, its number format, what its architecture allows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from spectune.draft.inspect import ModelFacts
from spectune.measure.doctor.findings import Finding, error, fine, note, warning

REFERENCE_TYPES = ("llama", "mistral", "qwen2", "qwen3")
NO_EAGLE3_IN_VLLM = ("opt", "gpt2", "phi3", "olmo2", "gemma3")


def check_target(target: ModelFacts, *, engine: str | None = None) -> Iterator[Finding]:
    """Findings about the target alone."""
    kind = str(target.config.get("model_type"))
    names = ", ".join(target.architectures) or "no architecture"
    yield note(
        "target", f"{names}, {target.count('num_hidden_layers')} layers, vocabulary {target.vocab_size}"
    )
    if engine == "reference" and kind not in REFERENCE_TYPES:
        yield error(
            "target",
            f"the reference engine does not know model_type {kind}",
            signature="the target is refused while loading",
            fix=f"known are {', '.join(REFERENCE_TYPES)}; others run with --backend vllm",
        )
    if engine == "vllm" and kind in NO_EAGLE3_IN_VLLM:
        yield error(
            "target",
            f"vLLM captures no hidden states of model_type {kind}, so EAGLE-3 does not run on it",
            signature="the engine refuses to start",
            fix="draft by n-gram lookup or with a small model",
        )
    yield from check_template(target)


def check_template(target: ModelFacts) -> Iterator[Finding]:
    """A chat model without its template is asked in another language than it was trained on."""
    if target.template is not None:
        digest = hashlib.sha256(target.template.encode()).hexdigest()
        yield fine("template", f"chat template {digest[:12]}")
        return
    yield warning(
        "template",
        f"the tokenizer of {target.path} has no chat template",
        signature="chat endpoints answer 400; here prompts are asked as plain text, and acceptance is that of "
        "plain text",
        fix="give it with --chat-template FILE, or put it beside tokenizer.json as chat_template.jinja, or, for a base model, use the "
        "completions endpoint and read acceptance as that of plain text",
    )
