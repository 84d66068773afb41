"""A GGUF file in, a Hugging Face directory out: config, bf16 safetensors, tokenizer, chat template.

Undoes what llama.cpp's converter did: quantisation, the row order of q_proj and k_proj of the llama
architecture (interleaved rotary pairs), and the loss of the pre-tokenizer, which a GGUF only names.
Refuses what it would have to guess: other architectures, unknown pre-tokenizers, frequency tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spectune.errors import BackendMissing, CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import tokenizers
    import torch
    from numpy.typing import NDArray

CONVERTER_VERSION = 1
"""Raised when a conversion of the same file would give another directory."""

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

MODULE_BY_GGUF_NAME = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")

SPECIAL_TOKEN_TYPES = (3, 4)  # llama.cpp: CONTROL, USER_DEFINED
CONTROL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """An open GGUF: metadata by key, and the reader that holds the tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: list[Any]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def need(self, key: str) -> Any:
        if key not in self.metadata:
            raise CheckpointError(f"{self.path}: GGUF key {key} is missing")
        return self.metadata[key]

    def arch(self, key: str, default: Any = None) -> Any:
        full = f"{self.architecture}.{key}"
        return self.need(full) if default is None else self.metadata.get(full, default)


def import_gguf(gguf: Path, directory: Path, *, progress: Callable[[str], None] | None = None) -> None:
    """Write `gguf` as a Hugging Face model into `directory`, which must exist and be empty."""
    source = _open(gguf)
    tell = progress or (lambda text: None)

    tell(f"converting {gguf.name}")
    config = _config(source)
    tokenizer = _tokenizer(source)
    weights = _weights(source, config)

    tell(f"writing {len(weights)} tensors")
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _generation_config(config))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(source))
    tokenizer.save(str(directory / "tokenizer.json"))
    _save(weights, directory / "model.safetensors")


def _open(path: Path) -> _Source:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as missing:
        raise BackendMissing(
            f"{path}: reading a GGUF file needs the package gguf", hint="pip install 'spectune[engine]'"
        ) from missing
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from error
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    source = _Source(path=path, metadata=metadata, tensors=list(reader.tensors))
    architecture = source.need("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture is {architecture!r}; supported: {', '.join(ARCHITECTURES)}"
        )
    return source


# Config ------------------------------------------------------------------------------------------


