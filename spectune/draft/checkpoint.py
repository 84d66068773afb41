"""EAGLE-3 head checkpoints: config.json beside model.safetensors or pytorch_model.bin.

Reads the classic layout (SafeAILab, SpecForge, SGLang, vLLM: `midlayer.*`) and the Speculators layout
(`layers.0.*`). Every check that can be made from the files is made before a token is drafted: a wrong
head does not crash, it accepts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectune.engine.checkpoint import TargetConfig
from spectune.engine.target_config import ROPE_KEYS_BY_TYPE, read_json
from spectune.errors import CheckpointError

_NEWER_PARTS = {
    "fc_norm": "a norm per captured feature: an EAGLE-3.1 head",
    "input_norm": "a norm before fc (norm_before_fc)",
    "mask_hidden": "a P-EAGLE head, which drafts all positions at once",
    "aux_norm_low": "a norm per captured feature: an EAGLE-3.1 head",
}
_UNSUPPORTED_FLAGS = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What a head's config.json says.

    norm_before_residual: the layer adds to hidden_norm(h) instead of h, as most Speculators heads do.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    aux_layer_ids: tuple[int, ...] | None
    target_hidden_size: int
    norm_before_residual: bool = False

    @classmethod
    def read(cls, path: Path, target: TargetConfig) -> HeadConfig:
        """Read `path`/config.json; raises CheckpointError naming file, key and value."""
        file = path / "config.json"
        if not file.is_file():
            raise CheckpointError(
                f"{path}: no config.json, so this is no EAGLE-3 head",
                hint="give --draft-model a folder with config.json and model.safetensors",
            )
        data = read_json(file)
        if data.get("speculators_model_type"):
            data = _from_speculators(file, data)
        _check_architecture(file, data)
        eagle = data.get("eagle_config")
        if eagle is not None and not isinstance(eagle, dict):
            raise CheckpointError(f"{file}: eagle_config is {eagle!r}, not an object")
        for flag in _UNSUPPORTED_FLAGS:
            if data.get(flag) or (eagle or {}).get(flag):
                raise CheckpointError(
                    f"{file}: {flag} is set, which is not supported",
                    hint="run without it this head would load and accept next to nothing",
                )
        try:
            config = cls._from(data, target)
        except KeyError as error:
            raise CheckpointError(f"{file}: key {error} is missing") from error
        except (TypeError, ZeroDivisionError) as error:
            raise CheckpointError(f"{file}: a size in it is no positive integer: {error}") from error
        _check_attention(file, config)
        return config

    @classmethod
    def _from(cls, data: dict[str, Any], target: TargetConfig) -> HeadConfig:
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        scaling = rope if rope.get("rope_type", rope.get("type", "default")) != "default" else None
        heads = data["num_attention_heads"]
        # top level: layers run before the capture (vLLM). Nested alone: the layer captured after
        # (SGLang, SpecForge), one lower for the same stream
        nested = (data.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        aux = data.get("eagle_aux_hidden_state_layer_ids") or (nested and [layer + 1 for layer in nested])
        return cls(
            hidden_size=data["hidden_size"],
            num_heads=heads,
            num_kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or data["hidden_size"] // heads,
            intermediate_size=data["intermediate_size"],
            rms_norm_eps=data.get("rms_norm_eps", 1e-6),
            # a head without a base was trained at 10000, whatever its target uses
            rope_theta=data.get("rope_theta") or rope.get("rope_theta") or 10000.0,
            rope_scaling=scaling,
            vocab_size=data["vocab_size"],
            draft_vocab_size=data.get("draft_vocab_size") or data["vocab_size"],
            max_position_embeddings=data.get("max_position_embeddings", 2048),
            aux_layer_ids=tuple(aux) if aux else None,
            target_hidden_size=data.get("target_hidden_size") or target.hidden_size,
            norm_before_residual=bool(
                data.get("norm_before_residual")
                or (data.get("eagle_config") or {}).get("norm_before_residual")
            ),
        )


def _from_speculators(file: Path, data: dict[str, Any]) -> dict[str, Any]:
    """The same head as classic keys. An unwritten norm_before_residual counts as set, as in vLLM."""
    kind = data["speculators_model_type"]
    layer = data.get("transformer_layer_config")
    if kind != "eagle3":
        raise CheckpointError(
            f"{file}: a Speculators head of type {kind}, not eagle3",
            hint="only eagle3 heads are read here",
        )
    if not isinstance(layer, dict):
        raise CheckpointError(f"{file}: key 'transformer_layer_config' is missing")
    own = {
        key: data[key]
        for key in (
            "architectures",
            "draft_vocab_size",
            "target_hidden_size",
            "norm_before_residual",
            *_UNSUPPORTED_FLAGS,
        )
        if key in data
    }
    ids = data.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        own["eagle_aux_hidden_state_layer_ids"] = ids
    return {**layer, "norm_before_residual": True, **own}


def _check_architecture(file: Path, data: dict[str, Any]) -> None:
    names = data.get("architectures") or []
    known = {"LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM", "Eagle3Speculator"}
    if not set(names) & known:
        raise CheckpointError(
            f"{file}: architectures {names} is no EAGLE-3 head", hint=f"expected one of {sorted(known)}"
        )
    if data.get("num_hidden_layers", 1) != 1:
        raise CheckpointError(f"{file}: num_hidden_layers {data['num_hidden_layers']}; a head has 1")


def _check_attention(file: Path, config: HeadConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{file}: num_key_value_heads {config.num_kv_heads} does not divide "
            f"num_attention_heads {config.num_heads}"
        )
    scaling = config.rope_scaling
    if scaling is None:
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in ROPE_KEYS_BY_TYPE:
        raise CheckpointError(
            f"{file}: rope_scaling type {kind!r} is not supported",
            hint=f"supported: {', '.join(ROPE_KEYS_BY_TYPE)}",
        )
    if missing := [key for key in ROPE_KEYS_BY_TYPE[kind] if key not in scaling]:
        raise CheckpointError(f"{file}: rope_scaling of type {kind} lacks {', '.join(missing)}")


@dataclass(frozen=True, slots=True)
class Head:
    """A checked head: tensors under classic names, and draft_to_target [D] absolute ids or None."""

    path: Path
    config: HeadConfig
    tensors: dict[str, Tensor]
    draft_to_target: Tensor | None


def load_head(path: Path, target: TargetConfig) -> Head:
    """Load and check the head in `path` against its target. Raises CheckpointError."""
    config = HeadConfig.read(path, target)
    _check_pair(path, config, target)
    tensors = {_classic_name(name): tensor for name, tensor in _read_tensors(path).items()}
    _check_shapes(path, config, tensors)
    return Head(path, config, tensors, _draft_to_target(path, config, tensors))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    safetensors_file, torch_file = path / "model.safetensors", path / "pytorch_model.bin"
    try:
        if safetensors_file.is_file():
            from safetensors.torch import load_file

            return load_file(safetensors_file)
        if torch_file.is_file():
            tensors: dict[str, Tensor] = torch.load(torch_file, map_location="cpu", weights_only=True)
            return tensors
    except Exception as error:
        raise CheckpointError(f"{path}: the weights cannot be read: {error}") from error
    raise CheckpointError(f"{path}: neither model.safetensors nor pytorch_model.bin is there")


def _classic_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _check_pair(path: Path, config: HeadConfig, target: TargetConfig) -> None:
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{path}: vocab_size {config.vocab_size} differs from the target's {target.vocab_size}",
            hint="this head was trained for another target or tokenizer",
        )
    if config.target_hidden_size != target.hidden_size or config.hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{path}: the head reads hidden size {config.target_hidden_size} (own {config.hidden_size}), "
            f"the target has {target.hidden_size}",
            hint="this head was trained for another target",
        )
    ids = config.aux_layer_ids
    if ids is None:
        if target.num_layers < 7:
            raise CheckpointError(
                f"{path}: no eagle_aux_hidden_state_layer_ids, and the default (2, L//2, L-3) needs a "
                f"target of at least 7 layers, this one has {target.num_layers}"
            )
        return
    if len(ids) != 3 or len(set(ids)) != 3 or not all(0 <= i < target.num_layers for i in ids):
        raise CheckpointError(
            f"{path}: eagle_aux_hidden_state_layer_ids {list(ids)}: need three different ids in "
            f"0..{target.num_layers - 1}",
            hint="ids count the layers run before the capture; SGLang's own ids are one lower",
        )


def expected_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the classic tensors. Attention reads 2H; heads·head_dim may differ from H."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "fc.weight": (hidden, 3 * config.target_hidden_size),
        "midlayer.self_attn.q_proj.weight": (query, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, query),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }


def _check_shapes(path: Path, config: HeadConfig, tensors: dict[str, Tensor]) -> None:
    optional = {"embed_tokens.weight": (config.vocab_size, config.hidden_size), "t2d": (config.vocab_size,)}
    for name, shape in (expected_shapes(config) | optional).items():
        if name not in tensors and name in optional:
            continue
        if name not in tensors:
            raise CheckpointError(f"{path}: tensor {name} is missing", hint="an EAGLE-3 head has it")
        found = tuple(tensors[name].shape)
        if found != shape:
            raise CheckpointError(
                f"{path}: tensor {name} is {list(found)}, config.json asks for {list(shape)}",
                hint=_likely_cause(name, found, config),
            )
    if biases := [name for name in tensors if name.endswith(".bias")]:
        raise CheckpointError(f"{path}: tensor {biases[0]}: the classic EAGLE-3 layer has no biases")
    known = {*expected_shapes(config), *optional, "d2t"}
    strange = [name for name in tensors if name not in known and not name.endswith("rotary_emb.inv_freq")]
    if strange:
        raise CheckpointError(
            f"{path}: tensor {strange[0]} is none of the classic EAGLE-3 layer",
            hint=_NEWER_PARTS.get(strange[0].split(".")[0], "leaving it out would change what is drafted"),
        )


def _likely_cause(name: str, found: tuple[int, ...], config: HeadConfig) -> str:
    if name == "fc.weight" and len(found) == 2 and found[1] == 2 * config.target_hidden_size:
        return "an fc of 2H is an EAGLE-1/2 head; this is method eagle, not eagle3"
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        if len(found) == 2 and found[1] == config.hidden_size:
            return "the attention of an EAGLE-3 head reads 2H (embedding and hidden); this one reads H"
        return "head_dim or the number of heads in config.json does not belong to these weights"
    if name == "lm_head.weight":
        return "draft_vocab_size in config.json does not belong to these weights"
    return "config.json and the weights come from different heads"


def _draft_to_target(path: Path, config: HeadConfig, tensors: dict[str, Tensor]) -> Tensor | None:
    """Absolute target ids [D] of the draft vocabulary; None where it is the target's own."""
    if "d2t" not in tensors:
        if config.draft_vocab_size == config.vocab_size:
            return None
        raise CheckpointError(
            f"{path}: draft_vocab_size {config.draft_vocab_size} is not vocab_size {config.vocab_size}, "
            "and there is no tensor d2t",
            hint="without the map every draft would be a wrong token; export the head with d2t",
        )
    offsets = tensors["d2t"].to(torch.int64)
    if tuple(offsets.shape) != (config.draft_vocab_size,):
        raise CheckpointError(
            f"{path}: d2t has {list(offsets.shape)} entries, draft_vocab_size is {config.draft_vocab_size}"
        )
    ids = torch.arange(config.draft_vocab_size) + offsets
    is_map = bool((ids.diff() > 0).all()) and int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size
    # an offset rises only where a token is left out: absolute ids rise everywhere
    is_absolute = offsets.numel() >= 64 and bool((offsets.diff() > 0).all())
    if not is_map or is_absolute:
        cause = "d2t holds offsets (target id = i + d2t[i])"
        if bool((offsets.diff() > 0).all()):
            cause += "; these look like absolute ids"
        raise CheckpointError(
            f"{path}: i + d2t[i] does not rise within 0..{config.vocab_size - 1}"
            if not is_map
            else f"{path}: d2t rises at every entry, as absolute ids do",
            hint=cause,
        )
    if "t2d" in tensors:
        flags = tensors["t2d"].bool()
        if int(flags.sum()) != config.draft_vocab_size or not bool(flags[ids].all()):
            raise CheckpointError(
                f"{path}: t2d and d2t speak of different tokens",
                hint="d2t holds offsets (target id = i + d2t[i]), t2d flags the target ids",
            )
    return ids
