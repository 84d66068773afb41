"""A drafter that does no work while plain rounds run, and catches up before it drafts again.

In plain rounds committed tokens and features are kept and not run through the draft; the next draft
of a slot commits all of them first. A slot that never speculates again costs the copy alone, so that
off inside a speculating engine is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spectune.engine.drafter import Drafter
from spectune.engine.sampling import RowSampling
from spectune.engine.tree import DraftPool, DraftTree
from spectune.records import SpecConfig

CHUNK = 512
"""Most tokens that one pass catches up; a longer backlog takes several."""


class _Part(NamedTuple):
    """A row of what one pass committed; cut out when it is needed, for a row that ends before costs nothing."""

    tokens: Tensor  # [B, T]
    features: Tensor  # [B, F, 3H]
    row: int
    num_features: int

    def cut(self) -> tuple[Tensor, Tensor]:
        """Tokens [n], features [num_features, 3H]; a start has one token more than features."""
        extra = self.tokens.shape[1] - self.features.shape[1]
        return self.tokens[self.row, : self.num_features + extra], self.features[
            self.row, : self.num_features
        ]


class DeferredDrafter:
    """Stands before another drafter; what that one proposes is the same, but for rounding.

    Texts that begin while rounds are plain are deferred whole; others reach the draft at once, so that
    an engine that speculates pays for a prompt where it always did.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.needs_features = drafter.needs_features
        self.pure_in_prefix = drafter.pure_in_prefix
        self.max_context = drafter.max_context
        self.weight_bytes = drafter.weight_bytes
        self._is_plain = False  # whether the last round was
        self._has_drafted = False  # since the last commit
        self._started: set[int] = set()  # slots whose text the draft holds from its first token
        self._backlog: dict[int, list[_Part]] = {}

    @property
    def num_deferred_tokens(self) -> int:
        """Tokens that the draft has not seen, over all slots."""
        return sum(part.num_features for parts in self._backlog.values() for part in parts)

    def reserve(self, num_slots: int, max_len: int, config: SpecConfig) -> None:
        self._drafter.reserve(num_slots, max_len, config)
        self._started.clear()
        self._backlog.clear()
        self._is_plain = self._has_drafted = False

    def start(self, slot: int, tokens: Tensor, features: Tensor) -> None:
        self._backlog.pop(slot, None)
        if self._is_plain:
            self._started.discard(slot)
            self._backlog[slot] = [_Part(tokens[None].clone(), features[None].clone(), 0, len(features))]
        else:
            self._started.add(slot)
            self._drafter.start(slot, tokens, features)

    def commit(self, slots: Sequence[int], tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        if self._has_drafted:
            self._has_drafted = self._is_plain = False
            self._drafter.commit(slots, tokens, features, counts)
        elif tokens.shape[1] == 1:  # a plain round emits one token a row
            self._is_plain = True
            self._defer(slots, tokens, features, counts)
        elif any(slot in self._backlog for slot in slots):  # a further chunk of a deferred prompt
            self._defer(slots, tokens, features, counts)
        else:
            self._drafter.commit(slots, tokens, features, counts)

    def propose(self, slots: Sequence[int], config: SpecConfig, rows: RowSampling) -> DraftTree:
        self._catch_up(slots)
        self._has_drafted = True
        return self._drafter.propose(slots, config, rows)

    def expand(self, slots: Sequence[int], topks: Sequence[int], depth: int) -> list[DraftPool]:
        self._catch_up(slots)
        return self._drafter.expand(slots, topks, depth)

    def stop(self, slot: int) -> None:
        self._backlog.pop(slot, None)
        self._started.discard(slot)
        self._drafter.stop(slot)

    def _defer(self, slots: Sequence[int], tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        """Keep copies: an engine may write the next round's features over this one's."""
        kept_tokens, kept_features = tokens.clone(), features.clone()
        for row, (slot, count) in enumerate(zip(slots, counts.tolist(), strict=True)):
            self._backlog.setdefault(slot, []).append(_Part(kept_tokens, kept_features, row, count))

    def _catch_up(self, slots: Sequence[int]) -> None:
        for slot in slots:
            deferred = self._backlog.pop(slot, None)
            if deferred is None:
                continue
            parts = [part.cut() for part in deferred]
            if slot not in self._started:
                first_tokens, first_features = parts.pop(0)
                self._started.add(slot)
                self._drafter.start(slot, first_tokens, first_features)
            if parts:
                self._commit_all(
                    slot, torch.cat([tokens for tokens, _ in parts]), torch.cat([f for _, f in parts])
                )

    def _commit_all(self, slot: int, tokens: Tensor, features: Tensor) -> None:
        for begin in range(0, len(tokens), CHUNK):
            part = tokens[begin : begin + CHUNK]
            count = torch.tensor([len(part)])  # known here: it stays on the host
            self._drafter.commit([slot], part[None], features[None, begin : begin + CHUNK], count)
