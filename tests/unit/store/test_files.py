"""Files written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectune.errors import StoreError
from spectune.store.files import naming_errors, replacing


def test_what_breaks_off_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    """An error in the middle of writing keeps what was there; the temporary file is gone."""
    file = tmp_path / "kept.json"
    file.write_text("old")

    def break_off() -> None:
        with replacing(file) as temporary:
            temporary.write_text("half of the n")
            raise KeyError

    with pytest.raises(KeyError):
        break_off()

    assert [file] == list(tmp_path.iterdir())
    assert "old" == file.read_text()


def test_a_file_where_a_folder_is_needed_is_what_the_error_names(tmp_path: Path) -> None:
    """Cleaning up does not hide why the file could not be written."""
    (tmp_path / "taken").touch()
    file = tmp_path / "taken" / "surface.json"

    with pytest.raises(StoreError) as caught, naming_errors(file), replacing(file):
        pass

    assert f"{file} cannot be written: File exists" == caught.value.message
