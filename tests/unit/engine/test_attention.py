"""Masks, grouped attention, the cache and the target's pass, against loops over single sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spectune.engine.attention import additive_mask, grouped_attention, visible_columns
from spectune.engine.kv_cache import KVCache, SlotView
from spectune.engine.target import default_aux_layers
from spectune.engine.tree import DraftTree
from tests.support.reference import run_target
from tests.support.toys import CPU, tiny_target, tiny_weights


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_visible_columns_are_the_prefix_and_the_ancestors() -> None:
    """Prefixes of 2 and 0 columns, a root with two children: the mask by hand."""
    parents = torch.tensor([[0, 0, 0]] * 2)
    tree = DraftTree(parents, parents, parents, parents.float(), parents >= 0)

    visible = visible_columns(torch.tensor([2, 0]), tree.ancestors(), 5)

    by_hand = [
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0]],  # columns 3 and 4 are past this row
    ]
    assert by_hand == visible.int().tolist()


def test_grouped_attention_equals_loops_over_heads() -> None:
    """Each query head attends to the key head of its group: softmax(q·k/√d) v, position by position."""
    batch, tokens, heads, kv_heads, columns, dim = 2, 3, 4, 2, 5, 8
    query = random(batch, tokens, heads, dim)
    keys, values = (
        random(batch, kv_heads, columns, dim, seed=1),
        random(batch, kv_heads, columns, dim, seed=2),
    )
    visible = torch.rand(batch, tokens, columns, generator=torch.Generator().manual_seed(3)) < 0.6
    visible[..., 0] = True

    mixed = grouped_attention(query, keys, values, additive_mask(visible, heads // kv_heads, torch.float32))

    for b in range(batch):
        for t in range(tokens):
            for h in range(heads):
                seen = visible[b, t].nonzero().flatten()
                key, value = keys[b, h // 2, seen].double(), values[b, h // 2, seen].double()
                weights = (key @ query[b, t, h].double() / math.sqrt(dim)).softmax(0)
                got = mixed[b, t, h * dim : (h + 1) * dim].double()
                assert torch.allclose(weights @ value, got, atol=1e-5)


def test_grouped_attention_without_a_mask_sees_every_column() -> None:
    """No mask means an all-visible one."""
    query, keys, values = random(1, 1, 4, 8), random(1, 2, 6, 8, seed=1), random(1, 2, 6, 8, seed=2)
    mask = additive_mask(torch.ones(1, 1, 6, dtype=torch.bool), 2, torch.float32)

    bare, masked = grouped_attention(query, keys, values, None), grouped_attention(query, keys, values, mask)

    assert torch.allclose(masked, bare, atol=1e-6)


def make_cache() -> KVCache:
    return KVCache(
        num_layers=2, num_slots=4, max_len=6, num_kv_heads=2, head_dim=3, device=CPU, dtype=torch.float32
    )


def written(cache: KVCache, slots: list[int], columns: list[list[int]]) -> Tensor:
    """Write distinct numbers at columns of slots in layer 1; returns them [B, T, 2, kv_heads, d]."""
    index = torch.tensor(columns)
    block = torch.arange(index.numel() * 12.0).view(*index.shape, 2, 2, 3) + 1
    cache.write(1, cache.flat(torch.tensor(slots), index), block)
    return block


@pytest.mark.parametrize("slots", [[1, 2], [2, 0], [3, 1]], ids=["span", "descending", "apart"])
def test_cache_reads_what_was_written_in_each_slot(slots: list[int]) -> None:
    """Keys and values come back by slot and column, whether the slots lie side by side or not."""
    cache = make_cache()
    block = written(cache, slots, [[0, 1, 2], [2, 4, 5]])

    keys, values = cache.read(1, SlotView(slots, CPU), 6)

    for row, columns in enumerate([[0, 1, 2], [2, 4, 5]]):
        for t, column in enumerate(columns):
            assert torch.equal(block[row, t, 0], keys[row, :, column])
            assert torch.equal(block[row, t, 1], values[row, :, column])
    others = [slot for slot in range(4) if slot not in slots]
    assert 0 == cache.read(1, SlotView(others, CPU), 6)[0].abs().sum()
    assert 0 == cache.read(0, SlotView(slots, CPU), 6)[0].abs().sum()


def test_cache_move_gathers_before_it_overwrites() -> None:
    """An accepted path 0, 2, 3 becomes columns 0, 1, 2 although sources and targets overlap."""
    cache = make_cache()
    block = written(cache, [2], [[1, 2, 3, 4]])

    cache.move(torch.tensor([2]), torch.tensor([[1, 3, 4]]), torch.tensor([[1, 2, 3]]))

    keys, values = cache.read(1, SlotView([2], CPU), 6)
    for column, node in [(1, 0), (2, 2), (3, 3)]:
        assert torch.equal(block[0, node, 0], keys[0, :, column])
        assert torch.equal(block[0, node, 1], values[0, :, column])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="grouped-heads"),
        pytest.param({"num_key_value_heads": 4}, id="all-heads"),
        pytest.param({"num_key_value_heads": 1, "head_dim": 12}, id="one-kv-head-of-another-width"),
        pytest.param({"model_type": "mistral", "sliding_window": 5}, id="sliding-window"),
    ],
)
def test_target_text_pass_equals_the_plain_reference(changes: dict[str, Any]) -> None:
    """Logits and captured streams of a text equal float64 loops without a cache, whatever the heads."""
    target = tiny_target(**changes)
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(4))

    hidden, features = target.forward_text(ids, torch.tensor([9, 9]))

    for row in range(2):
        logits, streams = run_target(*tiny_weights(**changes), ids[row].tolist())
        wanted = torch.cat([streams[i] for i in (2, 4, 5)], -1)
        assert torch.allclose(wanted.float(), features[row], atol=1e-4)
        assert torch.allclose(logits.float(), target.logits(hidden[row]), atol=1e-4)


@pytest.mark.parametrize(("num_layers", "expected"), [(7, (2, 3, 4)), (30, (2, 15, 27)), (32, (2, 16, 29))])
def test_default_aux_layers_are_low_middle_and_high(num_layers: int, expected: tuple[int, ...]) -> None:
    """The streams before layers 2, L//2 and L-3, as the published heads read them."""
    assert expected == default_aux_layers(num_layers)


