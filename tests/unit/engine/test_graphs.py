"""The pass in static shapes against the plain one; without CUDA the same functions run uncaptured."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from spectune.engine.graphs import COLUMN_BUCKET, StaticPass, StaticPasses, StaticShape, static_shape
from spectune.engine.kv_cache import KVCache, SlotView
from spectune.engine.plain_pass import PlainPass
from spectune.engine.target import Target
from tests.support.toys import CPU, tiny_weights

MAX_LEN = 640
TREE = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
).bool()
TREE_DEPTHS = torch.tensor([0, 1, 1, 2, 2])
CHAIN_DEPTHS = torch.arange(5)
WINDOW: dict[str, Any] = {
    "sliding_window": 9,
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
}


def plain_pass(**changes: Any) -> tuple[Target, PlainPass]:
    config, weights = tiny_weights(seed=3, **changes)
    target = Target(config, weights, device=CPU, dtype=torch.float32, kernels="plain")
    assert target.plain is not None
    return target, target.plain


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def filled(target: Target, num_slots: int, length: int, max_len: int = MAX_LEN) -> KVCache:
    """A cache whose slots hold different random texts, and loud scratch past them."""
    cache = target.new_cache(num_slots, max_len)
    assert isinstance(cache, KVCache)
    cache.data.fill_(1e4)
    positions = torch.arange(length).expand(num_slots, -1)
    slots = SlotView(range(num_slots), CPU)
    target.forward(random_ids(num_slots, length, seed=7), positions, cache, slots, [0] * num_slots, None)
    return cache


def both(
    plain: PlainPass, static: StaticPass, cache: KVCache, slots: list[int], lengths: list[int], **call: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], KVCache]:
    """Results of one call by the plain pass on a copy of the cache and by the static one, and the copy."""
    other = KVCache(
        num_layers=cache.data.shape[0],
        num_slots=cache.num_slots,
        max_len=cache.max_len,
        num_kv_heads=cache.data.shape[3],
        head_dim=cache.data.shape[5],
        device=CPU,
        dtype=torch.float32,
    )
    other.data.copy_(cache.data)
    ids, depths, ancestors = call["ids"], call["depths"], call["ancestors"]
    positions = torch.tensor(lengths).unsqueeze(1) + depths
    view = SlotView(slots, CPU)
    expected = plain.forward(ids, positions, other, view, lengths, ancestors)
    return expected, static.forward(ids, positions, cache, view, lengths, ancestors), other


def assert_alike(expected: tuple[Tensor, Tensor], actual: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(other, one, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [{}, WINDOW], ids=["full", "sliding window"])
@pytest.mark.parametrize("ancestors", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("slots", "lengths"),
    [
        ([0, 1, 2], [40, 40, 40]),
        ([0, 1, 2], [40, 23, 31]),
        ([1, 2], [300, 17]),
        ([0, 3], [252, 251]),
        ([2], [530]),
    ],
    ids=["equal", "ragged", "not from the first slot", "holes, past one bucket", "last bucket"],
)
def test_static_pass_equals_the_plain_one(
    changes: dict[str, Any], ancestors: Tensor | None, slots: list[int], lengths: list[int]
) -> None:
    """Padding the columns to a bucket changes neither results nor what is stored."""
    target, plain = plain_pass(**changes)
    cache = filled(target, 4, 540)
    rows = len(slots)

    expected, actual, other = both(
        plain,
        StaticPass(plain),
        cache,
        slots,
        lengths,
        ids=random_ids(rows, 5),
        depths=CHAIN_DEPTHS if ancestors is None else TREE_DEPTHS,
        ancestors=None if ancestors is None else ancestors.expand(rows, -1, -1),
    )

    assert_alike(expected, actual)
    torch.testing.assert_close(cache.data, other.data, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[40, 40], [40, 12]], ids=["equal", "ragged"])
def test_one_token_a_row_equals_the_plain_pass_without_a_mask(lengths: list[int]) -> None:
    """Plain decoding, which needs no mask at equal lengths, gives the same with the padded columns hidden."""
    target, plain = plain_pass()
    cache = filled(target, 2, 60)

    expected, actual, _ = both(
        plain,
        StaticPass(plain),
        cache,
        [0, 1],
        lengths,
        ids=random_ids(2, 1),
        depths=torch.zeros(1, dtype=torch.int64),
        ancestors=None,
    )

    assert_alike(expected, actual)


def test_every_call_of_one_shape_reads_its_own_inputs() -> None:
    """Ids, positions, slots, lengths and ancestors of the call before leave no trace, nor do results change."""
    target, plain = plain_pass()
    cache, static = filled(target, 4, 60), StaticPass(plain)
    calls = [
        ([0, 2], [50, 41], TREE, TREE_DEPTHS, 0),
        ([3, 1], [20, 57], None, CHAIN_DEPTHS, 1),
        ([1, 3], [33, 33], TREE.flip(0, 1).tril().logical_or(torch.eye(5).bool()), TREE_DEPTHS, 2),
        ([0, 2], [50, 41], TREE, TREE_DEPTHS, 3),
    ]
    kept: list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = []

    for slots, lengths, ancestors, depths, seed in calls:
        expected, actual, _ = both(
            plain,
            static,
            cache,
            slots,
            lengths,
            ids=random_ids(2, 5, seed=seed),
            depths=depths,
            ancestors=None if ancestors is None else ancestors.expand(2, -1, -1),
        )
        kept.append((expected, actual))

    assert [StaticShape(2, 5, COLUMN_BUCKET, is_leading=False)] == static.shapes
    for expected, actual in kept:
        assert_alike(expected, actual)


def test_shapes_grow_with_buckets_not_with_lengths() -> None:
    """Decoding from 1 to 600 columns makes one shape a bucket, the last cut at the cache's end."""
    target, plain = plain_pass()
    cache, static = filled(target, 2, 10, max_len=600), StaticPass(plain)
    slots, ids = SlotView([0, 1], CPU), random_ids(2, 1)

    for length in range(1, 600, 7):
        static.forward(ids, torch.full((2, 1), length), cache, slots, [length, 1], None)

    assert [(2, 1, 256, True), (2, 1, 512, True), (2, 1, 600, True)] == static.shapes
    assert 0 == static.num_graphs


