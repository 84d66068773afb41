"""The EAGLE-3 draft head as a trainable module, with the tensor names that serving engines load.

B sequences, T tokens, H hidden size, V target vocabulary, D draft vocabulary. Architecture (classic
form): `fc` folds three captured target features into one state; one decoder layer reads the pair
[input_layernorm(embedding) | hidden_norm(state)]; its output before `norm` is the next step's state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectune.errors import CheckpointError

if TYPE_CHECKING:
    from spectune.draft.checkpoint import Head
    from spectune.train.vocab import DraftVocab


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Shape of a head. `rope_theta` is the head's own and need not be the target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, int, int]
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 8192
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise CheckpointError(
                f"draft vocabulary {self.draft_vocab_size} is not within 1..{self.vocab_size}"
            )


class RMSNorm(nn.Module):
    """x / rms(x) · weight, reduced in at least fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scaled: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return scaled * self.weight


class SelfAttention(nn.Module):
    """The four projections; how positions attend is the caller's affair (see ttt.py)."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, h = config.head_dim, config.hidden_size
        self.q_proj = nn.Linear(2 * h, config.num_heads * width, bias=False)
        self.k_proj = nn.Linear(2 * h, config.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * h, config.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(config.num_heads * width, h, bias=False)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = SelfAttention(config)
        self.mlp = SwiGLU(h, config.intermediate_size)
        self.hidden_norm = RMSNorm(h, eps)
        self.input_layernorm = RMSNorm(h, eps)
        self.post_attention_layernorm = RMSNorm(h, eps)


class Eagle3Head(nn.Module):
    """fc, midlayer, norm, lm_head and the two vocabulary maps; the embedding is the target's."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig, vocab: DraftVocab) -> None:
        super().__init__()
        if vocab.draft_size != config.draft_vocab_size or vocab.target_size != config.vocab_size:
            raise CheckpointError(
                f"vocabulary map {vocab.draft_size} of {vocab.target_size} does not fit a head of "
                f"{config.draft_vocab_size} of {config.vocab_size}"
            )
        h = config.hidden_size
        self.config = config
        self.fc = nn.Linear(3 * h, h, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(h, config.rms_norm_eps)
        self.lm_head = nn.Linear(h, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", vocab.d2t)
        self.register_buffer("t2d", vocab.t2d)

    @property
    def target_ids(self) -> Tensor:
        """Target id of every draft id. [D]"""
        return self.d2t + torch.arange(self.d2t.numel(), device=self.d2t.device)

    def pair(self, state: Tensor, embedding: Tensor) -> Tensor:
        """Attention input, embedding half first. [..., H], [..., H] -> [..., 2H]"""
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embedding), layer.hidden_norm(state)], dim=-1)

    def queries(self, pair: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries. [B, A, 2H], [B, A] -> [B, heads, A, head_dim]"""
        return self._rotated(self.midlayer.self_attn.q_proj(pair), self.config.num_heads, positions)

    def keys_values(self, pair: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values. [B, T, 2H], [B, T] -> 2 x [B, kv_heads, T, head_dim]"""
        attn, heads = self.midlayer.self_attn, self.config.num_kv_heads
        value = _split_heads(attn.v_proj(pair), heads)
        return self._rotated(attn.k_proj(pair), heads, positions), value

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """Residual half of the layer. [B, A, H], [B, heads, A, head_dim] -> [B, A, H]"""
        layer = self.midlayer
        residual = layer.hidden_norm(state) if self.config.norm_before_residual else state
        mixed = residual + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        out: Tensor = mixed + layer.mlp(layer.post_attention_layernorm(mixed))
        return out

    def _rotated(self, x: Tensor, heads: int, positions: Tensor) -> Tensor:
        x = _split_heads(x, heads)
        cos, sin = rope(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        half = x.shape[-1] // 2
        swapped = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * cos + swapped * sin


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads·d] -> [B, heads, T, d]"""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def rope(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position, angles in float64. [B, T] -> 2 x [B, 1, T, head_dim]"""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angle = positions.double()[:, None, :, None] * theta**-exponent
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def head_config(
    target: Any,
    *,
    aux_layer_ids: tuple[int, int, int],
    draft_vocab_size: int,
    rope_theta: float | None = None,
) -> HeadConfig:
    """A head as wide as its target, with its last layer's heads, MLP and rope base.

    The base is written to the head's own config; nothing reads the target's at inference.
    """
    return HeadConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=aux_layer_ids,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta if rope_theta is None else rope_theta,
        max_positions=target.max_position_embeddings,
    )


