"""The engine on CUDA: the checks of the toy models again, and CPU against CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spectune.backend.reference import ReferenceBackend
from spectune.draft.checkpoint import load_head
from spectune.draft.eagle3 import Eagle3Drafter
from spectune.draft.ngram import NgramDrafter
from spectune.engine.kv_cache import KVCache, SlotView
from spectune.engine.sampling import RowSampling, choose, gumbel, splitmix64, uniform
from spectune.engine.scheduler import Engine
from spectune.engine.target import Target
from spectune.engine.verify import ForcedAcceptance
from spectune.records import Cell, Point, Request, RequestRecord, Sampling, SpecConfig
from tests.support.lossless import divergences
from tests.support.reference import PlainHead, run_target
from tests.support.toys import (
    CONFIGS,
    CPU,
    head_config,
    head_tensors,
    ragged_requests,
    random_drafter,
    request,
    save_head,
    save_target,
    tiny_target,
    tiny_weights,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA device"),
]

CUDA = torch.device("cuda")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 0.7, "seed": 3},
    "hot-nucleus": {"temperature": 1.0, "top_p": 0.95, "seed": 4},
}
EACH_SAMPLING = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)


def target_on(device: torch.device, dtype: torch.dtype = torch.float32) -> Target:
    config, weights = tiny_weights()
    return Target(config, weights, device=device, dtype=dtype)


def plain_of(engine: Engine, asks: list[Request]) -> tuple[tuple[RequestRecord, ...], dict[str, list[float]]]:
    records = engine.generate(asks, wants_margins=True).requests
    return records, engine.margins


def lossy(plain: Any, others: Any, margins: dict[str, list[float]]) -> list[Any]:
    return [d for d in divergences(plain, others, margins) if not d.is_near_tie]


def test_hash_and_uniforms_are_equal_on_both_devices() -> None:
    """The integers are equal bit for bit, and so are the floats made of them."""
    states = torch.arange(-50_000, 50_000) * 0x9E3779B97F4A7
    keys, indices = states[:500].unsqueeze(1), torch.arange(500).unsqueeze(1)
    lanes = torch.arange(400)

    assert torch.equal(splitmix64(states), splitmix64(states.to(CUDA)).cpu())
    on_cuda = uniform(keys.to(CUDA), indices.to(CUDA), lanes.to(CUDA)).cpu()
    assert torch.equal(uniform(keys, indices, lanes), on_cuda)


def test_noise_is_equal_to_rounding_on_both_devices() -> None:
    """Logarithms of the two devices differ in the last bits only."""
    keys, indices = torch.arange(8), torch.arange(8) + 3

    noise = gumbel(keys.to(CUDA), indices.to(CUDA), 5000).cpu()

    assert torch.allclose(gumbel(keys, indices, 5000), noise, rtol=1e-5, atol=1e-5)


@EACH_SAMPLING
def test_choices_are_equal_on_both_devices(sampling: dict[str, Any]) -> None:
    """The same logits give the same tokens."""
    asks = [request(f"r{i}", [1], **sampling) for i in range(4)]
    logits = torch.randn(4, 50, 300, generator=torch.Generator().manual_seed(0)) * 3
    indices = torch.arange(50).expand(4, -1)

    on_cuda = choose(logits.to(CUDA), RowSampling.of(asks, CUDA), indices.to(CUDA)).cpu()

    assert torch.equal(choose(logits, RowSampling.of(asks, CPU), indices), on_cuda)


@EACH_SAMPLING
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_cuda_engine_with_untrained_head_emits_plain_text(
    config: SpecConfig, sampling: dict[str, Any], batch_size: int, tmp_path: Path
) -> None:
    """Whatever the head drafts, the text is plain decoding's, near ties aside."""
    target = target_on(CUDA)
    asks = ragged_requests(9, 97, **sampling)
    plain, margins = plain_of(Engine(target, batch_size=batch_size, eos_ids=[2]), asks)
    drafter = random_drafter(target, tmp_path, 49)

    result = Engine(target, batch_size=batch_size, eos_ids=[2], drafter=drafter).generate(asks, config)

    assert [] == lossy(plain, result.requests, margins)
    assert [None] * 9 == [r.broken_identity() for r in result.requests]


@EACH_SAMPLING
def test_plain_text_on_cuda_is_that_of_the_cpu(sampling: dict[str, Any]) -> None:
    """The device changes no token, near ties aside."""
    asks = ragged_requests(6, 97, **sampling)
    plain, margins = plain_of(Engine(tiny_target(), batch_size=3, eos_ids=[2]), asks)

    on_cuda = Engine(target_on(CUDA), batch_size=3, eos_ids=[2]).generate(asks)

    assert [] == lossy(plain, on_cuda.requests, margins)


def test_ngram_on_cuda_emits_plain_text() -> None:
    """Prompt lookup runs on the device too."""
    target = target_on(CUDA)
    asks = [request(f"r{i}", [5, 6, 7, 5, 6, 7, 5 + i], max_tokens=20) for i in range(4)]
    plain, margins = plain_of(Engine(target, batch_size=3, eos_ids=[]), asks)
    engine = Engine(target, batch_size=3, eos_ids=[], drafter=NgramDrafter(CUDA))

    result = engine.generate(asks, SpecConfig.chain("ngram", 4))

    assert [] == lossy(plain, result.requests, margins)


