"""Requests for the model with real weights; token ids from a fixed generator for the others."""

from __future__ import annotations

from pathlib import Path

import torch

from spectune.engine.tokenizer import Tokenizer
from spectune.errors import SpectuneError
from spectune.records import Request, Sampling
from spectune.workload import load_workload
from tests.gpu.models import Loaded

# the chat template of SmolLM2, for machines that have no jinja2 to render it
SMOLLM2_CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
)


def requests_of(
    model: Loaded, count: int, max_tokens: int, folder: Path | None, *, sampling: Sampling | None = None
) -> list[Request]:
    """`count` requests of `max_tokens` outputs each; `folder` holds the real model's tokenizer."""
    settings = sampling or Sampling(max_tokens=max_tokens, ignore_eos=True)
    if model.weights == "real" and folder is not None:
        texts = [prompt.asked for prompt in load_workload(None, num_prompts=count).prompts]
        ids = [encoded(folder, text) for text in texts]
    else:
        generator = torch.Generator().manual_seed(5)
        vocab = model.target.config.vocab_size
        ids = [
            torch.randint(3, vocab, (8 + 5 * index % 23,), generator=generator).tolist()
            for index in range(count)
        ]
    return [
        Request(request_id=f"prompt-{index}", prompt_ids=tuple(row), category="gpu", sampling=settings)
        for index, row in enumerate(ids)
    ]


def encoded(folder: Path, text: str) -> list[int]:
    """The chat with one user turn, by the model's template or by what it would write."""
    try:
        return Tokenizer.from_dir(folder).encode_chat([{"role": "user", "content": text}])
    except (SpectuneError, ModuleNotFoundError):
        import tokenizers

        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return list(backend.encode(SMOLLM2_CHAT.format(text=text), add_special_tokens=False).ids)
