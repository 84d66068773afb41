"""Losslessness and record keeping of the engine on tiny random models in fp32."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spectune.draft.eagle3 import Eagle3Drafter
from spectune.draft.ngram import NgramDrafter
from spectune.engine.scheduler import Engine
from spectune.engine.target import Target
from spectune.records import Request, SpecConfig
from tests.support.toys import (
    CONFIGS,
    CPU,
    cyclic_pair,
    ragged_requests,
    random_drafter,
    request,
    tiny_target,
)

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 0.7, "seed": 3},
    "hot-nucleus": {"temperature": 1.0, "top_p": 0.95, "seed": 4},
    "top-k-min-p": {"temperature": 0.9, "top_k": 20, "min_p": 0.02, "seed": 5},
}


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Eagle3Drafter]:
    """A random target and an untrained head for it."""
    target = tiny_target()
    return target, random_drafter(target, tmp_path_factory.mktemp("head"), 49)


@functools.cache
def plain_texts(target: Target, sampling: str) -> list[tuple[int, ...]]:
    """Texts of plain decoding, one at a time; the batch does not change them, which is tested below."""
    records = Engine(target, batch_size=1, eos_ids=[2]).generate(asks(sampling)).requests
    return [record.output_ids for record in records]


def asks(sampling: str) -> list[Request]:
    """Nine ragged requests: some slots are used again, whatever their number."""
    return [
        replace(ask, sampling=replace(ask.sampling, max_tokens=ask.sampling.max_tokens // 2))
        for ask in ragged_requests(9, 97, **SAMPLINGS[sampling])
    ]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
@pytest.mark.parametrize(("batch_size", "count"), [(1, 2), (3, 5), (8, 9)], ids=["alone", "three", "eight"])
def test_engine_with_untrained_head_emits_plain_text(
    drafted: tuple[Target, Eagle3Drafter], config: SpecConfig, sampling: str, batch_size: int, count: int
) -> None:
    """Whatever the head drafts, the text is the one of plain decoding under the same seed."""
    target, drafter = drafted
    engine = Engine(target, batch_size=batch_size, eos_ids=[2], drafter=drafter)

    result = engine.generate(asks(sampling)[:count], config)

    assert plain_texts(target, sampling)[:count] == [r.output_ids for r in result.requests]
    assert [None] * count == [r.broken_identity() for r in result.requests]
    assert {config.num_draft_tokens - 1} == {s.num_verified for r in result.requests for s in r.steps}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.label)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_engine_with_partly_right_head_emits_plain_text(config: SpecConfig, batch_size: int) -> None:
    """Where some drafts are accepted and some refused, ragged over the batch, the text is plain's."""
    target, drafter = cyclic_pair()
    requests = ragged_requests(5, 16, temperature=1.0, seed=8)
    plain = Engine(target, batch_size=batch_size, eos_ids=[2]).generate(requests)
    engine = Engine(target, batch_size=batch_size, eos_ids=[2], drafter=drafter)

    result = engine.generate(requests, SpecConfig.from_dict(config.to_dict() | {"topk": min(config.topk, 4)}))

    accepted = {s.num_accepted for r in result.requests for s in r.steps}
    assert [r.output_ids for r in plain.requests] == [r.output_ids for r in result.requests]
    assert {0, 1} <= accepted


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.topk <= 7], ids=lambda config: config.label)
def test_engine_with_few_tokens_accepts_by_chance_and_emits_plain_text(
    config: SpecConfig, tmp_path: Path
) -> None:
    """Seven tokens in all: an untrained head is often right, by any sibling and at any depth."""
    target = tiny_target(vocab_size=7, scale=0.2)
    requests = ragged_requests(6, 7, temperature=1.0, seed=2, max_tokens=12)
    plain = Engine(target, batch_size=4, eos_ids=[]).generate(requests)
    engine = Engine(target, batch_size=4, eos_ids=[], drafter=random_drafter(target, tmp_path, 7))

    result = engine.generate(requests, config)

    assert [r.output_ids for r in plain.requests] == [r.output_ids for r in result.requests]
    assert max(s.num_accepted for r in result.requests for s in r.steps) >= min(2, config.num_steps)


@pytest.mark.parametrize("config", CONFIGS[-3:], ids=lambda config: config.label)
def test_engine_rows_of_different_settings_keep_their_own_text(
    drafted: tuple[Target, Eagle3Drafter], config: SpecConfig
) -> None:
    """Greedy and sampled rows in one batch write what each writes alone."""
    target, drafter = drafted
    mixed = [asks(name)[index] for index, name in enumerate([*SAMPLINGS, *SAMPLINGS])]
    alone = [Engine(target, eos_ids=[2]).generate([ask]).requests[0].output_ids for ask in mixed]

    result = Engine(target, batch_size=4, eos_ids=[2], drafter=drafter).generate(mixed, config)

    assert alone == [r.output_ids for r in result.requests]


def test_engine_plain_text_is_independent_of_batch_and_order() -> None:
    """Sampling is keyed by prompt and seed, so neither batch size nor order changes a text."""
    target = tiny_target()
    requests = ragged_requests(6, 97, temperature=1.0, seed=9)

    one = Engine(target, batch_size=1, eos_ids=[2]).generate(requests)
    many = Engine(target, batch_size=4, eos_ids=[2]).generate(requests[::-1])

    by_name = {r.request_id: r.output_ids for r in many.requests}
    assert {r.request_id: r.output_ids for r in one.requests} == by_name


