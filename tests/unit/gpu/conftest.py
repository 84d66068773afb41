"""The document that the tests of this folder share."""

from __future__ import annotations

import pytest

from spectune.store.gpu_run import GpuDocument
from tests.support.gpu_document import made_document


@pytest.fixture
def document() -> GpuDocument:
    """A measurement of a device, by hand."""
    return made_document()
