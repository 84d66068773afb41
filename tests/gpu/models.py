"""The targets and heads that are measured: the default target where it is at hand, else random weights.

Random weights cost what real ones cost: a pass reads the same bytes. What they write means nothing, so
every row of theirs is labelled, and drafts are accepted by force.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectune.draft.checkpoint import Head, HeadConfig, expected_shapes, load_head
from spectune.draft.eagle3 import Eagle3Drafter
from spectune.engine.checkpoint import TargetConfig
from spectune.engine.checkpoint import expected_shapes as target_shapes
from spectune.engine.target import Target

HEAD_FOLDER = Path(__file__).parents[2] / "spectune/heads/smollm2-135m-eagle3"
STD = 0.02

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# config.json of SmolLM2-135M, Llama 3.2 1B and Llama 3.1 8B, as far as shapes go; toys for rehearsals
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "rope_theta": 100000.0,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "draft_vocab_size": 8192,
    },
    "llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "rope_theta": 500000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "draft_vocab_size": 32000,
    },
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "draft_vocab_size": 32000,
    },
    "toy": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": True, "draft_vocab_size": 49,
    },
    "toy-wide": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 131, "rope_theta": 10000.0,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "draft_vocab_size": 64,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A target and its drafter on the device."""

    name: str
    weights: str  # real or random
    target: Target
    drafter: Eagle3Drafter

    @property
    def dtype(self) -> str:
        return str(self.target.dtype).removeprefix("torch.")


class Models:
    """Loads what is asked for and keeps it; all of it goes when the device has no room for the next."""

    def __init__(self, device: torch.device, *, real_target: Path | None, say: Callable[[str], None]) -> None:
        self.device, self.real_folder, self._say = device, real_target, say
        self._loaded: dict[tuple[str, str, str], Loaded] = {}

    @property
    def has_real(self) -> bool:
        """Whether the small model has real weights and a real head."""
        return self.real_folder is not None

    def of(self, name: str, dtype: torch.dtype, kernels: str = "auto") -> Loaded:
        """A model by name; torch.OutOfMemoryError where it does not fit alone."""
        key = (name, str(dtype), kernels)
        if key not in self._loaded:
            try:
                self._loaded[key] = self._load(name, dtype, kernels)
            except torch.OutOfMemoryError:
                if not self._loaded:
                    raise
                self.forget()
                self._loaded[key] = self._load(name, dtype, kernels)
        return self._loaded[key]

    def forget(self) -> None:
        """Free all of them."""
        self._loaded.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self, name: str, dtype: torch.dtype, kernels: str) -> Loaded:
        is_real = name == "smollm2-135m" and self.real_folder is not None
        self._say(f"loading {name} in {dtype}, {'real' if is_real else 'random'} weights")
        if is_real:
            target = Target.load(
                str(self.real_folder),
                device=str(self.device),
                dtype=str(dtype).removeprefix("torch."),
                kernels=kernels,
            )
            head = load_head(HEAD_FOLDER, target.config)
        else:
            target = random_target(name, self.device, dtype, kernels)
            head = random_head(name, target)
        ids = head.config.aux_layer_ids
        if ids is not None:
            target.aux_layer_ids = tuple(ids)
        weights = "real" if is_real else "random"
        return Loaded(name=name, weights=weights, target=target, drafter=Eagle3Drafter(head, target))


def random_target(name: str, device: torch.device, dtype: torch.dtype, kernels: str = "auto") -> Target:
    """A target of the shape `name` whose weights are drawn on the device itself."""
    config = TargetConfig.from_hf({**LLAMA, **SHAPES[name]}, name)
    draw = _drawer(device, dtype)
    weights = {key: draw(key, shape) for key, shape in target_shapes(config).items()}
    return Target(config, weights, device=device, dtype=dtype, is_dummy=True, kernels=kernels)


def random_head(name: str, target: Target) -> Head:
    """A classic EAGLE-3 head for the target; its draft vocabulary is spread over the target's."""
    shape = {**LLAMA, **SHAPES[name], "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    config = HeadConfig._from({**shape, "tie_word_embeddings": False}, target.config)
    draw = _drawer(target.device, target.dtype)
    tensors = {key: draw(key, size) for key, size in expected_shapes(config).items()}
    ids = torch.linspace(0, config.vocab_size - 1, config.draft_vocab_size).round().to(torch.int64)
    return Head(Path(name), config, tensors, ids)


def _drawer(device: torch.device, dtype: torch.dtype) -> Callable[[str, tuple[int, ...]], Tensor]:
    generator = torch.Generator(device).manual_seed(0)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.full(shape, float("weight" in name), device=device, dtype=dtype)
        return torch.empty(shape, device=device, dtype=dtype).normal_(0, STD, generator=generator)

    return draw
