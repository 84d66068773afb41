"""The EAGLE-3 drafter against a float64 head that recomputes one text at a time, without a cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from spectune.draft.checkpoint import load_head
from spectune.draft.eagle3 import Eagle3Drafter
from spectune.engine.kv_cache import SlotView
from spectune.engine.sampling import RowSampling
from spectune.engine.scheduler import Engine, RowView
from spectune.engine.step import Batch, step
from spectune.engine.target import Target
from spectune.engine.tree import DraftPool
from spectune.engine.verify import ForcedAcceptance
from spectune.errors import InfeasibleConfig
from spectune.records import SpecConfig
from tests.support.reference import PlainHead, run_target
from tests.support.toys import (
    CPU,
    head_config,
    head_tensors,
    ragged_requests,
    request,
    save_head,
    tiny_target,
    tiny_weights,
)

TREE = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=8)
NO_SAMPLING = RowSampling.of([], CPU)
TEXTS = [[5, 40, 12, 7, 66, 30, 9], [80, 3, 21], [14, 15, 92, 65, 35]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A drafter and the plain head of the same weights."""

    target: Target
    drafter: Eagle3Drafter
    plain: PlainHead

    def features(self, text: Sequence[int]) -> Tensor:
        """Plain features [T, 3H] of a text."""
        _, streams = run_target(*tiny_weights(), list(text))
        return torch.cat([streams[i] for i in self.target.aux_layer_ids], -1)

    def start(self, texts: Sequence[list[int]], slots: Sequence[int]) -> None:
        """Give the drafter texts whose last token is the root."""
        for slot, text in zip(slots, texts, strict=True):
            self.drafter.start(slot, torch.tensor(text), self.features(text[:-1]).float())

    def candidates(self, text: Sequence[int], topk: int, depth: int) -> tuple[list[Any], list[float]]:
        """Paths and scores that the plain head drafts after a text."""
        pool = self.plain.pool(self.features(text[:-1]), list(text[1:]), topk, depth)
        return [candidate.path for candidate in pool], [candidate.score for candidate in pool]


def make_pair(
    folder: Path, draft_vocab: int = 49, *, slots: int = 3, own_embedding: bool = False, **keys: Any
) -> Pair:
    target = tiny_target()
    config = head_config(target.config, draft_vocab, **keys)
    tensors = head_tensors(config, target.config, seed=5)
    if own_embedding:
        generator = torch.Generator().manual_seed(6)
        tensors["embed_tokens.weight"] = torch.randn(97, 32, generator=generator)
    head = load_head(save_head(folder, config, tensors), target.config)
    drafter = Eagle3Drafter(head, target)
    drafter.reserve(slots, 64, SpecConfig(method="eagle3", num_steps=5, topk=4, num_draft_tokens=8))
    embed = tensors.get("embed_tokens.weight", tiny_weights()[1]["model.embed_tokens.weight"])
    return Pair(target, drafter, PlainHead(head, embed))


def pool_paths(pool: DraftPool, row: int) -> list[tuple[int, ...]]:
    """The text of each candidate of a row."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(pool.tokens[row].tolist(), pool.parents[row].tolist(), strict=True):
        paths.append((paths[parent] if parent >= 0 else ()) + (token,))
    return paths


HEADS: dict[str, dict[str, Any]] = {
    "small-vocabulary": {},
    "whole-vocabulary": {"draft_vocab": 97},
    "wide-heads-other-base": {"head_dim": 12, "num_key_value_heads": 1, "rope_theta": 300.0},
    "own-embedding": {"own_embedding": True},
    "norm-before-residual": {"norm_before_residual": True},
}
EACH_HEAD = pytest.mark.parametrize("how", HEADS.values(), ids=HEADS)


@EACH_HEAD
def test_chain_equals_the_plain_head(how: dict[str, Any], tmp_path: Path) -> None:
    """Four greedy drafts and their scores are those of a recomputed text."""
    pair = make_pair(tmp_path, **how)
    pair.start(TEXTS[:1], [0])

    tree = pair.drafter.propose([0], SpecConfig.chain("eagle3", 4), NO_SAMPLING)

    paths, scores = pair.candidates(TEXTS[0], 1, 4)
    assert [TEXTS[0][-1], *paths[-1]] == tree.tokens[0].tolist()
    assert [0.0, *scores] == pytest.approx(tree.log_scores[0].tolist(), abs=1e-4)


@EACH_HEAD
@pytest.mark.parametrize(("topk", "depth"), [(2, 4), (4, 3)])
def test_pool_equals_the_plain_head(topk: int, depth: int, how: dict[str, Any], tmp_path: Path) -> None:
    """Every candidate of the beam has the path and the score of a recomputed text."""
    pair = make_pair(tmp_path, **how)
    pair.start(TEXTS[:1], [0])

    pool = pair.drafter.expand([0], [topk], depth)[0]

    paths, scores = pair.candidates(TEXTS[0], topk, depth)
    assert paths == pool_paths(pool, 0)
    assert scores == pytest.approx(pool.log_scores[0].tolist(), abs=1e-4)
    assert [len(path) for path in paths] == pool.depths[0].tolist()


def test_drafts_stay_inside_the_draft_vocabulary(tmp_path: Path) -> None:
    """Draft ids are mapped to the target's: with every second token kept, all are even."""
    pair = make_pair(tmp_path)
    pair.start(TEXTS, [0, 1, 2])

    pool = pair.drafter.expand([0, 1, 2], [4], 3)[0]

    assert {0} == set((pool.tokens % 2).flatten().tolist())


