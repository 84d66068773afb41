"""Target and head written once more, as plainly as possible: float64, one sequence, no cache, no mask.

Written from the model's definition and nothing of the engine's: tests compare the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spectune.draft.checkpoint import Head
from spectune.engine.checkpoint import TargetConfig

Weights = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def turn(heads: Tensor, theta: float) -> Tensor:
    """Heads [T, n, d] at positions 0 .. T-1: halves as complex numbers, multiplied by e^(i·angle)."""
    length, _, dim = heads.shape
    angles = torch.outer(
        torch.arange(length).double(),
        torch.tensor([theta ** (-2 * i / dim) for i in range(dim // 2)]).double(),
    )
    numbers = torch.complex(heads[..., : dim // 2].contiguous(), heads[..., dim // 2 :].contiguous())
    turned = numbers * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat([turned.real, turned.imag], -1)


def attend(query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Causal attention, query by query and head by head: [T, n, d] -> [T, n·d]."""
    length, heads, dim = query.shape
    group = heads // keys.shape[1]
    rows = []
    for t in range(length):
        first = 0 if window is None else max(0, t - window + 1)
        mixed = []
        for h in range(heads):
            key, value = keys[first : t + 1, h // group], values[first : t + 1, h // group]
            mixed.append((key @ query[t, h] / math.sqrt(dim)).softmax(0) @ value)
        rows.append(torch.cat(mixed))
    return torch.stack(rows)


def layer(
    weights: Weights,
    prefix: str,
    config: Any,
    x: Tensor,
    attention_input: Tensor,
    *,
    theta: float,
    window: int | None = None,
) -> Tensor:
    """x plus attention over `attention_input`, plus the MLP: [T, H]."""

    def product(name: str, of: Tensor) -> Tensor:
        return of @ weights[f"{prefix}{name}.weight"].double().T

    def heads(name: str, count: int) -> Tensor:
        return product(f"self_attn.{name}_proj", attention_input).view(len(x), count, config.head_dim)

    query = turn(heads("q", config.num_heads), theta)
    keys = turn(heads("k", config.num_kv_heads), theta)
    x = x + product("self_attn.o_proj", attend(query, keys, heads("v", config.num_kv_heads), window))
    inner = norm(x, weights[f"{prefix}post_attention_layernorm.weight"], config.rms_norm_eps)
    gate = product("mlp.gate_proj", inner)
    return x + product("mlp.down_proj", gate * gate.sigmoid() * product("mlp.up_proj", inner))


def run_target(config: TargetConfig, weights: Weights, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V] of a text, and the residual stream [T, H] that each layer reads."""
    x = weights["model.embed_tokens.weight"].double()[ids]
    streams = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        streams.append(x)
        inner = norm(x, weights[prefix + "input_layernorm.weight"], config.rms_norm_eps)
        x = layer(weights, prefix, config, x, inner, theta=config.rope_theta, window=config.sliding_window)
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"]).double()
    return norm(x, weights["model.norm.weight"], config.rms_norm_eps) @ head.T, streams


@dataclass(frozen=True, slots=True)
class Candidate:
    """One drafted node: its path from the root (excluded) and the sum of log-probabilities."""

    path: tuple[int, ...]
    score: float


class PlainHead:
    """An EAGLE-3 head over one text: real pairs first, then the drafts of one path."""

    def __init__(self, head: Head, embed: Tensor) -> None:
        self.config, self.tensors, self.embed = head.config, head.tensors, embed.double()
        ids = head.draft_to_target
        self.ids = list(range(head.config.draft_vocab_size)) if ids is None else ids.tolist()

    def state(self, features: Tensor, tokens: list[int], path: tuple[int, ...] = ()) -> Tensor:
        """Output [H] at the last pair: features [T, 3H] with the tokens after them, then the path.

        A drafted token is paired with the output at the pair before it.
        """
        h = features.double() @ self.tensors["fc.weight"].double().T
        for drafted in range(len(path) + 1):
            output = self._layer(h, [*tokens, *path[:drafted]])
            h = torch.cat([h, output[-1:]])
        return output[-1]

    def _layer(self, h: Tensor, tokens: list[int]) -> Tensor:
        eps = self.config.rms_norm_eps
        embedded = norm(self.embed[tokens], self.tensors["midlayer.input_layernorm.weight"], eps)
        normed = norm(h, self.tensors["midlayer.hidden_norm.weight"], eps)
        joined = torch.cat([embedded, normed], -1)
        x = normed if self.config.norm_before_residual else h
        return layer(self.tensors, "midlayer.", self.config, x, joined, theta=self.config.rope_theta)

    def log_probs(self, state: Tensor) -> Tensor:
        """Over the draft vocabulary [D]."""
        normed = norm(state, self.tensors["norm.weight"], self.config.rms_norm_eps)
        return (normed @ self.tensors["lm_head.weight"].double().T).log_softmax(-1)

    def pool(self, features: Tensor, tokens: list[int], topk: int, depth: int) -> list[Candidate]:
        """Every candidate of a beam of `topk`, level by level, best first within each parent."""

        def children(parent: Candidate) -> list[Candidate]:
            log_probs = self.log_probs(self.state(features, tokens, parent.path)).tolist()
            best = sorted(range(len(log_probs)), key=lambda d: -log_probs[d])[:topk]
            return [Candidate((*parent.path, self.ids[d]), parent.score + log_probs[d]) for d in best]

        level = children(Candidate((), 0.0))
        pool = list(level)
        for _ in range(2, depth + 1):
            frontier = sorted(level, key=lambda c: -c.score)[:topk]
            level = [child for parent in frontier for child in children(parent)]
            pool += level
        return pool
