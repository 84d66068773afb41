"""Tiny random targets, and EAGLE-3 heads for any target: random, perfect, adversarial."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spectune.draft.checkpoint import Head, HeadConfig, expected_shapes, load_head
from spectune.draft.eagle3 import Eagle3Drafter
from spectune.engine.checkpoint import TargetConfig
from spectune.engine.target import Target
from spectune.records import Request, Sampling, SpecConfig

CPU = torch.device("cpu")
# what losslessness is shown on: chains, trees, and a tree deeper than it has nodes
CONFIGS = [
    SpecConfig.chain("eagle3", 1),
    SpecConfig.chain("eagle3", 3),
    SpecConfig.chain("eagle3", 7),
    SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=8),
    SpecConfig(method="eagle3", num_steps=5, topk=4, num_draft_tokens=16),
    SpecConfig(method="eagle3", num_steps=5, topk=8, num_draft_tokens=32),
    # deeper than it has nodes: some rows draft chains, others trees
    SpecConfig(method="eagle3", num_steps=4, topk=2, num_draft_tokens=4),
]


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of an 8-layer Llama with 97 tokens."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "bos_token_id": 1,
    } | changes


def tiny_target(seed: int = 0, *, scale: float = 1.0, **changes: Any) -> Target:
    """A random fp32 target; `scale` sharpens its output distribution."""
    config, weights = tiny_weights(seed, scale=scale, **changes)
    return Target(config, weights, device=CPU, dtype=torch.float32)


def tiny_weights(
    seed: int = 0, *, scale: float = 1.0, **changes: Any
) -> tuple[TargetConfig, dict[str, Tensor]]:
    """What `tiny_target` is made of."""
    config = TargetConfig.from_hf(tiny_config(**changes), "toy")
    generator = torch.Generator().manual_seed(seed)
    weights = {n: torch.randn(s, generator=generator) * 0.15 for n, s in target_shapes(config).items()}
    for name in weights:
        if "norm" in name:
            weights[name] = torch.ones_like(weights[name])
    weights["model.embed_tokens.weight"] *= 6 * scale
    return config, weights


def save_target(folder: Path, **changes: Any) -> Path:
    """A random target as a Hugging Face directory; its tokens are 2 special ones and printable ASCII."""
    import tokenizers

    data = tiny_config(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
    save_file(tiny_weights(**changes)[1], folder / "model.safetensors")
    vocab = {"<pad>": 0, "<s>": 1} | {chr(code): code - 30 for code in range(32, 127)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def target_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a tied Llama without biases."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (query, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def head_config(target: TargetConfig, draft_vocab_size: int, **changes: Any) -> dict[str, Any]:
    """config.json of a classic head for the target."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
    } | changes


def head_tensors(config: dict[str, Any], target: TargetConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random head weights; the draft vocabulary is every other target token, then the rest."""
    parsed = HeadConfig._from(config, target)
    generator = torch.Generator().manual_seed(seed)
    tensors = {n: torch.randn(s, generator=generator) * 0.2 for n, s in expected_shapes(parsed).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] = torch.ones_like(tensors[name])
    size, vocab = parsed.draft_vocab_size, target.vocab_size
    if size < vocab:
        ids = torch.linspace(0, vocab - 1, size).round().to(torch.int64).unique()
        assert len(ids) == size
        tensors["d2t"] = ids - torch.arange(size)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def save_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def random_drafter(target: Target, folder: Path, draft_vocab_size: int, seed: int = 0) -> Eagle3Drafter:
    """An untrained head, written to disk and loaded as a user's would be."""
    config = head_config(target.config, draft_vocab_size)
    path = save_head(folder, config, head_tensors(config, target.config, seed))
    return Eagle3Drafter(load_head(path, target.config), target)


def cyclic_pair(vocab: int = 16, *, shift: int = 0) -> tuple[Target, Eagle3Drafter]:
    """A target that walks a permutation, and a head that knows it (shift 0) or is wrong (shift > 0).

    Embeddings are one-hot (H = V), attention and MLP of the target write nothing, its head is the
    permutation g. The draft's MLP moves e_x to e_g(x), so its state advances one token a step.
    """
    data = tiny_config(
        vocab_size=vocab, hidden_size=vocab, intermediate_size=vocab, tie_word_embeddings=False
    )
    config = TargetConfig.from_hf(data, "toy")
    weights = {name: torch.zeros(shape) for name, shape in target_shapes(config).items()}
    for name in weights:
        if "norm" in name:
            weights[name] = torch.ones_like(weights[name])
    step = torch.eye(vocab).roll(5, 0)  # column x has its one at row x + 5
    weights["model.embed_tokens.weight"] = torch.eye(vocab)
    weights["lm_head.weight"] = step.clone()
    target = Target(config, weights, device=CPU, dtype=torch.float32)
    eye, zero = torch.eye(vocab), torch.zeros(vocab, vocab)
    parsed = HeadConfig._from(head_config(config, vocab), config)
    tensors = {name: torch.zeros(shape) for name, shape in expected_shapes(parsed).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] = torch.ones_like(tensors[name])
    tensors["fc.weight"] = torch.cat([eye, zero, zero], 1)
    root = vocab**0.5
    gain = torch.nn.functional.silu(torch.tensor(root)).item() * root
    tensors["midlayer.mlp.gate_proj.weight"] = eye
    tensors["midlayer.mlp.up_proj.weight"] = eye
    tensors["midlayer.mlp.down_proj.weight"] = (step - eye) / gain
    tensors["lm_head.weight"] = step.roll(shift, 0)
    return target, Eagle3Drafter(Head(Path("toy"), parsed, tensors, None), target)


def request(name: str, prompt_ids: list[int], *, category: str = "toy", **sampling: Any) -> Request:
    return Request(
        request_id=name,
        prompt_ids=tuple(prompt_ids),
        category=category,
        sampling=Sampling(**({"max_tokens": 24} | sampling)),
    )


def ragged_requests(count: int, vocab: int, **sampling: Any) -> list[Request]:
    """Requests of different prompt and output lengths from a fixed generator."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for index in range(count):
        length = 3 + (index * 7) % 11
        ids = torch.randint(3, vocab, (length,), generator=generator).tolist()
        budget = {"max_tokens": 12 + (index * 5) % 17}
        made.append(request(f"toy-{index}", ids, **(budget | sampling)))
    return made
