"""The target's pass in static shapes: on CUDA one captured graph a shape, elsewhere the same calls.

In: what `Target.forward` takes; the host knows the lengths and picks the bucket of columns from them.
Out: the plain pass's results. Decode rounds are launch-bound on a GPU: a layer is some thirty small
kernels, and a replay launches all of them at once. Prefill is not, and stays with the plain pass.

    columns   0 ........ len_b-1 | len_b .. len_b + T-1 | ........ 255 | 256 ...
              committed            this pass, by mask     hidden         not read
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from spectune.engine.kv_cache import KVCache, SlotView
from spectune.engine.plain_pass import PlainPass
from spectune.engine.uploads import is_remote, on_device

COLUMN_BUCKET = 256  # columns are rounded up to a multiple: max_len / 256 graphs for each B and T
MAX_STATIC_TOKENS = 32  # longer passes are prefill, which comes in too many shapes


class StaticShape(NamedTuple):
    """What a captured pass is made for; rows of `is_leading` are the slots 0 .. B-1, read without a copy."""

    num_rows: int
    num_tokens: int
    num_columns: int
    is_leading: bool


class StaticPass:
    """Passes over one cache, by shape. Results are clones: they outlive the next call.

    A shape is captured when it is met for the second time; its first call runs uncaptured, so that a
    shape of one prompt alone costs no graph. Graphs share one memory pool, which is right as long as
    one thread replays them one after the other.
    """

    def __init__(self, plain: PlainPass) -> None:
        self._plain = plain
        self._passes: dict[StaticShape, _ShapedPass] = {}
        self._pool: Any = None  # torch keeps the type of its handles private

    @property
    def shapes(self) -> list[StaticShape]:
        """The shapes met so far."""
        return list(self._passes)

    @property
    def num_graphs(self) -> int:
        """Shapes that are captured; none where there is no CUDA."""
        return sum(shaped.graph is not None for shaped in self._passes.values())

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        slots: SlotView,
        lengths: list[int],
        ancestors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Arguments and results as in `Target.forward`; always the same cache, which is not kept alive."""
        shape = static_shape(ids, slots, max(lengths), cache.max_len)
        shaped = self._passes.get(shape)
        is_new = shaped is None
        if shaped is None:
            shaped = self._passes[shape] = _ShapedPass(self._plain, shape, ids.device)
        shaped.fill(ids, positions, slots, lengths, ancestors)
        if is_new or not is_remote(ids):
            return shaped.call(cache)
        if shaped.graph is None:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            shaped.capture(cache, self._pool)
        return shaped.replay()


class StaticPasses:
    """The static pass of each cache that a target has; graphs go when their cache does."""

    def __init__(self, plain: PlainPass) -> None:
        self._plain = plain
        self._by_cache: WeakKeyDictionary[KVCache, StaticPass] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._by_cache)

    def of(self, cache: KVCache) -> StaticPass:
        """The static pass of a cache, made when it is first asked for."""
        found = self._by_cache.get(cache)
        if found is None:
            found = self._by_cache[cache] = StaticPass(self._plain)
        return found


def static_shape(ids: Tensor, slots: SlotView, longest: int, max_len: int) -> StaticShape:
    """The shape of a pass over ids [B, T] after at most `longest` columns of a cache of `max_len`."""
    num_rows, num_tokens = ids.shape
    needed = longest + num_tokens
    assert needed <= max_len, f"a pass needs {needed} columns, the cache has {max_len}"
    num_columns = min(-(-needed // COLUMN_BUCKET) * COLUMN_BUCKET, max_len)
    return StaticShape(num_rows, num_tokens, num_columns, slots.span == (0, num_rows))


class _ShapedPass:
    """Input buffers of one shape, and on CUDA the graph that reads them."""

    def __init__(self, plain: PlainPass, shape: StaticShape, device: torch.device) -> None:
        batch, width = shape.num_rows, shape.num_tokens
        self._plain, self._shape = plain, shape
        self._ids = torch.zeros(batch, width, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._ancestors = torch.zeros(batch, width, width, dtype=torch.bool, device=device)
        self._chain = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        self._slots = SlotView(range(batch), device)
        if not shape.is_leading:
            self._slots.span = None  # read by the index, whose values each call fills in
        self.graph: torch.cuda.CUDAGraph | None = None
        self._results: tuple[Tensor, Tensor] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def fill(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: SlotView,
        lengths: Sequence[int],
        ancestors: Tensor | None,
    ) -> None:
        """Put a call's inputs into the buffers, every one of them; the host waits for none."""
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        self._slots.index.copy_(slots.index)
        self._lengths.copy_(on_device(lengths, self._lengths.device))
        self._ancestors.copy_(self._chain if ancestors is None else ancestors)

    def call(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Run the pass on the buffers."""
        return self._plain.run(
            self._ids,
            self._positions,
            cache,
            self._slots,
            self._lengths,
            self._ancestors,
            num_columns=self._shape.num_columns,
        )

    def capture(self, cache: KVCache, pool: Any) -> None:
        """Record the pass; the warm-up before it stores the columns that the replay stores again."""
        current = torch.cuda.current_stream(self._ids.device)
        side = torch.cuda.Stream(self._ids.device)  # type: ignore[no-untyped-call]  # torch's gap
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self.call(cache)
        current.wait_stream(side)
        # a longer cache replaces the rope's tables; the graph goes on reading those it was made with
        self._tables = self._plain.rope.device_tables
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self._results = self.call(cache)

    def replay(self) -> tuple[Tensor, Tensor]:
        """Launch the graph; other graphs of the pool may reuse its results' memory, hence clones."""
        assert self.graph is not None, "replay() comes after capture()"
        assert self._results is not None
        self.graph.replay()
        hidden, features = self._results
        return hidden.clone(), features.clone()
