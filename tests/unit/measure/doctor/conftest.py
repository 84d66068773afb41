"""Heads and targets as files: small, whole, and then broken in one place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spectune.draft.inspect import HeadFacts, ModelFacts, inspect_head, inspect_model

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, DRAFT_VOCAB = 32, 4, 2, 16, 48, 40, 10
KEEP = np.array([0, 1, 2, 5, 6, 9, 20, 21, 30, 39])  # the tokens that can be drafted


def target_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 30,
        "num_attention_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    } | changes


def head_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INNER,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]},
    } | changes


def head_tensors() -> dict[str, np.ndarray]:
    """Shapes written out by hand: attention reads 2H = 64, q has 4·16 rows, k and v 2·16."""
    shapes = {
        "fc.weight": (32, 96),
        "midlayer.self_attn.q_proj.weight": (64, 64),
        "midlayer.self_attn.k_proj.weight": (32, 64),
        "midlayer.self_attn.v_proj.weight": (32, 64),
        "midlayer.self_attn.o_proj.weight": (32, 64),
        "midlayer.mlp.gate_proj.weight": (48, 32),
        "midlayer.mlp.up_proj.weight": (48, 32),
        "midlayer.mlp.down_proj.weight": (32, 48),
        "midlayer.hidden_norm.weight": (32,),
        "midlayer.input_layernorm.weight": (32,),
        "midlayer.post_attention_layernorm.weight": (32,),
        "norm.weight": (32,),
        "lm_head.weight": (10, 32),
    }
    tensors: dict[str, np.ndarray] = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    tensors["d2t"] = KEEP - np.arange(DRAFT_VOCAB)
    tensors["t2d"] = np.isin(np.arange(VOCAB), KEEP)
    return tensors


@pytest.fixture
def target(tmp_path: Path) -> Callable[..., ModelFacts]:
    """A target's facts, read back from files; keywords change its config, `tokens` its tokenizer."""

    def make(
        tokens: list[str] | None = None, template: str | None = "{{ messages }}", **changes: Any
    ) -> ModelFacts:
        return inspect_model(_write(tmp_path / "target", target_config(**changes), None, tokens, template))

    return make


@pytest.fixture
def head(tmp_path: Path) -> Callable[..., HeadFacts]:
    """A head's facts, read back from files; `tensors` replaces or (None) removes tensors."""

    def make(
        tensors: dict[str, np.ndarray | None] | None = None,
        tokens: list[str] | None = None,
        drop: tuple[str, ...] = (),
        **changes: Any,
    ) -> HeadFacts:
        config = {key: value for key, value in head_config(**changes).items() if key not in drop}
        merged = {**head_tensors(), **(tensors or {})}
        kept = {name: value for name, value in merged.items() if value is not None}
        return inspect_head(_write(tmp_path / "head", config, kept, tokens, None))

    return make


def _write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray] | None,
    tokens: list[str] | None,
    template: str | None,
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tensors is not None:
        from safetensors.numpy import save_file

        save_file(tensors, str(folder / "model.safetensors"))
    if tokens is not None:
        document = {"model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}}}
        (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
