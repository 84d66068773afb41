"""One torch thread for toy models: two OpenMP teams on a small machine stand in each other's way."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    # collection has imported torch wherever a collected test needs it; elsewhere it stays unloaded
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
