"""What a round leaves in the target's cache: accepted nodes at their places, nothing else moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from spectune.engine.kv_cache import SlotView
from spectune.engine.step import commit_target
from spectune.engine.verify import Verdict


def test_commit_moves_accepted_nodes_and_nothing_of_rows_that_accepted_less() -> None:
    """Row 0 keeps nodes 2 and 5 after the root, row 1 only its root, row 2 node 1, which is in place."""
    moved: list[tuple[list[list[int]], list[list[int]]]] = []

    class Cache:
        def move(self, slots: Tensor, sources: Tensor, targets: Tensor) -> None:
            moved.append((sources.tolist(), targets.tolist()))

    batch = SimpleNamespace(lengths=[10, 20, 30], slots=SlotView(range(3), torch.device("cpu")))
    tree = SimpleNamespace(is_chain=False, tokens=torch.zeros(3, 6, dtype=torch.int64))
    verdict = Verdict(
        num_accepted=torch.tensor([2, 0, 1]),
        path=torch.tensor([[0, 2, 5], [0, 0, 0], [0, 1, 1]]),
        next_tokens=torch.zeros(3, dtype=torch.int64),
    )

    commit_target(cast(Any, batch), cast(Any, tree), verdict, cast(Any, Cache()))

    ((sources, targets),) = moved
    changed = [
        [(source, target) for source, target in zip(*pair, strict=True) if source != target]
        for pair in zip(sources, targets, strict=True)
    ]
    assert changed == [[(12, 11), (15, 12)], [], []]
