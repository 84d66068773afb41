"""Reading config.json and safetensors: what is accepted, and how a wrong checkpoint is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spectune.engine.checkpoint import TargetConfig, load_checkpoint
from spectune.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}

LLAMA_SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (16, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
}


def parse(**changes: Any) -> TargetConfig:
    return TargetConfig.from_hf({**LLAMA, **changes}, "config.json")


def write_model(
    directory: Path, changes: dict[str, Any], shapes: dict[str, tuple[int, ...]] = LLAMA_SHAPES
) -> dict[str, torch.Tensor]:
    (directory / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    weights = {
        name: torch.full(shape, float(index), dtype=torch.bfloat16)
        for index, (name, shape) in enumerate(shapes.items())
    }
    save_file(weights, directory / "model.safetensors")
    return weights


def test_config_llama_fields_are_read() -> None:
    """A Llama config.json gives its shapes, ids and the rotary base that Hugging Face assumes."""
    config = parse()

    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (1, 4, 2, 2)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    assert (config.rope_theta, config.rope_scaling, config.sliding_window) == (10000.0, None, None)
    assert (config.attention_bias, config.mlp_bias, config.qk_norm) == (False, False, False)


def test_config_null_kv_heads_means_one_per_head() -> None:
    """Old Llama files write null for num_key_value_heads: every head has keys of its own."""
    assert parse(num_key_value_heads=None).num_kv_heads == 4


def test_config_qwen2_has_bias_on_qkv_only() -> None:
    """Qwen2 has biases on q, k and v without saying so, and none on o."""
    config = parse(model_type="qwen2")

    assert config.attention_bias
    assert not config.has_output_bias


def test_config_qwen3_has_qk_norm_and_own_head_dim() -> None:
    """Qwen3 normalises queries and keys; its head_dim is not hidden size / heads."""
    config = parse(model_type="qwen3", head_dim=6)

    assert config.qk_norm
    assert config.head_dim == 6


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
        pytest.param({"rope_theta": 5e5}, 5e5, None, id="theta-only"),
        pytest.param(
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
            1e6,
            {"rope_type": "default"},
            id="nested-default",
        ),
        pytest.param(
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}, 5e5, LLAMA3_ROPE, id="theta-beside-llama3"
        ),
        pytest.param(
            {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}}, 5e5, LLAMA3_ROPE, id="nested-llama3"
        ),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            10000.0,
            {"rope_type": "linear", "factor": 2.0},
            id="old-key-type",
        ),
    ],
)
def test_config_rope_in_each_layout_is_read(
    keys: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    """The rotary base and scaling are found wherever a version of transformers wrote them."""
    config = parse(**keys)

    assert config.rope_theta == theta
    assert config.rope_scaling == scaling


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        pytest.param({"model_type": "gpt2"}, ["model_type", '"gpt2"', "mistral", "qwen3"], id="family"),
        pytest.param({"hidden_act": "gelu"}, ["hidden_act", '"gelu"', "silu"], id="activation"),
        pytest.param(
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            ["rope_scaling", "yarn", "llama3"],
            id="rope-type",
        ),
        pytest.param(
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            ["rope_scaling", "low_freq_factor"],
            id="rope-incomplete",
        ),
        pytest.param({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"], id="kv-heads"),
        pytest.param({"hidden_size": -8}, ["hidden_size", "-8"], id="negative"),
        pytest.param({"vocab_size": None}, ["vocab_size", "missing"], id="missing"),
        pytest.param({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"], id="partial-rotary"),
        pytest.param(
            {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"], id="quantised"
        ),
        pytest.param(
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 32,
                "num_hidden_layers": 4,
                "max_window_layers": 2,
            },
            ["sliding_window", "32", "some layers"],
            id="mixed-window",
        ),
    ],
)
def test_config_unsupported_value_is_named(keys: dict[str, Any], words: list[str]) -> None:
    """A refusal names the file, the key and the value."""
    with pytest.raises(CheckpointError) as caught:
        parse(**keys)

    assert all(word in caught.value.message for word in ["config.json", *words])


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        pytest.param({"model_type": "mistral"}, 4096, id="mistral-absent-is-its-default"),
        pytest.param({"model_type": "mistral", "sliding_window": None}, None, id="mistral-null-is-off"),
        pytest.param({"model_type": "qwen2", "sliding_window": 32}, None, id="qwen2-not-used"),
        pytest.param(
            {"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0},
            32,
            id="qwen2-every-layer",
        ),
        pytest.param({"sliding_window": 32}, None, id="llama-has-none"),
    ],
)
def test_config_sliding_window_follows_the_family(keys: dict[str, Any], window: int | None) -> None:
    """Each family has its own way to say that attention sees a window."""
    assert parse(**keys).sliding_window == window


def test_config_generation_file_adds_eos_ids(tmp_path: Path) -> None:
    """End-of-text ids of config.json come first, those of generation_config.json are added once."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))

    assert TargetConfig.from_dir(tmp_path).eos_token_ids == (2, 5)


