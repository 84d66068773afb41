"""Does this head belong to this target: architecture, widths, shapes, context, positions, number formats.

A wrong pair runs without an error and accepts nothing, so each check names what that would look like.
Vocabulary and capture points have modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from spectune.draft.inspect import HeadFacts, ModelFacts
from spectune.measure.doctor.findings import NO_ACCEPTANCE, Finding, error, fine, note, warning

HEAD_METHODS = ("eagle", "eagle3")
LOW_ACCEPTANCE = "acceptance length well below the published one, sometimes close to 1.0"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def check_pair(
    head: HeadFacts,
    target: ModelFacts,
    *,
    method: str = "eagle3",
    engine: str | None = None,
    context_tokens: int | None = None,
) -> Iterator[Finding]:
    """Everything about head and target but vocabulary and capture points.

    `context_tokens` is the longest context that is going to run; None where it is not decided.
    """
    yield from check_method(head, method)
    yield from check_widths(head, target)
    if method == "eagle3":
        yield from check_shapes(head)
        yield from check_flags(head, engine)
    yield from check_context(head, target, context_tokens)
    yield from check_rope(head, target)
    yield from check_quantisation(head, target)


def check_method(head: HeadFacts, method: str) -> Iterator[Finding]:
    """The drafting method against the architecture of the head."""
    names = ", ".join(head.architectures) or "none"
    if method not in HEAD_METHODS:
        if head.is_eagle3:
            yield error(
                "method",
                f"method {method} with the EAGLE-3 head {names}",
                signature="the engine does not start, or it drafts without the target's hidden states",
                fix="use method eagle3 (SGLang: --speculative-algorithm EAGLE3)",
            )
        return
    if method == "eagle" and head.is_eagle3:
        yield error(
            "method",
            f"method eagle with an EAGLE-3 head (architectures: {names})",
            signature=NO_ACCEPTANCE,
            fix="use method eagle3 (SGLang: --speculative-algorithm EAGLE3)",
        )
    elif method == "eagle3" and not head.is_eagle3:
        width = head.fc_width
        is_older = width is not None and width == 2 * (head.count("hidden_size") or -1)
        older = (
            "fc reads 2 hidden sizes, so this is an EAGLE-1 or EAGLE-2 head" if is_older else f"it is {names}"
        )
        yield error(
            "method",
            f"method eagle3 needs an EAGLE-3 head, {older}",
            signature="the head does not load, or " + NO_ACCEPTANCE,
            fix="use method eagle, or a head of architecture LlamaForCausalLMEagle3",
        )
    else:
        yield fine("method", f"{method} and architecture {names} belong together")


def check_widths(head: HeadFacts, target: ModelFacts) -> Iterator[Finding]:
    """Hidden size that the head reads against the one that the target has."""
    reads = head.count("target_hidden_size") or head.count("hidden_size")
    has = target.count("hidden_size")
    if reads is None or has is None:
        yield warning(
            "hidden-size",
            f"{(head if reads is None else target).path / 'config.json'} has no usable hidden_size",
            signature="the engine refuses the configuration",
            fix="complete config.json",
        )
    elif reads != has:
        yield error(
            "hidden-size",
            f"the head reads hidden size {reads}, the target has {has}",
            signature="a shape error while loading or at the first draft",
            fix="this head was trained for another target; take one for this target",
        )
    else:
        yield fine("hidden-size", f"hidden size {has}")


def expected_shapes(head: HeadFacts) -> dict[str, tuple[int, ...]] | None:
    """Shapes of a classic EAGLE-3 layer by config.json: attention reads 2H, heads·head_dim may differ from H."""
    hidden, inner = head.count("hidden_size"), head.count("intermediate_size")
    heads, head_dim, vocab = head.count("num_attention_heads"), head.head_dim, head.draft_vocab_size
    if hidden is None or inner is None or heads is None or head_dim is None or vocab is None:
        return None
    kv_heads = head.count("num_key_value_heads") or heads
    captured = len(head.top_level_ids or head.nested_ids or (0, 0, 0))
    return {
        "fc.weight": (hidden, captured * (head.count("target_hidden_size") or hidden)),
        "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }


def check_shapes(head: HeadFacts) -> Iterator[Finding]:
    """Every tensor of the head against config.json: name, both shapes, likely cause."""
    expected = expected_shapes(head)
    if head.shapes is None or expected is None:
        what = "no weights" if head.shapes is None else "no complete config.json"
        yield error(
            "shapes",
            f"{head.path} holds {what}",
            signature="the head does not load",
            fix="is the download complete? expected are config.json and model.safetensors",
        )
        return
    # what an engine takes from the target where the head has none of its own
    optional = {"lm_head.weight"} if head.draft_vocab_size == head.vocab_size else set()
    wrong = 0
    for name, shape in expected.items():
        found = head.shapes.get(name)
        if found == shape or (found is None and name in optional):
            continue
        wrong += 1
        text = f"tensor {name} is {'missing' if found is None else list(found)}, config.json asks for {list(shape)}"
        yield error(
            "shapes", text, signature="a shape error while loading", fix=_likely_cause(name, found, head)
        )
    if not wrong:
        yield fine("shapes", f"{len(expected)} tensors have the shapes of config.json")


def _likely_cause(name: str, found: tuple[int, ...] | None, head: HeadFacts) -> str:
    hidden = head.count("hidden_size") or 0
    if found is None:
        return "the file is incomplete, or this is no classic EAGLE-3 head"
    if name == "fc.weight" and found[-1] == 2 * hidden:
        return "an fc of 2H is an EAGLE-1 or EAGLE-2 head: use method eagle"
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        if found[-1] == hidden:
            return "the attention of an EAGLE-3 head reads 2H (embedding and hidden); this one reads H"
        if len(found) == 2 and found[-1] == 2 * hidden and head.count("num_attention_heads"):
            heads = head.count("num_attention_heads") or 1
            kv_heads = head.count("num_key_value_heads") or heads
            rows = found[0] // (heads if name.endswith("q_proj.weight") else kv_heads)
            return (
                f"the weights have a head_dim of {rows}: write head_dim {rows} into config.json; "
                "an engine that assumes hidden_size / num_attention_heads cannot load them"
            )
        return "head_dim or the number of heads in config.json is of another head"
    if name == "lm_head.weight":
        return f"write draft_vocab_size {found[0]} into config.json, or take the config of these weights"
    return "config.json and the weights come from different heads"


def check_flags(head: HeadFacts, engine: str | None) -> Iterator[Finding]:
    """Variants of the layer that not every engine has."""
    is_speculators = bool(head.config.get("speculators_model_type"))
    # vLLM takes norm_before_residual as true where a head of the speculators format does not say it
    if is_speculators and "norm_before_residual" not in head.config:
        set_flags = ["norm_before_residual (the default of this format)"]
    else:
        set_flags = []
    set_flags += [flag for flag in FLAGS if head.flag(flag)]
    residual = [flag for flag in set_flags if flag.startswith("norm_before_residual")]
    if residual:
        make = error if engine == "sglang" else warning
        yield make(
            "layer-variant",
            f"the head sets {residual[0]}, which SGLang does not implement",
            signature=f"in SGLang: {LOW_ACCEPTANCE}, without an error",
            fix="serve it with vLLM, or take a head of the classic layer",
        )
    others = [flag for flag in set_flags if flag not in residual]
    if engine == "reference" and others:
        yield error(
            "layer-variant",
            f"the reference engine does not have {', '.join(others)}, which this head sets",
            signature="the head is refused before anything is measured",
            fix="measure it with --backend vllm",
        )
    if engine in ("sglang", None) and head.config.get("tie_word_embeddings") and not is_speculators:
        make = error if engine == "sglang" else warning
        yield make(
            "tied-embeddings",
            "tie_word_embeddings is true: SGLang then takes the embedding for the head's own lm_head",
            signature=f"in SGLang: {NO_ACCEPTANCE}",
            fix="write tie_word_embeddings false into the head's config.json",
        )


def check_context(head: HeadFacts, target: ModelFacts, context_tokens: int | None) -> Iterator[Finding]:
    """The context that the head was trained for against the target's and the planned one."""
    own = head.count("max_position_embeddings")
    targets = target.count("max_position_embeddings")
    if own is None:
        yield note(
            "context",
            "the head's config.json has no max_position_embeddings: engines take their own default of 2048",
            fix="write the length that the head was trained with",
        )
        return
    if context_tokens is not None and targets is not None and context_tokens > targets:
        yield error(
            "context",
            f"a context of {context_tokens} tokens is beyond the target's {targets}",
            signature="requests are refused",
            fix=f"use at most {targets}",
        )
    if context_tokens is not None and context_tokens > own:
        yield error(
            "context",
            f"a context of {context_tokens} tokens is beyond the draft's {own}"
            + ("" if targets is None else f" (the target has {targets})"),
            signature="acceptance length falls to 1.0 beyond the draft's length, or the engine crashes there",
            fix=f"cap the context at {own}, switch speculation off beyond it, or train a head on longer text",
        )
    elif targets is not None and own < targets and context_tokens is None:
        yield warning(
            "context",
            f"the draft knows {own} positions, the target {targets}",
            signature=f"acceptance falls towards 1.0 from {own} tokens on; some engines cap the target or crash",
            fix=f"measure with --context on both sides of {own}, and cap --max-model-len there if it does not pay",
        )
    else:
        yield fine("context", f"the draft knows {own} positions")


