"""The reduced draft vocabulary: which target tokens a head may propose, and the two maps.

`d2t` holds offsets (target id = draft id + d2t[draft id]), never absolute ids; `t2d` marks the kept ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectune.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocab:
    """d2t: int64 [D] offsets; t2d: bool [V]; coverage: share of the counted answer tokens kept."""

    d2t: Tensor
    t2d: Tensor
    coverage: float

    def __post_init__(self) -> None:
        if problem := map_problem(self.d2t, self.t2d):
            raise CheckpointError(f"draft vocabulary map: {problem}")

    @property
    def draft_size(self) -> int:
        return self.d2t.numel()

    @property
    def target_size(self) -> int:
        return self.t2d.numel()

    @property
    def target_ids(self) -> Tensor:
        """Kept target ids, ascending. [D]"""
        return self.d2t + torch.arange(self.d2t.numel())


def map_problem(d2t: Tensor, t2d: Tensor) -> str | None:
    """What is wrong with a pair of maps, or None.

    Draft id + offset must rise strictly, stay inside the target vocabulary and meet exactly the
    marked ids; absolute ids in d2t break the first or second rule.
    """
    ids = d2t + torch.arange(d2t.numel(), device=d2t.device)
    if bool((ids[1:] <= ids[:-1]).any()):
        return "draft id + d2t does not rise strictly"
    if ids.numel() == 0 or int(ids[0]) < 0 or int(ids[-1]) >= t2d.numel():
        return f"draft id + d2t leaves 0..{t2d.numel() - 1} (absolute ids instead of offsets?)"
    if int(t2d.sum()) != ids.numel() or not bool(t2d[ids].all()):
        return f"t2d marks {int(t2d.sum())} ids, d2t names {ids.numel()}, and they differ"
    return None


def count_tokens(answers: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """How often every token occurs in the answers. int64 [V]"""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for answer in answers:
        counts += torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=vocab_size)
    return counts


def build_vocab(
    counts: Tensor, size: int, *, forced: Iterable[int] = (), preferred: Tensor | None = None
) -> DraftVocab:
    """Keep the `size` most frequent tokens, the forced ids (turn ends) always among them.

    Ties, and the padding when fewer distinct tokens were seen, go to the preferred ids (those that a
    head to go on from can draft already), then to the lowest id. counts: [V]
    """
    total = counts.numel()
    if not 1 <= size <= total:
        raise CheckpointError(f"draft vocabulary size {size} is not within 1..{total}")
    rank = 2 * counts
    if preferred is not None:
        rank[preferred] += 1
    rank[torch.tensor(sorted(set(forced)), dtype=torch.int64)] = torch.iinfo(torch.int64).max
    ids = torch.sort(rank, descending=True, stable=True).indices[:size].sort().values
    t2d = torch.zeros(total, dtype=torch.bool)
    t2d[ids] = True
    seen = int(counts.sum())
    return DraftVocab(
        d2t=ids - torch.arange(size),
        t2d=t2d,
        coverage=int(counts[ids].sum()) / seen if seen else 0.0,
    )