@pytest.mark.parametrize(("topk", "depth"), [(1, 5), (2, 4), (4, 3)])
def test_drafts_on_cuda_equal_the_plain_head(topk: int, depth: int, tmp_path: Path) -> None:
    """The pool's tokens and scores are those of a float64 head that recomputes the text."""
    target, text = target_on(CUDA), [5, 40, 12, 7, 66, 30, 9]
    config = head_config(target.config, 49)
    tensors = head_tensors(config, target.config, seed=5)
    head = load_head(save_head(tmp_path, config, tensors), target.config)
    drafter = Eagle3Drafter(head, target)
    drafter.reserve(2, 64, CONFIGS[4])
    _, streams = run_target(*tiny_weights(), text[:-1])
    features = torch.cat([streams[i] for i in target.aux_layer_ids], -1)
    drafter.start(1, torch.tensor(text, device=CUDA), features.float().to(CUDA))

    pool = drafter.expand([1], [topk], depth)[0]

    embed = tiny_weights()[1]["model.embed_tokens.weight"]
    wanted = PlainHead(head, embed).pool(features, text[1:], topk, depth)
    assert [c.path[-1] for c in wanted] == pool.tokens[0].tolist()
    assert [c.score for c in wanted] == pytest.approx(pool.log_scores[0].tolist(), abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS[1::3], ids=lambda config: config.label)
def test_half_precision_records_add_up(config: SpecConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    """16-bit rounds keep their counts, with accepted drafts too."""
    target = target_on(CUDA, dtype)
    engine = Engine(target, batch_size=3, eos_ids=[], drafter=random_drafter(target, tmp_path, 97))

    result = engine.generate(ragged_requests(7, 97), config, forced=ForcedAcceptance(1.0))

    assert [None] * 7 == [r.broken_identity() for r in result.requests]
    assert all(round_.verify_s > 0 for round_ in result.rounds)


def test_reference_backend_runs_on_cuda(tmp_path: Path) -> None:
    """`--device cuda` loads target and head onto the device and writes one text for every method."""
    target_folder = save_target(tmp_path / "target", eos_token_id=0)
    config = head_config(tiny_target().config, 97)
    head = save_head(tmp_path / "head", config, head_tensors(config, tiny_target().config))
    backend = ReferenceBackend(
        model=str(target_folder), draft_model=str(head), device="cuda", dtype="float32"
    )
    cell = Cell(batch_size=2, context_tokens=0, temperature=0.0)
    points = [
        Point(config=spec, cell=cell, workload_hash="w", sampling=Sampling())
        for spec in (SpecConfig.off(), CONFIGS[1], CONFIGS[3], SpecConfig.chain("ngram", 3))
    ]

    with backend.open(backend.plan(points)[0]) as session:
        results = [session.run(point, ragged_requests(3, 97)) for point in points]

    assert 1 == len({tuple(r.output_ids for r in result.requests) for result in results})
    assert backend.fingerprint().device == torch.cuda.get_device_name()


def both_kernels(dtype: torch.dtype = torch.float32) -> tuple[Target, Target]:
    """One toy target without graphs and with them."""
    config, weights = tiny_weights()
    plain = Target(config, weights, device=CUDA, dtype=dtype, kernels="plain")
    return plain, Target(config, weights, device=CUDA, dtype=dtype)


@pytest.mark.parametrize("slots", [[0, 1, 2], [0, 3, 2]], ids=["leading", "holes"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_captured_pass_equals_the_plain_one(slots: list[int], shape: str) -> None:
    """First call, capture and replays over two buckets give the plain results, each with its own inputs."""
    plain, graphs = both_kernels()
    assert ("plain", "graphs") == (plain.kernels, graphs.kernels)
    caches = [target.new_cache(4, 600) for target in (plain, graphs)]
    text = torch.randint(3, 97, (4, 300), generator=torch.Generator().manual_seed(0)).to(CUDA)
    everywhere = torch.arange(300, device=CUDA).expand(4, -1)
    for target, cache in zip((plain, graphs), caches, strict=True):
        target.forward(text, everywhere, cache, SlotView(range(4), CUDA), [0] * 4, None)
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool().to(CUDA)
    depths = torch.tensor([0, 1, 2, 3] if shape == "chain" else [0, 1, 1, 2], device=CUDA)
    ancestors = None if shape == "chain" else tree.expand(3, -1, -1)
    kept = []

    for call, lengths in enumerate(
        [[50, 40, 30], [60, 61, 20], [9, 70, 200], [300, 40, 7], [290, 1, 80]] * 2
    ):
        ids = torch.randint(3, 97, (3, 4), generator=torch.Generator().manual_seed(call)).to(CUDA)
        positions = torch.tensor(lengths, device=CUDA).unsqueeze(1) + depths
        view = SlotView(slots, CUDA)
        kept.append(
            [
                target.forward(ids, positions, cache, view, lengths, ancestors)
                for target, cache in zip((plain, graphs), caches, strict=True)
            ]
        )

    assert graphs.static is not None
    assert isinstance(caches[1], KVCache)
    assert 2 == graphs.static.of(caches[1]).num_graphs
    for expected, actual in kept:
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(other, one, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [None, *CONFIGS[1::2]], ids=lambda c: "off" if c is None else c.label)
def test_text_is_the_same_with_and_without_graphs(config: SpecConfig | None, tmp_path: Path) -> None:
    """Greedy decoding with captured passes writes the plain pass's text, near ties aside."""
    plain, graphs = both_kernels()
    asks = ragged_requests(9, 97)
    expected, margins = plain_of(Engine(plain, batch_size=3, eos_ids=[2]), asks)
    drafter = random_drafter(graphs, tmp_path, 49)
    engine = Engine(graphs, batch_size=3, eos_ids=[2], drafter=drafter)

    result = engine.generate(asks, config)

    assert [] == lossy(expected, result.requests, margins)
    assert graphs.static is not None
    assert isinstance(engine.cache, KVCache)
    assert graphs.static.of(engine.cache).num_graphs > 0