@pytest.mark.parametrize("slots", [[0, 1, 2], [2, 0, 1]], ids=["in-order", "shuffled"])
@pytest.mark.parametrize("config", [SpecConfig.chain("eagle3", 4), TREE], ids=lambda config: config.label)
def test_batched_rows_draft_as_single_ones(config: SpecConfig, slots: list[int], tmp_path: Path) -> None:
    """Ragged texts side by side, in any slots, draft what each drafts alone."""
    pair = make_pair(tmp_path)
    pair.start(TEXTS, slots)

    together = pair.drafter.propose(slots, config, NO_SAMPLING)

    for row, text in enumerate(TEXTS):
        pair.start([text], [0])
        alone = pair.drafter.propose([0], config, NO_SAMPLING)
        assert together.tokens[row].tolist() == alone.tokens[0].tolist()
        assert together.parents[row].tolist() == alone.parents[0].tolist()
        assert torch.allclose(together.log_scores[row], alone.log_scores[0], atol=1e-5)


def test_drafting_twice_gives_the_same_tree(tmp_path: Path) -> None:
    """What a draft wrote on its way is no part of the text."""
    pair = make_pair(tmp_path)
    pair.start(TEXTS[:1], [1])
    first = pair.drafter.propose([1], TREE, NO_SAMPLING)
    pair.drafter.propose([1], SpecConfig.chain("eagle3", 5), NO_SAMPLING)

    again = pair.drafter.propose([1], TREE, NO_SAMPLING)

    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.log_scores, again.log_scores)


def test_reused_slot_has_forgotten_its_text(tmp_path: Path) -> None:
    """A second text in a slot drafts as in a fresh one."""
    pair = make_pair(tmp_path)
    pair.start(TEXTS[2:], [0])
    fresh = pair.drafter.propose([0], TREE, NO_SAMPLING)
    pair.start(TEXTS[:1], [0])
    pair.drafter.propose([0], TREE, NO_SAMPLING)
    pair.drafter.stop(0)

    pair.start(TEXTS[2:], [0])

    assert torch.equal(fresh.tokens, pair.drafter.propose([0], TREE, NO_SAMPLING).tokens)


ROUTES: dict[str, dict[str, Any]] = {
    "off": {"config": SpecConfig.off()},
    "chain": {"config": SpecConfig.chain("eagle3", 4), "forced": ForcedAcceptance(1.5)},
    "tree": {"config": TREE, "forced": ForcedAcceptance(1.4)},
    "refusing-tree": {"config": TREE, "forced": ForcedAcceptance(0.0)},
}


@pytest.mark.parametrize("prefill_chunk", [1, 7, 512])
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_draft_state_is_that_of_real_target_features(
    route: dict[str, Any], prefill_chunk: int, tmp_path: Path
) -> None:
    """At every prefix of a batch, however reached, the drafts are those of the plain text.

    Forced acceptance makes ragged accepted paths out of every draft.
    """
    pair = make_pair(tmp_path)
    asks = ragged_requests(3, 97, max_tokens=6, ignore_eos=True)
    engine = Engine(pair.target, drafter=pair.drafter, batch_size=2, prefill_chunk=prefill_chunk, eos_ids=[])
    seen: dict[tuple[str, int], tuple[list[Any], list[float]]] = {}

    def look(rows: Sequence[RowView]) -> None:
        pool = pair.drafter.expand([row.slot for row in rows], [2], 2)[0]
        for index, row in enumerate(rows):
            key = (row.request_id, row.num_outputs)
            seen[key] = (pool_paths(pool, index), pool.log_scores[index].tolist())

    records = engine.generate(asks, **route, on_round=look).requests

    texts = {a.request_id: list(a.prompt_ids + r.output_ids) for a, r in zip(asks, records, strict=True)}
    prompts = {ask.request_id: len(ask.prompt_ids) for ask in asks}
    assert len(seen) >= 6
    for (name, num_outputs), (paths, scores) in seen.items():
        wanted_paths, wanted_scores = pair.candidates(texts[name][: prompts[name] + num_outputs], 2, 2)
        assert wanted_paths == paths
        assert wanted_scores == pytest.approx(scores, abs=1e-4)


