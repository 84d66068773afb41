"""Comparing texts of plain and speculative decoding where rounding may flip a near tie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spectune.records import RequestRecord

NEAR_TIE = 1e-3
"""Gap of the two best (perturbed) fp32 logits below which another kernel may pick the other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """First token at which a text leaves plain decoding's, and how near a tie plain's choice was."""

    request_id: str
    index: int
    margin: float

    @property
    def is_near_tie(self) -> bool:
        return self.margin < NEAR_TIE


def divergences(
    plain: Sequence[RequestRecord],
    others: Sequence[RequestRecord],
    margins: Mapping[str, Sequence[float]],
) -> list[Divergence]:
    """One for each text that differs; `margins` are plain decoding's, from its second token on."""
    found = []
    for one, other in zip(plain, others, strict=True):
        assert one.request_id == other.request_id
        if one.output_ids == other.output_ids:
            continue
        pairs = zip(one.output_ids, other.output_ids, strict=False)
        shorter = min(one.num_output_tokens, other.num_output_tokens)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        gaps = margins[one.request_id]
        margin = gaps[index - 1] if 0 < index <= len(gaps) else math.inf
        found.append(Divergence(request_id=one.request_id, index=index, margin=margin))
    return found
