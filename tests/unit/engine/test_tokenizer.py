"""Encoding, decoding and chat templates; the pre-tokenizer that a GGUF does not carry."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from spectune.engine.gguf_import import pre_tokenizer
from spectune.engine.tokenizer import Tokenizer
from spectune.errors import CheckpointError

USER = {"role": "user", "content": "hello"}


def small_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE of a few tokens, without merges."""
    vocab = {"<|end|>": 0, "<|im_start|>": 1, "h": 2, "i": 3, "1": 4, "2": 5, "Ġ": 6}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizer("smollm", Path("small.gguf"))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, special=True) for name in ("<|end|>", "<|im_start|>")])
    return backend


def with_template(template: str, **options: Any) -> Tokenizer:
    return Tokenizer(small_backend(), eos_ids=(0,), chat_template=template, **options)


def pieces(name: str, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer(name, Path("any.gguf")).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("smollm", ["Ġin", "Ġ", "1", "2", "3", "4", "x"], id="smollm-each-digit"),
        pytest.param("llama-bpe", ["Ġin", "Ġ", "123", "4", "x"], id="llama3-three-digits"),
        pytest.param("qwen2", ["Ġin", "Ġ", "1", "2", "3", "4", "x"], id="qwen2-each-digit"),
        pytest.param("gpt-2", ["Ġin", "Ġ1234", "x"], id="gpt2-whole-number"),
    ],
)
def test_pre_tokenizer_splits_numbers_as_its_model_does(name: str, expected: list[str]) -> None:
    """The named pre-tokenizers differ in how they cut numbers."""
    assert pieces(name, " in 1234x") == expected


def test_encode_special_token_in_text_is_one_id() -> None:
    """The name of a special token inside a text becomes that token."""
    tokenizer = with_template("")

    assert tokenizer.encode("<|im_start|>hi 12<|end|>") == [1, 2, 3, 6, 4, 5, 0]


def test_decode_special_tokens_are_left_out_unless_asked_for() -> None:
    """Special tokens are no text of the answer."""
    tokenizer = with_template("")

    assert tokenizer.decode([1, 2, 3, 0]) == "hi"
    assert tokenizer.decode([1, 2, 3, 0], skip_special_tokens=False) == "<|im_start|>hi<|end|>"


def test_vocab_size_counts_added_tokens() -> None:
    """The vocabulary includes the special tokens once."""
    assert with_template("").vocab_size == 7


def test_chat_template_is_trimmed_as_hugging_face_does() -> None:
    """Lines that hold only a statement leave no blank line and no indent."""
    template = (
        "{% for m in messages %}\n    {% if true %}\n[{{ m['content'] }}]\n    {% endif %}\n{% endfor %}"
    )

    assert with_template(template).render_chat([USER]) == "[hello]\n"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param("{{ '<a> & é' | tojson }}", '"<a> & é"', id="tojson-escapes-no-html"),
        pytest.param("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024", id="clock"),
        pytest.param("{{ bos_token }}{{ eos_token }}", "<s><|end|>", id="special-tokens"),
        pytest.param("{% if add_generation_prompt %}go{% endif %}", "go", id="generation-prompt"),
        pytest.param("{% for m in [1, 2] %}{{ m }}{% break %}{% endfor %}", "1", id="loop-controls"),
    ],
)
def test_chat_template_helpers_are_there(template: str, expected: str) -> None:
    """Templates find the helpers that Hugging Face gives them."""
    tokenizer = with_template(
        template,
        special_tokens={"bos_token": "<s>", "eos_token": "<|end|>"},
        now=lambda: datetime(2024, 7, 26),
    )

    assert tokenizer.render_chat([USER]) == expected


def test_chat_template_own_refusal_is_passed_on() -> None:
    """A template may refuse a conversation; its words reach the user."""
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")

    with pytest.raises(CheckpointError, match="roles must alternate"):
        tokenizer.encode_chat([USER])


def test_chat_template_is_sandboxed() -> None:
    """A template from a download cannot reach into Python."""
    tokenizer = with_template("{{ messages.__class__.__mro__ }}")

    with pytest.raises(CheckpointError, match="unsafe"):
        tokenizer.encode_chat([USER])


