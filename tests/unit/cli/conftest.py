"""How the tests call the command line: in this process, in a folder of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spectune.cli.app import run


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as the one JSON document that it must be."""
        return json.loads(self.out)


@pytest.fixture
def spectune(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """Runs a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*argv: str) -> Answer:
        capsys.readouterr()
        code = run(argv)
        out, err = capsys.readouterr()
        return Answer(code=code, out=out, err=err)

    return call
