"""An EAGLE-3 head along texts that are known: many roots of many texts in one pass.

The head as `eagle3.py` runs it, laid out for traces. One pass over a text writes the keys and values
of all its real pairs; a draft node then attends to the pairs before its root and to its own ancestors,
so nodes of any roots and texts share one batch of matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spectune.draft.checkpoint import Head
from spectune.engine.linear import Linear
from spectune.engine.rope import Rope
from spectune.engine.target import Target
from spectune.engine.trace_path import Children
from spectune.engine.trace_texts import KnownText
from spectune.errors import InfeasibleConfig
from spectune.store.trace_file import ABSENT

_ROWS = 512  # nodes whose logits are held at once
_LEVEL = 1 << 40  # node id = level · _LEVEL + number within the level


class HeadAlongText:
    """An EAGLE-3 head's weights, ready to read texts. Counts its passes in `num_calls`.

    Args:
        num_children: best tokens kept of each node; one more than the largest topk.
        vocab_slices: sizes for `Children.own_ranks`; the whole draft vocabulary if empty.
    """

    def __init__(
        self, head: Head, target: Target, *, num_children: int, vocab_slices: Sequence[int] = ()
    ) -> None:
        config, device, dtype = head.config, target.device, target.dtype
        self.config, self.device, self.dtype = config, device, dtype
        self.num_children = min(num_children, config.draft_vocab_size)
        self.vocab_slices = tuple(vocab_slices) or (config.draft_vocab_size,)
        self.num_calls = 0
        tensors = {n: t.to(device, dtype) for n, t in head.tensors.items() if n not in ("d2t", "t2d")}
        self.embed = tensors.get("embed_tokens.weight", target.embed_weight)  # [V, H]
        attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
        self._fc = Linear(tensors["fc.weight"])
        self._qkv = Linear(torch.cat([tensors[f"{attention}{n}_proj.weight"] for n in "qkv"]))
        self._out = Linear(tensors[attention + "o_proj.weight"])
        self._gate_up = Linear(torch.cat([tensors[f"{mlp}{n}_proj.weight"] for n in ("gate", "up")]))
        self._down = Linear(tensors[mlp + "down_proj.weight"])
        self._head = Linear(tensors["lm_head.weight"])
        self._norms = {
            name: tensors[key]
            for name, key in (
                ("embed", "midlayer.input_layernorm.weight"),
                ("hidden", "midlayer.hidden_norm.weight"),
                ("post", "midlayer.post_attention_layernorm.weight"),
                ("last", "norm.weight"),
            )
        }
        ids = torch.arange(config.draft_vocab_size) if head.draft_to_target is None else head.draft_to_target
        self.target_ids = ids.to(device)
        self._draft_ids = torch.full((config.vocab_size,), -1, device=device)
        self._draft_ids[self.target_ids] = torch.arange(config.draft_vocab_size, device=device)
        self._rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling, device=device, dtype=dtype)

    @torch.inference_mode()
    def read(self, texts: Sequence[KnownText], depth: int) -> TextStates:
        """Run all real pairs of the texts; drafts of up to `depth` levels may follow."""
        longest = max(len(text.ids) for text in texts)
        limit = self.config.max_position_embeddings
        if longest > limit:
            raise InfeasibleConfig(f"a text has {longest} tokens, the draft head's context is {limit}")
        self._rope.reserve(longest + depth)
        width = longest - 1
        tokens = torch.zeros(len(texts), width, dtype=torch.int64)
        features = torch.zeros(len(texts), width, texts[0].features.shape[1], dtype=self.dtype)
        for row, text in enumerate(texts):
            tokens[row, : len(text.ids) - 1] = torch.tensor(text.ids[1:])
            features[row, : len(text.ids) - 1] = text.features
        hidden = self._fc(features.to(self.device))  # [B, S, H]
        positions = torch.arange(width, device=self.device).expand(len(texts), -1)
        query, keys, values = self.project(hidden, tokens.to(self.device), positions)
        self.num_calls += 1
        groups = self.config.num_heads // self.config.num_kv_heads
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2).repeat_interleave(groups, 1),
            values.transpose(1, 2).repeat_interleave(groups, 1),
            is_causal=True,
        )
        states = self.finish(hidden, mixed.transpose(1, 2).flatten(2))
        return TextStates(self, list(texts), states, keys.transpose(1, 2), values.transpose(1, 2))

    def project(self, hidden: Tensor, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [..., heads, d], rotated keys and values [..., kv_heads, d] of inputs [B, T]."""
        config = self.config
        embedding = F.embedding(tokens, self.embed)
        joined = torch.cat([self._rms(embedding, "embed"), self._rms(hidden, "hidden")], -1)
        heads = self._qkv(joined).view(*tokens.shape, -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = self._rope.rotate(heads[:, :, :num_rotated], *self._rope.at(positions))
        return rotated[:, :, : config.num_heads], rotated[:, :, config.num_heads :], heads[:, :, num_rotated:]

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output [..., H] from its input and what attention mixed [..., heads·d]."""
        x = hidden + self._out(mixed)
        gate, up = self._gate_up(self._rms(x, "post")).chunk(2, -1)
        return x + self._down(F.silu(gate) * up)

    def children(self, states: Tensor, tokens: Tensor, temperatures: Tensor) -> Children:
        """What the head says at states [M, H] about the next token, and about the text's own [M]."""
        parts = [
            self._some_children(*columns)
            for columns in zip(
                *(torch.split(whole, _ROWS) for whole in (states, tokens, temperatures)), strict=True
            )
        ]
        return Children(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _some_children(self, states: Tensor, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, ...]:
        logits = self._head(self._rms(states, "last")).float()  # [M, D]
        log_probs = logits.log_softmax(-1)
        best = log_probs.topk(self.num_children)
        drafts = torch.where(tokens >= 0, self._draft_ids[tokens.clamp_min(0)], -1)
        rows = (drafts >= 0).nonzero().flatten()
        own = torch.full_like(tokens, float("-inf"), dtype=torch.float32)
        sampled = own.clone()
        ranks = torch.full((len(tokens), len(self.vocab_slices)), ABSENT, device=self.device)
        if len(rows):
            index = drafts[rows].unsqueeze(1)
            own[rows] = log_probs[rows].gather(1, index).squeeze(1)
            warm = logits[rows] / temperatures[rows].unsqueeze(1)
            sampled[rows] = (warm.gather(1, index) - warm.logsumexp(1, keepdim=True)).squeeze(1)
            ahead = log_probs[rows] > own[rows].unsqueeze(1)
            for column, size in enumerate(self.vocab_slices):
                rank = ahead[:, :size].sum(1).clamp_max(ABSENT)
                ranks[rows, column] = torch.where(drafts[rows] < size, rank, ABSENT)
        return best.values, self.target_ids[best.indices], own, ranks, sampled

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._norms[name], self.config.rms_norm_eps)


class TextStates:
    """Texts that the head has read: states [B, S, H], keys and values [B, kv_heads, S, d]."""

    def __init__(
        self, head: HeadAlongText, texts: list[KnownText], states: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        self.head, self.texts, self.states = head, texts, states
        self.keys, self.values = keys.contiguous(), values.contiguous()

    def at(self, roots: Sequence[tuple[int, int]]) -> HeadRoots:
        """Roots as (text, index of the root token in it)."""
        return HeadRoots(self, roots)


@dataclass(slots=True)
class _Level:
    """Nodes of one level: root number, layer output, key and value, numbers of the ancestors above."""

    roots: Tensor  # [M]
    states: Tensor  # [M, H]
    keys: Tensor  # [M, kv_heads, d]
    values: Tensor
    ancestors: Tensor  # [M, level - 1]

    def joined(self, other: _Level) -> _Level:
        return _Level(
            *(torch.cat([getattr(self, n), getattr(other, n)]) for n in _Level.__dataclass_fields__)
        )


class HeadRoots:
    """The draft nodes that grow below some roots: `RootsAlongText` of an EAGLE-3 head."""

    def __init__(self, read: TextStates, roots: Sequence[tuple[int, int]]) -> None:
        head = read.head
        self._read, self._head = read, head
        where = torch.tensor(roots, dtype=torch.int64, device=head.device)
        self._text, self._index = where[:, 0], where[:, 1]
        heats = [read.texts[text].request.sampling.temperature or 1.0 for text, _ in roots]
        self._temperatures = torch.tensor(heats, device=head.device)
        self._states = read.states[self._text, self._index - 1]  # [R, H]
        self._levels: list[_Level] = []

    @torch.inference_mode()
    def roots(self, text_tokens: Tensor) -> Children:
        return self._head.children(self._states, text_tokens, self._temperatures)

    @torch.inference_mode()
    def grow(self, parents: Tensor, tokens: Tensor, text_tokens: Tensor) -> tuple[Tensor, Children]:
        head = self._head
        level = int(parents[0]) // _LEVEL + 1
        above = parents % _LEVEL
        if level == 1:
            roots, hidden = above, self._states[above]
            ancestors = above.new_empty(len(above), 0)
        else:
            up = self._levels[level - 2]
            roots, hidden = up.roots[above], up.states[above]
            ancestors = torch.cat([up.ancestors[above], above.unsqueeze(1)], 1)  # [M, level-1]
        positions = (self._index[roots] + level - 1).unsqueeze(0)
        query, keys, values = head.project(hidden.unsqueeze(0), tokens.unsqueeze(0), positions)
        head.num_calls += 1
        mixed = self._attend(query[0], keys[0], values[0], roots, ancestors)
        states = head.finish(hidden, mixed)
        new = _Level(roots, states, keys[0], values[0], ancestors)
        first = 0
        if level > len(self._levels):
            self._levels.append(new)
        else:
            first = len(self._levels[level - 1].roots)
            self._levels[level - 1] = self._levels[level - 1].joined(new)
        ids = level * _LEVEL + first + torch.arange(len(tokens), device=tokens.device)
        return ids, head.children(states, text_tokens, self._temperatures[roots])

    def _attend(
        self, query: Tensor, keys: Tensor, values: Tensor, roots: Tensor, ancestors: Tensor
    ) -> Tensor:
        """Attention [M, heads·d] of nodes over the pairs before their root, their ancestors, themselves."""
        count, num_heads, dim = query.shape
        num_kv = keys.shape[1]
        query = query.reshape(count, num_kv, num_heads // num_kv, dim)
        above = [self._levels[i] for i in range(ancestors.shape[1])]
        own_keys = [level.keys[ancestors[:, i]] for i, level in enumerate(above)] + [keys]
        own_values = [level.values[ancestors[:, i]] for i, level in enumerate(above)] + [values]
        branch_keys, branch_values = torch.stack(own_keys, 2), torch.stack(own_values, 2)  # [M, kv, A, d]
        branch = query @ branch_keys.transpose(2, 3)  # [M, kv, G, A]
        texts, starts = self._text[roots], self._index[roots]
        mixed = torch.empty_like(query)
        for text in torch.unique(texts).tolist():
            rows = (texts == text).nonzero().flatten()
            mixed[rows] = self._mix(
                query[rows], branch[rows], branch_values[rows], text, starts[rows], dim**-0.5
            )
        return mixed.reshape(count, num_heads * dim)

    def _mix(
        self, query: Tensor, branch: Tensor, branch_values: Tensor, text: int, starts: Tensor, scale: float
    ) -> Tensor:
        """Nodes of one text: query [m, kv, G, d], branch scores [m, kv, G, A] -> [m, kv, G, d]."""
        count, num_kv, groups, dim = query.shape
        num_columns = int(starts.max())
        keys = self._read.keys[text, :, :num_columns]  # [kv, S, d]
        values = self._read.values[text, :, :num_columns]
        folded = query.transpose(0, 1).reshape(num_kv, count * groups, dim)
        prefix = (folded @ keys.transpose(1, 2)).view(num_kv, count, groups, num_columns).transpose(0, 1)
        hidden = torch.arange(num_columns, device=starts.device) >= starts.view(-1, 1)
        prefix = prefix.float().masked_fill(hidden.view(count, 1, 1, -1), float("-inf"))
        weights = (torch.cat([prefix, branch.float()], -1) * scale).softmax(-1).to(query.dtype)
        from_prefix = weights[..., :num_columns].transpose(0, 1).reshape(num_kv, count * groups, num_columns)
        mixed = (from_prefix @ values).view(num_kv, count, groups, dim).transpose(0, 1)
        return mixed + weights[..., num_columns:] @ branch_values
