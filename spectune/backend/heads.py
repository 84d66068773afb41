"""The draft heads that come with spectune: a name out of points, policies and commands, its folder in.

A name is the same on every machine, a folder is not, so only the one who loads a head asks for it.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from spectune.errors import UsageError

DEFAULT_HEAD = "smollm2-135m-eagle3"
"""For the default target."""


def heads_folder() -> Path:
    """Where the installed package keeps its heads, one folder each."""
    return Path(str(resources.files("spectune"))) / "heads"


def shipped_heads() -> tuple[str, ...]:
    """Names of the heads that are installed."""
    return tuple(sorted(file.parent.name for file in heads_folder().glob("*/config.json")))


def head_folder(draft_model: str) -> Path:
    """Folder of a head: the given path, or that of a shipped head where no such folder exists."""
    given = Path(draft_model).expanduser()
    if not given.is_dir() and draft_model in shipped_heads():
        return heads_folder() / draft_model
    return given


def folder_digest(folder: Path) -> str:
    """Digest of a head's files: another head may lie in the same folder tomorrow.

    UsageError where there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(
            f"--draft-model {folder}: there is no such folder",
            hint="fetch the draft model and give its folder",
        )
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors", ".bin"):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]
