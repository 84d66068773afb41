"""A config.json in, a TargetConfig out.

Knows the Llama family: Llama (SmolLM2 is one), Mistral, Qwen2, Qwen3. Everything that such a model
could ask for and the engine cannot do is refused here, by file, key and value. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectune.errors import CheckpointError

DEFAULT_BY_MODEL_TYPE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"attention_bias": True},
    "qwen3": {"head_dim": 128},
}
"""Supported architectures, with what Hugging Face assumes for a key that config.json leaves out."""

ROPE_KEYS_BY_TYPE = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Shape and flags of a Llama-family model: one engine serves all by these fields.

    `rope_scaling` is None or a dict whose `rope_type` is "default", "linear" or "llama3", with the keys
    that Hugging Face gives that type. `attention_bias` is the bias of q, k and v; o_proj has one too except for Qwen2.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    hidden_act: str

    @property
    def has_output_bias(self) -> bool:
        """Whether o_proj has a bias."""
        return self.attention_bias and self.model_type != "qwen2"

    @classmethod
    def from_hf(cls, data: Mapping[str, Any], source: str | Path) -> TargetConfig:
        """The config of a parsed config.json; `source` is the file that errors name."""
        keys = _Keys(data, str(source))
        hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
        kv_heads = keys.count("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise keys.refusal("num_key_value_heads", f"does not divide num_attention_heads {heads}")
        if keys.get("head_dim") is None and hidden % heads:
            raise keys.refusal("hidden_size", f"is no multiple of num_attention_heads {heads}")
        keys.only("hidden_act", ("silu",), default="silu")
        keys.only("partial_rotary_factor", (1.0, None), default=None)
        keys.only("quantization_config", (None,), default=None)
        rope_theta, rope_scaling = _rope(keys)
        num_layers = keys.count("num_hidden_layers")
        return cls(
            model_type=keys.model_type,
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=keys.count("head_dim", default=hidden // heads),
            intermediate_size=keys.count("intermediate_size"),
            vocab_size=keys.count("vocab_size"),
            rms_norm_eps=float(keys.get("rms_norm_eps", 1e-6)),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            max_position_embeddings=keys.count("max_position_embeddings"),
            tie_word_embeddings=bool(keys.get("tie_word_embeddings", False)),
            attention_bias=bool(keys.get("attention_bias", False)),
            mlp_bias=bool(keys.get("mlp_bias", False)),
            qk_norm=keys.model_type == "qwen3",
            sliding_window=_sliding_window(keys, num_layers),
            eos_token_ids=token_ids(keys.get("eos_token_id")),
            bos_token_id=keys.get("bos_token_id"),
            hidden_act="silu",
        )

    @classmethod
    def from_dir(cls, directory: Path) -> TargetConfig:
        """The config of a model directory; a generation_config.json adds its end-of-text ids."""
        data = read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        if generation.exists():
            extra = token_ids(read_json(generation).get("eos_token_id"))
            merged = dict.fromkeys(token_ids(data.get("eos_token_id")) + extra)
            data = {**data, "eos_token_id": list(merged)}
        return cls.from_hf(data, directory / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; CheckpointError names the file if it is missing or broken."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist", hint="is this a Hugging Face model?") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, not an object")
    return data


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """The tuple of a field that Hugging Face writes as null, a number or a list."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


class _Keys:
    """Typed access to a config.json whose errors name file, key and value."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.source = source
        self.data: Mapping[str, Any] = data
        self.model_type = self.only("model_type", tuple(DEFAULT_BY_MODEL_TYPE))
        # A null num_key_value_heads or head_dim means the same as an absent one; sliding_window does not.
        present = {key: value for key, value in data.items() if value is not None or key == "sliding_window"}
        self.data = {**DEFAULT_BY_MODEL_TYPE[self.model_type], **present}

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)

    def count(self, key: str, *, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.data.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.source}: key {key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(key, "is not a positive whole number")
        return value

    def only(self, key: str, supported: tuple[Any, ...], **default: Any) -> Any:
        """The value of `key`, which must be one of `supported`."""
        value = self.data.get(key, default.get("default"))
        if value not in supported:
            names = ", ".join(json.dumps(choice) for choice in supported)
            raise self.refusal(key, f"is not supported; supported: {names}")
        return value

    def refusal(self, key: str, reason: str) -> CheckpointError:
        shown = json.dumps(self.data.get(key), default=str)
        return CheckpointError(f"{self.source}: {key} {shown} {reason}")


def _rope(keys: _Keys) -> tuple[float, dict[str, Any] | None]:
    """Base frequency and scaling, from `rope_parameters`, or `rope_scaling` beside `rope_theta`."""
    name = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    nested = dict(keys.get(name) or {})
    theta = float(nested.pop("rope_theta", keys.get("rope_theta", 10000.0)))
    kind = nested.pop("rope_type", nested.pop("type", "default"))
    nested.pop("type", None)
    if kind not in ROPE_KEYS_BY_TYPE:
        raise keys.refusal(name, f"is not supported; supported rope_type: {', '.join(ROPE_KEYS_BY_TYPE)}")
    if missing := [key for key in ROPE_KEYS_BY_TYPE[kind] if key not in nested]:
        raise keys.refusal(name, f"lacks {', '.join(missing)}")
    if nested.get("partial_rotary_factor", 1.0) != 1.0:
        raise keys.refusal(name, "rotates a part of each head, which is not supported")
    if not keys.get(name):
        return theta, None
    return theta, {"rope_type": kind, **{key: nested[key] for key in ROPE_KEYS_BY_TYPE[kind]}}


def _sliding_window(keys: _Keys, num_layers: int) -> int | None:
    """Attention window in tokens, the same in every layer, or None; a mixture is refused."""
    window = keys.get("sliding_window")
    if keys.model_type == "llama" or window is None:
        return None
    layers = keys.get("layer_types")
    if keys.model_type in ("qwen2", "qwen3"):
        if not keys.get("use_sliding_window", False):
            return None
        # Hugging Face: only layers from max_window_layers on attend through the window.
        full = min(int(keys.get("max_window_layers", 28)), num_layers)
        layers = layers or ["full_attention"] * full + ["sliding_attention"] * (num_layers - full)
    if layers and len(set(layers)) > 1:
        raise keys.refusal("sliding_window", "holds for some layers only, which is not supported")
    return int(window) if not layers or layers[0] == "sliding_attention" else None