def _config(source: _Source) -> dict[str, Any]:
    """config.json in Hugging Face terms; `tie_word_embeddings` is set once the tensors are known."""
    heads = int(source.arch("attention.head_count"))
    hidden = int(source.arch("embedding_length"))
    head_dim = int(source.arch("attention.key_length", hidden // heads))
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[source.architecture]],
        "model_type": source.architecture,
        "hidden_size": hidden,
        "num_hidden_layers": int(source.arch("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(source.arch("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "intermediate_size": int(source.arch("feed_forward_length")),
        "vocab_size": len(source.need("tokenizer.ggml.tokens")),
        "rms_norm_eps": _short(source.arch("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(source.arch("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(source),
        "max_position_embeddings": int(source.arch("context_length")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": source.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": int(source.need("tokenizer.ggml.eos_token_id")),
        "torch_dtype": "bfloat16",
    }
    rotary = int(source.arch("rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise CheckpointError(
            f"{source.path}: {source.architecture}.rope.dimension_count is {rotary}, but heads have "
            f"{head_dim}: partial rotary embeddings are not supported"
        )
    return config


def _rope_scaling(source: _Source) -> dict[str, Any] | None:
    kind = source.metadata.get(f"{source.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise CheckpointError(
            f"{source.path}: {source.architecture}.rope.scaling.type is {kind!r}; supported: none, linear"
        )
    return {"rope_type": "linear", "factor": float(source.arch("rope.scaling.factor"))}


def _short(number: float) -> float:
    """The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(number)))


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}


# Weights -----------------------------------------------------------------------------------------


def _weights(source: _Source, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Hugging Face name -> bf16 tensor, dequantised, rows in Hugging Face order."""
    import torch
    from gguf.quants import dequantize

    heads_by_module = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    weights: dict[str, torch.Tensor] = {}
    for tensor in source.tensors:
        name = hf_name(tensor.name, source.path)
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{source.path}: {tensor.name} has type {tensor.tensor_type.name}, "
                "which the package gguf cannot dequantise"
            ) from error
        module = name.split(".")[-2]
        if source.architecture == "llama" and module in heads_by_module:
            values = unpermute_rotary(values, heads_by_module[module])
        weights[name] = torch.tensor(values).to(torch.bfloat16)
    return weights


def hf_name(name: str, path: Path) -> str:
    """Hugging Face name of a GGUF tensor: blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    stem, _, suffix = name.rpartition(".")
    prefix = ""
    if stem.startswith("blk."):
        _, layer, stem = stem.split(".", 2)
        prefix = f"model.layers.{layer}."
    if stem not in MODULE_BY_GGUF_NAME:
        hint = "use the Hugging Face directory of the model" if stem == "rope_freqs" else None
        raise CheckpointError(f"{path}: tensor {name} is not one of a supported model", hint=hint)
    return f"{prefix}{MODULE_BY_GGUF_NAME[stem]}.{suffix}"


def unpermute_rotary(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q_proj or k_proj from llama.cpp's order (x0 y0 x1 y1 ...) to halves (x0 x1 ... y0 y1 ...).

    [num_heads * head_dim, ...] -> the same shape; inverse of `permute` in convert_hf_to_gguf.py.
    """
    pairs = values.shape[0] // num_heads // 2
    split = values.reshape(num_heads, pairs, 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
    path.chmod(0o644)  # save_file leaves the file readable by its owner only


# Tokenizer ---------------------------------------------------------------------------------------


def pre_tokenizer(name: str, path: Path) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that llama.cpp calls `name` (GGUF key tokenizer.ggml.pre)."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

    def split_then_bytes(pattern: str) -> list[PreTokenizer]:
        bytes_only = ByteLevel(add_prefix_space=False, use_regex=False)
        return [Split(Regex(pattern), behavior="isolated"), bytes_only]

    parts_by_name: dict[str, list[PreTokenizer]] = {
        "smollm": [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)],
        "gpt-2": [ByteLevel(add_prefix_space=False, use_regex=True)],
        "llama-bpe": split_then_bytes(LLAMA3_PATTERN),
        "qwen2": split_then_bytes(QWEN2_PATTERN),
    }
    if name not in parts_by_name:
        raise CheckpointError(
            f"{path}: tokenizer.ggml.pre is {name!r}; supported: {', '.join(parts_by_name)}",
            hint="use the Hugging Face directory of the model",
        )
    return Sequence(parts_by_name[name])


def _tokenizer(source: _Source) -> tokenizers.Tokenizer:
    """Byte-level BPE from the tokens and merges of the GGUF."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    if (model := source.need("tokenizer.ggml.model")) != "gpt2":
        raise CheckpointError(
            f"{source.path}: tokenizer.ggml.model is {model!r}; supported: gpt2 (byte-level BPE)",
            hint="use the Hugging Face directory of the model",
        )
    tokens: list[str] = source.need("tokenizer.ggml.tokens")
    types: list[int] = source.need("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in source.need("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    pre = source.metadata.get("tokenizer.ggml.pre", "gpt-2")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizer(pre, source.path)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if source.metadata.get("tokenizer.ggml.add_bos_token", False):
        index = source.need("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[index], "$A"], special_tokens=[(tokens[index], index)]
        )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in SPECIAL_TOKEN_TYPES
        ]
    )
    return tokenizer


def _tokenizer_config(source: _Source) -> dict[str, Any]:
    tokens = source.need("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(source.arch("context_length")),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(source.metadata.get("tokenizer.ggml.add_bos_token", False)),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = source.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{role}_token"] = tokens[index]
    if template := source.metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
