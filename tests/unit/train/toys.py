"""Small heads, samples and a target stand-in shared by the tests of train/."""

from __future__ import annotations

import torch
from torch import Tensor

from spectune.engine.target_config import TargetConfig
from spectune.train.head import Eagle3Head, HeadConfig
from spectune.train.ttt import Sample
from spectune.train.vocab import build_vocab

HIDDEN, VOCAB, DRAFT = 16, 40, 24


def target_config(num_layers: int = 8) -> TargetConfig:
    """A Llama of 8 layers, 4 query and 2 key heads of width 4, tied embedding."""
    return TargetConfig.from_hf(
        {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "vocab_size": VOCAB,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 1,
        },
        "toy",
    )


def target_weights(config: TargetConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    h, inner, kv = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim
    weights = {"model.embed_tokens.weight": draw(config.vocab_size, h), "model.norm.weight": torch.ones(h)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": draw(h, h),
            prefix + "self_attn.k_proj.weight": draw(kv, h),
            prefix + "self_attn.v_proj.weight": draw(kv, h),
            prefix + "self_attn.o_proj.weight": draw(h, h),
            prefix + "mlp.gate_proj.weight": draw(inner, h),
            prefix + "mlp.up_proj.weight": draw(inner, h),
            prefix + "mlp.down_proj.weight": draw(h, inner),
            prefix + "input_layernorm.weight": torch.ones(h),
            prefix + "post_attention_layernorm.weight": torch.ones(h),
        }
    return weights


def toy_head(*, dtype: torch.dtype = torch.float64, seed: int = 0) -> Eagle3Head:
    """A random head of 4 query and 2 key heads over 24 of 40 tokens."""
    torch.manual_seed(seed)
    config = HeadConfig(
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT,
        aux_layer_ids=(2, 4, 5),
    )
    counts = torch.arange(VOCAB) % 7
    return Eagle3Head(config, build_vocab(counts, DRAFT, forced=[2])).to(dtype)


def toy_sample(
    length: int, answer_start: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Sample:
    """Random ids, features and hidden states; the target's choice is the text's next token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (length,), generator=generator)
    return Sample(
        ids=ids,
        answer_start=answer_start,
        features=torch.randn(length, 3 * HIDDEN, generator=generator).to(dtype),
        final=torch.randn(length, HIDDEN, generator=generator).to(dtype),
        top=torch.cat([ids[1:], ids[:1]]),
    )


def toy_embedding(dtype: torch.dtype = torch.float64) -> Tensor:
    """Random embedding [V, H]."""
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9)).to(dtype)
