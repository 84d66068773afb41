"""The target against Hugging Face transformers on tiny random models of every supported family.

A second implementation, used where it is installed; spectune does not depend on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spectune.engine.target import Target

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": ("LlamaConfig", {"rope_theta": 500000.0}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("LlamaConfig", {"rope_scaling": LLAMA3}),
    "linear-rope": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 6}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_target_equals_transformers(tmp_path: Path, name: str) -> None:
    """Logits and the three captured residual streams agree to fp32 rounding."""
    kind, changes = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(SHAPE | changes))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == config.model_type
    ids = torch.randint(3, 97, (2, 19))

    with torch.inference_mode():
        expected = model(ids, output_hidden_states=True)
        target = Target.load(tmp_path, dtype="float32")
        hidden, features = target.forward_text(ids, torch.tensor([19, 19]))
        logits = target.logits(hidden)

    streams = torch.cat([expected.hidden_states[index] for index in (2, 4, 5)], -1)
    torch.testing.assert_close(features, streams, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits, expected.logits, atol=2e-3, rtol=1e-4)
