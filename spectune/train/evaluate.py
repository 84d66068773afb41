"""How a head would do as a drafter on held-out answers, from one unrolled pass.

On a greedy answer the chain that starts at t reads exactly the text while its drafts are accepted, so
teacher forcing gives the real accepted count of every root; hopping root to root gives rounds.
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


@torch.no_grad()
def match_table(head: Eagle3Head, embedding: Tensor, sample: Sample, depth: int) -> tuple[Tensor, Tensor]:
    """(matches, inside): bool [A, depth], draft j of the chain rooted after position t is the text's.

    Rows are the positions t from answer_start - 1 on; inside is False where the text has ended.
    """
    batch = collate([sample], 0, embedding.device)
    target_ids = head.target_ids
    columns, valid = [], []
    for step, state in enumerate(unroll(head, embedding, batch, depth)):
        draft = target_ids[head.lm_head(head.norm(state[0])).argmax(-1)]  # [A]
        predicted = (batch.positions[0] + 2 + step).clamp(max=sample.ids.numel() - 1)
        inside = loss_mask(batch, step)[0]
        columns.append((draft == batch.ids[0, predicted]) & inside)
        valid.append(inside)
    return torch.stack(columns, dim=1), torch.stack(valid, dim=1)


def accepted_by_hops(matches: Tensor) -> list[int]:
    """Accepted drafts of every round along one answer. matches: bool [A, depth]

    A round rooted after t with m accepted drafts is followed by one rooted after t + m + 1.
    """
    lengths = matches.long().cumprod(dim=1).sum(dim=1).tolist()
    accepted, position = [], 0
    while position < len(lengths):
        accepted.append(lengths[position])
        position += lengths[position] + 1
    return accepted


def evaluate(
    head: Eagle3Head, embedding: Tensor, samples: Sequence[Sample], *, depth: int, dtype: torch.dtype
) -> HeldOut:
    """Held-out acceptance of a chain of `depth` drafts, pooled over samples."""
    hits, reached, bases = [0] * depth, [0] * depth, [0] * depth
    num_rounds = num_accepted = 0
    for sample in samples:
        with torch.autocast(embedding.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            matches, inside = match_table(head, embedding, sample, depth)
        survived = matches.long().cumprod(dim=1).bool()
        before = torch.cat([torch.ones_like(survived[:, :1]), survived[:, :-1]], dim=1)
        for j in range(depth):
            bases[j] += int(inside[:, j].sum())
            reached[j] += int((before[:, j] & inside[:, j]).sum())
            hits[j] += int(survived[:, j].sum())
        accepted = accepted_by_hops(matches)
        num_rounds += len(accepted)
        num_accepted += sum(accepted)
    return HeldOut(
        survival=tuple(hit / max(1, base) for hit, base in zip(hits, bases, strict=True)),
        conditional=tuple(hit / max(1, base) for hit, base in zip(hits, reached, strict=True)),
        acceptance_length=1 + num_accepted / max(1, num_rounds),
        num_rounds=num_rounds,
    )
