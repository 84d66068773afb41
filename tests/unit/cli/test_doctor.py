"""`spectune doctor` as a user calls it: what is judged, what is not, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spectune.cli.doctor import head_folder_of

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