@pytest.mark.parametrize("chunks", [[9], [1] * 9, [4, 5], [8, 1]], ids=str)
def test_target_pass_in_chunks_equals_one_pass(chunks: list[int]) -> None:
    """The cache carries a text over any split into passes."""
    target = tiny_target()
    ids = torch.randint(3, 97, (1, 9), generator=torch.Generator().manual_seed(5))
    whole, whole_features = target.forward_text(ids, torch.tensor([9]))
    cache, view, begin, parts = target.new_cache(2, 16), SlotView([1], CPU), 0, []

    for size in chunks:
        positions = torch.arange(begin, begin + size).unsqueeze(0)
        parts.append(target.forward(ids[:, begin : begin + size], positions, cache, view, [begin], None))
        begin += size

    assert torch.allclose(whole, torch.cat([hidden for hidden, _ in parts], 1), atol=1e-5)
    assert torch.allclose(whole_features, torch.cat([f for _, f in parts], 1), atol=1e-5)


def test_target_tree_pass_scores_each_node_after_its_own_path() -> None:
    """Ragged rows, a tree: each node's logits are those of prefix and path alone as a text."""
    target = tiny_target()
    prefixes = [[5, 6, 7, 8], [9, 10]]
    parents = [0, 0, 0, 1, 1, 3]
    tokens = [[20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34, 35]]
    depths = [0, 1, 1, 2, 2, 3]
    tree = tree_of(tokens, parents, depths)
    cache = target.new_cache(3, 32)
    for slot, prefix in zip((2, 0), prefixes, strict=True):
        ids, positions = torch.tensor([prefix]), torch.arange(len(prefix)).unsqueeze(0)
        target.forward(ids, positions, cache, SlotView([slot], CPU), [0], None)
    lengths = [len(prefix) for prefix in prefixes]

    hidden, features = target.forward(
        tree.tokens,
        torch.tensor(lengths).unsqueeze(1) + tree.depths,
        cache,
        SlotView([2, 0], CPU),
        lengths,
        tree.ancestors(),
    )

    for row, prefix in enumerate(prefixes):
        for node in range(6):
            path, above = [tokens[row][node]], node
            while above:
                above = parents[above]
                path.insert(0, tokens[row][above])
            logits, streams = run_target(*tiny_weights(), prefix + path)
            wanted = torch.cat([streams[i][-1] for i in (2, 4, 5)])
            assert torch.allclose(logits[-1].float(), target.logits(hidden[row, node]), atol=1e-4)
            assert torch.allclose(wanted.float(), features[row, node], atol=1e-4)


def tree_of(tokens: list[list[int]], parents: list[int], depths: list[int]) -> DraftTree:
    rows = len(tokens)
    return DraftTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor([parents] * rows),
        depths=torch.tensor([depths] * rows),
        log_scores=torch.zeros(rows, len(parents)),
        valid=torch.ones(rows, len(parents), dtype=torch.bool),
    )
