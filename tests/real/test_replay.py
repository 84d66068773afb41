"""Replay on the default target with the shipped head in fp32: equal to live decoding, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from spectune.backend.heads import shipped_heads
from spectune.records import Sampling, SpecConfig
from tests.bench.replay_exact import SHIPPED, Bench
from tests.support.replay import compare

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.skipif(SHIPPED not in shipped_heads(), reason="no head is shipped for the default target"),
]

CONFIGS = [
    SpecConfig.chain("eagle3", 4),
    SpecConfig(method="eagle3", num_steps=4, topk=3, num_draft_tokens=9),
    SpecConfig(method="eagle3", num_steps=6, topk=8, num_draft_tokens=16),
]


@pytest.fixture(scope="module")
def bench(default_target_dir: Any) -> Bench:
    del default_target_dir  # fetched
    return Bench("float32", batch_size=4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "seeded"])
def test_replayed_steps_are_the_live_ones_on_real_prompts(bench: Bench, sampling: dict[str, Any]) -> None:
    """Four prompts of four categories: every step but those at a listed tie below 1e-5."""
    requests = bench.requests(4, Sampling(max_tokens=16, **sampling))
    traced = bench.trace(requests)

    for config in CONFIGS:
        live = bench.engine(config).generate(requests, config).requests
        found = compare(traced, config, live)

        assert [] == [difference for difference in found if not difference.is_listed]
