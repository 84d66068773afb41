"""A prompt as the target's token ids: its chat template, after a context of real text."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from spectune.errors import CheckpointError, WorkloadError
from spectune.records import Prompt

if TYPE_CHECKING:
    from spectune.engine.tokenizer import Tokenizer

CONTEXT_FRAME = "Read this text first.\n\n{context}\n\n{prompt}"


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")


def load_tokenizer(folder: Path, chat_template: Path | None = None) -> Tokenizer:
    """The tokenizer of a model directory of any family: a server decodes it, so only its text is ours.

    `chat_template` is a file that replaces the model's own template.

    CheckpointError without a tokenizer.json.
    """
    from spectune.engine.tokenizer import Tokenizer

    if not (folder / "tokenizer.json").exists():
        raise CheckpointError(
            f"{folder} holds no tokenizer.json", hint="save the model with its fast tokenizer"
        )
    with tempfile.TemporaryDirectory() as scratch:
        # without config.json, which the engine reads for the families that it decodes itself
        for name in TOKENIZER_FILES:
            if (folder / name).exists():
                shutil.copyfile(folder / name, Path(scratch) / name)
        own = Tokenizer.from_dir(scratch)
    return own if chat_template is None else own.with_template(chat_template)


def encode_prompt(
    tokenizer: Tokenizer, prompt: Prompt, context_text: str, context_tokens: int
) -> tuple[int, ...]:
    """Chat-templated ids of the turn that is asked, after the answers so far and `context_tokens` of text.

    WorkloadError where the text is too short for the context.
    """
    text = prompt.turns[0]  # the context stands before the first turn
    if context_tokens:
        ids = tokenizer.encode(context_text)
        if len(ids) < context_tokens:
            raise WorkloadError(
                f"--context {context_tokens} needs more text than the {len(ids)} tokens that are there",
                hint="put a longer long_context.txt beside the workload",
            )
        text = CONTEXT_FRAME.format(context=tokenizer.decode(ids[:context_tokens]), prompt=text)
    return tuple(tokenizer.encode_chat(chat_messages(prompt, text)))


def chat_messages(prompt: Prompt, first: str | None = None) -> list[dict[str, str]]:
    """The conversation up to the turn that is asked; `first` replaces the first turn."""
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    messages = [*system, {"role": "user", "content": prompt.turns[0] if first is None else first}]
    for answer, turn in zip(prompt.answers, prompt.turns[1:], strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return messages
