"""The fast twins of `Target.forward` and of a draft head's layer: same arguments, same results."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numba.core.errors import NumbaError
from torch import Tensor

from spectune.engine.cpu.choices import PART, best_pass, draw_pass
from spectune.engine.cpu.layers import output_pass, target_pass
from spectune.engine.cpu.packed import Array, PackedCache, PackedWeight, array_of
from spectune.engine.cpu.team import Team
from spectune.engine.cpu.tiles import BLOCK, MAX_ROWS, aligned_zeros
from spectune.engine.kv_cache import Cache

_NO_KIND = np.zeros(1, dtype=np.float32)
NO_NORM = np.zeros(0, dtype=np.float32)
_QUERIES = 24  # rows of scores a thread keeps: four full tiles


@functools.cache
def team(num_threads: int) -> Team:
    return Team(num_threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """Sizes that every layer of a model shares."""

    width: int
    num_heads: int
    num_kv_heads: int
    dim: int
    inner: int
    window: int
    eps: float


class Scratch:
    """Buffers of a pass, kept and grown; one of each for every thread where threads do not share it."""

    def __init__(self, shape: LayerShape, dtype: torch.dtype, num_threads: int, joined: int) -> None:
        self._shape, self._dtype, self._threads, self._joined = shape, dtype, num_threads, joined
        self._rows = self._columns = self._nodes = 0

    def reserve(self, num_rows: int, num_columns: int, num_nodes: int) -> None:
        """Room for `num_rows` rows, cache rows of `num_columns` and trees of `num_nodes` new columns."""
        shape, threads = self._shape, self._threads
        if num_rows > self._rows:
            self._rows = num_rows
            self.x = self._make(num_rows, shape.width)
            self.normed = self._make(threads, num_rows, shape.width)
            self.joined = self._make(threads, num_rows, self._joined)
            self.heads = self._make(num_rows, (shape.num_heads + 2 * shape.num_kv_heads) * shape.dim)
            self.mixed_heads = self._make(num_rows, shape.num_heads * shape.dim)
            self.gated = self._make(num_rows, shape.inner)
            self.sums = array_of(aligned_zeros((threads, MAX_ROWS, BLOCK), torch.float32))
        padded = -(-shape.dim // BLOCK) * BLOCK
        if num_columns > self._columns:
            self._columns = num_columns
            queries = max(_QUERIES, shape.num_heads // shape.num_kv_heads)
            self.rotated = array_of(aligned_zeros((threads, padded), torch.float32))
            self.queries = self._make(threads, queries, padded)
            self.scores = array_of(aligned_zeros((threads, queries, num_columns), torch.float32))
            self.weights = self._make(threads, queries, num_columns)
            self.mixed = array_of(aligned_zeros((threads, queries, padded), torch.float32))
        if num_nodes > self._nodes:
            self._nodes = num_nodes
            self.tail = self._make(threads, (num_nodes + 4) // 2 * 2 * padded)

    def _make(self, *shape: int) -> Array:
        return array_of(aligned_zeros(shape, self._dtype))

    def arrays(self) -> tuple[Array, ...]:
        return (self.rotated, self.queries, self.scores, self.weights, self.mixed, self.tail, self.sums)


class Twin:
    """What target and draft head share: shape, scratch, team, and how a pass is described."""

    def __init__(self, shape: LayerShape, dtype: torch.dtype, *, joined: int, quantize: bool) -> None:
        self.shape, self.dtype = shape, dtype
        self.team = team(torch.get_num_threads())
        self.scratch = Scratch(shape, dtype, self.team.num_threads, joined)
        kinds = {torch.bfloat16: np.uint16, torch.float32: np.float32}
        self.kind = np.zeros(1, dtype=np.int8 if quantize else kinds[dtype])
        self._no_mask = np.zeros((1, 1, 1), dtype=np.bool_)

    def new_cache(self, num_layers: int, num_slots: int, max_len: int) -> PackedCache:
        """A packed cache for `num_slots` rows of at most `max_len` columns."""
        shape = self.shape
        return PackedCache(
            num_layers=num_layers,
            num_slots=num_slots,
            max_len=max_len,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.dim,
            dtype=self.dtype,
        )

    def describe(self, weights: list[PackedWeight], num_rows: int, num_tokens: int, num_new: int) -> Array:
        """The `shape` argument of `layer_pass`."""
        s = self.shape
        qkv, out, gate_up, down = weights
        return np.array(
            [
                num_rows, num_tokens, num_new, s.width, s.num_heads, s.num_kv_heads, s.dim, s.inner,
                qkv.num_steps, gate_up.num_steps, out.num_steps, down.num_steps, s.window,
            ],
            dtype=np.int64,
        )  # fmt: skip

    def mask(self, num_rows: int, ancestors: Tensor | None) -> tuple[Array, bool]:
        if ancestors is not None:
            return ancestors.contiguous().numpy(), True
        if self._no_mask.shape[0] < num_rows:
            self._no_mask = np.zeros((num_rows, 1, 1), dtype=np.bool_)
        return self._no_mask, False

    def output(self, x: Tensor, weight: PackedWeight, norm: Array, dtype: torch.dtype) -> Tensor:
        """x [rows, in], normed where `norm` is given, times a weight -> [rows, out]."""
        num_rows = x.shape[0]
        self.scratch.reserve(num_rows, BLOCK, 1)
        out = torch.empty(num_rows, weight.width, dtype=dtype)
        self.team.run(
            output_pass, self.kind, array_of(x), num_rows, norm, np.float32(self.shape.eps),
            weight.address, weight.num_steps, self.scratch.normed, array_of(out), weight.width,
            self.scratch.sums,
        )  # fmt: skip
        return out


def probe(dtype: torch.dtype) -> bool:
    """Whether one small product agrees with torch's own."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 32, generator=generator).to(dtype)
    rows = torch.randn(7, 32, generator=generator).to(dtype)
    shape = LayerShape(width=32, num_heads=1, num_kv_heads=1, dim=32, inner=32, window=0, eps=1e-5)
    try:
        twin = Twin(shape, dtype, joined=2, quantize=False)
        product = twin.output(rows, PackedWeight(weight, None), NO_NORM, torch.float32)
    except (NumbaError, RuntimeError, OSError):
        return False
    return torch.allclose(product, rows.float() @ weight.float().T, atol=1e-3, rtol=1e-3)