@torch.no_grad()
def init_from_target(head: Eagle3Head, weights: dict[str, Tensor], *, seed: int = 0) -> None:
    """Start the head near "the target's last layer, run on the late feature".

    lm_head and norm are the target's own rows; fc passes the latest feature through; attention and
    MLP are the last layer's, its queries, keys and values reading the state half, with small noise
    on the embedding half and on the early features so that every path has a gradient.
    `weights` are Hugging Face names of the target.
    """
    config, h = head.config, head.config.hidden_size
    last = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    prefix = f"model.layers.{last - 1}."
    noise = torch.Generator().manual_seed(seed)

    def jitter(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=noise) * (0.02 / math.sqrt(columns / h))

    head.fc.weight.copy_(torch.cat([jitter(h, 2 * h), torch.eye(h)], dim=1))
    for name in ("q_proj", "k_proj", "v_proj"):
        source = weights[f"{prefix}self_attn.{name}.weight"].float()
        module = getattr(head.midlayer.self_attn, name)
        module.weight.copy_(torch.cat([jitter(source.shape[0], h), source], dim=1))
    head.midlayer.self_attn.o_proj.weight.copy_(weights[f"{prefix}self_attn.o_proj.weight"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(head.midlayer.mlp, name).weight.copy_(weights[f"{prefix}mlp.{name}.weight"])
    head.midlayer.hidden_norm.weight.copy_(weights[f"{prefix}input_layernorm.weight"])
    head.midlayer.post_attention_layernorm.weight.copy_(weights[f"{prefix}post_attention_layernorm.weight"])
    head.norm.weight.copy_(weights["model.norm.weight"])
    rows = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    head.lm_head.weight.copy_(rows[head.target_ids[: config.draft_vocab_size]])


@torch.no_grad()
def init_from_head(head: Eagle3Head, tensors: dict[str, Tensor], target_ids: Tensor) -> int:
    """Go on from another head of this shape: its layer, and its output row for every shared token.

    Rows of tokens that the other head cannot draft stay as they are. tensors: classic names;
    target_ids: the other head's draft vocabulary [D']. Returns the number of shared tokens.
    """
    for name, parameter in head.named_parameters():
        if name == "lm_head.weight":
            continue
        if tensors[name].shape != parameter.shape:
            raise CheckpointError(
                f"{name} is {list(tensors[name].shape)} there and {list(parameter.shape)} here",
                hint="a head can go on only from one of its own shape",
            )
        parameter.copy_(tensors[name])
    place = torch.full((head.config.vocab_size,), -1, dtype=torch.int64)
    place[target_ids] = torch.arange(target_ids.numel())
    there = place[head.target_ids.cpu()]
    shared = there >= 0
    rows = head.lm_head.weight
    rows[shared] = tensors["lm_head.weight"][there[shared]].to(rows)
    return int(shared.sum())


def head_from_checkpoint(loaded: Head, aux_layer_ids: tuple[int, ...]) -> Eagle3Head:
    """A stored head as a trainable module in fp32; raises CheckpointError where it is another layer."""
    from spectune.train.vocab import DraftVocab

    shape = loaded.config
    if shape.rope_scaling is not None:
        raise CheckpointError(f"{loaded.path}: rope_scaling is not supported here")
    low, middle, high = aux_layer_ids
    config = HeadConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        aux_layer_ids=(low, middle, high),
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        max_positions=shape.max_position_embeddings,
        norm_before_residual=shape.norm_before_residual,
    )
    ids = loaded.draft_to_target
    ids = torch.arange(shape.vocab_size) if ids is None else ids
    kept = torch.zeros(shape.vocab_size, dtype=torch.bool)
    kept[ids] = True
    vocab = DraftVocab(d2t=ids - torch.arange(ids.numel()), t2d=kept, coverage=1.0)
    head = Eagle3Head(config, vocab)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(loaded.tensors[name])
    return head
