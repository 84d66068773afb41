"""What the reference backend says about itself; a tiny random target stands in for a real one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spectune.backend import reference
from spectune.backend.reference import ReferenceBackend
from tests.support.toys import head_config, head_tensors, save_head, tiny_target


@pytest.fixture
def backend_of(monkeypatch):
    """Makes a backend on a tiny target; `bandwidths` are what the memory measures, in turn."""

    def make(*, bandwidths=(2e9,), target=None, **options):
        measured = iter(bandwidths)
        monkeypatch.setattr(reference, "read_bandwidth_bytes_per_s", lambda device: next(measured))
        backend = ReferenceBackend(**{"model": "some/model", **options})
        vars(backend)["target"] = target or tiny_target()
        vars(backend)["tokenizer"] = SimpleNamespace(template_digest="t" * 64)
        return backend

    return make


def test_fingerprint_measures_the_bandwidth_once(backend_of):
    """Every fingerprint of a backend is the same one: the bandwidth does not change within a run."""
    backend = backend_of(bandwidths=(2e9, 3e9))

    assert backend.fingerprint() == backend.fingerprint()
    assert backend.fingerprint().read_bandwidth_bytes_per_s == 2e9


def test_fingerprint_holds_what_changes_acceptance(backend_of):
    """Runs with another prefill chunk, with a prefix cache or with another template are not compared."""
    backend = backend_of(prefill_chunk=64)

    settings = backend.fingerprint().settings
    assert (settings["prefill_chunk"], settings["prefix_cache"]) == (64, False)
    assert settings["chat_template"] == backend.template_digest == "t" * 64


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param("folder/tiny-model", "tiny-model", id="a-folder-by-its-last-part"),
        pytest.param("owner/tiny-model", "owner/tiny-model", id="a-hub-id-whole"),
    ],
)
def test_fingerprint_names_the_target_without_its_place(model, name, backend_of, tmp_path, monkeypatch):
    """Where a folder lies on this machine is no part of what was measured."""
    (tmp_path / "folder" / "tiny-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert backend_of(model=model).fingerprint().target == name


def test_fingerprint_tells_two_heads_in_the_same_folder_apart(backend_of, tmp_path):
    """A head that was trained again under its old name is another head."""
    target = tiny_target()
    digests = []
    for seed in (0, 1):
        config = head_config(target.config, 97)
        folder = save_head(tmp_path / "head", config, head_tensors(config, target.config, seed))
        mark = backend_of(target=target, draft_model=str(folder)).fingerprint()
        digests.append(mark.settings["draft_digest"])
        assert mark.draft == "head"

    assert len(set(digests)) == 2
