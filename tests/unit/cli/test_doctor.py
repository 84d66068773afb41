"""`spectune doctor` as a user calls it: what is judged, what is not, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectune.cli.doctor import head_folder_of
from spectune.engine.checkpoint import TargetConfig
from tests.support.toys import head_config, head_tensors, save_head, save_target

Spectune = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A target's folder as far as the doctor reads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_head_is_an_error_with_a_method_that_drafts_without_hidden_states(
    spectune: Spectune, model: Path
) -> None:
    """Naming a head and the method ngram contradict each other: exit code 3."""
    head = head_folder_of(None, None)
    result = spectune("doctor", str(head), "--model", str(model), "--method", "ngram", "--json")
    found = {one["check"]: one for one in result.document["findings"]}
    assert result.code == 3
    assert found["method"]["severity"] == "error"


def test_no_head_is_judged_where_none_is_named_and_the_method_needs_none(
    spectune: Spectune, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch with n-gram lookup says nothing of the shipped head, whether or not its target is cached."""
    cache = tmp_path / "cache"
    (cache / "models").mkdir(parents=True)
    launch = ("doctor", "--engine", "vllm", "--launch", "vllm serve T --spec-method ngram --spec-tokens 3")
    monkeypatch.setenv("SPECTUNE_CACHE", str(cache))
    apart = spectune(*launch, "--json")
    model.rename(cache / "models" / "SmolLM2-135M-Instruct")
    cached = spectune(*launch, "--json")
    for result in (apart, cached):
        findings = result.document["findings"]
        assert "method" not in {one["check"] for one in findings}
        assert result.code == 0, findings


def test_a_default_target_that_is_not_fetched_is_said(
    spectune: Spectune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a model and without the default target in the cache, the doctor says that no pair was checked."""
    monkeypatch.setenv("SPECTUNE_CACHE", str(tmp_path))
    result = spectune("doctor", "--json")
    notes = [one["text"] for one in result.document["findings"] if one["check"] == "target"]
    assert len(notes) == 1
    assert "not fetched" in notes[0]


@pytest.mark.parametrize(
    ("keys", "engine", "words"),
    [
        ({"norm_before_residual": True}, "sglang", "norm_before_residual"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, "vllm", "SGLang's counting"),
    ],
    ids=["norm-before-residual", "ids-one-early"],
)
def test_a_head_that_would_load_and_run_wrong_is_named_with_its_signature(
    keys: dict[str, Any], engine: str, words: str, spectune: Spectune, tmp_path: Path
) -> None:
    """Exit code 3, what is wrong, what it would look like at run time, and what cures it."""
    target = save_target(tmp_path / "target")
    config = TargetConfig.from_dir(target)
    written = head_config(config, 60, **keys)
    head = save_head(tmp_path / "head", written, head_tensors(written, config))

    result = spectune("doctor", str(head), "--model", str(target), "--engine", engine, "--json")

    assert result.code == 3
    found = [
        one for one in result.document["findings"] if one["severity"] == "error" and words in one["text"]
    ]
    assert len(found) == 1
    assert "acceptance" in found[0]["signature"]
    assert found[0]["fix"]


def test_a_resolved_config_that_is_not_there_is_named(spectune: Spectune, model: Path) -> None:
    """A wrong path of --resolved-config is a usage error, not a crash."""
    launch = ("--engine", "vllm", "--launch", "vllm serve T", "--resolved-config", "nowhere.json")

    result = spectune("doctor", "--model", str(model), *launch)

    assert result.code == 2
    assert "--resolved-config nowhere.json" in result.err