def check_rope(head: HeadFacts, target: ModelFacts) -> Iterator[Finding]:
    """Rotary bases and scaling of both; a difference is told, not refused: a head is trained with its own."""
    own, theirs = head.rope, target.rope
    shown = (
        f"head: theta {_theta(own.theta)}, scaling {_scaling(own.scaling)} (from {own.place}); "
        f"target: theta {_theta(theirs.theta)}, scaling {_scaling(theirs.scaling)} (from {theirs.place})"
    )
    if own.theta == theirs.theta and own.scaling == theirs.scaling:
        yield fine("rope", shown)
    else:
        yield warning(
            "rope",
            shown,
            signature="usually none: the measured effect is small and of either sign",
            fix="right if the head was trained so; if a conversion dropped the values, write them back",
        )


def _theta(value: float | None) -> str:
    return "absent (10000)" if value is None else f"{value:g}"


def _scaling(value: object) -> str:
    if not isinstance(value, dict):
        return "none"
    kind = value.get("rope_type", value.get("type"))
    return f"{kind} x{value['factor']:g}" if isinstance(value.get("factor"), int | float) else str(kind)


def check_quantisation(head: HeadFacts, target: ModelFacts) -> Iterator[Finding]:
    """Number formats side by side: quantisation destroys acceptance without any error."""
    shown = f"target {_format(target)}, head {_format(head)}"
    if head.quantisation is not None:
        yield warning(
            "quantisation",
            f"the head is quantised: {shown}",
            signature="acceptance length near 1.0; FP8 heads have accepted 0 of 692 drafts",
            fix="serve the unquantised head; it is small",
        )
    elif target.quantisation is not None:
        yield warning(
            "quantisation",
            f"the target is quantised, the head was probably trained on the plain one: {shown}",
            signature="acceptance up to a third lower than on the plain target, worse with rotated weights",
            fix="measure both targets; a drop beyond 30% asks for a head trained on the quantised one",
        )
    else:
        yield fine("quantisation", shown)


def _format(facts: ModelFacts) -> str:
    dtype = facts.config.get("torch_dtype") or facts.config.get("dtype") or "an unnamed dtype"
    return f"{dtype}" if facts.quantisation is None else f"{dtype} quantised by {facts.quantisation}"
