"""Text in, token ids out, and back: tokenizer.json and the chat template of a model directory.

Rendering follows Hugging Face's `apply_chat_template`: a sandboxed Jinja environment with
`raise_exception`, `tojson`, `strftime_now`, trim_blocks and lstrip_blocks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from spectune.engine.target_config import TargetConfig, read_json, token_ids
from spectune.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import jinja2
    import tokenizers

Message = Mapping[str, str]
"""`role` (system, user or assistant) and `content`."""

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """Encodes and decodes for one model.

    A model without a chat template (a base model) gets its messages as plain paragraphs;
    `template_digest` is None then.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...],
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.eos_ids = eos_ids
        self.chat_template = chat_template
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._template = None if chat_template is None else _environment(now).from_string(chat_template)

    @classmethod
    def from_dir(cls, directory: str | Path) -> Tokenizer:
        """The tokenizer of a model directory: tokenizer.json, tokenizer_config.json, config.json."""
        from tokenizers import Tokenizer as Backend

        folder = Path(directory)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(
                f"{path} does not exist", hint="save the model with a fast tokenizer, or use its GGUF file"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the package raises plain Exception for every defect
            raise CheckpointError(f"{path}: {error}") from error
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.exists() else {}
        return cls(
            backend,
            eos_ids=_eos_ids(folder, config, backend),
            chat_template=_chat_template(folder, config),
            special_tokens=_special_tokens(config),
        )

    def with_template(self, file: Path) -> Tokenizer:
        """The same tokens under another chat template; UsageError for a file that is none."""
        try:
            text = file.read_text(encoding="utf-8")
            return Tokenizer(
                self._backend, eos_ids=self.eos_ids, chat_template=text, special_tokens=self._special_tokens
            )
        except (OSError, ValueError) as error:
            raise UsageError(f"--chat-template {file} cannot be read: {error}") from error
        except Exception as error:  # jinja2 is imported where a template is compiled
            raise UsageError(f"--chat-template {file} is no Jinja template: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's matrices may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def template_digest(self) -> str | None:
        """SHA-256 of the chat template's text; None without one."""
        if self.chat_template is None:
            return None
        return hashlib.sha256(self.chat_template.encode()).hexdigest()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; names of special tokens inside it become those tokens."""
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no whole character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as the model's template writes it, ready for the assistant's turn."""
        if self._template is None:
            return "\n\n".join(message["content"] for message in messages)
        from jinja2 import TemplateError

        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise CheckpointError(f"the chat template refused the conversation: {error}") from error

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the rendered conversation.

        A template writes its own beginning-of-text token; plain text gets the tokenizer's.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=self._template is None)


def _environment(now: Callable[[], datetime]) -> jinja2.Environment:
    """Hugging Face's template environment; `now` is the clock of `strftime_now`."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        # Jinja's own filter escapes HTML characters, which would change the prompt.
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The default template: chat_template.jinja, else the entry of tokenizer_config.json."""
    separate = directory / "chat_template.jinja"
    if separate.exists():
        return separate.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # named templates; tool use and the like stand beside "default"
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like as text; Hugging Face writes a string or an object with `content`."""
    texts: dict[str, str] = {}
    for role in SPECIAL_ROLES:
        value = config.get(role)
        if value is not None:
            texts[role] = value["content"] if isinstance(value, dict) else value
    return texts


def _eos_ids(directory: Path, config: Mapping[str, Any], backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """End-of-text ids of the model's configs, else of tokenizer_config.json's eos_token."""
    if (directory / "config.json").exists() and (ids := TargetConfig.from_dir(directory).eos_token_ids):
        return ids
    text = _special_tokens(config).get("eos_token")
    return token_ids(None if text is None else backend.token_to_id(text))
