"""Head checkpoints: every defect that can be seen in the files is named, with both shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spectune.draft.checkpoint import HeadConfig, expected_shapes, load_head
from spectune.engine.checkpoint import TargetConfig
from spectune.errors import CheckpointError
from tests.support.toys import head_config, head_tensors, save_head, tiny_config

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], None]

ATTENTION = "midlayer.self_attn."


def target_config(**changes: Any) -> TargetConfig:
    return TargetConfig.from_hf(tiny_config(**changes), "toy")


TARGET = target_config()  # H 32, 4 heads of 8, 97 tokens, 8 layers
DRAFT_VOCAB = 49


def saved(folder: Path, *, change: Change | None = None, target: TargetConfig = TARGET, **keys: Any) -> Path:
    """A head for the target with changed config keys and changed tensors."""
    config = head_config(target, DRAFT_VOCAB, **keys)
    tensors = head_tensors(head_config(target, DRAFT_VOCAB), target)
    if change is not None:
        change(tensors)
    return save_head(folder, config, tensors)


def refusal(folder: Path, **how: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_head(saved(folder, **how), how.get("target", TARGET))
    return caught.value


def shaped(name: str, *shape: int) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = torch.zeros(shape)

    return change


def without(*names: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def test_sound_head_is_loaded_with_its_map(tmp_path: Path) -> None:
    """d2t holds offsets; the loaded map holds target ids, every second token here."""
    head = load_head(saved(tmp_path), TARGET)

    assert head.draft_to_target is not None
    assert list(range(0, 97, 2)) == head.draft_to_target.tolist()
    assert set(expected_shapes(head.config)) <= set(head.tensors)


@pytest.mark.parametrize(
    ("name", "shape", "asked", "hint"),
    [
        pytest.param(ATTENTION + "q_proj.weight", (32, 32), [32, 64], "reads 2H", id="q-of-width-h"),
        pytest.param(ATTENTION + "k_proj.weight", (16, 32), [16, 64], "reads 2H", id="k-of-width-h"),
        pytest.param(
            ATTENTION + "v_proj.weight", (32, 64), [16, 64], "head_dim or the number of heads", id="v"
        ),
        pytest.param("fc.weight", (32, 64), [32, 96], "EAGLE-1/2", id="fc-of-two-features"),
        pytest.param("fc.weight", (32, 128), [32, 96], "different heads", id="fc-of-four-features"),
        pytest.param("lm_head.weight", (50, 32), [49, 32], "draft_vocab_size", id="lm-head"),
        pytest.param("midlayer.mlp.down_proj.weight", (32, 60), [32, 64], "different heads", id="mlp"),
        pytest.param("norm.weight", (31,), [32], "different heads", id="norm"),
        pytest.param("embed_tokens.weight", (97, 16), [97, 32], "different heads", id="own-embedding"),
        pytest.param("t2d", (96,), [97], "different heads", id="t2d"),
    ],
)
def test_tensor_of_a_wrong_shape_is_named_with_both_shapes(
    name: str, shape: tuple[int, ...], asked: list[int], hint: str, tmp_path: Path
) -> None:
    """The message holds the tensor and both shapes, the hint the likely cause."""
    error = refusal(tmp_path, change=shaped(name, *shape))

    assert f"tensor {name} is {list(shape)}, config.json asks for {asked}" in error.message
    assert hint in (error.hint or "")


def test_head_dim_that_is_not_hidden_over_heads_is_accepted(tmp_path: Path) -> None:
    """Attention may be wider than the hidden size: 5 heads of 16 on H 40 give q 80x80 and o 40x80."""
    target = target_config(hidden_size=40, num_attention_heads=5, num_key_value_heads=1, head_dim=16)

    head = load_head(saved(tmp_path, target=target), target)

    assert (80, 80) == tuple(head.tensors[ATTENTION + "q_proj.weight"].shape)
    assert (40, 80) == tuple(head.tensors[ATTENTION + "o_proj.weight"].shape)


def test_head_dim_left_out_is_hidden_over_heads(tmp_path: Path) -> None:
    """A null head_dim means the usual one, and a wrong guess of it is seen in q_proj."""
    target = target_config(hidden_size=40, num_attention_heads=5, num_key_value_heads=1, head_dim=16)

    error = refusal(tmp_path, target=target, head_dim=None)

    assert f"{ATTENTION}q_proj.weight is [80, 80], config.json asks for [40, 80]" in error.message
    assert "head_dim" in (error.hint or "")


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    """A head without its fused features' projection is none."""
    assert "tensor fc.weight is missing" in refusal(tmp_path, change=without("fc.weight")).message


def test_bias_is_refused(tmp_path: Path) -> None:
    """A bias that would be left out changes what is drafted."""
    assert "q_proj.bias" in refusal(tmp_path, change=shaped(ATTENTION + "q_proj.bias", 32)).message


