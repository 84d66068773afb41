"""One decode round of the whole batch: draft, verify, accept, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spectune.engine.drafter import Drafter
from spectune.engine.kv_cache import Cache, SlotView
from spectune.engine.sampling import RowSampling, Span, choose
from spectune.engine.target import Target
from spectune.engine.tree import DraftTree
from spectune.engine.uploads import on_device
from spectune.engine.verify import ForcedAcceptance, Verdict, force, match, verify_residual
from spectune.records import SpecConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one round; all lists are in row order.

    `lengths` counts committed target columns, `num_outputs` emitted tokens, `num_steps` finished
    steps; `roots` [B] are the last emitted tokens, not in the cache yet.
    """

    slots: SlotView
    lengths: list[int]
    num_outputs: list[int]
    num_steps: list[int]
    roots: Tensor
    rows: RowSampling
    forced_text: Sequence[Sequence[int]] | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What one round did: emitted [B][m+1] tokens, counts per row, and the seconds of each part.

    `forcing_s`, what it took to force an acceptance, is in none of the parts.
    """

    emitted: list[list[int]]
    num_accepted: list[int]
    num_verified: list[int]
    num_proposed: list[int]
    draft_s: float
    verify_s: float
    other_s: float
    forcing_s: float = 0.0
    margins: list[list[float]] | None = None


class Stopwatch:
    """Laps of one round; on CUDA it waits for the device, so that a lap is its own work."""

    def __init__(self, clock: Callable[[], float], device: torch.device) -> None:
        self._clock, self._device = clock, device
        self._last = clock()
        self.seconds = {"draft": 0.0, "verify": 0.0, "other": 0.0, "forcing": 0.0}

    def lap(self, part: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = self._clock()
        self.seconds[part] += now - self._last
        self._last = now


def step(
    batch: Batch,
    target: Target,
    cache: Cache,
    drafter: Drafter | None,
    config: SpecConfig,
    *,
    clock: Callable[[], float],
    forced: ForcedAcceptance | None = None,
    wants_margins: bool = False,
) -> Turn:
    """Run one round; the caller keeps the lengths of the rows."""
    watch = Stopwatch(clock, target.device)
    tree = draft(batch, drafter, config)
    watch.lap("draft")
    hidden, features = verify(batch, tree, target, cache)
    span = span_of(tree, config)
    scores = score(batch, tree, hidden, target, span, wants_logits=wants_margins)
    watch.lap("verify")
    if forced is not None and batch.forced_text is None:
        scores = with_forced(batch, tree, scores, span, forced, watch)
    verdict = accept(batch, tree, scores, span)
    emitted, num_verified = tell(tree, verdict)
    verdict = verdict.cut(max(map(len, emitted)))
    commit_target(batch, tree, verdict, cache)
    watch.lap("other")
    if drafter is not None:
        commit_draft(batch, verdict, emitted, features, drafter)
    watch.lap("draft")
    seconds = watch.seconds
    return Turn(
        emitted=emitted,
        num_accepted=[len(tokens) - 1 for tokens in emitted],
        num_verified=num_verified,
        num_proposed=num_verified if tree.num_drafted is None else [tree.num_drafted] * len(emitted),
        draft_s=seconds["draft"],
        verify_s=seconds["verify"],
        other_s=seconds["other"],
        forcing_s=seconds["forcing"],
        margins=path_margins(batch, tree, scores, span, verdict) if wants_margins else None,
    )


def draft(batch: Batch, drafter: Drafter | None, config: SpecConfig) -> DraftTree:
    """A draft tree for each row; the root alone where the round does not speculate."""
    if config.is_off:
        return DraftTree.root_only(batch.roots)
    assert drafter is not None, f"{config.label} without a drafter"
    return drafter.propose(batch.slots.slots, config, batch.rows)


def verify(batch: Batch, tree: DraftTree, target: Target, cache: Cache) -> tuple[Tensor, Tensor]:
    """Score all nodes of all rows in one target pass: hidden [B, N, H], features [B, N, 3H]."""
    starts = on_device(batch.lengths, target.device).unsqueeze(1)
    ancestors = None if tree.is_chain else tree.ancestors()
    return target.forward(tree.tokens, starts + tree.depths, cache, batch.slots, batch.lengths, ancestors)


@dataclass(frozen=True, slots=True)
class Scores:
    """What the target says at each node: its own tokens [B, N], and logits [B, N, V] where they are needed."""

    vocab_size: int
    choices: Tensor | None = None
    logits: Tensor | None = None


def span_of(tree: DraftTree, config: SpecConfig) -> Span:
    """The output indices of a round's nodes, as far as its configuration tells."""
    if tree.is_chain:
        return Span(tree.num_nodes, is_chain=True)
    return Span(min(config.num_steps + 1, tree.num_nodes), is_chain=False)


