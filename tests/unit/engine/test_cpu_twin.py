"""The compiled passes against the plain ones, and against themselves in other company."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from spectune.draft.checkpoint import load_head
from spectune.draft.eagle3 import Eagle3Drafter
from spectune.engine import tree as trees_module
from spectune.engine import verify as verify_module
from spectune.engine.cpu import jit, trees
from spectune.engine.cpu.build import can_compile
from spectune.engine.cpu.packed import PackedCache, PackedWeight
from spectune.engine.cpu.scalar import exp, log
from spectune.engine.cpu.team import Team
from spectune.engine.cpu.tiles import has_avx512, pack, pack_int8, tile
from spectune.engine.cpu.twin import NO_NORM, LayerShape, Twin
from spectune.engine.kv_cache import SlotView
from spectune.engine.sampling import gumbel
from spectune.engine.scheduler import Engine
from spectune.engine.target import Target
from spectune.engine.tree import DraftPool, DraftTree, rerank
from spectune.engine.verify import match
from spectune.errors import UsageError
from spectune.records import SpecConfig
from tests.support.toys import CONFIGS, CPU, head_config, head_tensors, request, save_head, tiny_weights

needs_bf16 = pytest.mark.skipif(not has_avx512(), reason="this CPU has no AVX512")
STORAGES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)]


def pair(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Target, Target]:
    """One toy target plain and with its twin."""
    config, weights = tiny_weights(seed=3, **changes)
    plain = Target(config, weights, device=CPU, dtype=dtype, kernels="plain")
    fast = Target(config, weights, device=CPU, dtype=dtype)
    assert fast.twin is not None
    return plain, fast


def random_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, shape, generator=torch.Generator().manual_seed(seed))


def prefill(target: Target, ids: Tensor, max_len: int = 80) -> Any:
    """A cache that holds ids [B, T]."""
    cache = target.new_cache(ids.shape[0], max_len)
    positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
    target.forward(ids, positions, cache, SlotView(range(len(ids)), CPU), [0] * len(ids), None)
    return cache


SIBLINGS = torch.tensor(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
).bool()
DEPTHS = torch.tensor([0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"head_dim": 80},
        {"intermediate_size": 70, "hidden_size": 40},
        {"sliding_window": 9, "model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    ],
    ids=["toy", "no groups", "one key head", "wide heads", "odd sizes", "sliding window"],
)
@pytest.mark.parametrize("ancestors", [None, SIBLINGS], ids=["chain", "tree"])
def test_twin_gives_the_hidden_states_and_features_of_the_plain_pass(
    changes: dict[str, Any], ancestors: Tensor | None
) -> None:
    """After a prefill, five new tokens in two rows of unequal length come out alike in fp32."""
    plain, fast = pair(**changes)
    ids, new = random_ids(2, 23), random_ids(2, 5, seed=1)
    lengths = [23, 18]
    steps = torch.arange(5) if ancestors is None else DEPTHS
    positions = torch.tensor(lengths).unsqueeze(1) + steps
    mask = None if ancestors is None else ancestors.expand(2, -1, -1)
    found = [
        target.forward(new, positions, prefill(target, ids), SlotView([0, 1], CPU), lengths, mask)
        for target in (plain, fast)
    ]

    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(fast.logits(found[1][0]), plain.logits(found[0][0]), atol=5e-4, rtol=1e-4)


def test_twin_applies_biases_and_head_norms() -> None:
    """A Qwen-like target with biases on q, k, v and norms on query and key heads comes out alike."""
    config, weights = tiny_weights(
        seed=4, architectures=["Qwen3ForCausalLM"], model_type="qwen3", attention_bias=True
    )
    generator = torch.Generator().manual_seed(9)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}.self_attn."
        for name in "qkv":
            size = weights[f"{prefix}{name}_proj.weight"].shape[0]
            weights[f"{prefix}{name}_proj.bias"] = torch.randn(size, generator=generator)
        for name in "qk":
            weights[f"{prefix}{name}_norm.weight"] = 1 + 0.3 * torch.randn(
                config.head_dim, generator=generator
            )
    plain = Target(config, weights, device=CPU, dtype=torch.float32, kernels="plain")
    fast = Target(config, weights, device=CPU, dtype=torch.float32)
    ids = random_ids(3, 30)

    expected = plain.forward_text(ids, torch.tensor([30, 30, 30]))
    actual = fast.forward_text(ids, torch.tensor([30, 30, 30]))

    torch.testing.assert_close(actual[0], expected[0], atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(actual[1], expected[1], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("length", [7, 8], ids=["odd prefix", "even prefix"])
def test_a_token_has_the_same_bits_in_a_tree_a_batch_and_alone(dtype: torch.dtype, length: int) -> None:
    """Nodes of a tree, verified beside other rows, equal one-at-a-time decoding of their path bit by bit."""
    _, fast = pair(dtype)
    ids, new = random_ids(1, length), random_ids(1, 5, seed=1)
    alone = prefill(fast, ids)
    expected = [
        fast.forward(
            new[:, node : node + 1],
            torch.tensor([[length + place]]),
            alone,
            SlotView([0], CPU),
            [length + place],
            None,
        )
        for place, node in enumerate((0, 2, 4))
    ]
    crowd = fast.new_cache(7, 80)
    everywhere = torch.arange(length).expand(7, -1)
    texts = random_ids(7, length, seed=5)
    texts[3] = ids[0]
    fast.forward(texts, everywhere, crowd, SlotView(range(7), CPU), [0] * 7, None)
    found = fast.forward(
        new.expand(7, -1),
        (length + DEPTHS).expand(7, -1),
        crowd,
        SlotView(range(7), CPU),
        [length] * 7,
        SIBLINGS.expand(7, -1, -1),
    )

    for (hidden, features), node in zip(expected, (0, 2, 4), strict=True):
        assert torch.equal(hidden[0, 0], found[0][3, node])
        assert torch.equal(features[0, 0], found[1][3, node])
        assert torch.equal(fast.logits(hidden)[0, 0], fast.logits(found[0])[3, node])


@pytest.mark.skipif(not has_avx512(), reason="this CPU has no AVX512")
@pytest.mark.parametrize("num_rows", [1, 4, 6])
@pytest.mark.parametrize("inputs", [2, 34, 512, 1102])
@pytest.mark.parametrize("adds", [False, True])
def test_pairs_of_bf16_are_multiplied_without_a_product_for_them(
    num_rows: int, inputs: int, adds: bool
) -> None:
    """Widened halves give the sums of fp64, also behind the first 512 inputs and at an odd end."""
    multiply = tile("halves", num_rows, 4, adds=adds)

    @numba.njit
    def product(x, x_bytes, weights, steps, out, out_bytes):  # type: ignore[no-untyped-def]
        multiply(x, x_bytes, weights, steps, out, out_bytes, out, 0)

    rows = torch.randn(num_rows, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = torch.randn(64, inputs, generator=torch.Generator().manual_seed(2)).bfloat16()
    packed = pack(weight)
    out = torch.full((num_rows, 64), 3.0)

    product(rows.data_ptr(), 2 * inputs, packed.data_ptr(), inputs // 2, out.data_ptr(), 256)

    exact = rows.double() @ weight.double().T + (3 if adds else 0)
    assert torch.allclose(out.double(), exact, atol=1e-4, rtol=1e-5)


@needs_bf16
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bf16_speculation_writes_the_text_of_plain_decoding(tmp_path: Path, temperature: float) -> None:
    """Chains and trees of a random head change no token in bf16: there are no near ties to lose."""
    config, weights = tiny_weights(seed=5)
    target = Target(config, weights, device=CPU, dtype=torch.bfloat16)
    spec = head_config(config, 48)
    drafter = Eagle3Drafter(
        load_head(save_head(tmp_path / "head", spec, head_tensors(spec, config)), config), target
    )
    requests = [
        request(f"r{i}", random_ids(11 + i, seed=i).tolist(), max_tokens=40, temperature=temperature)
        for i in range(5)
    ]

    plain = Engine(target, batch_size=3, eos_ids=[]).generate(requests)

    for choice in CONFIGS:
        spoken = Engine(target, drafter=drafter, batch_size=3, eos_ids=[]).generate(requests, choice)
        assert [r.output_ids for r in plain.requests] == [r.output_ids for r in spoken.requests]


@pytest.mark.parametrize("topk", [1, 2, 4, 8])
def test_twin_of_a_head_grows_the_tree_of_the_plain_one(tmp_path: Path, topk: int) -> None:
    """After start and two commits, every candidate of five levels has the same token, parent and score."""
    plain, fast = pair()
    spec = head_config(plain.config, 48)
    head = load_head(save_head(tmp_path / "head", spec, head_tensors(spec, plain.config)), plain.config)
    features = torch.randn(2, 20, 96, generator=torch.Generator().manual_seed(1))
    tokens = random_ids(2, 21)
    pools = []
    for target in (plain, fast):
        drafter = Eagle3Drafter(head, target)
        drafter.reserve(2, 64, SpecConfig(method="eagle3", num_steps=5, topk=topk, num_draft_tokens=6))
        for slot in range(2):
            drafter.start(slot, tokens[slot, :13], features[slot, :12])
        drafter.commit([0, 1], tokens[:, 13:16], features[:, 12:15], torch.tensor([3, 2]))
        drafter.commit([0, 1], tokens[:, 16:17], features[:, 15:16], torch.tensor([1, 1]))
        pools += drafter.expand([0, 1], [topk], 5)

    expected, actual = pools
    assert torch.equal(expected.tokens, actual.tokens)
    assert torch.equal(expected.parents, actual.parents)
    assert torch.equal(expected.depths, actual.depths)
    torch.testing.assert_close(actual.log_scores, expected.log_scores, atol=1e-4, rtol=1e-4)


def random_tree(seed: int, num_nodes: int = 12) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(4, num_nodes, dtype=torch.int64)
    depths = torch.zeros(4, num_nodes, dtype=torch.int64)
    for node in range(1, num_nodes):
        parents[:, node] = torch.randint(0, node, (4,), generator=generator)
        depths[:, node] = depths.gather(1, parents[:, node : node + 1])[:, 0] + 1
    tokens = torch.arange(num_nodes).expand(4, -1).contiguous()  # no two children of a node alike
    valid = torch.rand(4, num_nodes, generator=generator) < 0.9
    valid[:, 0] = True
    for node in range(1, num_nodes):
        valid[:, node] &= valid.gather(1, parents[:, node : node + 1])[:, 0]
    return DraftTree(
        tokens=tokens, parents=parents, depths=depths, log_scores=torch.zeros(4, num_nodes), valid=valid
    )


@pytest.mark.parametrize("seed", range(8))
def test_loops_over_nodes_equal_the_plain_operators(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ancestors, accepted path and the choice of the best candidates agree with torch's on random trees."""
    tree = random_tree(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    children = [
        [n for n in range(1, 12) if tree.parents[b, n] == node] for b in range(4) for node in range(12)
    ]
    picks = [torch.randint(0, 13, (1,), generator=generator).item() for _ in children]
    choices = torch.tensor(
        [kids[pick % len(kids)] if kids and pick else 50 for kids, pick in zip(children, picks, strict=True)]
    ).view(4, 12)
    scores = torch.randn(4, 20, generator=generator).cumsum(1).neg().abs().neg().round(decimals=1)
    scores = scores.sort(1, descending=True).values  # a child stands behind its parent and below it
    behind = torch.stack([torch.randint(-1, max(1, i), (4,), generator=generator) for i in range(20)], 1)
    behind[:, 0] = -1
    pool = DraftPool(2, random_ids(4, 20), behind, torch.ones(4, 20, dtype=torch.int64), scores)
    roots = random_ids(4)

    fast = (tree.ancestors(), match(tree, choices), rerank(pool, roots, 9))
    monkeypatch.setattr(trees_module, "uses_kernels", lambda tensor: False)
    monkeypatch.setattr(verify_module, "uses_kernels", lambda tensor: False)
    plain = (tree.ancestors(), match(tree, choices), rerank(pool, roots, 9))

    assert torch.equal(plain[0], fast[0])
    for name in ("num_accepted", "path", "next_tokens"):
        assert torch.equal(getattr(plain[1], name), getattr(fast[1], name))
    for name in ("tokens", "parents", "depths", "log_scores"):
        assert torch.equal(getattr(plain[2], name), getattr(fast[2], name))


def test_moved_columns_are_read_where_they_went() -> None:
    """An accepted tree path moved to its place decodes on as if it had been written there."""
    _, fast = pair()
    ids, new = random_ids(2, 9), random_ids(2, 5, seed=1)
    slots = SlotView([0, 1], CPU)
    moved = prefill(fast, ids)
    fast.forward(new, (9 + DEPTHS).expand(2, -1), moved, slots, [9, 9], SIBLINGS.expand(2, -1, -1))
    moved.move(slots.index, torch.tensor([[9, 11, 13]] * 2), torch.tensor([[9, 10, 11]] * 2))
    written = prefill(fast, torch.cat([ids, new[:, [0, 2, 4]]], 1))
    following = random_ids(2, 1, seed=2)

    found = [
        fast.forward(following, torch.full((2, 1), 12), cache, slots, [12, 12], None)[0]
        for cache in (moved, written)
    ]

    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 13, 16])