def test_missing_d2t_is_refused(tmp_path: Path) -> None:
    """A smaller vocabulary without its map would draft wrong tokens."""
    error = refusal(tmp_path, change=without("d2t", "t2d"))

    assert "draft_vocab_size 49 is not vocab_size 97" in error.message
    assert "d2t" in error.message


def test_absolute_d2t_is_refused(tmp_path: Path) -> None:
    """Ids where offsets belong leave the vocabulary, and the hint says so."""

    def change(tensors: Tensors) -> None:
        tensors["d2t"] = tensors["d2t"] + torch.arange(DRAFT_VOCAB)

    error = refusal(tmp_path, change=change)

    assert "does not rise within 0..96" in error.message
    assert "absolute ids" in (error.hint or "")


def test_absolute_d2t_of_low_ids_is_caught_by_t2d(tmp_path: Path) -> None:
    """Ids that stay inside the vocabulary as offsets still contradict t2d."""

    def change(tensors: Tensors) -> None:
        tensors["d2t"] = torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.arange(97) < DRAFT_VOCAB

    error = refusal(tmp_path, change=change)

    assert "t2d and d2t speak of different tokens" in error.message
    assert "offsets" in (error.hint or "")


def test_d2t_that_falls_is_refused(tmp_path: Path) -> None:
    """Kept ids rise; a shuffled map belongs to another lm_head."""

    def change(tensors: Tensors) -> None:
        tensors["d2t"] = tensors["d2t"].flip(0)

    assert "does not rise" in refusal(tmp_path, change=change).message


def test_d2t_of_another_length_is_named_with_both(tmp_path: Path) -> None:
    """The map has one entry for each row of lm_head."""
    error = refusal(tmp_path, change=lambda tensors: tensors.update(d2t=tensors["d2t"][:-1]))

    assert "d2t has [48] entries, draft_vocab_size is 49" in error.message


def test_wrong_t2d_is_refused(tmp_path: Path) -> None:
    """Flags that do not match the map betray mixed files."""
    error = refusal(tmp_path, change=lambda tensors: tensors.update(t2d=tensors["t2d"].roll(1)))

    assert "t2d and d2t" in error.message


def test_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    """draft_vocab_size equal to vocab_size, or left out, drafts the target's ids."""
    config = head_config(TARGET, 97)
    tensors = head_tensors(config, TARGET)
    for folder, keys in [("equal", config), ("absent", config | {"draft_vocab_size": None})]:
        assert load_head(save_head(tmp_path / folder, keys, tensors), TARGET).draft_to_target is None


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0."])
def test_names_of_other_exporters_are_read(prefix: str, tmp_path: Path) -> None:
    """`layers.0.` is the same layer as `midlayer.`."""
    classic = load_head(saved(tmp_path / "classic"), TARGET)

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[prefix + name.removeprefix("midlayer.")] = tensors.pop(name)

    head = load_head(saved(tmp_path / "other", change=change), TARGET)

    assert classic.tensors.keys() == head.tensors.keys()
    assert all(torch.equal(classic.tensors[name], head.tensors[name]) for name in head.tensors)


def test_pytorch_file_is_read(tmp_path: Path) -> None:
    """pytorch_model.bin serves where there is no safetensors file."""
    folder = saved(tmp_path)
    torch.save(head_tensors(head_config(TARGET, DRAFT_VOCAB), TARGET), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    assert (32, 96) == tuple(load_head(folder, TARGET).tensors["fc.weight"].shape)


# The pair ------------------------------------------------------------------------------------------


def test_other_vocabulary_is_refused(tmp_path: Path) -> None:
    """A head of another tokenizer is named with both sizes."""
    error = refusal(tmp_path, vocab_size=101)

    assert "vocab_size 101 differs from the target's 97" in error.message


@pytest.mark.parametrize("key", ["hidden_size", "target_hidden_size"])
def test_other_hidden_size_is_refused(key: str, tmp_path: Path) -> None:
    """A head of a wider target is named with both widths."""
    error = refusal(tmp_path, **{key: 64})

    assert "64" in error.message
    assert "the target has 32" in error.message


@pytest.mark.parametrize(
    "ids", [[2, 4, 8], [-2, 2, 4], [2, 2, 4], [2, 4], [1, 2, 3, 4]], ids=lambda ids: str(ids)
)
@pytest.mark.parametrize("place", ["top", "nested"])
def test_aux_layer_ids_that_the_target_lacks_are_refused(ids: list[int], place: str, tmp_path: Path) -> None:
    """Three different ids below the number of layers are needed, wherever config.json has them.

    Nested ids name the layer that the capture follows, one lower than the count of layers before it.
    """
    read = ids if place == "top" else [layer + 1 for layer in ids]
    key = {"eagle_aux_hidden_state_layer_ids": ids}
    error = refusal(tmp_path, **(key if place == "top" else {"eagle_config": key}))

    assert f"{read}: need three different ids in 0..7" in error.message


def test_aux_layer_ids_at_the_top_win_over_nested_ones(tmp_path: Path) -> None:
    """The key that every engine reads decides."""
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    folder = saved(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 4, 6], eagle_config=nested)

    assert (1, 4, 6) == load_head(folder, TARGET).config.aux_layer_ids


