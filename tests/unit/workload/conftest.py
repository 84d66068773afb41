"""Fixtures for prompt files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows as JSON Lines, or bytes as they are, into a file of the test's folder."""

    def write_file(content: list[Any] | bytes, name: str = "traffic.jsonl") -> Path:
        path = tmp_path / name
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content).encode()
        path.write_bytes(content)
        return path

    return write_file


@pytest.fixture
def shared_data() -> Path:
    """Folder of public evaluation sets; the test is skipped where there is none."""
    named = os.environ.get("SPECTUNE_TEST_DATA")
    folder = Path(named) if named else Path(__file__).parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no public evaluation sets at {folder}; name a folder with SPECTUNE_TEST_DATA")
    return folder
