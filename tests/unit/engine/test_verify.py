"""Verification: the rules proven by exact enumeration, and the tensors held to the proven rules.

The proofs use fractions only: a target p(next | text) and a draft q(next | text) over three tokens,
and every draw a branch. A rule is lossless if the blocks it emits, continued by plain decoding to a
fixed length, are distributed as plain decoding's own texts: equal fractions, no tolerance.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from spectune.engine.sampling import RowSampling
from spectune.engine.tree import DraftTree
from spectune.engine.verify import ForcedAcceptance, Verdict, force, match, verify_residual
from tests.support.toys import CPU, request

Text = tuple[int, ...]
Model = Callable[[Text], list[Fraction]]
Texts = dict[Text, Fraction]
Tree = dict[int, Any]  # token -> subtree, siblings in draft order
Rule = Callable[[Model, Tree], Texts]

VOCAB = 3
LENGTH = 3
ONE = Fraction(1)


def toy_model(seed: int, *, zeros: bool = False) -> Model:
    """A fixed random distribution after each text; with `zeros` some tokens are impossible."""

    @functools.cache
    def distribution(text: Text) -> list[Fraction]:
        rng = random.Random(f"{seed}:{text}")
        weights = [rng.randint(1, 9) for _ in range(VOCAB)]
        if zeros:
            weights[rng.randrange(VOCAB)] = 0
        return [Fraction(w, sum(weights)) for w in weights]

    return distribution


def plain(p: Model, length: int = LENGTH, text: Text = ()) -> Texts:
    """Distribution of the next `length` tokens of plain decoding."""
    if length == 0:
        return {(): ONE}
    texts: Texts = {}
    for token, chance in enumerate(p(text)):
        for rest, other in plain(p, length - 1, (*text, token)).items():
            add(texts, (token, *rest), chance * other)
    return texts


def continued(p: Model, blocks: Texts) -> Texts:
    """Emitted blocks continued by plain decoding, or cut, to LENGTH tokens."""
    texts: Texts = {}
    for block, chance in blocks.items():
        for rest, other in plain(p, max(0, LENGTH - len(block)), block).items():
            add(texts, (block + rest)[:LENGTH], chance * other)
    return texts


def distance(texts: Texts, others: Texts) -> Fraction:
    """Total variation distance."""
    return sum((abs(texts.get(t, ONE * 0) - others.get(t, ONE * 0)) for t in texts | others), ONE * 0) / 2


def positive_part(p: list[Fraction], q: list[Fraction]) -> list[Fraction]:
    """(p - q)+, normalised; p where nothing is left."""
    rest = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return [r / sum(rest) for r in rest] if sum(rest) else p


def add(blocks: Texts, block: Text, chance: Fraction) -> None:
    if chance:
        blocks[block] = blocks.get(block, Fraction(0)) + chance


# The rules -----------------------------------------------------------------------------------------


def sample_and_match(p: Model, tree: Tree, text: Text = ()) -> Texts:
    """Draw the target's token; a child that equals it is accepted, else the token is the last one."""
    blocks: Texts = {}
    for token, chance in enumerate(p(text)):
        if token in tree:
            for rest, other in sample_and_match(p, tree[token], (*text, token)).items():
                add(blocks, (token, *rest), chance * other)
        else:
            add(blocks, (token,), chance)
    return blocks


def zero_the_refused(p: Model, tree: Tree, text: Text = ()) -> Texts:
    """Children in turn: accept x with r(x); refused, r(x) becomes 0 and r is normalised again."""
    blocks: Texts = {}
    rest, reach = p(text), ONE
    for token, subtree in tree.items():
        for below, other in zero_the_refused(p, subtree, (*text, token)).items():
            add(blocks, (token, *below), reach * rest[token] * other)
        reach *= 1 - rest[token]
        if not reach:
            return blocks
        kept = 1 - rest[token]
        rest = [Fraction(0) if t == token else chance / kept for t, chance in enumerate(rest)]
    for token, chance in enumerate(rest):
        add(blocks, (token,), reach * chance)
    return blocks


