"""A head written in every layout and read back; what a layout cannot say is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from spectune.draft.checkpoint import Head, load_head
from spectune.draft.formats import FORMATS, cut_draft_vocab, write_head
from spectune.errors import CheckpointError, StoreError
from tests.support.toys import head_config, head_tensors, save_head, tiny_target

TARGET = tiny_target().config


def stored_head(folder: Path, **changes: Any) -> Head:
    config = head_config(TARGET, 24, eagle_aux_hidden_state_layer_ids=[2, 4, 5], **changes)
    return load_head(save_head(folder, config, head_tensors(config, TARGET, seed=3)), TARGET)


@pytest.mark.parametrize("layout", FORMATS)
def test_written_head_reads_back_as_the_same_head(layout: str, tmp_path: Path) -> None:
    """Weights in bf16, vocabulary map, layers, rope base and shapes survive each layout."""
    head = stored_head(tmp_path / "in")

    again = load_head(write_head(head, tmp_path / "out", TARGET, layout, verifier="toy/target"), TARGET)

    for name, tensor in head.tensors.items():
        if name not in ("d2t", "t2d"):
            assert torch.equal(again.tensors[name], tensor.to(torch.bfloat16)), name
    assert again.draft_to_target is not None
    assert head.draft_to_target is not None
    assert again.draft_to_target.tolist() == head.draft_to_target.tolist()
    assert again.config.rope_theta == head.config.rope_theta == 10000.0
    assert (again.config.aux_layer_ids or (2, 4, 5)) == (2, 4, 5)
    assert again.config.head_dim == head.config.head_dim


def test_classic_layout_carries_both_ways_of_counting_layers(tmp_path: Path) -> None:
    """vLLM reads layers run before the capture at the top, SGLang one lower in eagle_config."""
    path = write_head(stored_head(tmp_path / "in"), tmp_path / "out", TARGET, "classic")

    data = json.loads((path / "config.json").read_text())
    assert data["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert data["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert data["tie_word_embeddings"] is False


def test_speculators_layout_names_target_and_every_norm_flag(tmp_path: Path) -> None:
    """norm_before_residual is true by default there, so false is written."""
    head = stored_head(tmp_path / "in")
    path = write_head(head, tmp_path / "out", TARGET, "speculators", verifier="toy/target")

    data = json.loads((path / "config.json").read_text())
    assert data["speculators_config"]["verifier"]["name_or_path"] == "toy/target"
    assert [data[f] for f in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")] == [
        False
    ] * 4
    with pytest.raises(CheckpointError, match="names its target"):
        write_head(head, tmp_path / "other", TARGET, "speculators")


def test_speculators_head_with_an_unwritten_norm_flag_has_it_set(tmp_path: Path) -> None:
    """vLLM takes the missing flag as set; so is it here, and it is written where the format can say it."""
    path = write_head(stored_head(tmp_path / "in"), tmp_path / "out", TARGET, "speculators", verifier="toy")
    data = json.loads((path / "config.json").read_text())
    del data["norm_before_residual"]
    (path / "config.json").write_text(json.dumps(data))

    head = load_head(path, TARGET)

    assert head.config.norm_before_residual
    again = write_head(head, tmp_path / "again", TARGET, "speculators", verifier="toy")
    assert json.loads((again / "config.json").read_text())["norm_before_residual"] is True
    assert load_head(again, TARGET).config.norm_before_residual


@pytest.mark.parametrize("layout", ["classic", "safeailab"])
def test_norm_before_residual_is_refused_where_a_reader_does_not_know_it(layout: str, tmp_path: Path) -> None:
    """SGLang and the SafeAILab code would load such a head without a word and accept next to nothing."""
    head = stored_head(tmp_path / "in")
    head = replace(head, config=replace(head.config, norm_before_residual=True))

    with pytest.raises(CheckpointError, match="norm_before_residual") as refused:
        write_head(head, tmp_path / "out", TARGET, layout)

    assert "speculators" in (refused.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_safeailab_layout_refuses_layers_that_its_code_does_not_capture(tmp_path: Path) -> None:
    """A head on layers 1, 3, 4 would load there and read 2, 4, 5."""
    config = head_config(TARGET, 24, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    head = load_head(save_head(tmp_path / "in", config, head_tensors(config, TARGET)), TARGET)

    with pytest.raises(CheckpointError, match=r"captures layers \[2, 4, 5\]; this head reads \[1, 3, 4\]"):
        write_head(head, tmp_path / "out", TARGET, "safeailab")


def test_whole_vocabulary_head_is_written_without_maps(tmp_path: Path) -> None:
    """vLLM wants no d2t where draft and target vocabulary are one."""
    config = head_config(TARGET, TARGET.vocab_size)
    head = load_head(save_head(tmp_path / "in", config, head_tensors(config, TARGET)), TARGET)

    again = load_head(write_head(head, tmp_path / "out", TARGET, "classic"), TARGET)

    assert again.draft_to_target is None
    assert "d2t" not in again.tensors


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fc_norm.0.weight", "EAGLE-3.1"),
        ("input_norm.weight", "norm before fc"),
        ("mask_hidden", "P-EAGLE"),
        ("extra.weight", "would change what is drafted"),
    ],
)
def test_tensor_of_another_layer_is_refused_by_name(name: str, words: str, tmp_path: Path) -> None:
    """A part that the classic layer does not have is named, with the kind of head that has it."""
    config = head_config(TARGET, 24)
    tensors = head_tensors(config, TARGET) | {name: torch.ones(32)}

    with pytest.raises(CheckpointError, match=name.split(".")[0]) as refused:
        load_head(save_head(tmp_path, config, tensors), TARGET)

    assert words in (refused.value.hint or "")


def test_unknown_layout_is_refused(tmp_path: Path) -> None:
    """The error lists the layouts."""
    with pytest.raises(CheckpointError, match="gguf is unknown") as refused:
        write_head(stored_head(tmp_path / "in"), tmp_path / "out", TARGET, "gguf")

    assert refused.value.hint == "use classic, speculators, safeailab"


def test_cut_draft_vocab_keeps_the_lowest_tokens_and_their_rows(tmp_path: Path) -> None:
    """Ten of 24 draft tokens: rows, offsets and flags are those of the first ten."""
    head = stored_head(tmp_path / "in")

    again = load_head(write_head(cut_draft_vocab(head, 10), tmp_path / "out", TARGET, "classic"), TARGET)

    assert head.draft_to_target is not None
    assert again.draft_to_target is not None
    assert again.draft_to_target.tolist() == head.draft_to_target[:10].tolist()
    assert torch.equal(
        again.tensors["lm_head.weight"], head.tensors["lm_head.weight"][:10].to(torch.bfloat16)
    )
    assert again.config.draft_vocab_size == 10
    with pytest.raises(CheckpointError, match=r"1\.\.24"):
        cut_draft_vocab(head, 25)


def test_cut_draft_vocab_keeps_the_end_of_a_turn(tmp_path: Path) -> None:
    """Ten tokens, the turn's end being the highest of all: nine lowest ones and the end, with their rows."""
    head = stored_head(tmp_path / "in")
    assert head.draft_to_target is not None
    end = int(head.draft_to_target[-1])

    cut = cut_draft_vocab(head, 10, (end, TARGET.vocab_size + 5))

    assert cut.draft_to_target is not None
    assert cut.draft_to_target.tolist() == [*head.draft_to_target[:9].tolist(), end]
    assert torch.equal(cut.tensors["lm_head.weight"][-1], head.tensors["lm_head.weight"][-1])


def test_speculators_layout_names_the_targets_architecture(tmp_path: Path) -> None:
    """A head of a Qwen3 target says so; vLLM checks the verifier by this name."""
    target = replace(TARGET, model_type="qwen3")

    path = write_head(stored_head(tmp_path / "in"), tmp_path / "out", target, "speculators", verifier="toy")

    written = json.loads((path / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("layout", ["speculators", "safeailab"])
def test_full_disk_is_told_and_leaves_no_half_file(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both writers fail as they do on a full disk: a StoreError that names the folder, nothing partial."""

    def fail(tensors: object, path: Path, **more: object) -> None:
        Path(path).write_bytes(b"half")
        error = RuntimeError if layout == "safeailab" else safetensors.SafetensorError
        raise error("No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    monkeypatch.setattr(safetensors.torch, "save_file", fail)

    with pytest.raises(StoreError, match="out cannot be written: No space left"):
        write_head(stored_head(tmp_path / "in"), tmp_path / "out", TARGET, layout, verifier="toy")

    assert list((tmp_path / "out").iterdir()) == []
