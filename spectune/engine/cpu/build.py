"""Makes a twin where this machine and these shapes allow one; says no with None, never with an error.

What LLVM compiles is probed once with real numbers before it is trusted.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from spectune.engine.target_config import TargetConfig

if TYPE_CHECKING:
    from spectune.engine.cpu.draft_twin import DraftTwin
    from spectune.engine.cpu.twin import TargetTwin


@functools.cache
def can_compile(dtype: torch.dtype) -> bool:
    """Whether the compiled product exists here and agrees with `F.linear` for this dtype."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    try:
        from spectune.engine.cpu.tiles import has_avx512
        from spectune.engine.cpu.twin import probe
    except ImportError:
        return False
    return (dtype is torch.float32 or has_avx512()) and probe(dtype)


def target_twin(
    config: TargetConfig, weights: dict[str, Tensor], dtype: torch.dtype, *, quantize: bool
) -> TargetTwin | None:
    """The twin of a target over Hugging Face weights of `dtype`; None where there is none."""
    if not _fits(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim):
        return None
    if not can_compile(dtype) or (quantize and dtype is not torch.float32):
        return None
    from spectune.engine.cpu.packed import PackedWeight
    from spectune.engine.cpu.tiles import interleave
    from spectune.engine.cpu.twin import LayerShape, TargetTwin

    def merged(names: list[str], part: str) -> Tensor | None:
        found = [weights[f"{name}.{part}"] for name in names if f"{name}.{part}" in weights]
        return torch.cat(found) if found else None

    layers, norms, head_norms = [], [], []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [f"{attention}{name}_proj" for name in "qkv"]
        qkv_weight = merged(qkv, "weight")
        assert qkv_weight is not None
        gate_up = [weights[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")]
        inner_bias = None
        if mlp + "gate_proj.bias" in weights:
            biases = [weights[f"{mlp}{name}_proj.bias"].unsqueeze(1) for name in ("gate", "up")]
            inner_bias = interleave(*biases).squeeze(1)
        layers.append(
            [
                PackedWeight(qkv_weight, merged(qkv, "bias"), quantize=quantize),
                PackedWeight(
                    weights[attention + "o_proj.weight"],
                    weights.get(attention + "o_proj.bias"),
                    quantize=quantize,
                ),
                PackedWeight(interleave(*gate_up), inner_bias, quantize=quantize),
                PackedWeight(
                    weights[mlp + "down_proj.weight"], weights.get(mlp + "down_proj.bias"), quantize=quantize
                ),
            ]
        )
        norms += [weights[f"{prefix}{name}_layernorm.weight"] for name in ("input", "post_attention")]
        pair = [weights.get(f"{attention}{name}_norm.weight") for name in "qk"]
        kept = [tensor for tensor in pair if tensor is not None and config.qk_norm]
        head_norms.append(torch.stack(kept) if kept else torch.zeros(2, 0))
    embedding = weights["model.embed_tokens.weight"]
    return TargetTwin(
        LayerShape(
            width=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            inner=config.intermediate_size,
            window=config.sliding_window or 0,
            eps=config.rms_norm_eps,
        ),
        dtype,
        layers=layers,
        norms=torch.stack([*norms, weights["model.norm.weight"]]),
        head_norms=torch.stack(head_norms),
        embedding=embedding,
        head=PackedWeight(weights.get("lm_head.weight", embedding), None, quantize=quantize),
        quantize=quantize,
    )


def draft_twin(
    config: HeadShape,
    tensors: dict[str, Tensor],
    embedding: Tensor,
    draft_to_target: Tensor | None,
    dtype: torch.dtype,
) -> DraftTwin | None:
    """The twin of an EAGLE-3 head over its tensors in `dtype`; None where there is none."""
    if not _fits(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim):
        return None
    if not can_compile(dtype):
        return None
    from spectune.engine.cpu.draft_twin import DraftTwin
    from spectune.engine.cpu.packed import PackedWeight
    from spectune.engine.cpu.tiles import interleave
    from spectune.engine.cpu.twin import LayerShape

    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    gate_up = [tensors[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")]
    weights = [
        torch.cat([tensors[f"{attention}{name}_proj.weight"] for name in "qkv"]),
        tensors[attention + "o_proj.weight"],
        interleave(*gate_up),
        tensors[mlp + "down_proj.weight"],
    ]
    norms = ["midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"]
    head = tensors["lm_head.weight"]
    return DraftTwin(
        LayerShape(
            width=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            inner=config.intermediate_size,
            window=0,
            eps=config.rms_norm_eps,
        ),
        dtype,
        layer=[PackedWeight(weight, None) for weight in weights],
        norms=torch.stack([tensors[f"{name}.weight"] for name in norms]),
        embedding=embedding,
        fusion=PackedWeight(tensors["fc.weight"], None),
        head=PackedWeight(head, None),
        draft_to_target=torch.arange(head.shape[0]) if draft_to_target is None else draft_to_target,
    )


class HeadShape(Protocol):
    """What a twin reads of a draft head's configuration."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


def _fits(*inputs: int) -> bool:
    """Products read pairs of bf16, so inputs are even."""
    return all(size % 2 == 0 for size in inputs)