def test_encode_chat_without_template_is_plain_paragraphs() -> None:
    """A base model without a chat template reads the messages as they are, and says so by no digest."""
    tokenizer = Tokenizer(small_backend(), eos_ids=(0,))

    assert tokenizer.encode_chat([{"role": "user", "content": "hi 12"}]) == [2, 3, 6, 4, 5]
    assert tokenizer.template_digest is None


def test_template_digest_is_of_the_template_text() -> None:
    """The digest tells templates apart."""
    # SHA-256 of "abc", FIPS 180-2 appendix B.1.
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

    assert with_template("abc").template_digest == digest
    assert with_template("abd").template_digest != digest


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"tokenizer_config.json": json.dumps({"chat_template": "T"})}, id="string"),
        pytest.param(
            {
                "tokenizer_config.json": json.dumps(
                    {
                        "chat_template": [
                            {"name": "tool_use", "template": "U"},
                            {"name": "default", "template": "T"},
                        ]
                    }
                )
            },
            id="named-list",
        ),
        pytest.param(
            {"tokenizer_config.json": json.dumps({"chat_template": "U"}), "chat_template.jinja": "T"},
            id="own-file-wins",
        ),
    ],
)
def test_from_dir_finds_the_template_wherever_it_is(tmp_path: Path, files: dict[str, str]) -> None:
    """The template is found in each place where a version of transformers puts it."""
    small_backend().save(str(tmp_path / "tokenizer.json"))
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    assert Tokenizer.from_dir(tmp_path).chat_template == "T"


def test_from_dir_end_token_falls_back_to_tokenizer_config(tmp_path: Path) -> None:
    """Without model configs the end of text is the eos_token, also when it is written as an object."""
    small_backend().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|end|>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    assert Tokenizer.from_dir(tmp_path).eos_ids == (0,)


def test_from_dir_without_tokenizer_file_is_refused(tmp_path: Path) -> None:
    """A model without tokenizer.json is named by the missing file."""
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_dir(tmp_path)


@pytest.fixture(scope="module")
def default_tokenizer(default_target_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(default_target_dir)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("The year 1984, 12345 and 3.14159", id="digits"),
        pytest.param("  two  spaces\n\n\ttab\r\nend   ", id="whitespace"),
        pytest.param("naïve café – “quoted” … €5", id="accents"),
        pytest.param("日本語 русский العربية हिन्दी", id="scripts"),
        pytest.param("🦊 emoji 👩‍💻", id="emoji"),
        pytest.param("def f(x):\n    return {'a': x**2}\n", id="code"),
        pytest.param("it's we'll DON'T", id="contractions"),
    ],
)
def test_default_tokenizer_round_trip_is_exact(default_tokenizer: Tokenizer, text: str) -> None:
    """Text comes back as it went in."""
    assert default_tokenizer.decode(default_tokenizer.encode(text)) == text


@pytest.mark.real_model
def test_default_tokenizer_digits_are_single_tokens(default_tokenizer: Tokenizer) -> None:
    """SmolLM2 reads numbers digit by digit."""
    ids = default_tokenizer.encode("12345")

    assert [default_tokenizer.decode([token]) for token in ids] == ["1", "2", "3", "4", "5"]


@pytest.mark.real_model
def test_default_tokenizer_special_tokens_have_the_published_ids(default_tokenizer: Tokenizer) -> None:
    """The special tokens are single ids, those of the published tokenizer."""
    names = "<|endoftext|><|im_start|><|im_end|><repo_name><file_sep>"

    assert default_tokenizer.encode(names) == [0, 1, 2, 3, 5]
    assert default_tokenizer.decode([0, 1, 2, 3, 5]) == ""


@pytest.mark.real_model
def test_default_chat_has_system_prompt_and_open_assistant_turn(default_tokenizer: Tokenizer) -> None:
    """The template adds the model's own system prompt and leaves the assistant's turn open."""
    ids = default_tokenizer.encode_chat([{"role": "user", "content": "Hi"}])

    assert default_tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1
    assert default_tokenizer.eos_ids == (2,)