def test_topk_beyond_the_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    """A level cannot hold more candidates than the head knows tokens."""
    pair = make_pair(tmp_path, draft_vocab=3)
    pair.start(TEXTS[:1], [0])

    with pytest.raises(InfeasibleConfig, match="topk 4 exceeds the draft vocabulary of 3"):
        pair.drafter.expand([0], [4], 2)


def test_draft_without_reserved_room_is_refused(tmp_path: Path) -> None:
    """A deep wide tree never writes past its slot's columns."""
    pair = make_pair(tmp_path)
    pair.drafter.reserve(1, 8, SpecConfig.chain("eagle3", 1))
    pair.start([[5, 6, 7]], [0])

    with pytest.raises(InfeasibleConfig, match="columns"):
        pair.drafter.expand([0], [8], 20)


def test_sampled_tree_is_refused(tmp_path: Path) -> None:
    """Drafts drawn from the head are for chains: a pruned tree of them would be lossy."""
    pair = make_pair(tmp_path)
    pair.start(TEXTS[:1], [0])
    options = (("draft_sampling", "probabilistic"),)
    config = SpecConfig(method="eagle3", num_steps=2, topk=2, num_draft_tokens=4, options=options)

    with pytest.raises(InfeasibleConfig, match="chains"):
        pair.drafter.propose([0], config, NO_SAMPLING)


# Sampled chains: the whole round, by frequency ------------------------------------------------------

ROWS = 2000
PROMPT, ROOT = [3, 1, 2], 4


def next_token_probabilities(target: Target, text: list[int], temperature: float) -> list[float]:
    hidden, _ = target.forward_text(torch.tensor([text]), torch.tensor([len(text)]))
    scores = target.logits(hidden)[0, -1].double() / temperature
    return scores.softmax(-1).tolist()


@pytest.mark.parametrize("draft_vocab", [6, 4], ids=["whole-vocabulary", "small-vocabulary"])
def test_sampled_chain_round_follows_the_target(draft_vocab: int, tmp_path: Path) -> None:
    """One round over 2000 seeds: first tokens, and second ones after each first, fall as plain decoding's."""
    temperature = 0.9
    target = tiny_target(vocab_size=6, scale=0.3)
    config = head_config(target.config, draft_vocab)
    head = load_head(save_head(tmp_path, config, head_tensors(config, target.config)), target.config)
    drafter = Eagle3Drafter(head, target)
    spec = SpecConfig.chain("eagle3", 2, options=(("draft_sampling", "probabilistic"),))
    asks = [request(f"row-{i}", PROMPT, temperature=temperature, seed=2) for i in range(ROWS)]
    slots, ids = list(range(ROWS)), torch.tensor(PROMPT).expand(ROWS, -1)
    drafter.reserve(ROWS, 8, spec)
    cache, view = target.new_cache(ROWS, 8), SlotView(slots, CPU)

    with torch.inference_mode():
        _, features = target.forward(ids, torch.arange(3).expand(ROWS, -1), cache, view, [0] * ROWS, None)
        following = torch.tensor([*PROMPT[1:], ROOT]).expand(ROWS, -1)
        drafter.commit(slots, following, features, torch.full((ROWS,), 3))
        batch = Batch(
            slots=view,
            lengths=[3] * ROWS,
            num_outputs=[1] * ROWS,
            num_steps=[0] * ROWS,
            roots=torch.full((ROWS,), ROOT),
            rows=RowSampling.of(asks, CPU),
        )
        turn = step(batch, target, cache, drafter, spec, clock=lambda: 0.0)

    first = Counter(block[0] for block in turn.emitted)
    p = next_token_probabilities(target, [*PROMPT, ROOT], temperature)
    assert stats.chisquare([first[t] for t in range(6)], [ROWS * x for x in p]).pvalue > 1e-3
    accepted = Counter(block[0] for block in turn.emitted if len(block) > 1)
    assert set(accepted) <= set(drafter._target_ids(torch.arange(draft_vocab)).tolist())
    token, count = accepted.most_common(1)[0]
    second = Counter(block[1] for block in turn.emitted if len(block) > 1 and block[0] == token)
    after = next_token_probabilities(target, [*PROMPT, ROOT, token], temperature)
    assert count > 100
    assert stats.chisquare([second[t] for t in range(6)], [count * x for x in after]).pvalue > 1e-3
