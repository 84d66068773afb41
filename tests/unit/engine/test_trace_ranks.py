"""Recorded ranks: against full candidate pools, and against live decoding of every configuration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spectune.draft.along_text import HeadAlongText
from spectune.draft.checkpoint import load_head
from spectune.draft.eagle3 import Eagle3Drafter
from spectune.draft.ngram import NgramDrafter
from spectune.engine.drafter import Drafter
from spectune.engine.scheduler import Engine
from spectune.engine.target import Target
from spectune.engine.trace import trace as trace_pools
from spectune.engine.trace_path import TraceSpace
from spectune.engine.trace_record import HeadRecorder, LookupRecorder, record, trace_group
from spectune.engine.tree import DraftPool, rerank
from spectune.errors import StoreError, UsageError
from spectune.records import Request, SpecConfig
from spectune.replay.accepted import accepted_counts
from spectune.replay.rounds import by_request
from spectune.replay.sampled import sampled_chain
from spectune.store.trace_file import Trace
from tests.support.replay import compare
from tests.support.toys import head_config, head_tensors, ragged_requests, request, save_head, tiny_target

VOCAB = 14  # small, so that an untrained head is often right
SPACE = TraceSpace(
    topks=(1, 2, 3, 5), max_steps=5, max_draft_tokens=20, max_child_rank=6, vocab_slices=(12, 5)
)
NGRAM = (("prompt_lookup_max", 3), ("prompt_lookup_min", 1))
ABOUT: dict[str, dict[str, Any]] = {
    name: {} for name in ("fingerprint", "workload", "sampling", "provenance")
}


class Pair:
    """A toy target, its untrained head as a live drafter and as a head along texts."""

    def __init__(self, folder: Path, *, scale: float = 0.5) -> None:
        self.target: Target = tiny_target(3, scale=scale, vocab_size=VOCAB)
        config = head_config(self.target.config, VOCAB - 2)
        head = load_head(
            save_head(folder, config, head_tensors(config, self.target.config)), self.target.config
        )
        self.drafter = Eagle3Drafter(head, self.target)
        self.head = HeadAlongText(
            head, self.target, num_children=max(SPACE.topks) + 1, vocab_slices=SPACE.vocab_slices
        )

    def engine(self, drafter: Drafter | None = None, *, eos_ids: Sequence[int] = ()) -> Engine:
        return Engine(self.target, drafter=drafter, batch_size=3, eos_ids=list(eos_ids))

    @property
    def recorder(self) -> HeadRecorder:
        return HeadRecorder(self.head, SPACE, method="eagle3", draft_model="toy")

    def trace(self, requests: Sequence[Request], **engine: Any) -> Trace:
        lookup = LookupRecorder(
            NgramDrafter(self.target.device), method="ngram", options=NGRAM, max_steps=SPACE.max_steps
        )
        return trace_group(self.engine(**engine), requests, [self.recorder, lookup], ABOUT)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("head"))


def some_configs(topk: int) -> list[SpecConfig]:
    """Every depth of a topk with node budgets from the smallest to the largest."""
    if topk == 1:
        return [SpecConfig.chain("eagle3", k) for k in range(1, SPACE.max_steps + 1)]
    return [
        SpecConfig(method="eagle3", num_steps=d, topk=topk, num_draft_tokens=n)
        for d in range(1, SPACE.max_steps + 1)
        for n in (2, 3, 4, 6, 9, 14, 20)
        if n - 1 <= topk + (d - 1) * topk**2
    ]


def accepted_in_pool(pool: DraftPool, config: SpecConfig, text: Sequence[int]) -> int:
    """Depth of the deepest node of the engine's own selection that spells the text."""
    size = config.topk + (config.num_steps - 1) * config.topk**2
    columns = (getattr(pool, name)[:, :size] for name in ("tokens", "parents", "depths", "log_scores"))
    tree = rerank(DraftPool(pool.topk, *columns), torch.zeros(1, dtype=torch.int64), config.num_draft_tokens)
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return max(len(path) for path in paths if list(path) == list(text[: len(path)]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ranks_tell_what_the_full_pool_of_every_configuration_accepts(pair: Pair, temperature: float) -> None:
    """All topks and depths, many budgets, all positions: equal to reranking the drafter's own pools."""
    requests = ragged_requests(2, VOCAB, temperature=temperature, seed=5)
    traced = pair.trace(requests)
    texts = dict(zip(traced.request_ids, _texts(traced), strict=True))
    points = trace_pools(pair.engine(pair.drafter), requests, texts, SPACE.topks, SPACE.max_steps)

    for column, topk in enumerate(SPACE.topks):
        configs = some_configs(topk)
        counts = accepted_counts(traced, configs)
        first = 0
        for name, text in texts.items():
            for point in points[name][: len(text) - 1]:
                rest = text[point.num_outputs :]
                expected = [accepted_in_pool(point.pools[column], config, rest) for config in configs]
                assert expected == counts[:, first + point.num_outputs - 1].tolist()
            first += len(text) - 1
    assert traced.drafters[0].path.max() >= 3  # the toy is right often enough to say something


def _texts(traced: Trace) -> list[list[int]]:
    ends = np.cumsum(traced.num_outputs)
    return [traced.output_ids[e - n : e].tolist() for e, n in zip(ends, traced.num_outputs, strict=True)]


LIVE = [
    SpecConfig.chain("eagle3", 1),
    SpecConfig.chain("eagle3", 4),
    SpecConfig(method="eagle3", num_steps=2, topk=5, num_draft_tokens=4),
    SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=8),
    SpecConfig(method="eagle3", num_steps=5, topk=3, num_draft_tokens=20),
    SpecConfig(method="eagle3", num_steps=5, topk=2, num_draft_tokens=3),
    SpecConfig.chain("ngram", 1, options=NGRAM),
    SpecConfig.chain("ngram", 5, options=NGRAM),
]


@pytest.mark.parametrize("config", LIVE, ids=lambda config: config.label)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replayed_steps_are_the_live_ones(pair: Pair, config: SpecConfig, temperature: float) -> None:
    """Every step record of live decoding, with EOS and max_tokens cutting blocks, comes out of the trace."""
    requests = ragged_requests(8, VOCAB, temperature=temperature, seed=2)
    traced = pair.trace(requests, eos_ids=[4, 9])
    drafter = NgramDrafter(pair.target.device) if config.method == "ngram" else pair.drafter

    live = pair.engine(drafter, eos_ids=[4, 9]).generate(requests, config).requests

    assert [] == compare(traced, config, live)
    counts = by_request(traced, [config])
    for index, record_ in enumerate(live):
        steps = record_.steps
        assert len(steps) == counts.num_steps[0, index]
        assert sum(step.num_emitted for step in steps) == counts.num_emitted[0, index]
        assert sum(step.cut is not None for step in steps) == counts.num_cut[0, index]
        assert sum(step.num_verified for step in steps) == counts.num_verified[0, index]
        assert record_.finish_reason == traced.finish_reasons[index]


def test_nodes_of_many_roots_and_topks_share_a_pass(pair: Pair) -> None:
    """At most one pass a level and one for each deeper level of the beams, however many positions."""
    requests = ragged_requests(6, VOCAB, temperature=1.0, seed=7)
    before = pair.head.num_calls

    traced = pair.trace(requests)

    calls = pair.head.num_calls - before
    one_by_one = traced.num_positions * len(SPACE.topks) * (SPACE.max_steps - 1)
    assert calls <= 1 + 2 * (SPACE.max_steps - 1)
    assert calls * 10 <= one_by_one


def test_text_of_another_engine_is_traced_as_given(pair: Pair) -> None:
    """Forced texts give the trace that decoding would have given had it emitted them."""
    requests = ragged_requests(3, VOCAB, temperature=1.0, seed=3)
    own = pair.trace(requests)
    texts: dict[str, Sequence[int]] = dict(zip(own.request_ids, _texts(own), strict=True))
    cold = [request(r.request_id, list(r.prompt_ids), max_tokens=r.sampling.max_tokens) for r in requests]

    forced = trace_group(pair.engine(), cold, [pair.recorder], ABOUT, texts)

    assert own.output_ids.tolist() == forced.output_ids.tolist()
    configs = [config for topk in SPACE.topks for config in some_configs(topk)]
    assert (accepted_counts(own, configs) == accepted_counts(forced, configs)).all()


def test_a_request_without_a_text_is_named(pair: Pair) -> None:
    """A missing or empty text is a usage error that names the request."""
    with pytest.raises(UsageError, match="toy-0"):
        trace_group(pair.engine(), ragged_requests(1, VOCAB), [pair.recorder], ABOUT, {"toy-0": []})


def test_one_token_outputs_have_no_positions(pair: Pair) -> None:
    """A request that ends with its first token leaves no root, and the trace stays whole."""
    requests = [request("one", [3, 4, 5], max_tokens=1), request("two", [3, 4, 5], max_tokens=1)]

    traced = pair.trace(requests)

    assert 0 == traced.num_positions
    assert [[0, 0]] == by_request(traced, [SpecConfig.chain("eagle3", 2)]).num_steps.tolist()


def test_draft_probabilities_are_kept_of_warm_texts_only(pair: Pair) -> None:
    """min(1, q/p) at every depth within the text, 0 past its end; greedy traces have none."""
    warm = pair.trace(ragged_requests(2, VOCAB, temperature=1.0, seed=3)).drafters[0].sampled
    cold = pair.trace(ragged_requests(2, VOCAB)).drafters[0].sampled

    assert cold is None
    assert warm is not None
    assert ((warm >= 0) & (warm <= 1)).all()
    assert [0.0] * 4 == warm[-1, 1:].tolist()


def test_a_finished_group_is_not_run_again(pair: Pair, tmp_path: Path) -> None:
    """A second run reads the saved parts; one that was lost is made again, to the same trace."""
    requests = ragged_requests(5, VOCAB, temperature=1.0, seed=3)
    asked: list[int] = []

    def run() -> Trace:
        return record(
            pair.engine(),
            requests,
            [pair.recorder],
            ABOUT,
            group_size=2,
            parts_dir=tmp_path,
            on_part=lambda done, of: asked.append(done),
        )

    first = run()
    calls = pair.head.num_calls
    second = run()
    assert calls == pair.head.num_calls
    (tmp_path / "part-0001.npz").write_bytes(b"half")
    third = run()

    assert calls < pair.head.num_calls
    assert [2, 4, 5] * 3 == asked
    for other in (second, third):
        assert first.request_ids == other.request_ids
        assert (first.drafters[0].path == other.drafters[0].path).all()


def test_parts_of_another_run_are_refused(pair: Pair, tmp_path: Path) -> None:
    """Parts with other settings are never mixed into a trace."""
    requests = ragged_requests(2, VOCAB)
    more = {"group_size": 2, "parts_dir": tmp_path}
    record(pair.engine(), requests, [pair.recorder], ABOUT, **more)

    with pytest.raises(StoreError, match="other settings"):
        record(pair.engine(), requests, [pair.recorder], ABOUT | {"sampling": {"seed": 1}}, **more)


def test_a_head_is_no_lookup_drafter(pair: Pair) -> None:
    """A drafter that needs features cannot be recorded from tokens alone."""
    with pytest.raises(UsageError, match="text alone"):
        LookupRecorder(pair.drafter, method="eagle3", options=(), max_steps=3)


def test_exact_ties_are_listed(pair: Pair, tmp_path: Path) -> None:
    """A head whose two best tokens always score the same lists a tie of margin 0 where a chain cuts."""
    config = head_config(pair.target.config, VOCAB - 2)
    tensors = head_tensors(config, pair.target.config)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:1].expand(VOCAB - 2, -1).clone()  # all equal
    head = load_head(save_head(tmp_path, config, tensors), pair.target.config)
    along = HeadAlongText(head, pair.target, num_children=max(SPACE.topks) + 1)
    recorder = HeadRecorder(along, SPACE, method="eagle3", draft_model="toy")

    traced = trace_group(pair.engine(), ragged_requests(2, VOCAB), [recorder], ABOUT)

    ties = traced.drafters[0].ties
    assert set(range(traced.num_positions)) >= set(ties.position.tolist())
    assert len(ties.position)
    assert 0.0 == ties.margin.max()


@pytest.mark.slow
def test_expected_steps_of_sampled_drafts_are_those_of_live_sampled_drafts(pair: Pair) -> None:
    """Mean steps over 120 texts: from plain samples, and from chains whose drafts were drawn; z below 4."""
    requests = [request(f"toy-{i}", [3, 5, 7, 4], temperature=1.0, max_tokens=10) for i in range(120)]
    config = SpecConfig.chain("eagle3", 3, options=(("draft_sampling", "probabilistic"),))
    engine = Engine(pair.target, drafter=pair.drafter, batch_size=40, eos_ids=[])

    traced = trace_group(engine, requests, [pair.recorder], ABOUT)
    live = engine.generate(requests, config).requests

    expected = sampled_chain(traced, 3).num_steps
    counted = np.array([len(record_.steps) for record_ in live])
    error = np.sqrt((expected.var() + counted.var()) / len(requests))
    assert abs(expected.mean() - counted.mean()) < 4 * error
    assert expected.mean() < 8  # of at most 9: drafts are kept often enough to tell
