"""A trained head as a directory that vLLM, SGLang and our own engine load (classic EAGLE-3 layout)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spectune.errors import CheckpointError, StoreError
from spectune.store.files import replacing
from spectune.train.head import Eagle3Head
from spectune.train.vocab import map_problem

if TYPE_CHECKING:
    from spectune.engine.checkpoint import TargetConfig


def head_config_json(head: Eagle3Head, target: TargetConfig, provenance: dict[str, Any]) -> dict[str, Any]:
    """config.json of the head; `provenance` (target name, digest, training) goes under "spectune"."""
    config = head.config
    eos = list(target.eos_token_ids)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
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
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        # vLLM reads the list above: layers run before the capture. SGLang reads the one below and
        # captures after the layer it names, so the same streams have ids one lower there.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layer_ids],
        },
        "spectune": provenance,
    }


def head_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """bf16 weights under their classic names, d2t as int64 offsets, t2d as bool."""
    tensors = {}
    for name, tensor in head.state_dict().items():
        kept = tensor if name in ("d2t", "t2d") else tensor.to(torch.bfloat16)
        tensors[name] = kept.detach().cpu().contiguous()
    return tensors


def export_head(head: Eagle3Head, directory: Path, target: TargetConfig, provenance: dict[str, Any]) -> Path:
    """Write config.json and model.safetensors; returns the directory."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if problem := map_problem(head.d2t, head.t2d):
        raise CheckpointError(f"the head's vocabulary map is broken: {problem}")
    text = json.dumps(head_config_json(head, target, provenance), indent=2, ensure_ascii=False)
    try:
        with replacing(directory / "model.safetensors") as partial:
            save_file(head_tensors(head), partial, metadata={"format": "pt"})
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise StoreError(
            f"{directory} cannot be written: {error}",
            hint="make room and give --resume: the trained weights are kept in train-state.pt",
        ) from error
    return directory


def directory_digest(directory: Path) -> str:
    """SHA-256 over the weight files of a model directory, names included."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