def test_product_of_any_number_of_rows_is_torchs(dtype: torch.dtype, num_rows: int) -> None:
    """Products of odd widths with a bias agree with fp32 arithmetic on the same rounded numbers."""
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(150, 46, generator=generator).to(dtype)
    bias = torch.randn(150, generator=generator).to(dtype)
    rows = torch.randn(num_rows, 46, generator=generator).to(dtype)
    twin = Twin(toy_shape(46), dtype, joined=2, quantize=False)

    product = twin.output(rows, PackedWeight(weight, bias), NO_NORM, torch.float32)

    expected = rows.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(product.double(), expected, atol=1e-4, rtol=1e-4)


def toy_shape(width: int) -> LayerShape:
    return LayerShape(width=width, num_heads=1, num_kv_heads=1, dim=width, inner=width, window=0, eps=1e-5)


def test_int8_target_is_the_target_of_its_rounded_weights() -> None:
    """A quantised target equals a plain one over weights that are levels times scales."""
    config, weights = tiny_weights(seed=6, tie_word_embeddings=False)
    weights["lm_head.weight"] = torch.randn(97, 32, generator=torch.Generator().manual_seed(2))
    rounded = dict(weights)
    for name, weight in weights.items():
        if "proj" in name or name == "lm_head.weight":
            scale = weight.abs().amax(1, keepdim=True) / 127
            rounded[name] = (weight / scale).round() * scale
    plain = Target(config, rounded, device=CPU, dtype=torch.float32, kernels="plain")
    fast = Target(config, weights, device=CPU, dtype=torch.float32, quantization="int8")
    ids = random_ids(2, 17)

    expected = plain.logits(plain.forward_text(ids, torch.tensor([17, 17]))[0])
    actual = fast.logits(fast.forward_text(ids, torch.tensor([17, 17]))[0])

    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
    assert fast.weight_bytes * 4 == plain.weight_bytes


