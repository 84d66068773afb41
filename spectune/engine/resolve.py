"""`--model` in, a Hugging Face directory out.

Nothing is the default target; an existing path is a directory or a .gguf file; `owner/name` is a hub id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from spectune.engine.default_target import convert_once, default_cache_dir, fetch_default_target
from spectune.errors import BackendMissing, CheckpointError, DownloadFailed

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model(
    model: str | None,
    *,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Directory with config.json, safetensors and tokenizer of `model`; the default target if None.

    `cache_dir` is the root of spectune's cache (default: SPECTUNE_CACHE, XDG, ~/.cache/spectune).
    """
    cache = cache_dir or default_cache_dir()
    if model is None:
        return fetch_default_target(cache, progress=progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _model_directory(path)
    if path.is_file():
        return _from_gguf(path, cache, progress)
    if HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _from_hub(model)
    raise CheckpointError(
        f"--model {model} does not exist",
        hint="give a Hugging Face directory, a .gguf file or a hub id such as owner/name",
    )


def _model_directory(directory: Path) -> Path:
    if (directory / "config.json").exists():
        return directory
    ggufs = sorted(directory.glob("*.gguf"))
    hint = f"pass --model {ggufs[0]}" if ggufs else "is this a Hugging Face model?"
    raise CheckpointError(f"--model {directory} holds no config.json", hint=hint)


def _from_gguf(path: Path, cache: Path, progress: Callable[[str], None] | None) -> Path:
    """The conversion of a GGUF file, cached by path, size and time of change."""
    if path.suffix != ".gguf":
        raise CheckpointError(f"--model {path} is a file, but not a .gguf file")
    facts = path.stat()
    identity = f"{path.resolve()}:{facts.st_size}:{facts.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()
    directory = cache / "models" / f"{path.stem}-{digest[:12]}"
    return convert_once(directory, identity, lambda scratch: path, progress=progress)


def _from_hub(model: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as missing:
        raise BackendMissing(
            f"--model {model} is no local path; fetching it from the hub needs huggingface_hub",
            hint="pip install huggingface_hub",
        ) from missing
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS))
    except Exception as error:  # network, authorisation and missing repositories have no common base
        raise DownloadFailed(
            f"--model {model} could not be fetched from the hub: {error}",
            hint="check the name, `hf auth login` and the network, or give a local directory",
        ) from error
