"""Texts for traces: decoded once without speculation, with the features that heads read on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectune.engine.running import RowView
from spectune.engine.sampling import RowSampling, warp
from spectune.engine.scheduler import Engine
from spectune.engine.target import Target
from spectune.engine.tree import DraftPool, DraftTree
from spectune.errors import UsageError
from spectune.records import Request, RequestRecord, SpecConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownText:
    """A prompt and its whole output: ids [n], features [n-1, 3H] of all tokens but the last.

    log_p: [T] log-probabilities of the output tokens under the request's sampling, T > 0 only.
    """

    request: Request
    output_ids: tuple[int, ...]
    finish_reason: str
    features: Tensor
    log_p: Tensor | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.output_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_positions(self) -> int:
        """Roots that decoding could stand at: after 1 .. T-1 output tokens."""
        return max(0, len(self.output_ids) - 1)


def decode(
    engine: Engine, requests: Sequence[Request], texts: dict[str, Sequence[int]] | None = None
) -> list[KnownText]:
    """The requests' outputs and features from one run of plain decoding.

    With `texts` (output ids by request id) the target is made to emit these: what another engine wrote.
    """
    if texts is not None and (missing := [r.request_id for r in requests if not texts.get(r.request_id)]):
        raise UsageError(f"request {missing[0]} has no output text to trace")
    tap = _FeatureTap()
    own, engine.drafter = engine.drafter, tap
    try:
        block = engine.generate(requests, forced_text=texts, on_round=tap.look)
    finally:
        engine.drafter = own
    return [
        _known(engine.target, request, record, tap)
        for request, record in zip(requests, block.requests, strict=True)
    ]


def _known(target: Target, request: Request, record: RequestRecord, tap: _FeatureTap) -> KnownText:
    features = tap.features.pop(request.request_id, None)
    if features is None:  # ended with its first token: there is no root
        features = torch.zeros(0, 0)
    output = record.output_ids
    return KnownText(
        request=request,
        output_ids=output,
        finish_reason=str(record.finish_reason),
        features=features,
        log_p=None if request.sampling.is_greedy else text_log_probs(target, request, output),
    )


@torch.inference_mode()
def text_log_probs(target: Target, request: Request, output_ids: Sequence[int]) -> Tensor:
    """Log-probabilities [T] of output tokens under the request's sampling; one pass over the text."""
    ids = torch.tensor([[*request.prompt_ids, *output_ids]], device=target.device)
    hidden, _ = target.forward_text(ids, torch.tensor([ids.shape[1]]))
    rows = RowSampling.of([request], target.device)
    first = len(request.prompt_ids) - 1
    parts = []
    for begin in range(first, ids.shape[1] - 1, 128):  # logits are wide, texts long
        end = min(begin + 128, ids.shape[1] - 1)
        log_p = warp(target.logits(hidden[:, begin:end]), rows).log_softmax(-1)
        parts.append(log_p[0].gather(1, ids[0, begin + 1 : end + 1].unsqueeze(1)).squeeze(1))
    return torch.cat(parts)


class _FeatureTap:
    """Listens where a drafter would: keeps the features of every text, proposes nothing."""

    needs_features = True
    pure_in_prefix = True
    max_context: int | None = None
    weight_bytes = 0

    def __init__(self) -> None:
        self.features: dict[str, Tensor] = {}
        self._pieces: dict[int, list[Tensor]] = {}
        self._names: dict[int, str] = {}

    def look(self, rows: Sequence[RowView]) -> None:
        self._names.update({row.slot: row.request_id for row in rows})

    def reserve(self, num_slots: int, max_len: int, config: SpecConfig) -> None:
        del num_slots, max_len, config

    def start(self, slot: int, tokens: Tensor, features: Tensor) -> None:
        self._pieces[slot] = [features]

    def commit(self, slots: Sequence[int], tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        for slot, row, count in zip(slots, features, counts.tolist(), strict=True):
            self._pieces[slot].append(row[:count])

    def stop(self, slot: int) -> None:
        pieces, name = self._pieces.pop(slot), self._names.pop(slot, None)
        if name is not None:
            self.features[name] = torch.cat(pieces)

    def propose(self, slots: Sequence[int], config: SpecConfig, rows: RowSampling) -> DraftTree:
        raise NotImplementedError("plain decoding proposes nothing")

    def expand(self, slots: Sequence[int], topks: Sequence[int], depth: int) -> list[DraftPool]:
        raise NotImplementedError("plain decoding proposes nothing")