def score(
    batch: Batch, tree: DraftTree, hidden: Tensor, target: Target, span: Span, *, wants_logits: bool
) -> Scores:
    """Turn final hidden states [B, N, H] into the target's choices."""
    vocab_size = target.config.vocab_size
    is_given = batch.forced_text is not None
    samples_drafts = tree.q is not None and not batch.rows.is_greedy
    if not (wants_logits or samples_drafts) and (is_given or batch.rows.is_greedy):
        return Scores(vocab_size, choices=None if is_given else target.best(hidden))
    logits = target.logits(hidden)  # [B, N, V]
    if is_given or samples_drafts:
        return Scores(vocab_size, logits=logits)
    choices = choose(logits, batch.rows, output_indices(batch, tree), draw=target.draw, span=span)
    return Scores(vocab_size, choices=choices, logits=logits)


def accept(batch: Batch, tree: DraftTree, scores: Scores, span: Span) -> Verdict:
    """Decide what each row keeps."""
    if batch.forced_text is not None:
        return match(tree, text_choices(batch.forced_text, output_indices(batch, tree)))
    if scores.choices is None:
        assert scores.logits is not None, "sampled drafts are verified against logits"
        return verify_residual(tree, scores.logits, batch.rows, output_indices(batch, tree))
    return match(tree, scores.choices)


def with_forced(
    batch: Batch, tree: DraftTree, scores: Scores, span: Span, forced: ForcedAcceptance, watch: Stopwatch
) -> Scores:
    """The scores with choices that keep what is asked for; the time of changing them is none of the round's."""
    choices = scores.choices
    if choices is None:
        assert scores.logits is not None
        choices = choose(scores.logits, batch.rows, output_indices(batch, tree), span=span)
    watch.lap("other")
    counts = [forced.count(number, tree.num_nodes) for number in batch.num_steps]
    choices = force(tree, choices, counts, scores.vocab_size)
    watch.lap("forcing")
    return replace(scores, choices=choices)


def output_indices(batch: Batch, tree: DraftTree) -> Tensor:
    """Output index [B, N] that the target's choice at each node would fill."""
    return on_device(batch.num_outputs, tree.depths.device).unsqueeze(1) + tree.depths


def text_choices(texts: Sequence[Sequence[int]], indices: Tensor) -> Tensor:
    """Choices [B, N] read from given texts; past their end token 0, where the row is cut anyway."""
    rows = [
        [text[index] if index < len(text) else 0 for index in row]
        for text, row in zip(texts, indices.tolist(), strict=True)
    ]
    return on_device(rows, indices.device)


def tell(tree: DraftTree, verdict: Verdict) -> tuple[list[list[int]], list[int]]:
    """Emitted tokens and number of verified drafts of each row.

    The round's one wait for the device: the texts live on the host.
    """
    numbers = torch.stack([verdict.num_accepted, verdict.next_tokens, tree.valid.sum(1) - 1], 1)
    told = torch.cat([numbers, tree.tokens.gather(1, verdict.path)[:, 1:]], 1).tolist()
    return [[*kept[:count], final] for count, final, _, *kept in told], [row[2] for row in told]


def commit_target(batch: Batch, tree: DraftTree, verdict: Verdict, cache: Cache) -> None:
    """Make the accepted path part of the text."""
    if not tree.is_chain and verdict.path.shape[1] > 1:
        starts = on_device(batch.lengths, tree.tokens.device).unsqueeze(1)
        steps = torch.arange(verdict.path.shape[1], device=tree.tokens.device)
        # rows shorter than the longest path have nothing to move there: their last node stays where it is
        sources = starts + verdict.path
        is_own = steps <= verdict.num_accepted.unsqueeze(1)
        cache.move(batch.slots.index, sources, torch.where(is_own, starts + steps, sources))


def commit_draft(
    batch: Batch, verdict: Verdict, emitted: list[list[int]], features: Tensor, drafter: Drafter
) -> None:
    """Replace the draft's own states by pairs with the target's features of root and accepted nodes."""
    width = verdict.path.shape[1]
    padded = [tokens + [tokens[-1]] * (width - len(tokens)) for tokens in emitted]
    tokens = on_device(padded, features.device)
    counts = torch.tensor([len(tokens) for tokens in emitted])  # known here: it stays on the host
    if features.shape[1] > 1:  # a plain round has the root alone
        features = features.gather(1, verdict.path.unsqueeze(2).expand(-1, -1, features.shape[2]))
    drafter.commit(batch.slots.slots, tokens, features, counts)


def path_margins(
    batch: Batch, tree: DraftTree, scored: Scores, span: Span, verdict: Verdict
) -> list[list[float]]:
    """Top-2 gap of the (perturbed) logits at each emitted token of each row."""
    from spectune.engine.sampling import perturbed

    logits = scored.logits
    assert logits is not None, "margins are asked for before the round"
    scores = logits.float()
    if not batch.rows.is_greedy:
        scores = perturbed(logits, batch.rows, output_indices(batch, tree), span)
    top = scores.topk(2, -1).values
    gaps = (top[..., 0] - top[..., 1]).gather(1, verdict.path)
    counts = verdict.num_accepted.tolist()
    return [row[: count + 1] for row, count in zip(gaps.tolist(), counts, strict=True)]
