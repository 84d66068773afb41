"""The one protocol behind which every drafter stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from spectune.engine.sampling import RowSampling
from spectune.engine.tree import DraftPool, DraftTree
from spectune.records import SpecConfig


class Drafter(Protocol):
    """Proposes drafts for rows ("slots") of the engine.

    The text of a slot grows only through `start` and `commit`, with real target features, so that
    the draft at a prefix is a pure function of that prefix; what `propose` computed on the way is
    dropped after the round.
    """

    needs_features: bool
    pure_in_prefix: bool
    max_context: int | None
    weight_bytes: int

    def reserve(self, num_slots: int, max_len: int, config: SpecConfig) -> None:
        """Make room for texts of `max_len` tokens and the scratch of `config`."""
        ...

    def start(self, slot: int, tokens: Tensor, features: Tensor) -> None:
        """Begin a text: tokens [T+1], features [T, 3H] of the first T of them (one prefill chunk)."""
        ...

    def commit(self, slots: Sequence[int], tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        """Extend texts: tokens [B, M] follow features [B, M, 3H]; row b has counts[b] real ones.

        features[b, j] belongs to the token before tokens[b, j]. Counts may lie on the host, where the
        engine knows them, and then nobody waits for a device. Called after every round, off rounds too.
        """
        ...

    def propose(self, slots: Sequence[int], config: SpecConfig, rows: RowSampling) -> DraftTree:
        """One draft tree for each slot; its root is the last token committed."""
        ...

    def expand(self, slots: Sequence[int], topks: Sequence[int], depth: int) -> list[DraftPool]:
        """All candidates down to `depth`, one pool for each topk (for traces)."""
        ...

    def stop(self, slot: int) -> None:
        """Forget the text of a slot."""
        ...
