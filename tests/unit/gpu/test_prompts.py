"""The requests of the call on a device."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spectune.engine.tokenizer import Tokenizer
from tests.gpu.prompts import encoded, requests_of


def model(weights: str) -> Any:
    config = SimpleNamespace(vocab_size=97)
    return SimpleNamespace(weights=weights, target=SimpleNamespace(config=config))


def test_random_weights_get_the_same_random_ids_in_every_call() -> None:
    """Lengths differ, ids are of the vocabulary, and a resumed call decodes the same prompts."""
    first = requests_of(model("random"), 5, 8, None)

    assert first == requests_of(model("random"), 5, 8, None)
    assert 5 == len({request.request_id for request in first}) == len({len(r.prompt_ids) for r in first})
    assert all(3 <= token < 97 for request in first for token in request.prompt_ids)
    assert {(8, True)} == {(r.sampling.max_tokens, r.sampling.ignore_eos) for r in first}


@pytest.mark.real_model
def test_the_chat_is_written_alike_with_and_without_jinja(
    default_target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without the template engine asks the real model the same ids."""
    text = "Why is the sky blue?\n\nAnswer in one line."
    expected = Tokenizer.from_dir(default_target_dir).encode_chat([{"role": "user", "content": text}])

    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)

    assert expected == encoded(default_target_dir, text)


@pytest.mark.real_model
def test_the_real_model_is_asked_the_built_in_prompts(default_target_dir: Path) -> None:
    """One request a prompt, in the model's own chat."""
    asked = requests_of(model("real"), 3, 8, default_target_dir)

    assert 3 == len({request.prompt_ids for request in asked})
    assert all("<|im_start|>" not in request.prompt_text for request in asked)
