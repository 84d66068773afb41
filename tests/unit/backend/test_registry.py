"""The registry of backends."""

from __future__ import annotations

import sys

import pytest

from spectune.backend import backend_names, create_backend
from spectune.errors import BackendMissing, UsageError


def test_create_backend_simulated_takes_its_options():
    """Options go to the backend that was named."""
    backend = create_backend("simulated", seed=5, max_batch_size=3)

    assert backend.capabilities().is_simulated
    assert backend.capabilities().max_batch_size == 3


def test_create_backend_unknown_name_lists_the_known_ones():
    """A typo is answered with the names."""
    with pytest.raises(UsageError, match="--backend vlm") as caught:
        create_backend("vlm")

    assert caught.value.hint == "one of: reference, simulated, vllm, sglang, attached"
    assert backend_names() == ("reference", "simulated", "vllm", "sglang", "attached")


def test_create_backend_unknown_option_is_a_usage_error():
    """An option that the backend lacks is not dropped."""
    with pytest.raises(UsageError, match="sede"):
        create_backend("simulated", sede=1)


def test_create_backend_without_its_dependency_says_what_to_install(monkeypatch):
    """Where torch is missing the reference engine names the package and the extra."""

    class NoTorch:
        def find_spec(self, name, path, target=None):
            if name == "spectune.backend.reference":
                raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.delitem(sys.modules, "spectune.backend.reference", raising=False)
    monkeypatch.delattr("spectune.backend.reference", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoTorch(), *sys.meta_path])

    with pytest.raises(BackendMissing, match="needs the package torch") as caught:
        create_backend("reference")
    assert caught.value.hint == "pip install 'spectune[engine]'"
