"""A Hugging Face directory in, a TargetConfig and the named tensors out.

Checks names, shapes and dtypes against config.json before any tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from spectune.engine.target_config import TargetConfig, read_json
from spectune.errors import CheckpointError

__all__ = ["TargetConfig", "load_checkpoint", "expected_shapes", "read_header", "weight_files"]

LOAD_FORMATS = ("auto", "safetensors", "dummy")
WEIGHT_DTYPES = ("BF16", "F16", "F32")
CAUSE_BY_NAME_PART = {
    "embed_tokens": "vocab_size or hidden_size",
    "lm_head": "vocab_size or hidden_size",
    "q_proj": "num_attention_heads, head_dim or hidden_size",
    "o_proj": "num_attention_heads, head_dim or hidden_size",
    "k_proj": "num_key_value_heads, head_dim or hidden_size",
    "v_proj": "num_key_value_heads, head_dim or hidden_size",
    "mlp": "intermediate_size or hidden_size",
    "norm": "hidden_size or head_dim",
}
"""Keys of config.json that set the shape of a tensor."""
INITIALIZER_RANGE = 0.02
"""Standard deviation of dummy weights where config.json names none (Hugging Face's default)."""


def load_checkpoint(
    path: str | Path, load_format: str = "auto", *, seed: int = 0
) -> tuple[TargetConfig, dict[str, torch.Tensor]]:
    """Config and tensors of a model directory, on the CPU, in the dtype of the file.

    Names are Hugging Face's; `lm_head.weight` is absent for tied embeddings. `load_format="dummy"`
    reads config.json alone and draws seeded random weights of the right shapes.
    """
    if load_format not in LOAD_FORMATS:
        raise CheckpointError(f"--load-format {load_format} is not one of {', '.join(LOAD_FORMATS)}")
    directory = Path(path)
    config = TargetConfig.from_dir(directory)
    if load_format == "dummy":
        return config, dummy_weights(config, read_json(directory / "config.json"), seed)
    return config, _load_safetensors(directory, config)


def expected_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of such a model, by Hugging Face name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linear = {
        "self_attn.q_proj": (query, hidden, config.attention_bias),
        "self_attn.k_proj": (key, hidden, config.attention_bias),
        "self_attn.v_proj": (key, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query, config.has_output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for module, (rows, columns, bias) in linear.items():
            shapes[f"{prefix}{module}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{module}.bias"] = (rows,)
        shapes |= {f"{prefix}{module}.weight": (size,) for module, size in norms.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def dummy_weights(config: TargetConfig, data: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random weights: ones for norms, zeros for biases, a normal distribution for the rest."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, str(data.get("torch_dtype") or data.get("dtype") or "bfloat16"))
    std = float(data.get("initializer_range", INITIALIZER_RANGE))

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.full(shape, float(name.endswith("weight")), dtype=dtype)
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    return {name: draw(name, shape) for name, shape in expected_shapes(config).items()}


def _load_safetensors(directory: Path, config: TargetConfig) -> dict[str, torch.Tensor]:
    """Check every header first, so that a wrong checkpoint fails before gigabytes are read."""
    from safetensors.torch import load_file

    files = weight_files(directory)
    headers: dict[str, Any] = {}
    for file in files:
        headers |= read_header(file)
    expected = expected_shapes(config)
    _check(headers, expected, config, directory)
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= {name: tensor for name, tensor in load_file(file).items() if name in expected}
    return weights


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model: those of the index, or the single one."""
    index = directory / "model.safetensors.index.json"
    shards = read_json(index)["weight_map"].values() if index.exists() else ["model.safetensors"]
    files = [directory / name for name in sorted(set(shards))]
    if missing := [file for file in files if not file.exists()]:
        raise CheckpointError(
            f"{missing[0]} is missing",
            hint="is the download complete? weights must be safetensors, not pytorch_model.bin",
        )
    return files


def read_header(path: Path) -> dict[str, Any]:
    """`dtype` and `shape` of every tensor of a safetensors file, without reading its data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length + 8 > path.stat().st_size:
            raise CheckpointError(f"{path} is cut short or no safetensors file")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path} is no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if length + 8 + end != path.stat().st_size:
        raise CheckpointError(
            f"{path} has {path.stat().st_size} bytes, its header implies {length + 8 + end}",
            hint="is the download complete?",
        )
    return header


def _check(
    headers: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], config: TargetConfig, directory: Path
) -> None:
    """Raise CheckpointError for the first tensor that is missing, of another shape or dtype, or unknown."""
    for name, shape in expected.items():
        if name not in headers:
            cause = _why_missing(name, headers)
            raise CheckpointError(f"{directory}: tensor {name} {list(shape)} is missing: {cause}")
        found, dtype = headers[name]["shape"], headers[name]["dtype"]
        if found != list(shape):
            cause = next(cause for part, cause in CAUSE_BY_NAME_PART.items() if part in name)
            raise CheckpointError(
                f"{directory}: tensor {name} is {found}, config.json implies {list(shape)}: "
                f"{cause} is of another model"
            )
        if dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{directory}: tensor {name} is {dtype}; supported: {', '.join(WEIGHT_DTYPES)}",
                hint="use the unquantised checkpoint",
            )
    ignored = ("rotary_emb.inv_freq", *(["lm_head.weight"] if config.tie_word_embeddings else []))
    for name in headers:
        if name not in expected and not name.endswith(ignored):
            raise CheckpointError(
                f"{directory}: tensor {name} {headers[name]['shape']} has no place in a {config.model_type} "
                f"model of {config.num_layers} layers: config.json is of another model"
            )


def _why_missing(name: str, found: Iterable[str]) -> str:
    """Likely cause of a missing tensor, from the names that are there."""
    names = set(found)
    if any(other.endswith((".qweight", ".weight_packed", ".weight_scale")) for other in names):
        return "the checkpoint is quantised, which is not supported"
    if name == "lm_head.weight":
        return "config.json has tie_word_embeddings false, but the file holds no output matrix"
    if name.removeprefix("model.") in names:
        return "the checkpoint was saved without the prefix model. (from the base model)"
    return "config.json is of another model, or a shard is incomplete"