def ratio_and_residual(p: Model, q: Model, length: int, text: Text = ()) -> Texts:
    """A chain drawn from q: accept x with min(1, p/q); refused, draw from (p - q)+ and stop."""
    blocks: Texts = {}
    if length == 0:
        return {(token,): chance for token, chance in enumerate(p(text)) if chance}
    here, draft = p(text), q(text)
    residual = positive_part(here, draft)
    for x, drawn in enumerate(draft):
        if not drawn:
            continue
        accept = min(ONE, here[x] / drawn)
        for below, other in ratio_and_residual(p, q, length - 1, (*text, x)).items():
            add(blocks, (x, *below), drawn * accept * other)
        for token, chance in enumerate(residual):
            add(blocks, (token,), drawn * (1 - accept) * chance)
    return blocks


def best_child_by_ratio(p: Model, q: Model) -> Texts:
    """BROKEN: the draft's best token, accepted with p/q though it was not drawn from q."""
    blocks: Texts = {}
    here, draft = p(()), q(())
    x = draft.index(max(draft))
    accept = min(ONE, here[x] / draft[x])
    add(blocks, (x,), accept)
    for token, chance in enumerate(positive_part(here, draft)):
        add(blocks, (token,), (1 - accept) * chance)
    return blocks


def best_tokens_only(p: Model, tree: Tree, text: Text = ()) -> Texts:
    """BROKEN at T > 0: accept a child if it is the target's most likely token."""
    here = p(text)
    best = here.index(max(here))
    if best not in tree:
        return {(best,): ONE}
    return {(best, *rest): c for rest, c in best_tokens_only(p, tree[best], (*text, best)).items()}


TREES: dict[str, Tree] = {
    "one-draft": {1: {}},
    "chain": {2: {0: {}}},
    "siblings": {1: {}, 2: {}},
    "whole-vocabulary": {0: {}, 1: {}, 2: {}},
    "tree": {2: {1: {}, 0: {}}, 0: {2: {}}},
    "deep-tree": {1: {1: {0: {}}, 2: {}}, 2: {}},
}
EACH_TREE = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
EACH_TARGET = pytest.mark.parametrize("p", [toy_model(1), toy_model(2), toy_model(3, zeros=True)])


@EACH_TARGET
@EACH_TREE
def test_sample_and_match_emits_plain_texts_exactly(p: Model, tree: Tree) -> None:
    """Whatever tree is drafted, the distribution of the text is the target's."""
    assert plain(p) == continued(p, sample_and_match(p, tree))


@EACH_TARGET
@EACH_TREE
def test_zeroing_the_refused_child_emits_plain_texts_exactly(p: Model, tree: Tree) -> None:
    """Accepting a deterministic child with p(x) and setting a refused one to 0 leaves p as it is."""
    blocks = zero_the_refused(p, tree)

    assert plain(p) == continued(p, blocks)
    assert sample_and_match(p, tree) == blocks


@EACH_TARGET
def test_single_deterministic_draft_is_the_target_itself(p: Model) -> None:
    """One candidate x: x comes out with p(x), each other y with (1 - p(x)) · p(y) / (1 - p(x)) = p(y)."""
    for x in range(VOCAB):
        first = Counter[int]()
        for block, chance in zero_the_refused(p, {x: {}}).items():
            first[block[0]] += chance  # type: ignore[assignment]
        assert p(()) == [first[token] for token in range(VOCAB)]


def test_sibling_order_changes_nothing_for_deterministic_drafts() -> None:
    """Which candidate is tried first decides neither the text nor how many are accepted."""
    p = toy_model(4)
    orders = [{key: {} for key in order} for order in itertools.permutations(range(VOCAB), 2)]

    for tree in orders:
        assert zero_the_refused(p, dict(sorted(tree.items()))) == zero_the_refused(p, tree)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("zeros", [False, True], ids=["full-support", "impossible-tokens"])
def test_ratio_and_residual_emits_plain_texts_exactly(length: int, zeros: bool) -> None:
    """A chain drawn from any q leaves the distribution of the text as it is."""
    p, q = toy_model(5, zeros=zeros), toy_model(6, zeros=zeros)

    assert plain(p) == continued(p, ratio_and_residual(p, q, length))


def test_ratio_accepts_the_overlap_of_both_distributions() -> None:
    """The chance to keep the first draft is Σ min(p, q)."""
    p, q = toy_model(5), toy_model(6)

    blocks = ratio_and_residual(p, q, 1)

    kept = sum(chance for block, chance in blocks.items() if len(block) == 2)
    assert sum(min(a, b) for a, b in zip(p(()), q(()), strict=True)) == kept


