"""A checked head written in the layouts that others load: classic, Speculators, SafeAILab.

Classic is what vLLM and SGLang load at once. Speculators is vLLM's self-contained repository (it names
its target). SafeAILab is the EAGLE authors' own code, which captures the default layers only. Whatever
a layout cannot say is refused, for an engine would load such a head and accept nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectune.draft.checkpoint import Head, HeadConfig
from spectune.engine.checkpoint import TargetConfig
from spectune.errors import CheckpointError, StoreError
from spectune.store.files import replacing

VERIFIERS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Hugging Face's architecture by model_type of the target, as Speculators names it."""

FORMATS = ("classic", "speculators", "safeailab")
SPECULATIVE_TOKENS = 3


def write_head(
    head: Head,
    directory: Path,
    target: TargetConfig,
    layout: str,
    *,
    verifier: str = "",
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write `head` in one of FORMATS; returns the directory.

    Args:
        verifier: name or path of the target, which the Speculators layout carries.
        extra: what goes into config.json under "spectune" (provenance).

    Raises:
        CheckpointError: an unknown layout, or a head that it cannot express.
        StoreError: the files cannot be written.
    """
    if layout not in FORMATS:
        raise CheckpointError(f"--format {layout} is unknown", hint=f"use {', '.join(FORMATS)}")
    config = {
        "classic": classic_config,
        "speculators": speculators_config,
        "safeailab": safeailab_config,
    }[layout](head.config, target, verifier)
    if extra:
        config["spectune"] = extra
    tensors = layout_tensors(head, layout)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_weights(tensors, directory, layout)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (directory / "config.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be written: {error}", hint="make room or name another folder"
        ) from error
    return directory


def cut_rows(ids: Tensor, size: int, ends: Sequence[int]) -> Tensor:
    """Rows [size] of a draft vocabulary that a cut one keeps: ends of a turn, then the lowest ids.

    Low ids are what byte-pair merging made first, so they are the frequent ones; a turn's end may have a
    high one, and a head that cannot draft it loses a round an answer. ids: target ids, ascending [D]
    """
    is_end = torch.isin(ids, torch.tensor(list(ends), dtype=ids.dtype, device=ids.device))
    order = torch.cat([is_end.nonzero()[:, 0], (~is_end).nonzero()[:, 0]])
    return order[:size].sort().values


def cut_draft_vocab(head: Head, size: int, ends: Sequence[int] = ()) -> Head:
    """The head with `size` of its draft tokens only: nothing is trained anew (arXiv 2502.14856).

    Kept are those of cut_rows. Raises CheckpointError unless 1 <= size <= the head's draft vocabulary.
    """
    config = head.config
    if not 1 <= size <= config.draft_vocab_size:
        raise CheckpointError(
            f"--draft-vocab-size {size} is not within 1..{config.draft_vocab_size} of this head"
        )
    known = head.draft_to_target
    ids = torch.arange(config.vocab_size) if known is None else known
    tensors = {name: tensor for name, tensor in head.tensors.items() if name not in ("d2t", "t2d")}
    rows = cut_rows(ids, size, ends)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][rows].contiguous()
    kept = ids[rows]
    return replace(head, config=replace(config, draft_vocab_size=size), tensors=tensors, draft_to_target=kept)


def layers_of(config: HeadConfig, target: TargetConfig) -> tuple[int, ...]:
    """Layers run before each capture: the head's own, or EAGLE-3's default."""
    from spectune.engine.target import default_aux_layers

    return config.aux_layer_ids or default_aux_layers(target.num_layers)


def classic_config(config: HeadConfig, target: TargetConfig, verifier: str = "") -> dict[str, Any]:
    """config.json for vLLM and SGLang at once.

    vLLM reads the layer ids at the top (layers run before the capture), SGLang the nested ones (the
    layer captured after, one lower for the same stream).
    """
    _refuse_norm_before_residual(config, "SGLang, which reads this layout too,")
    layers = layers_of(config, target)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(config, target),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
        },
    }


def _refuse_norm_before_residual(config: HeadConfig, reader: str) -> None:
    if config.norm_before_residual:
        raise CheckpointError(
            f"the head sets norm_before_residual, which {reader} does not know: it would load and accept "
            "next to nothing",
            hint="use --format speculators, which vLLM serves",
        )


def speculators_config(config: HeadConfig, target: TargetConfig, verifier: str = "") -> dict[str, Any]:
    """config.json of a Speculators repository; every norm flag is written, for their defaults differ."""
    if not verifier:
        raise CheckpointError(
            "the Speculators layout names its target", hint="give --verifier, a hub id or a path"
        )
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(layers_of(config, target)),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(config, target),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}],
            "verifier": {
                "name_or_path": verifier,
                "architectures": [VERIFIERS.get(target.model_type, "LlamaForCausalLM")],
            },
        },
        "torch_dtype": "bfloat16",
    }


def safeailab_config(config: HeadConfig, target: TargetConfig, verifier: str = "") -> dict[str, Any]:
    """config.json of the EAGLE authors' code, which captures layers 2, L//2, L-3 whatever is written."""
    from spectune.engine.target import default_aux_layers

    _refuse_norm_before_residual(config, "the SafeAILab code")
    usual = default_aux_layers(target.num_layers)
    if layers_of(config, target) != usual:
        raise CheckpointError(
            f"the SafeAILab code captures layers {list(usual)}; this head reads {list(layers_of(config, target))}",
            hint="it would load and accept nothing; use --format classic",
        )
    if config.head_dim * config.num_heads != config.hidden_size:
        raise CheckpointError(
            f"the SafeAILab code takes hidden_size / num_attention_heads as head size; this head has {config.head_dim}",
            hint="use --format classic",
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        **_layer_config(config, target),
        "draft_vocab_size": config.draft_vocab_size,
        "torch_dtype": "bfloat16",
    }


def _layer_config(config: HeadConfig, target: TargetConfig) -> dict[str, Any]:
    eos = list(target.eos_token_ids)
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }


def layout_tensors(head: Head, layout: str) -> dict[str, Tensor]:
    """bf16 weights under the layout's names, the maps d2t (offsets) and t2d where it carries them.

    An embedding in the file is kept: vLLM uses it, and it may be the head's own.
    """
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in head.tensors.items()
        if name not in ("d2t", "t2d")
    }
    config = head.config
    if head.draft_to_target is not None and config.draft_vocab_size < config.vocab_size:
        ids = head.draft_to_target
        tensors["d2t"] = ids - torch.arange(ids.numel())
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
    return tensors


def _write_weights(tensors: dict[str, Tensor], directory: Path, layout: str) -> None:
    name = "pytorch_model.bin" if layout == "safeailab" else "model.safetensors"
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with replacing(directory / name) as partial:
            if layout == "safeailab":
                torch.save(tensors, partial)
            else:
                save_file(tensors, partial, metadata={"format": "pt"})
    except (RuntimeError, SafetensorError) as error:  # what the two writers raise on a full disk
        raise OSError(str(error)) from error
