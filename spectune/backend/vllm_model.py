"""What a server of a checkpoint needs to know of it, from its config alone; no weights are read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from spectune.errors import CheckpointError

GIB = 2**30
MAX_CACHE_GIB = 16


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, the text part of a model with several parts; empty where there is none."""
    file = folder / "config.json"
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else dict(config)


def model_limit(folder: Path) -> int | None:
    """Most tokens of a sequence; None if the config does not say."""
    limit = read_config(folder).get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 else None


def kv_bytes_per_token(folder: Path, bytes_per_value: int = 2) -> int | None:
    """Bytes of keys and values of one token over all layers; None if the config does not say."""
    config = read_config(folder)
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    hidden = config.get("hidden_size")
    if not all(isinstance(value, int) and value > 0 for value in (layers, heads, hidden)):
        return None
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * kv_heads * head_dim * bytes_per_value)


def quantization_scheme(folder: Path) -> str:
    """How the weights are quantised, in the words of the config: `fp8`, `compressed-tensors`; `none`."""
    config = read_config(folder)
    scheme = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(scheme, dict):
        return "none"
    return str(scheme.get("quant_method") or scheme.get("format") or "of unknown kind")


def weight_bytes(folder: Path) -> int | None:
    """Size of the weight files; None where there are none of a known kind."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) or None


def cache_gib(folder: Path, num_tokens: int) -> int:
    """Whole GiB that hold `num_tokens` twice over (the draft's own cache among them), 1 to 16."""
    per_token = kv_bytes_per_token(folder)
    if per_token is None:
        return 4
    return min(MAX_CACHE_GIB, max(1, math.ceil(2 * per_token * num_tokens / GIB)))


def check_head(folder: Path) -> None:
    """CheckpointError for a head that vLLM would load as EAGLE-3 and that is none: it would run and
    accept nothing."""
    if not folder.is_dir():
        return  # a hub id: the engine reads it
    if not (folder / "config.json").exists():
        raise CheckpointError(f"--draft-model {folder} holds no config.json")
    config = read_config(folder)
    names = " ".join(map(str, config.get("architectures") or ()))
    is_speculators = config.get("speculators_model_type") is not None
    looks_like_eagle = "eagle" in names.lower()
    if looks_like_eagle and "eagle3" not in names.lower() and not is_speculators:
        raise CheckpointError(
            f"--draft-model {folder} is {names}: an EAGLE-1 head, which method eagle3 loads and never accepts",
            hint="give an EAGLE-3 head",
        )
    if not looks_like_eagle and not is_speculators and config.get("draft_vocab_size") is None:
        raise CheckpointError(
            f"--draft-model {folder} is {names or 'without an architecture'}, not an EAGLE-3 head",
            hint="--method draft_model takes a small model of the same tokenizer",
        )