class TargetTwin(Twin):
    """All layers of a target in one call."""

    def __init__(
        self,
        shape: LayerShape,
        dtype: torch.dtype,
        *,
        layers: list[list[PackedWeight]],
        norms: Tensor,
        head_norms: Tensor,
        embedding: Tensor,
        head: PackedWeight,
        quantize: bool = False,
    ) -> None:
        super().__init__(shape, dtype, joined=2, quantize=quantize)
        self.layers, self.head = layers, head
        self._linears = np.array([[weight.row for weight in layer] for layer in layers], dtype=np.int64)
        self._norms = norms.float().contiguous().numpy()
        self._head_norms = head_norms.float().contiguous().numpy()
        self._embedding = array_of(embedding.contiguous())

    @property
    def weight_bytes(self) -> int:
        return sum(weight.num_bytes for layer in self.layers for weight in layer) + self.head.num_bytes

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: Cache,
        slots: Tensor,
        lengths: list[int],
        ancestors: Tensor | None,
        tables: tuple[Array, Array],
        aux_layer_ids: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """As `Target.forward`; `tables` are cosine and signed sine by position, fp32."""
        assert isinstance(cache, PackedCache), "a twin reads its own kind of cache"
        batch, num_tokens = ids.shape
        num_rows = batch * num_tokens
        scratch = self.scratch
        scratch.reserve(num_rows, cache.max_len, num_tokens)
        hidden = torch.empty(batch, num_tokens, self.shape.width, dtype=self.dtype)
        features = torch.empty(batch, num_tokens, len(aux_layer_ids) * self.shape.width, dtype=self.dtype)
        aux = np.full(len(self.layers), -1, dtype=np.int64)
        aux[list(aux_layer_ids)] = np.arange(len(aux_layer_ids))
        mask, is_tree = self.mask(batch, ancestors)
        self.team.run(
            target_pass, self.kind, self.describe(self.layers[0], num_rows, num_tokens, num_tokens),
            np.float32(self.shape.eps), self._linears, self._norms, self._head_norms, aux, self._embedding,
            ids.reshape(-1).numpy(), scratch.x, scratch.normed, scratch.heads, scratch.mixed_heads,
            scratch.gated, array_of(features).reshape(num_rows, -1), array_of(hidden).reshape(num_rows, -1),
            cache.array, slots.numpy(), np.array(lengths, dtype=np.int64), mask, is_tree,
            positions.reshape(-1).numpy(), *tables, *scratch.arrays(),
        )  # fmt: skip
        return hidden, features

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., V] of final hidden states [..., H]."""
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        out = self.output(rows, self.head, NO_NORM, torch.float32)
        return out.view(*hidden.shape[:-1], -1)

    def best(self, hidden: Tensor) -> Tensor:
        """Most likely next tokens [...] of final hidden states [..., H]; no logits are stored."""
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        num_rows, threads = rows.shape[0], self.team.num_threads
        self.scratch.reserve(num_rows, BLOCK, 1)
        tops = np.empty((threads, num_rows), dtype=np.float32)
        ids = torch.empty(threads, num_rows, dtype=torch.int64)
        self.team.run(
            best_pass, self.kind, array_of(rows), num_rows, self.head.address, self.head.num_steps,
            self.head.width, self.scratch.sums, tops, ids.numpy(),
        )  # fmt: skip
        return ids[0].view(hidden.shape[:-1])

    def draw(self, scores: Tensor, keys: Tensor, indices: Tensor, noisy: Tensor) -> Tensor:
        """Tokens [...] drawn from unnormalised log-probabilities scores [..., V] with keyed Gumbel noise.

        keys, indices, noisy: [...]; rows that are not noisy take their best token.
        """
        rows = scores.reshape(-1, scores.shape[-1])
        shape = (self.team.num_threads, rows.shape[0])
        tops, ids = np.empty(shape, dtype=np.float32), torch.empty(shape, dtype=torch.int64)
        self.team.run(
            draw_pass, _NO_KIND, rows.contiguous().numpy(), keys.reshape(-1).numpy(),
            indices.reshape(-1).numpy(), noisy.reshape(-1).numpy(),
            np.empty((self.team.num_threads, PART), dtype=np.float32), tops, ids.numpy(),
        )  # fmt: skip
        return ids[0].view(scores.shape[:-1])
