"""Replay along a text: exact against live decoding, for every configuration."""

from __future__ import annotations

import pytest

from spectune.engine.scheduler import Engine
from spectune.engine.trace import replay_text, trace
from spectune.engine.tree import rerank
from spectune.records import SpecConfig
from tests.support.toys import cyclic_pair, ragged_requests

CONFIGS = [
    SpecConfig.chain("eagle3", 3),
    SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=6),
    SpecConfig(method="eagle3", num_steps=4, topk=4, num_draft_tokens=16),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_replay_of_the_emitted_text_counts_the_live_steps(config: SpecConfig) -> None:
    """Teacher-forcing the text that decoding emitted gives the same accepted counts, step by step."""
    target, drafter = cyclic_pair()
    engine = Engine(target, drafter=drafter, batch_size=2, eos_ids=[])
    requests = ragged_requests(4, 16, temperature=1.0, seed=5)
    live = engine.generate(requests, config)

    texts = {r.request_id: r.output_ids for r in live.requests}
    replayed = replay_text(engine, requests, texts, config)

    assert [r.steps for r in live.requests] == [r.steps for r in replayed.requests]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
def test_trace_holds_the_tree_of_every_live_step(config: SpecConfig) -> None:
    """Hopping through the traced pools of the text gives the live accepted counts of every step."""
    target, drafter = cyclic_pair()
    engine = Engine(target, drafter=drafter, batch_size=3, eos_ids=[])
    requests = ragged_requests(3, 16, temperature=1.0, seed=6)
    live = engine.generate(requests, config)
    texts = {r.request_id: r.output_ids for r in live.requests}

    points = trace(engine, requests, texts, [1, 2, 4], config.num_steps)

    for record in live.requests:
        by_position = {point.num_outputs: point for point in points[record.request_id]}
        position, counts = 1, []
        while position < record.num_output_tokens:
            pool = by_position[position].pools[[1, 2, 4].index(config.topk)]
            accepted = _longest_match(pool, config, record.output_ids[position:])
            counts.append(accepted)
            position += accepted + 1
        assert [s.num_accepted for s in record.steps] == counts


def _longest_match(pool: object, config: SpecConfig, text: tuple[int, ...]) -> int:
    """Depth of the deepest node of the reranked tree whose path spells the text."""
    import torch

    tree = rerank(pool, torch.zeros(1, dtype=torch.int64), config.num_draft_tokens)  # type: ignore[arg-type]
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return max(len(path) for path in paths if path == text[: len(path)])
