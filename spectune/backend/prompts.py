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


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model directory of any family: a server decodes it, so only its text is ours.

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
        return Tokenizer.from_dir(scratch)


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
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    messages = [*system, {"role": "user", "content": text}]
    for answer, turn in zip(prompt.answers, prompt.turns[1:], strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return tuple(tokenizer.encode_chat(messages))