def test_ratio_rule_on_a_deterministic_draft_is_lossy() -> None:
    """p/q and (p - q)+ are wrong where the draft is the best token of q: the enumeration sees it."""
    p, q = toy_model(5), toy_model(6)

    assert distance(continued(p, best_child_by_ratio(p, q)), plain(p)) > Fraction(1, 20)


@EACH_TREE
def test_argmax_rule_with_a_random_target_is_lossy(tree: Tree) -> None:
    """Taking the target's best token is no sampling: the enumeration sees it."""
    p = toy_model(1)

    assert distance(continued(p, best_tokens_only(p, tree)), plain(p)) > Fraction(1, 20)


# The tensors, over every choice ---------------------------------------------------------------------


def flat_nodes(tree: Tree, parent: int, depth: int, text: Text) -> Iterator[tuple[int, int, Text]]:
    """(parent, depth, text) of every node in breadth-first order, the root first."""
    yield 0, 0, ()
    level = [(0, tree, ())]
    index = 0
    while level:
        deeper = []
        for above, children, prefix in level:
            for token, subtree in children.items():
                index += 1
                yield above, len(prefix) + 1, (*prefix, token)
                deeper.append((index, subtree, (*prefix, token)))
        level = deeper


def tensor_tree(tree: Tree, batch: int, *, num_padding: int = 0) -> tuple[DraftTree, list[Text]]:
    """The tree as tensors, `batch` rows of it, and the text of each node."""
    nodes = list(flat_nodes(tree, 0, 0, ()))
    texts = [text for _, _, text in nodes]
    tokens = [0] + [text[-1] for text in texts[1:]] + [0] * num_padding
    parents = [parent for parent, _, _ in nodes] + [len(nodes) - 1 + i for i in range(num_padding)]
    depths = [depth for _, depth, _ in nodes] + [nodes[-1][1] + 1 + i for i in range(num_padding)]
    size = len(tokens)

    def rows(values: list[int]) -> Tensor:
        return torch.tensor(values).expand(batch, -1)

    valid = torch.arange(size).expand(batch, -1) < len(nodes)
    return DraftTree(rows(tokens), rows(parents), rows(depths), torch.zeros(batch, size), valid), texts


