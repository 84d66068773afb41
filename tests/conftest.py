"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_target_dir() -> Path:
    """The default target in the user's cache, fetched on first use; for tests marked real_model."""
    from spectune.engine.resolve import resolve_model
    from spectune.errors import DownloadFailed

    try:
        return resolve_model(None)
    except DownloadFailed as error:
        pytest.skip(error.message)