@pytest.mark.parametrize(
    ("longest", "num_columns"), [(0, 256), (251, 256), (252, 512), (507, 512), (508, 600), (595, 600)]
)
def test_columns_are_rounded_up_to_a_bucket_or_the_cache(longest: int, num_columns: int) -> None:
    """Five tokens after `longest` columns read the least multiple of 256 that holds them, at most max_len."""
    shape = static_shape(torch.zeros(1, 5), SlotView([0], CPU), longest, 600)

    assert StaticShape(1, 5, num_columns, is_leading=True) == shape


def test_longer_tables_of_rope_leave_positions_as_they_were() -> None:
    """A pass over a first cache is the same after a longer cache replaced the tables of positions."""
    target, plain = plain_pass()
    cache, static = filled(target, 1, 50, max_len=64), StaticPass(plain)
    slots, ids, positions = SlotView([0], CPU), random_ids(1, 2), torch.tensor([[50, 51]])
    before = static.forward(ids, positions, cache, slots, [50], None)

    target.new_cache(1, 4096)

    assert_alike(before, static.forward(ids, positions, cache, slots, [50], None))


def test_shapes_go_with_their_cache() -> None:
    """A cache has one static pass, does not share it, and is not kept alive by it."""
    target, plain = plain_pass()
    passes = StaticPasses(plain)
    first, second = filled(target, 1, 10), filled(target, 1, 10)
    slots, ids, positions = SlotView([0], CPU), random_ids(1, 1), torch.tensor([[10]])
    passes.of(first).forward(ids, positions, first, slots, [10], None)

    assert passes.of(first) is passes.of(first)
    assert [] == passes.of(second).shapes
    gc.disable()
    try:
        del first
        assert 1 == len(passes)
    finally:
        gc.enable()


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_a_target_on_the_cpu_has_no_static_passes(kernels: str) -> None:
    """Graphs are for CUDA: on a CPU the compiled twin or the plain pass decodes."""
    config, weights = tiny_weights()
    target = Target(config, weights, device=CPU, dtype=torch.float32, kernels=kernels)

    assert target.static is None
    assert target.kernels in ("compiled", "plain")