def emitted(tree: DraftTree, verdict: Verdict) -> list[Text]:
    """The block of each row: accepted tokens and the target's own."""
    tokens = tree.tokens.gather(1, verdict.path)[:, 1:].tolist()
    return [
        (*row[:count], last)
        for row, count, last in zip(
            tokens, verdict.num_accepted.tolist(), verdict.next_tokens.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize("num_padding", [0, 1], ids=["full", "padded"])
@EACH_TARGET
@EACH_TREE
def test_match_over_all_choices_emits_plain_texts_exactly(p: Model, tree: Tree, num_padding: int) -> None:
    """match() fed with every combination of target choices, each weighted by its probability."""
    num_nodes = len(list(flat_nodes(tree, 0, 0, ()))) + num_padding
    choices = list(itertools.product(range(VOCAB), repeat=num_nodes))
    drafts, texts = tensor_tree(tree, len(choices), num_padding=num_padding)

    verdict = match(drafts, torch.tensor(choices))

    blocks: Texts = {}
    for block, row in zip(emitted(drafts, verdict), choices, strict=True):
        chance = ONE / VOCAB**num_padding
        for text, token in zip(texts, row, strict=False):
            chance *= p(text)[token]
        add(blocks, block, chance)
    assert sample_and_match(p, tree) == blocks
    assert plain(p) == continued(p, blocks)


def test_match_ragged_rows_are_told_by_hand() -> None:
    """Paths start at the root, follow the accepted nodes and are padded by their last node."""
    # root 9 -> (1: 4, 2: 5); 4 -> (3: 6, 4: 7)
    rows = 3
    drafts = DraftTree(
        tokens=torch.tensor([[9, 4, 5, 6, 7]]).expand(rows, -1),
        parents=torch.tensor([[0, 0, 0, 1, 1]]).expand(rows, -1),
        depths=torch.tensor([[0, 1, 1, 2, 2]]).expand(rows, -1),
        log_scores=torch.zeros(rows, 5),
        valid=torch.ones(rows, 5, dtype=torch.bool),
    )
    choices = torch.tensor([[4, 7, 0, 0, 8], [5, 6, 1, 0, 0], [3, 6, 4, 0, 0]])

    verdict = match(drafts, choices)

    assert [2, 1, 0] == verdict.num_accepted.tolist()
    assert [[0, 1, 4], [0, 2, 2], [0, 0, 0]] == verdict.path.tolist()
    assert [8, 1, 3] == verdict.next_tokens.tolist()


# The tensors, by frequency --------------------------------------------------------------------------

TOKENS = 4
DRAFTS = 2
ROWS = 4000
TARGET = torch.tensor([[4, 3, 2, 1], [1, 1, 6, 2], [2, 5, 1, 2], [3, 3, 3, 1]]) / 10.0
DRAFT = torch.tensor([[2, 5, 1, 2], [3, 3, 2, 2], [2, 2, 4, 2], [1, 1, 1, 7]]) / 10.0


def many_rows(temperature: float = 1.0) -> RowSampling:
    asks = [request(f"row-{i}", [1], temperature=temperature, seed=7) for i in range(ROWS)]
    return RowSampling.of(asks, CPU)


def draw(p: Tensor, generator: torch.Generator) -> Tensor:
    """One token for each row of p [B, V]."""
    return torch.multinomial(p, 1, generator=generator).squeeze(1)


def sampled_chain(generator: torch.Generator, rows: int = ROWS, *, is_greedy: bool = False) -> DraftTree:
    """Two drafts from the table after root 0, drawn from it or (wrongly for q) its best tokens."""
    last = torch.zeros(rows, dtype=torch.int64)
    drafts, dists = [], []
    for _ in range(DRAFTS):
        dists.append(DRAFT[last])
        last = DRAFT[last].argmax(-1) if is_greedy else draw(DRAFT[last], generator)
        drafts.append(last)
    valid = torch.ones(rows, DRAFTS, dtype=torch.bool)
    valid[::3, 1] = False  # every third row drafted one token only
    roots = torch.zeros(rows, dtype=torch.int64)
    tokens = torch.stack(drafts, 1)
    return DraftTree.chain(roots, tokens, torch.zeros(rows, DRAFTS), valid, torch.stack(dists, 1))


def p_value(chain: DraftTree, verdict: Verdict, p: Tensor, generator: torch.Generator) -> float:
    """Chi-square of the first two tokens of all rows against the target's chain of distributions.

    Blocks of one token are continued by an honest draw.
    """
    blocks = emitted(chain, verdict)
    first = torch.tensor([block[0] for block in blocks])
    honest = draw(p[first], generator).tolist()
    pairs = Counter((b[0], b[1] if len(b) > 1 else h) for b, h in zip(blocks, honest, strict=True))
    cells = list(itertools.product(range(TOKENS), repeat=2))
    exact = p.double() / p.double().sum(1, keepdim=True)
    expected = [ROWS * float(exact[0, a] * exact[a, b]) for a, b in cells]
    return float(stats.chisquare([pairs[cell] for cell in cells], expected).pvalue)


def residual_verdict(chain: DraftTree, temperature: float = 1.0) -> Verdict:
    logits = TARGET[chain.tokens].log()
    indices = torch.arange(DRAFTS + 1).expand(ROWS, -1)
    return verify_residual(chain, logits, many_rows(temperature), indices)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_residual_frequencies_are_the_warped_targets(temperature: float) -> None:
    """Drafts drawn from q, at 4000 seeds: the texts fall as the target's own."""
    generator = torch.Generator().manual_seed(1)
    chain = sampled_chain(generator)

    verdict = residual_verdict(chain, temperature)

    powered = TARGET ** (1 / temperature)
    p = powered / powered.sum(1, keepdim=True)
    assert p_value(chain, verdict, p, generator) > 1e-3
    kept = (verdict.num_accepted > 0).float().mean().item()
    overlap = torch.minimum(p[0], DRAFT[0]).sum().item()
    assert overlap == pytest.approx(kept, abs=4 * (0.25 / ROWS) ** 0.5)


def test_frequencies_catch_the_ratio_rule_on_best_tokens() -> None:
    """The same test refuses a q that the drafts were not drawn from."""
    generator = torch.Generator().manual_seed(1)
    chain = sampled_chain(generator, is_greedy=True)

    assert p_value(chain, residual_verdict(chain), TARGET, generator) < 1e-12


def test_frequencies_catch_a_refusal_that_draws_from_the_target() -> None:
    """The same test refuses p in place of (p - q)+ after a refusal."""
    generator = torch.Generator().manual_seed(1)
    chain = sampled_chain(generator)
    honest = residual_verdict(chain)
    last = chain.tokens.gather(1, honest.path[:, -1:]).squeeze(1)
    broken = Verdict(honest.num_accepted, honest.path, draw(TARGET[last], generator))

    assert p_value(chain, honest, TARGET, generator) > 1e-3
    assert p_value(chain, broken, TARGET, generator) < 1e-12


def test_frequencies_catch_the_argmax_rule() -> None:
    """The same test refuses the target's best tokens at T = 1."""
    generator = torch.Generator().manual_seed(1)
    chain = sampled_chain(generator)

    verdict = match(chain, TARGET[chain.tokens].argmax(-1))

    assert p_value(chain, verdict, TARGET, generator) < 1e-12


def test_residual_never_accepts_an_impossible_draft() -> None:
    """A draft that a filter of the target ruled out is refused at every coin."""
    chain = sampled_chain(torch.Generator().manual_seed(1), 200)
    logits = TARGET[chain.tokens].log()
    asks = [request(f"row-{i}", [1], temperature=1.0, top_k=1) for i in range(200)]

    verdict = verify_residual(
        chain, logits, RowSampling.of(asks, CPU), torch.arange(DRAFTS + 1).expand(200, -1)
    )

    best = TARGET.argmax(1).tolist()
    for block in emitted(chain, verdict):
        assert tuple(best[token] for token in (0, *block[:-1])) == block


def test_residual_row_at_temperature_zero_emits_the_best_tokens() -> None:
    """A greedy row beside sampled ones stays greedy."""
    chain = sampled_chain(torch.Generator().manual_seed(1), 200)
    asks = [request(f"row-{i}", [1], temperature=float(i % 2)) for i in range(200)]

    verdict = verify_residual(
        chain,
        TARGET[chain.tokens].log(),
        RowSampling.of(asks, CPU),
        torch.arange(DRAFTS + 1).expand(200, -1),
    )

    best = TARGET.argmax(1).tolist()
    greedy = emitted(chain, verdict)[::2]
    assert [tuple(best[token] for token in (0, *block[:-1])) for block in greedy] == greedy


# Forced acceptance ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        pytest.param(0.0, [0, 0, 0, 0], id="none"),
        pytest.param(1.5, [1, 2, 1, 2], id="halves"),
        pytest.param(0.75, [0, 1, 1, 1], id="three-of-four"),
        pytest.param(3.0, [3, 3, 3, 3], id="all"),
    ],
)
def test_forced_counts_meet_their_mean(mean: float, expected: list[int]) -> None:
    """Whole numbers of drafts whose running mean stays within one of the wanted one."""
    forced = ForcedAcceptance(mean)

    assert expected == [forced.count(step, 3) for step in range(4)]


def test_forced_count_is_bounded_by_the_draft() -> None:
    """No step accepts more than was drafted."""
    assert 2 == ForcedAcceptance(5.0).count(0, 2)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_force_accepts_exactly_the_asked_number(count: int) -> None:
    """A path so deep is followed wherever it lies, and the token after it is none of its children."""
    drafts, _ = tensor_tree({2: {}, 0: {1: {}, 2: {}}}, 27)
    choices = torch.tensor([(*row, 0, 1) for row in itertools.product(range(3), repeat=3)])

    verdict = match(drafts, force(drafts, choices, [count] * 27, TOKENS))

    assert {count} == set(verdict.num_accepted.tolist())
    assert int(verdict.next_tokens.max()) < TOKENS


def test_force_steps_past_the_last_token_of_the_vocabulary() -> None:
    """A refused child that is the last token gives way to a token that exists."""
    drafts, _ = tensor_tree({3: {}}, 1)

    verdict = match(drafts, force(drafts, torch.tensor([[3, 0]]), [0], TOKENS))

    assert ([0], [0]) == (verdict.num_accepted.tolist(), verdict.next_tokens.tolist())
