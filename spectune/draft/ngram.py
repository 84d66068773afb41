"""Prompt lookup: the last n tokens seen earlier in the same text propose what followed them then.

The vLLM method of the same name: longest match first (n from `prompt_lookup_max` down to
`prompt_lookup_min`), the earliest occurrence wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spectune.engine.sampling import RowSampling
from spectune.engine.tree import DraftPool, DraftTree
from spectune.engine.uploads import on_device
from spectune.errors import InfeasibleConfig
from spectune.records import SpecConfig

DEFAULT_WINDOW = 5


class NgramDrafter:
    """Proposes chains by looking the last tokens up in the text so far. No weights, no features."""

    needs_features = False
    pure_in_prefix = True
    max_context: int | None = None
    weight_bytes = 0

    def __init__(
        self, device: torch.device, *, window_max: int = DEFAULT_WINDOW, window_min: int = 1
    ) -> None:
        self._device = device
        self._window = _checked(window_max, window_min)
        self._texts: dict[int, list[int]] = {}

    def reserve(self, num_slots: int, max_len: int, config: SpecConfig) -> None:
        if config.is_tree:
            raise InfeasibleConfig(f"method ngram drafts chains only, not topk {config.topk}")
        self._window_of(config)

    def _window_of(self, config: SpecConfig) -> tuple[int, int]:
        window_max = int(config.option("prompt_lookup_max", self._window[0]))
        window_min = int(config.option("prompt_lookup_min", self._window[1]))
        return _checked(window_max, window_min)

    def start(self, slot: int, tokens: Tensor, features: Tensor) -> None:
        self._texts[slot] = tokens.tolist()

    def commit(self, slots: Sequence[int], tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        for slot, row, count in zip(slots, tokens.tolist(), counts.tolist(), strict=True):
            self._texts[slot].extend(row[:count])

    def stop(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def propose(self, slots: Sequence[int], config: SpecConfig, rows: RowSampling) -> DraftTree:
        window_max, window_min = self._window_of(config)
        texts = [self._texts[slot] for slot in slots]
        found = [lookup(text, config.num_steps, window_max, window_min) for text in texts]
        length = max(1, max(len(drafts) for drafts in found))
        padded = [drafts + [0] * (length - len(drafts)) for drafts in found]
        drafts = on_device(padded, self._device)
        counts = on_device([len(drafts) for drafts in found], self._device)
        valid = torch.arange(length, device=self._device) < counts.unsqueeze(1)
        roots = on_device([text[-1] for text in texts], self._device)
        if not any(found):
            return DraftTree.root_only(roots)
        return DraftTree.chain(roots, drafts, torch.zeros(drafts.shape, device=self._device), valid)

    def expand(self, slots: Sequence[int], topks: Sequence[int], depth: int) -> list[DraftPool]:
        if any(topk != 1 for topk in topks):
            raise InfeasibleConfig(f"method ngram drafts chains only, not topk {list(topks)}")
        tree = self.propose(slots, SpecConfig.chain("ngram", depth), _no_sampling(self._device))
        scores = torch.where(tree.valid, tree.log_scores, float("-inf"))[:, 1:]
        return [
            DraftPool(1, tree.tokens[:, 1:], tree.parents[:, 1:] - 1, tree.depths[:, 1:], scores)
            for _ in topks
        ]


def _checked(window_max: int, window_min: int) -> tuple[int, int]:
    if not 1 <= window_min <= window_max:
        raise InfeasibleConfig(f"n-gram window {window_min}..{window_max} is empty")
    return window_max, window_min


def _no_sampling(device: torch.device) -> RowSampling:
    return RowSampling.of([], device)


def lookup(text: list[int], num_tokens: int, window_max: int, window_min: int) -> list[int]:
    """Up to `num_tokens` tokens that followed the earliest earlier occurrence of the text's tail."""
    array = np.asarray(text, dtype=np.int64)
    for window in range(min(window_max, len(text) - 1), window_min - 1, -1):
        tail = array[-window:]
        views = np.lib.stride_tricks.sliding_window_view(array[:-1], window)
        hits = np.flatnonzero((views == tail).all(1))
        if hits.size:
            start = int(hits[0]) + window
            return text[start : start + num_tokens]
    return []
