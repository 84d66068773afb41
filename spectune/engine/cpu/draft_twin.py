"""The fast twin of an EAGLE-3 head: what it does in a round as two calls, commit and expand."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spectune.engine.cpu.beam import expand_pass
from spectune.engine.cpu.drafts import commit_pass, draft_pass
from spectune.engine.cpu.packed import Array, PackedCache, PackedWeight, array_of
from spectune.engine.cpu.tiles import aligned_zeros
from spectune.engine.cpu.twin import NO_NORM, LayerShape, Twin
from spectune.engine.kv_cache import Cache


class DraftTwin(Twin):
    """One layer over fused features.

    norms [4, H]: of the embedding, of the hidden state, after attention, before the output.
    draft_to_target [D]: target id of each draft id.
    """

    def __init__(
        self,
        shape: LayerShape,
        dtype: torch.dtype,
        *,
        layer: list[PackedWeight],
        norms: Tensor,
        embedding: Tensor,
        fusion: PackedWeight,
        head: PackedWeight,
        draft_to_target: Tensor,
    ) -> None:
        super().__init__(shape, dtype, joined=2 * shape.width, quantize=False)
        self._layer, self._fusion, self._head = layer, fusion, head
        self._linears = np.array([weight.row for weight in layer], dtype=np.int64)
        self._norms = norms.float().contiguous().numpy()
        self._embedding = array_of(embedding.contiguous())
        self._draft_to_target = draft_to_target.contiguous().numpy()

    def logits(self, states: Tensor) -> Tensor:
        """fp32 logits [..., D] of layer outputs [..., H]."""
        rows = states.reshape(-1, states.shape[-1]).contiguous()
        out = self.output(rows, self._head, self._norms[3], torch.float32)
        return out.view(*states.shape[:-1], -1)

    def layer(
        self,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        slots: Tensor,
        lengths: list[int],
        num_new: int,
        ancestors: Tensor | None,
        tables: tuple[Array, Array],
    ) -> Tensor:
        """The layer over hidden [B, T, H] and tokens, positions [B, T] -> new states [B, T, H].

        Token t is stored at column lengths[b] + num_new - T + t and sees, of the num_new columns from
        lengths[b] on, those that ancestors [B, T, num_new] names (None: all up to its own).
        """
        assert isinstance(cache, PackedCache), "a twin reads its own kind of cache"
        batch, num_tokens = tokens.shape
        num_rows = batch * num_tokens
        scratch = self.scratch
        scratch.reserve(num_rows, cache.max_len, num_new)
        states = hidden.contiguous().clone()
        mask, is_tree = self.mask(batch, ancestors)
        self.team.run(
            draft_pass, self.kind, self.describe(self._layer, num_rows, num_tokens, num_new),
            np.float32(self.shape.eps), self._linears, self._norms, NO_NORM, self._embedding,
            tokens.reshape(-1).numpy(), array_of(states).reshape(num_rows, -1), scratch.joined,
            scratch.normed, scratch.heads, scratch.mixed_heads, scratch.gated, cache.array, slots.numpy(),
            np.array(lengths, dtype=np.int64), mask, is_tree, positions.reshape(-1).numpy(), *tables,
            *scratch.arrays(),
        )  # fmt: skip
        return states

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states [B, T, H] of target features [B, T, 3H]."""
        rows = features.reshape(-1, features.shape[-1])
        return self.output(rows, self._fusion, NO_NORM, self.dtype).view(*features.shape[:-1], -1)

    def commit(
        self,
        tokens: Tensor,
        features: Tensor,
        counts: Tensor,
        cache: Cache,
        slots: Tensor,
        lengths: list[int],
        tables: tuple[Array, Array],
        states: Tensor,
        roots: Tensor,
    ) -> None:
        """Take in tokens [B, M] with features [B, M, 3H], counts [B] of them real; see `commit_pass`."""
        assert isinstance(cache, PackedCache), "a twin reads its own kind of cache"
        batch, num_tokens = tokens.shape
        num_rows = batch * num_tokens
        scratch = self.scratch
        scratch.reserve(num_rows, cache.max_len, num_tokens)
        starts = np.array(lengths, dtype=np.int64)
        positions = (starts[:, None] + np.arange(num_tokens)).reshape(-1)
        self.team.run(
            commit_pass, self.kind, self.describe(self._layer, num_rows, num_tokens, num_tokens),
            np.float32(self.shape.eps), self._linears, self._norms, NO_NORM, self._embedding,
            self._fusion.address, self._fusion.num_steps, array_of(features.reshape(num_rows, -1)),
            tokens.reshape(-1).numpy(), counts.numpy(), array_of(states), roots.numpy(), scratch.x,
            scratch.joined, scratch.normed, scratch.heads, scratch.mixed_heads, scratch.gated, cache.array,
            slots.numpy(), starts, self.mask(batch, None)[0], positions, *tables, *scratch.arrays(),
        )  # fmt: skip

    def expand(
        self,
        topk: int,
        depth: int,
        cache: Cache,
        slots: Tensor,
        lengths: list[int],
        tables: tuple[Array, Array],
        states: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, parents, path scores [B, P] of all candidates down to `depth`."""
        assert isinstance(cache, PackedCache), "a twin reads its own kind of cache"
        batch = len(lengths)
        num_rows, pool = batch * topk, topk + (depth - 1) * topk * topk
        scratch = self.scratch
        scratch.reserve(num_rows, cache.max_len, depth * topk)
        tokens = torch.empty(batch, pool, dtype=torch.int64)
        parents = torch.empty(batch, pool, dtype=torch.int64)
        path_scores = torch.empty(batch, pool)
        width = self.shape.width
        self.team.run(
            expand_pass, self.kind, self.describe(self._layer, num_rows, topk, topk),
            np.float32(self.shape.eps), self._linears, self._norms, NO_NORM, self._embedding,
            self._head.address, self._head.num_steps, self._draft_to_target, topk, depth, array_of(states),
            tokens.numpy(), parents.numpy(), path_scores.numpy(),
            np.empty((num_rows, self._head.width), dtype=np.float32),
            np.empty((num_rows, topk), dtype=np.float32), np.empty((num_rows, topk), dtype=np.int64),
            np.zeros((2, batch, topk), dtype=np.int64), np.empty((batch, topk), dtype=np.float32),
            np.zeros((2, batch, topk, depth * topk), dtype=np.bool_), np.zeros(num_rows, dtype=np.int64),
            array_of(aligned_zeros((num_rows, width), self.dtype)),
            array_of(aligned_zeros((num_rows, width), self.dtype)),
            scratch.joined, scratch.normed, scratch.heads, scratch.mixed_heads, scratch.gated, cache.array,
            slots.numpy(), np.array(lengths, dtype=np.int64), np.zeros(num_rows, dtype=np.int64), *tables,
            *scratch.arrays(),
        )  # fmt: skip
        return tokens, parents, path_scores