@pytest.mark.parametrize("config", [SpecConfig.chain("eagle3", k) for k in (1, 3, 5)], ids=lambda c: c.label)
def test_perfect_head_accepts_every_draft(config: SpecConfig) -> None:
    """A head that knows the target's walk gives K + 1 tokens a step, with no decay along the text."""
    target, drafter = cyclic_pair()
    engine = Engine(target, drafter=drafter, eos_ids=[])

    result = engine.generate([request("walk", [1, 6, 11], max_tokens=121)], config)

    steps = result.requests[0].steps
    assert {config.num_steps + 1} == {s.num_emitted for s in steps[:-1]}


def test_perfect_head_in_a_tree_reaches_depth_plus_one() -> None:
    """The oracle's path is always inside the dynamic tree."""
    target, drafter = cyclic_pair()
    engine = Engine(target, drafter=drafter, batch_size=2, eos_ids=[])
    config = SpecConfig(method="eagle3", num_steps=4, topk=2, num_draft_tokens=8)
    requests = [request("a", [1, 6], max_tokens=51), request("b", [2, 7, 12], max_tokens=40)]

    result = engine.generate(requests, config)

    assert {5} == {s.num_emitted for r in result.requests for s in r.steps[:-1]}


def test_adversarial_head_accepts_nothing_and_stays_lossless() -> None:
    """A head that is always wrong costs time and changes no token."""
    target, drafter = cyclic_pair(shift=3)
    ask = [request("walk", [1, 6, 11], max_tokens=30)]
    plain = Engine(target, eos_ids=[]).generate(ask)

    result = Engine(target, drafter=drafter, eos_ids=[]).generate(ask, SpecConfig.chain("eagle3", 3))

    assert plain.requests[0].output_ids == result.requests[0].output_ids
    assert {0} == {s.num_accepted for s in result.requests[0].steps}


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_engine_eos_inside_accepted_block_cuts_there(position: int) -> None:
    """Tokens after an accepted end-of-text are neither emitted nor counted."""
    target, drafter = cyclic_pair()
    walk = [(6 + 5 * i) % 16 for i in range(12)]  # the prompt ends in 1
    eos = walk[1 + position]  # the first token comes from prefill, then a block of four

    result = Engine(target, drafter=drafter, eos_ids=[eos]).generate(
        [request("walk", [12, 1], max_tokens=12)], SpecConfig.chain("eagle3", 3)
    )

    record = result.requests[0]
    assert tuple(walk[: 2 + position]) == record.output_ids
    assert ("eos", position + 1) == (record.finish_reason, record.steps[-1].num_emitted)
    assert min(position + 1, 3) == record.steps[-1].num_accepted


def test_engine_max_tokens_inside_block_cuts_there() -> None:
    """A block never overshoots max_tokens."""
    target, drafter = cyclic_pair()

    result = Engine(target, drafter=drafter, eos_ids=[]).generate(
        [request("walk", [12, 1], max_tokens=7)], SpecConfig.chain("eagle3", 3)
    )

    record = result.requests[0]
    assert (7, "length") == (record.num_output_tokens, record.finish_reason)
    assert [4, 2] == [s.num_emitted for s in record.steps]
    assert [None, "length"] == [s.cut for s in record.steps]


def test_ngram_drafter_in_engine_emits_plain_text() -> None:
    """Prompt lookup through the same protocol is lossless too, and does find the loop of the walk."""
    target, _ = cyclic_pair()
    ask = [request("walk", [1, 6, 11], max_tokens=40), request("other", [2, 7], max_tokens=33)]
    plain = Engine(target, batch_size=2, eos_ids=[]).generate(ask)
    engine = Engine(target, batch_size=2, eos_ids=[], drafter=NgramDrafter(CPU))

    result = engine.generate(ask, SpecConfig.chain("ngram", 4))

    assert [r.output_ids for r in plain.requests] == [r.output_ids for r in result.requests]
    assert 5 == max(s.num_emitted for r in result.requests for s in r.steps)


@pytest.mark.parametrize("chunk", [1, 7])
def test_prefill_in_chunks_gives_the_same_drafts(tmp_path: Path, chunk: int) -> None:
    """Where a prompt is cut for prefill changes neither the text nor one accepted count."""
    target = tiny_target()
    requests = ragged_requests(5, 97)
    config = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=8)

    def run(prefill_chunk: int) -> list[tuple[int, ...]]:
        engine = Engine(
            target, drafter=random_drafter(target, tmp_path, 97), prefill_chunk=prefill_chunk, eos_ids=[]
        )
        records = engine.generate(requests, config).requests
        return [r.output_ids + tuple(s.num_accepted for s in r.steps) for r in records]

    assert run(512) == run(chunk)


def test_draft_is_a_pure_function_of_the_prefix(tmp_path: Path) -> None:
    """What is drafted at a prefix does not depend on the rounds that led there (chain 5 or off)."""
    target = tiny_target()
    ask = ragged_requests(1, 97, max_tokens=30)
    config = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=8)

    def pools(through: SpecConfig) -> dict[int, list[int]]:
        drafter = random_drafter(target, tmp_path, 97)
        engine = Engine(target, drafter=drafter, eos_ids=[])
        seen: dict[int, list[int]] = {}

        def look(slots: object) -> None:
            seen[drafter._lengths[0]] = drafter.expand([0], [2], config.num_steps)[0].tokens[0].tolist()

        engine.generate(ask, through, on_round=look)
        return seen

    every, some = pools(SpecConfig.off()), pools(SpecConfig.chain("eagle3", 5))
    assert len(some) > 3
    assert {length: every[length] for length in some} == some