def test_load_single_file_returns_its_tensors(tmp_path: Path) -> None:
    """Every tensor comes back under its name, with its values and dtype; tied models have no lm_head."""
    written = write_model(tmp_path, {})

    _, weights = load_checkpoint(tmp_path)

    assert set(weights) == set(LLAMA_SHAPES)
    assert all(torch.equal(weights[name], written[name]) for name in written)


def test_load_sharded_returns_all_tensors(tmp_path: Path) -> None:
    """The shards that the index names are read together."""
    written = write_model(tmp_path, {})
    (tmp_path / "model.safetensors").unlink()
    names = list(written)
    shards = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for shard, members in shards.items():
        save_file({name: written[name] for name in members}, tmp_path / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    _, weights = load_checkpoint(tmp_path)

    assert all(torch.equal(weights[name], written[name]) for name in written)


def test_load_missing_shard_is_named(tmp_path: Path) -> None:
    """An interrupted download is reported by the file that is not there."""
    write_model(tmp_path, {})
    index = {"weight_map": {"model.norm.weight": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    with pytest.raises(CheckpointError, match=r"model-00002\.safetensors is missing"):
        load_checkpoint(tmp_path)


def test_load_truncated_file_is_named(tmp_path: Path) -> None:
    """A file shorter than its header says is refused with both sizes."""
    write_model(tmp_path, {})
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-10])

    with pytest.raises(CheckpointError, match=rf"has {size - 10} bytes, its header implies {size}"):
        load_checkpoint(tmp_path)


def without(name: str) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in LLAMA_SHAPES.items() if key != name}


@pytest.mark.parametrize(
    ("changes", "shapes", "words"),
    [
        pytest.param(
            {"num_key_value_heads": 4},
            LLAMA_SHAPES,
            ["k_proj.weight is [4, 8]", "[8, 8]", "num_key_value_heads"],
            id="kv-heads",
        ),
        pytest.param(
            {"vocab_size": 20}, LLAMA_SHAPES, ["embed_tokens.weight is [16, 8]", "[20, 8]"], id="vocabulary"
        ),
        pytest.param(
            {"tie_word_embeddings": False},
            LLAMA_SHAPES,
            ["lm_head.weight [16, 8] is missing", "tie_word_embeddings"],
            id="untied-without-head",
        ),
        pytest.param(
            {"num_hidden_layers": 2},
            LLAMA_SHAPES,
            ["model.layers.1.self_attn.q_proj.weight [8, 8] is missing"],
            id="too-few-layers",
        ),
        pytest.param(
            {},
            {**LLAMA_SHAPES, "model.layers.0.self_attn.q_proj.bias": (8,)},
            ["q_proj.bias [8] has no place", "llama"],
            id="unknown-bias",
        ),
        pytest.param(
            {},
            {name.removeprefix("model."): shape for name, shape in LLAMA_SHAPES.items()},
            ["without the prefix model."],
            id="base-model-names",
        ),
        pytest.param(
            {},
            {**without("model.layers.0.mlp.up_proj.weight"), "model.layers.0.mlp.up_proj.qweight": (3, 8)},
            ["up_proj.weight", "quantised"],
            id="quantised",
        ),
    ],
)
def test_load_tensor_that_does_not_fit_is_named(
    tmp_path: Path, changes: dict[str, Any], shapes: dict[str, tuple[int, ...]], words: list[str]
) -> None:
    """A wrong pair of config and weights names the tensor, the shapes and the likely cause."""
    write_model(tmp_path, changes, shapes)

    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path)

    assert all(word in caught.value.message for word in words), caught.value.message


def test_load_fp8_weight_is_refused(tmp_path: Path) -> None:
    """A tensor in a quantised dtype is refused by name before it is used as if it were a weight."""
    weights = write_model(tmp_path, {})
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")

    with pytest.raises(CheckpointError, match=r"up_proj\.weight is F8_E4M3"):
        load_checkpoint(tmp_path)


def test_load_dummy_needs_config_only_and_is_seeded(tmp_path: Path) -> None:
    """Dummy weights have the model's shapes, the same for one seed, others for another."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    _, first = load_checkpoint(tmp_path, "dummy", seed=1)
    _, again = load_checkpoint(tmp_path, "dummy", seed=1)
    _, other = load_checkpoint(tmp_path, "dummy", seed=2)

    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == LLAMA_SHAPES
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert torch.equal(first["model.norm.weight"], torch.ones(8, dtype=torch.bfloat16))


def test_load_unknown_format_is_refused(tmp_path: Path) -> None:
    """An unknown --load-format is answered with the known ones."""
    with pytest.raises(CheckpointError, match=r"--load-format pickle is not one of auto, safetensors, dummy"):
        load_checkpoint(tmp_path, "pickle")


def test_load_directory_without_config_is_refused(tmp_path: Path) -> None:
    """A folder that is no model is named by the file it lacks."""
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_checkpoint(tmp_path)