def test_int8_levels_meet_each_row_at_its_largest_weight() -> None:
    """Levels are symmetric: the largest weight of a row is 127 steps of its scale."""
    levels, scale = pack_int8(torch.tensor([[1.0, -2.0], [0.5, 0.25]]))

    assert [[64, -127], [127, 64]] == levels[0, :, :2].T.tolist()
    assert pytest.approx([2 / 127, 0.5 / 127]) == scale[:2].tolist()


def test_int8_without_a_twin_is_refused() -> None:
    """The plain pass has no 8-bit weights, and says which flags have them."""
    config, weights = tiny_weights()

    with pytest.raises(UsageError, match="--quantization int8"):
        Target(config, weights, device=CPU, dtype=torch.float32, kernels="plain", quantization="int8")


def test_shapes_without_pairs_fall_back_to_the_plain_pass() -> None:
    """An odd inner size cannot be read in pairs, so the target has no twin and still decodes."""
    config, weights = tiny_weights(intermediate_size=65)

    target = Target(config, weights, device=CPU, dtype=torch.float32)

    assert target.twin is None
    assert (1, 4, 32) == target.forward_text(random_ids(1, 4), torch.tensor([4]))[0].shape


def test_unknown_kernels_are_refused_by_name() -> None:
    """A misspelt choice of kernels names the ones there are."""
    config, weights = tiny_weights()

    with pytest.raises(UsageError, match="--kernels fast is unknown"):
        Target(config, weights, device=CPU, dtype=torch.float32, kernels="fast")


