"""How a head would do as a drafter along given texts, from one unrolled pass over each.

While the drafts of a chain are accepted the text is exactly what the chain reads, so teacher forcing
gives the real accepted count of every root of a text that the target itself chose (greedily, or by
noise that belongs to the position); hopping root to root gives rounds.

A roots of one text, K drafts, C draft-vocabulary slices (the first is the whole one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectune.train.head import Eagle3Head
from spectune.train.ttt import Sample, collate, loss_mask, unroll


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Acceptance on held-out greedy answers with a chain of len(survival) drafts.

    survival[j]: share of answer positions whose first j+1 drafts match; conditional[j] given the
    first j; acceptance_length: 1 + Σ accepted / Σ rounds, rounds found by hopping.
    """

    survival: tuple[float, ...]
    conditional: tuple[float, ...]
    acceptance_length: float
    num_rounds: int

    @property
    def text(self) -> str:
        conditional = " ".join(f"{value:.3f}" for value in self.conditional)
        survival = " ".join(f"{value:.3f}" for value in self.survival)
        return (
            f"conditional {conditional} | survival {survival} | "
            f"AL {self.acceptance_length:.3f} (chain K={len(self.survival)}, {self.num_rounds} rounds)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMatches:
    """What a head drafts along one text, root by root.

    matches: bool [C, A, K], draft j of the chain rooted after token t is the text's; inside: bool
    [A, K], the text has a token there; confidence: [A, K], the draft's probability; covered: bool [A],
    the text's own next token is in the draft vocabulary. Row r is the root at answer token r.
    """

    matches: Tensor
    inside: Tensor
    confidence: Tensor
    covered: Tensor


@torch.no_grad()
def text_matches(
    head: Eagle3Head, embedding: Tensor, sample: Sample, depth: int, slices: Sequence[Tensor] = ()
) -> TextMatches:
    """Drafts of every root of one text. slices: rows of the draft vocabulary that a cut one would keep."""
    batch = collate([sample], 0, embedding.device)
    target_ids = head.target_ids
    matches, inside, confidence = [], [], []
    covered = torch.empty(0)
    for step, state in enumerate(unroll(head, embedding, batch, depth)):
        logits = head.lm_head(head.norm(state[0]))  # [A, D]
        predicted = (batch.positions[0] + 2 + step).clamp(max=sample.ids.numel() - 1)
        truth = batch.ids[0, predicted]
        valid = loss_mask(batch, step)[0]
        chosen = [logits.argmax(-1), *(rows[logits[:, rows].argmax(-1)] for rows in slices)]
        drafts = target_ids[torch.stack(chosen)]
        matches.append((drafts == truth) & valid)
        inside.append(valid)
        confidence.append(logits.float().softmax(-1).max(-1).values)
        if step == 0:
            covered = head.t2d[truth] & valid
    return TextMatches(
        matches=torch.stack(matches, dim=2),
        inside=torch.stack(inside, dim=1),
        confidence=torch.stack(confidence, dim=1),
        covered=covered,
    )


@dataclass(frozen=True, slots=True)
class Round:
    """One round along a text: its root is answer token `position`; `accepted` of the drafts were kept."""

    position: int
    accepted: int


def rounds_by_hops(matches: Tensor) -> list[Round]:
    """Rounds along one answer. matches: bool [A, K]

    A round rooted after t with m accepted drafts is followed by one rooted after t + m + 1.
    """
    lengths = matches.long().cumprod(dim=1).sum(dim=1).tolist()
    rounds, position = [], 0
    while position < len(lengths):
        rounds.append(Round(position, lengths[position]))
        position += lengths[position] + 1
    return rounds


def evaluate(
    head: Eagle3Head, embedding: Tensor, samples: Sequence[Sample], *, depth: int, dtype: torch.dtype
) -> HeldOut:
    """Held-out acceptance of a chain of `depth` drafts, pooled over samples."""
    hits, reached, bases = [0] * depth, [0] * depth, [0] * depth
    num_rounds = num_accepted = 0
    for sample in samples:
        with torch.autocast(embedding.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = text_matches(head, embedding, sample, depth)
        matches, inside = found.matches[0], found.inside
        survived = matches.long().cumprod(dim=1).bool()
        before = torch.cat([torch.ones_like(survived[:, :1]), survived[:, :-1]], dim=1)
        for j in range(depth):
            bases[j] += int(inside[:, j].sum())
            reached[j] += int((before[:, j] & inside[:, j]).sum())
            hits[j] += int(survived[:, j].sum())
        rounds = rounds_by_hops(matches)
        num_rounds += len(rounds)
        num_accepted += sum(one.accepted for one in rounds)
    return HeldOut(
        survival=tuple(hit / max(1, base) for hit, base in zip(hits, bases, strict=True)),
        conditional=tuple(hit / max(1, base) for hit, base in zip(hits, reached, strict=True)),
        acceptance_length=1 + num_accepted / max(1, num_rounds),
        num_rounds=num_rounds,
    )
