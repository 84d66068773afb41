"""Heads that come with spectune are named, heads of the user are paths."""

from __future__ import annotations

from spectune.backend import heads


def install(monkeypatch, folder, *names):
    """Makes `folder` the place of the shipped heads."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(heads, "heads_folder", lambda: folder)


def test_shipped_heads_are_the_folders_with_a_config(monkeypatch, tmp_path):
    """A folder without config.json is no head."""
    install(monkeypatch, tmp_path, "b", "a")
    (tmp_path / "notes").mkdir()

    assert heads.shipped_heads() == ("a", "b")


def test_shipped_heads_without_any_are_empty(monkeypatch, tmp_path):
    """An installation without heads has none, and says so without an error."""
    monkeypatch.setattr(heads, "heads_folder", lambda: tmp_path / "absent")

    assert heads.shipped_heads() == ()


def test_head_folder_of_a_name_is_in_the_installation(monkeypatch, tmp_path):
    """A shipped name becomes the folder that this machine has."""
    install(monkeypatch, tmp_path, "small")

    assert heads.head_folder("small") == tmp_path / "small"


def test_head_folder_of_a_path_is_that_path(monkeypatch, tmp_path):
    """A folder of the user wins over a shipped head of the same name and is not made absolute."""
    install(monkeypatch, tmp_path / "installed", "small")
    (tmp_path / "here" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")

    assert str(heads.head_folder("small")) == "small"
    assert str(heads.head_folder("elsewhere/head")) == "elsewhere/head"