def test_half_precision_without_bf16_products_is_not_compiled() -> None:
    """fp16 has no compiled pass."""
    assert not can_compile(torch.float16)


def test_exp_and_log_are_as_right_as_fp32_allows() -> None:
    """The branch-free exp and log stay as near float64's as fp32 products of their arguments can."""
    for x in np.linspace(-80, 80, 2001).astype(np.float32):
        assert abs(exp(x) / math.exp(x) - 1) < (4 + 2 * abs(x)) * 2**-24
    for x in np.geomspace(1e-30, 1e30, 2001).astype(np.float32):
        assert abs(log(x) - math.log(x)) < 4 * 2**-23 * max(1.0, abs(math.log(x)))


def test_keyed_draw_takes_what_the_noise_of_sampling_says() -> None:
    """The compiled draw is the argmax of scores plus `gumbel`, and plain argmax where no noise is asked."""
    _, fast = pair()
    assert fast.draw is not None
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(40, 5000, generator=generator)
    keys = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    indices = torch.arange(40)
    noisy = torch.arange(40) % 4 > 0

    drawn = fast.draw(scores, keys, indices, noisy)

    noise = gumbel(keys, indices, 5000)
    assert torch.equal((scores + noise * noisy.unsqueeze(1)).argmax(-1), drawn)