def test_default_aux_layers_need_seven_layers(tmp_path: Path) -> None:
    """On a target of 6 layers 2, L//2 and L-3 are not three layers."""
    small = target_config(num_hidden_layers=6)

    error = refusal(tmp_path, target=small)

    assert "at least 7 layers, this one has 6" in error.message
    own = saved(tmp_path / "own", target=small, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    assert (1, 2, 4) == load_head(own, small).config.aux_layer_ids


# config.json ---------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("keys", "theta", "kind"),
    [
        pytest.param({"rope_theta": 500000.0}, 500000.0, None, id="top-level"),
        pytest.param({"rope_theta": None}, 10000.0, None, id="null-is-10000-not-the-targets"),
        pytest.param(
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            1e6,
            None,
            id="rope-parameters",
        ),
        pytest.param({"rope_theta": 2e5, "rope_scaling": LLAMA3}, 2e5, "llama3", id="llama3-scaling"),
        pytest.param(
            {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 3e5}},
            3e5,
            "llama3",
            id="llama3-new",
        ),
    ],
)
def test_rope_of_the_head_is_its_own(
    keys: dict[str, Any], theta: float, kind: str | None, tmp_path: Path
) -> None:
    """The base is read at the top or under rope_parameters and never inherited from the target."""
    target = target_config(rope_theta=777.0)

    config = load_head(saved(tmp_path, target=target, **keys), target).config

    assert theta == config.rope_theta
    assert kind == (config.rope_scaling or {}).get("rope_type")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        pytest.param({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'", id="unknown-scaling"),
        pytest.param(
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor", id="half-llama3"
        ),
        pytest.param({"num_key_value_heads": 3}, "3 does not divide", id="kv-heads"),
        pytest.param({"architectures": ["BertModel"]}, "BertModel", id="architecture"),
        pytest.param({"num_hidden_layers": 2}, "num_hidden_layers 2", id="two-layers"),
        pytest.param({"speculators_model_type": "mtp"}, "type mtp", id="speculators-of-another-type"),
        pytest.param(
            {"speculators_model_type": "eagle3"}, "transformer_layer_config", id="speculators-no-layer"
        ),
        pytest.param({"norm_before_fc": True}, "norm_before_fc", id="variant-at-the-top"),
        pytest.param({"eagle_config": {"fc_norm": True}}, "fc_norm", id="variant-nested"),
    ],
)
def test_config_that_is_not_supported_names_file_and_key(
    keys: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """What cannot be run is refused by file and value."""
    error = refusal(tmp_path, **keys)

    assert words in error.message
    assert "config.json" in error.message


@pytest.mark.parametrize("keys", [{"eagle_config": None}, {"rope_scaling": None}], ids=str)
def test_null_sections_are_as_good_as_absent(keys: dict[str, Any], tmp_path: Path) -> None:
    """Exporters write null for what they have not set."""
    assert TARGET.hidden_size == load_head(saved(tmp_path, **keys), TARGET).config.hidden_size


def test_missing_key_is_named(tmp_path: Path) -> None:
    """A config without a size that nothing can guess is refused."""
    config = head_config(TARGET, DRAFT_VOCAB)
    del config["intermediate_size"]

    with pytest.raises(CheckpointError, match=r"config\.json: key 'intermediate_size' is missing"):
        load_head(save_head(tmp_path, config, {"norm.weight": torch.ones(1)}), TARGET)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(None, "no config.json", id="missing"),
        pytest.param("{", "JSON", id="broken"),
        pytest.param("[1, 2]", "holds a list", id="no-object"),
    ],
)
def test_config_file_that_cannot_be_read_is_named(text: str | None, words: str, tmp_path: Path) -> None:
    """A missing, broken or senseless config.json is told apart, by its path."""
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")

    with pytest.raises(CheckpointError, match=words) as caught:
        HeadConfig.read(tmp_path, TARGET)

    assert str(tmp_path) in caught.value.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(None, "neither model.safetensors nor pytorch_model.bin", id="missing"),
        pytest.param(b"not a tensor file", "cannot be read", id="broken"),
    ],
)
def test_weights_that_cannot_be_read_are_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    """Missing and broken weights are told apart, by their folder."""
    config = head_config(TARGET, DRAFT_VOCAB)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(CheckpointError, match=words) as caught:
        load_head(tmp_path, TARGET)

    assert str(tmp_path) in caught.value.message