def test_best_token_is_the_first_of_equals() -> None:
    """Of equal logits the lowest id wins, across blocks of outputs and threads."""
    config, weights = tiny_weights(tie_word_embeddings=False)
    weights["lm_head.weight"] = torch.zeros(97, 32)
    weights["lm_head.weight"][[40, 70, 96]] = 1.0
    target = Target(config, weights, device=CPU, dtype=torch.float32)

    assert [[40]] == target.best(torch.ones(1, 1, 32)).tolist()


def test_a_team_of_threads_does_every_call_once() -> None:
    """Two thousand small products by three threads in a row are all complete when they return."""
    twin = Twin(toy_shape(64), torch.float32, joined=2, quantize=False)
    twin.team = Team(3)
    twin.scratch = type(twin.scratch)(toy_shape(64), torch.float32, 3, 2)
    weight = torch.randn(640, 64, generator=torch.Generator().manual_seed(0))
    packed, row = PackedWeight(weight, None), torch.ones(1, 64)
    expected = twin.output(row, packed, NO_NORM, torch.float32)

    for _ in range(2000):
        assert torch.equal(expected, twin.output(row, packed, NO_NORM, torch.float32))
    torch.testing.assert_close(expected[0], weight.sum(1), atol=1e-4, rtol=1e-4)


def test_packed_cache_tells_its_size() -> None:
    """Columns are rounded up to whole blocks, and a token's bytes count keys and values of all layers."""
    cache = PackedCache(
        num_layers=3, num_slots=2, max_len=65, num_kv_heads=2, head_dim=64, dtype=torch.float32
    )

    assert 128 == cache.max_len
    assert 3 * 2 * 2 * 64 * 4 == cache.bytes_per_token


def test_ancestors_of_a_chain_are_all_before() -> None:
    """In a chain every node sees itself and all nodes before it."""
    parents = torch.tensor([[0, 0, 1, 2]])

    assert torch.equal(torch.ones(4, 4).tril().bool(), trees.ancestors(parents)[0])


A_PASS = """
import hashlib
import torch
from spectune.engine.kv_cache import SlotView
from spectune.engine.target import Target
from tests.support.toys import tiny_weights

config, weights = tiny_weights(seed=3, hidden_size=576, intermediate_size=640)
target = Target(config, weights, device=torch.device("cpu"), dtype=torch.float32)
assert target.twin is not None
cache, slots = target.new_cache(1, 64), SlotView([0], torch.device("cpu"))
ids, positions = torch.arange(3, 43).unsqueeze(0), torch.arange(40).unsqueeze(0)
hidden, features = target.forward(ids, positions, cache, slots, [0], None)
print(hashlib.sha256(hidden.numpy().tobytes() + features.numpy().tobytes()).hexdigest())
"""


def test_the_run_that_compiles_gives_the_bits_of_all_later_ones(tmp_path: Path) -> None:
    """A pass of a process that finds no compiled code equals that of one that loads it."""
    root = Path(__file__).resolve().parents[3]
    places = {"SPECTUNE_CACHE": str(tmp_path), "PYTHONPATH": str(root)}

    first, second = (
        subprocess.run(
            [sys.executable, "-c", A_PASS],
            env={**os.environ, **places},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(2)
    )

    assert len(first.strip()) == 64
    assert first == second


def test_that_kernels_are_compiled_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kernels that are not on disk are one sentence; what is on disk is none."""
    told: list[str] = []
    monkeypatch.setattr(jit, "_compiled_dir", lambda: tmp_path)
    monkeypatch.setattr(jit, "_compiler", jit._Compiler())
    jit.tell_compiling(told.append)

    try:
        assert jit.kernel(twice)(np.float32(1.5)) == 3.0
        assert jit.kernel(thrice)(np.float32(1.5)) == 4.5
        assert len(told) == 1
        jit.tell_compiling(told.append)
        assert jit.kernel(twice)(np.float32(2.5)) == 5.0
        assert len(told) == 1
    finally:
        jit._compiler.close()


def test_kernels_compile_here_where_no_other_process_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler process that ends at once costs nothing but the bits of this run."""
    monkeypatch.setattr(jit, "_compiled_dir", lambda: tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(jit, "_compiler", jit._Compiler())

    double = jit.kernel(twice)

    assert double(np.float32(1.5)) == 3.0


def twice(x: float) -> float:
    return 2 * x


def thrice(x: float) -> float:
    return 3 * x
